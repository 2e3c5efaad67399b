"""`logit_attribution`: what each head adds to the logit of an answer by itself, past everything that comes after.

Heads, MLPs and embeddings write into one stream, whose sum the final norm and the output embedding make logits of
(Elhage et al. 2021, "residual stream"). With the scale of that norm kept as it is at a token, logits are linear in the
stream, and a head with output o adds

    u . (g / s) (W o - c)

to the logit of a token whose output embedding is u, where W is the head's slice of the output projection, g and s the
weight and the scale of the norm, and c the mean of what is written, where the norm takes a mean away (nostalgebraist
2020, "logit lens"; Wang et al. 2022, section 3). What a head does through later layers is not in it; patching and
ablation measure that.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.gate import Gated, Gates
from headwise.analysis.prompts import Question, Recorded, one_batch, output_embedding
from headwise.analysis.recording import require_module
from headwise.analysis.replacements import zero
from headwise.data.batches import call_model, evaluation_mode
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.output_projection import output_projection, weight_of
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.table import HeadTable
from headwise.shapes import Float, Int

SLACK = 0.02
"""The part of a sum that rounding may take in any dtype: bfloat16 has 8 bits."""

REMEDY = "ablate or patch heads instead"


class Attribution(HeadTable[HeadRow]):
    """What each head adds to the logit of the answer by itself: `logit`."""

    NAME = "attribution"
    ROW_TYPE = HeadRow


def logit_attribution(
    model: nn.Module, batch: Tensor | Mapping[str, Any], *, answer: Any, wrong: Any = None, at: Any = -1
) -> Attribution:
    """The part of a logit that each head adds directly, mean and standard error over prompts.

    All parts of heads, embeddings, MLPs and biases add up to the logit, as the output embedding gives it: before what
    some models do to logits afterwards, such as capping them. Whether heads write into what the output embedding reads,
    unchanged but for the final norm, is tried out: the model runs once as it is and once without heads and with all
    norms as they were, in evaluation mode and without gradients. What heads and norms give is in memory.

    Args:
        model: one that `watch` can see into and that names its output embedding (`get_output_embeddings`), as
            decoders of `transformers` do.
        batch: prompts, as the model takes them.
        answer: ids of the tokens whose logits are meant, `(batch,)`, or one for all.
        wrong: ids of tokens, likewise, whose logits are taken away: what is added to the difference of both.
        at: which of a prompt's tokens the answer follows, padding (by `attention_mask`) not counted: a number, or one
            a prompt. The last by default.

    Raises:
        InputError: no such token; a model that `watch` refuses, without an output embedding, or in which heads do not
            write straight into what it reads: as in encoders with a norm after every sum.
    """
    require_module(model)
    question, inputs = Question.of(answer, wrong, at), one_batch(model, batch)
    with evaluation_mode(model), torch.no_grad():
        run, norms, stream = Recorded(model), _Norms(model), _Stream(model)
        with intercepted(model, run), norms.kept(), stream.followed():
            call_model(model, inputs)
        run.require_attention()
        end = stream.end(question, inputs)
        parts, written = [], torch.zeros_like(end.before)
        for record in run.records:
            out = torch.stack([end.here(each) for each in run.of[record.site]]).sum(0)
            weight = _projection(model, record.site.path, out.shape[1:].numel(), end)
            parts.append(((end.direction @ weight).view(out.shape) * out).sum(-1))
            written += out.flatten(1) @ weight.mT
        gates = Gates({record.site.path: [Gated(None, zero())] for record in run.records})
        with intercepted(model, gates), norms.again(), stream.followed():
            call_model(model, inputs)
        left = stream.passed().given[torch.arange(len(written)), end.place]
        _require_direct(model, end.before - left, written, end.before)
    of_heads = torch.cat(parts, 1)
    rows = [
        HeadRow(**place, statistics={"logit": MeanEstimate.of(of_heads[:, number].tolist())})
        for number, (_, place) in enumerate(run.head_labels())
    ]
    measured = {"sequences": len(of_heads), "logit": end.logit.mean().item(), "heads": of_heads.sum(1).mean().item()}
    return Attribution(tuple(rows), {**run_settings(model, None, None, wrong=wrong is not None), "measured": measured})


# -- where logits are read --------------------------------------------------------------------------------------------


class _Passed(NamedTuple):
    """A call of a module: what it was given, and what it gave."""

    module: nn.Module
    given: Tensor
    output: Tensor


class _Stream:
    """What goes into the output embedding of a model, and the module that it comes from."""

    def __init__(self, model: nn.Module) -> None:
        embedding = output_embedding(model)
        if embedding is None:
            expected = "one that names its output embedding (get_output_embeddings)"
            raise InputError("model", expected=expected, got=type(model).__name__)
        self._model, self._embedding = model, embedding
        self._last: _Passed | None = None
        self._found: _Passed | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the context the model runs, once."""
        self._last = self._found = None
        hooks = [module.register_forward_hook(self._ends) for module in self._model.modules()]
        hooks.append(self._embedding.register_forward_pre_hook(self._reads))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _ends(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """The last module that gave something new: dropout, say, hands on what it is given."""
        if not given or not isinstance(given[0], Tensor) or not isinstance(output, Tensor):
            return
        if self._last is None or not _is_same(output, self._last.output):
            self._last = _Passed(module, given[0], output)

    def _reads(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        if self._last is not None and given and _is_same(given[0], self._last.output):
            self._found = self._last

    def passed(self) -> _Passed:
        """What went into that module in that run, and came out. `InputError` where none was found."""
        found = self._found
        if found is None or found.given.shape != found.output.shape or found.output.ndim != 3:
            raise _indirect(self._model)
        return found

    def end(self, question: Question, batch: Mapping[str, Any]) -> "_End":
        """What it was in that run at the tokens that answers follow. `InputError` where the module is no norm."""
        norm, given, output = self.passed()
        place = question.place(batch, output)
        prompts = torch.arange(len(place), device=place.device)
        wide = torch.promote_types(output.dtype, torch.float32)
        before, after = (each[prompts, place].to(wide) for each in (given, output))
        embedding = weight_of(self._embedding, output.shape[-1])
        if embedding is None:
            raise _indirect(self._model)
        answer, wrong = question.ids(place, len(embedding))
        bias = getattr(self._embedding, "bias", None)
        bias = embedding.new_zeros(len(embedding)) if bias is None else bias
        words, added = embedding[answer].to(wide), bias[answer].to(wide)
        if wrong is not None:
            words, added = words - embedding[wrong], added - bias[wrong]
        direction = _linearised(self._model, norm, before, after, words, like=output)
        return _End(self._model, output.shape[1], place, before, direction, (words * after).sum(-1) + added)


class _End(NamedTuple):
    """The end of the stream at the tokens that answers follow.

    Attributes:
        before: what the final norm was given.
        direction: whose product with what is added to that is what is added to the logit.
        logit: of the answer, less that of the wrong token if there is one.
    """

    model: nn.Module
    length: int
    place: Int[Tensor, " prompts"]
    before: Float[Tensor, "prompts width"]
    direction: Float[Tensor, "prompts width"]
    logit: Float[Tensor, " prompts"]

    def here(self, out: Float[Tensor, "batch heads queries value_dim"]) -> Float[Tensor, "prompts heads value_dim"]:
        """What heads gave at these tokens. `InputError` where they read other tokens."""
        if (len(out), out.shape[2]) != (len(self.place), self.length):
            raise _indirect(self.model)
        return out[torch.arange(len(out), device=out.device), :, self.place].to(self.before.dtype)


def _linearised(
    model: nn.Module,
    norm: nn.Module,
    before: Float[Tensor, "prompts width"],
    after: Float[Tensor, "prompts width"],
    words: Float[Tensor, "prompts width"],
    *,
    like: Tensor,
) -> Float[Tensor, "prompts width"]:
    """The direction in the stream that is `words` after a norm whose scale is kept.

    The norm is asked what it is: what it makes of 0 is its bias, of numbers whose mean is 0 its weight, up to a factor,
    and of equal ones whether it takes the mean away. The scale at a token is what is then left.
    """
    signs = torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
    signs[1::2] = -1.0
    if len(signs) % 2:
        signs[-3:] = torch.tensor([1.0, 1.0, -2.0])
    asked = torch.stack([torch.zeros_like(signs), torch.ones_like(signs), signs])[:, None]
    bias, of_equal, weight = norm(asked)[:, 0].to(before.dtype)
    weight = (weight - bias) / signs
    centres = bool((of_equal - bias).norm() < SLACK * weight.norm())
    seen = weight * (before - before.mean(-1, keepdim=True) if centres else before)
    scale = ((after - bias) * seen).sum(-1, keepdim=True) / (seen * seen).sum(-1, keepdim=True)
    if not bool(((after - bias - scale * seen).norm(dim=-1) < SLACK * (after - bias).norm(dim=-1)).all()):
        raise _indirect(model)
    direction: Tensor = words * weight * scale
    return direction - direction.mean(-1, keepdim=True) if centres else direction


def _is_same(one: Any, other: Tensor) -> bool:
    """Whether both are the same numbers in memory."""
    return isinstance(one, Tensor) and one.shape == other.shape and one.data_ptr() == other.data_ptr()


# -- that heads write there -------------------------------------------------------------------------------------------


class _Norms:
    """What every norm of a model gave in a run, given again in another."""

    def __init__(self, model: nn.Module) -> None:
        named = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
        self._gave: dict[nn.Module, list[Any]] = {module: [] for module in named}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within the context it is kept."""
        with self._hooks(lambda module, _, output: self._gave[module].append(output)):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the context it is given, whatever goes in."""
        left = {module: iter(gave) for module, gave in self._gave.items()}
        with self._hooks(lambda module, *_: next(left[module], None)):
            yield

    @contextmanager
    def _hooks(self, hook: Callable[..., Any]) -> Iterator[None]:
        handles = [module.register_forward_hook(hook) for module in self._gave]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _projection(model: nn.Module, path: str, width: int, end: _End) -> Float[Tensor, "stream width"]:
    """The weight by which the heads of a module write. `InputError` where it is not found."""
    found = output_projection(model, path, width)
    weight = None if found is None else weight_of(found, width)
    if weight is None or len(weight) != end.before.shape[-1]:
        raise InputError("model", expected=f"an output projection of the heads of {path}", got="none", remedy=REMEDY)
    return weight.to(end.before.dtype)


def _require_direct(
    model: nn.Module,
    gone: Float[Tensor, "prompts width"],
    written: Float[Tensor, "prompts width"],
    stream: Float[Tensor, "prompts width"],
) -> None:
    """Refuse a model whose stream does not lose just what heads write when they are gone and nothing else changes."""
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), stream.dtype)
    rounding = 8 * torch.finfo(dtype).eps * stream.norm(dim=-1)
    if bool(((gone - written).norm(dim=-1) > SLACK * written.norm(dim=-1) + rounding).any()):
        raise _indirect(model)


def _indirect(model: nn.Module) -> InputError:
    expected = "one whose output embedding reads, through a final norm, the sum that heads write into"
    return InputError("model", expected=expected, got=type(model).__name__, remedy=REMEDY)
