"""End of a model's residual stream, the sum that the final norm and the output embedding turn into logits, and outputs
of modules that are held constant in a later run.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.prompts import AnswerTokens
from headwise.data.tokenization import output_embeddings
from headwise.errors import InputError
from headwise.intercept.module_calls import module_calls
from headwise.intercept.trace.projection import linear_map, output_projection
from headwise.shapes import Float, Int

TOLERANCE = 0.02
"""Largest relative difference that is attributed to rounding, in any dtype: bfloat16 has 8 bits."""

REMEDY = "ablate or patch heads instead"


def not_direct_error(model: nn.Module) -> InputError:
    """Return the error for a model whose heads do not write directly into the input of its final norm. Their direct
    effect on logits is then not defined.
    """
    expected = "one whose output embedding reads, through a final norm, the sum that heads write into"
    return InputError("model", expected=expected, got=type(model).__name__, remedy=REMEDY)


class _ModuleCall(NamedTuple):
    """One finished call of a PyTorch module whose first argument and output are tensors."""

    module: nn.Module
    input: Tensor
    output: Tensor


class ResidualStream:
    """Observer of a run of the model that finds the final norm: the module whose output is the input of the output
    embedding. From the final norm's input, it computes what each summand of the residual stream adds to logits.
    """

    def __init__(self, model: nn.Module) -> None:
        embedding = output_embeddings(model)
        if embedding is None:
            expected = "one that names its output embedding (get_output_embeddings)"
            raise InputError("model", expected=expected, got=type(model).__name__)
        self._model, self._embedding = model, embedding
        self._final_call: _ModuleCall | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Observe one run of the model while the context is active, and store the final norm's input and output."""
        self._final_call, last_call = None, list[_ModuleCall]()

        def on_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            """Store a finished module call as the latest one, if its first argument and its output are tensors. Ignore
            a call whose output is the same tensor in memory as the output of the call before; dropout can return its
            input in this way.
            """
            is_of_tensors = bool(args) and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            if is_of_tensors and not (last_call and _is_same_memory(output, last_call[0].output)):
                last_call[:] = [_ModuleCall(module, args[0], output)]

        def on_embedding(_: nn.Module, args: tuple[Any, ...]) -> None:
            """Store the last module call as the call of the final norm, if the output of that call is the input of the
            output embedding.
            """
            if last_call and args and _is_same_memory(args[0], last_call[0].output):
                self._final_call = last_call[0]

        modules = {module: module for module in self._model.modules()}
        with module_calls(modules, on_call), self._embedding.register_forward_pre_hook(on_embedding):
            yield

    def final_norm_call(self) -> _ModuleCall:
        """Return the call of the final norm in the last observed run: the module, its input and its output. Raise
        `InputError` if no such call was found. Raise it also if input and output differ in shape, or do not have three
        axes.
        """
        call = self._final_call
        if call is None or call.input.shape != call.output.shape or call.output.ndim != 3:
            raise not_direct_error(self._model)
        return call

    def end(
        self, tokens: AnswerTokens, batch: Mapping[str, Any]
    ) -> tuple[
        Int[Tensor, " prompts"],
        Float[Tensor, "prompts width"],
        Float[Tensor, "prompts width"],
        Float[Tensor, " prompts"],
    ]:
        """Return four tensors for the observed run, all at the token that each prompt's answer follows: its position,
        the final norm's input, a vector `direction`, and the logit of the answer. If there are wrong answers, their
        logits are subtracted. The scalar product of `direction` with a summand of the norm's input is what the summand
        adds to the logit.
        """
        norm, before, after = self.final_norm_call()
        like = after  # the norm's width, dtype and device
        positions = tokens.positions(batch, after)
        prompts = torch.arange(len(positions), device=positions.device)
        dtype = torch.promote_types(after.dtype, torch.float32)
        before, after = (stream[prompts, positions].to(dtype) for stream in (before, after))
        logits = linear_map(self._embedding, like.shape[-1])
        if logits is None:
            raise not_direct_error(self._model)
        embedding, bias = logits
        answer, wrong = tokens.ids_per_prompt(positions, len(embedding))
        bias = embedding.new_zeros(len(embedding)) if bias is None else bias
        unembedding, answer_bias = embedding[answer].to(dtype), bias[answer].to(dtype)
        if wrong is not None:
            unembedding, answer_bias = unembedding - embedding[wrong], answer_bias - bias[wrong]
        direction = _direction_before_norm(self._model, norm, before, after, unembedding, like=like)
        return positions, before, direction, (unembedding * after).sum(-1) + answer_bias


def projection_weight(model: nn.Module, path: str, width: int, stream: Tensor) -> Float[Tensor, "stream width"]:
    """Return the weight matrix of an attention module's output projection in the dtype of `stream`. It maps the
    concatenated outputs of the module's heads, `width` features, to the residual stream.
    """
    projection = output_projection(dict(model.named_modules()), path, width)
    if projection is None or len(projection.map.weight) != stream.shape[-1]:
        raise InputError("model", expected=f"an output projection of the heads of {path}", got="none", remedy=REMEDY)
    return projection.map.weight.to(stream.dtype)


def require_direct(
    model: nn.Module,
    lost: Float[Tensor, "... width"],
    written: Float[Tensor, "... width"],
    stream: Float[Tensor, "... width"],
) -> None:
    """Raise `InputError` if heads change the end of the residual stream by something other than what they write into it
    directly. `lost` is what the stream loses when all heads are removed, and `written` is the sum of what heads write.
    They may differ by rounding, up to a limit that grows with the norms of `written` and of `stream`.
    """
    parameters = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next((parameter.dtype for parameter in parameters), stream.dtype)
    rounding = 8 * torch.finfo(dtype).eps * stream.norm(dim=-1)
    if bool(((lost - written).norm(dim=-1) > TOLERANCE * written.norm(dim=-1) + rounding).any()):
        raise not_direct_error(model)


def _direction_before_norm(
    model: nn.Module,
    norm: nn.Module,
    before: Float[Tensor, "prompts width"],
    after: Float[Tensor, "prompts width"],
    unembedding: Float[Tensor, "prompts width"],
    *,
    like: Tensor,
) -> Float[Tensor, "prompts width"]:
    """Convert a direction at the output of the final norm to a direction at its input, for each prompt. The norm's
    scale at each token is held constant, so that the norm is linear. The returned vector's scalar product with the
    norm's input equals the scalar product of `unembedding` with the norm's output, up to a constant.

    The norm is probed with three inputs. Zeros give its bias. Numbers whose mean is 0 give its weight, up to a factor.
    Equal numbers show whether it subtracts the mean. The scale at each token follows from its input and output.
    """
    signs = torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
    signs[1::2] = -1.0
    if len(signs) % 2:
        signs[-3:] = torch.tensor([1.0, 1.0, -2.0])
    probes = torch.stack([torch.zeros_like(signs), torch.ones_like(signs), signs])[:, None]
    bias, of_equal, weight = norm(probes)[:, 0].to(before.dtype)
    weight = (weight - bias) / signs
    subtracts_mean = bool((of_equal - bias).norm() < TOLERANCE * weight.norm())
    unscaled = weight * (before - before.mean(-1, keepdim=True) if subtracts_mean else before)
    scale = ((after - bias) * unscaled).sum(-1, keepdim=True) / (unscaled * unscaled).sum(-1, keepdim=True)
    error = (after - bias - scale * unscaled).norm(dim=-1)
    if not bool((error < TOLERANCE * (after - bias).norm(dim=-1)).all()):
        raise not_direct_error(model)
    direction: Tensor = unembedding * weight * scale
    return direction - direction.mean(-1, keepdim=True) if subtracts_mean else direction


def _is_same_memory(one: Any, other: Tensor) -> bool:
    """Return True if `one` is a tensor that starts at the same memory address as `other` and has the same shape."""
    return isinstance(one, Tensor) and one.shape == other.shape and one.data_ptr() == other.data_ptr()


class ModuleOutputs:
    """Recorder of the outputs of some modules in one run of a model. In a later run it can make the modules return the
    recorded outputs.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {module: module for module in modules}
        self._outputs: dict[nn.Module, list[Any]] = {module: [] for module in self._modules}

    def recorded(self) -> AbstractContextManager[None]:
        """Return a context in which the output of every call of every chosen module is recorded."""
        return module_calls(self._modules, lambda module, _, output: self._outputs[module].append(output))

    def replayed(self) -> AbstractContextManager[None]:
        """Return a context in which each chosen module returns its recorded outputs, one after another, instead of what
        it computes.
        """
        remaining = {module: iter(outputs) for module, outputs in self._outputs.items()}
        return module_calls(self._modules, lambda module, *_: next(remaining[module], None))
