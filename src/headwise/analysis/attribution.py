"""Direct logit attribution: the part of an answer's logit that each head adds by itself.

Heads, MLPs and embeddings write into one residual stream (Elhage et al. 2021). The final norm and the output embedding
turn its sum into logits. With the scale of the final norm held constant at each token, logits are linear in the stream.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.gate_interceptor import GateInterceptor, HeadGate
from headwise.analysis.prompts import AnswerTokens, one_batch
from headwise.analysis.recording import RecordedRun
from headwise.analysis.replacements import zero
from headwise.analysis.residual_stream import REMEDY, TOLERANCE, ResidualStream, StreamEnd, not_direct_error
from headwise.checks import require_module
from headwise.data.batches import call_model, evaluation_mode
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.output_projection import output_projection
from headwise.runs.fingerprint import run_settings
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.shapes import Float


class Attribution(HeadTable[HeadRow]):
    """Table of the direct logit attribution of each head, one row per head. Its column `logit` is the mean over prompts
    of what the head adds directly to the logit of the prompt's answer, without the head's effect through later layers.
    If there are wrong answers, what the head adds to the wrong answer's logit is subtracted.

    A head with output o adds

        u . (g / s) (W o - c)

    to the logit of a token with output embedding u (nostalgebraist 2020, "logit lens"; Wang et al. 2022, section 3). W
    is the head's slice of the output projection, g and s are the weight and the scale of the final norm at the token,
    and c is the mean of W o if the norm subtracts means. The parts of all heads, embeddings, MLPs and biases sum to the
    logit, before any later processing of logits such as capping.
    """

    NAME = "attribution"
    ROW_TYPE = HeadRow
    SIGNED = ("logit",)
    SAMPLES = "prompt"


def logit_attribution(
    model: nn.Module, batch: Tensor | Mapping[str, Any], *, answer: Any, wrong: Any = None, at: Any = -1
) -> Attribution:
    """Measure how much each head adds directly to the logit of the token `answer`, by what the head writes into the
    residual stream and not through later layers. The results are means over a batch of prompts. If `wrong` is given,
    the logit of `answer` minus that of `wrong` is attributed to the heads instead.

    `Attribution` has the formula (Wang et al. 2022, section 3). A head's effect through later layers is not included;
    `activation_patching` and `ablate` measure it.

        parts = hw.logit_attribution(model, prompts, answer=mary, wrong=john)
        parts.table()                       # one row per head: layer, head, ..., logit

    The model runs in evaluation mode, without gradients: once unchanged, and once without heads and with the outputs of
    all norms held constant. The second run checks that heads write directly into the stream. The outputs of all heads
    and norms are kept in memory.

    Args:
        model: any module that `watch` supports and that names its output embedding (`get_output_embeddings`), such as
            the decoders of `transformers`.
        batch: prompts, as a tensor or a mapping of the model's arguments.
        answer: token ids of the answers, `(batch,)`, or one for all.
        wrong: token ids in the same form, whose logits are subtracted; None to attribute the logit of the answer alone.
        at: index of the prompt's token that the answer follows, without padding (by `attention_mask`): one number, or
            one per prompt. The last token by default.

    Returns:
        A table with one row per head: mean and standard error of `logit` over prompts, in units of the logits.

    Raises:
        InputError: a token does not exist; the model is not supported by `watch`, has no output embedding, or its heads
            do not write directly into the input of the final norm, as in encoders with a norm after each sum.
    """
    require_module(model)
    tokens, inputs = AnswerTokens.from_arguments(answer, wrong, at), one_batch(model, batch)
    with evaluation_mode(model), torch.no_grad():
        run, norms, stream = RecordedRun(model), _NormOutputs(model), ResidualStream(model)
        with intercepted(model, run), norms.recorded(), stream.followed():
            call_model(model, inputs)
        run.require_attention()
        end = stream.end(tokens, inputs)
        parts, written = [], torch.zeros_like(end.before_norm)
        for record in run.records:
            out = torch.stack([end.at_positions(outputs) for outputs in run.by_site[record.site]]).sum(0)
            weight = _projection_weight(model, record.site.path, out.shape[1:].numel(), end)
            parts.append(((end.direction @ weight).view(out.shape) * out).sum(-1))
            written += out.flatten(1) @ weight.mT
        without_heads = GateInterceptor({record.site.label: [HeadGate(None, zero())] for record in run.records})
        with intercepted(model, without_heads), norms.replayed(), stream.followed():
            call_model(model, inputs)
        remaining = stream.final_norm_call().input[torch.arange(len(written)), end.positions]
        _require_direct(model, end.before_norm - remaining, written, end.before_norm)
    logits = torch.cat(parts, 1)
    rows = [
        HeadRow(**labels, statistics={"logit": MeanEstimate.of(logits[:, index].tolist())})
        for index, (_, labels) in enumerate(run.head_labels())
    ]
    measured = {"sequences": len(logits), "logit": end.logit.mean().item(), "heads": logits.sum(1).mean().item()}
    return Attribution(tuple(rows), {**run_settings(model, None, None, wrong=wrong is not None), "measured": measured})


class _NormOutputs:
    """Recorder of the outputs of all norm layers of a model in one run, which can make the norm layers return these
    outputs in a later run.

    A norm is a module with "norm" in the name of its class.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
        self._outputs: dict[nn.Module, list[Any]] = {module: [] for module in norms}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the output of every call of every norm layer of the model while the context is active."""
        with self._hooks(lambda module, _, output: self._outputs[module].append(output)):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Make each norm layer of the model return the outputs that `recorded` stored, in the order of its calls, while
        the context is active.
        """
        remaining = {module: iter(outputs) for module, outputs in self._outputs.items()}
        with self._hooks(lambda module, *_: next(remaining[module], None)):
            yield

    @contextmanager
    def _hooks(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Register `hook` as forward hook of every norm layer of the model while the context is active."""
        handles = [module.register_forward_hook(hook) for module in self._outputs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _projection_weight(model: nn.Module, path: str, width: int, end: StreamEnd) -> Float[Tensor, "stream width"]:
    """Return the weight matrix `(stream, width)` of the output projection of the attention module at `path`. It maps
    the concatenated outputs of the module's heads, `width` features, to the residual stream. The matrix gets the dtype
    of `end`, the end of that stream.

    Raises:
        InputError: no projection from `width` features to the stream is found.
    """
    projection = output_projection(dict(model.named_modules()), path, width)
    if projection is None or len(projection.map.weight) != end.before_norm.shape[-1]:
        raise InputError("model", expected=f"an output projection of the heads of {path}", got="none", remedy=REMEDY)
    return projection.map.weight.to(end.before_norm.dtype)


def _require_direct(
    model: nn.Module,
    lost: Float[Tensor, "prompts width"],
    written: Float[Tensor, "prompts width"],
    stream: Float[Tensor, "prompts width"],
) -> None:
    """Raise `InputError` if heads change the residual stream by something other than what they write into it. `lost` is
    what the stream loses when all heads are removed, and `written` is the sum of what heads write. They may differ by
    rounding, up to a limit that grows with the norms of `written` and of the whole `stream`.
    """
    parameters = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next((parameter.dtype for parameter in parameters), stream.dtype)
    rounding = 8 * torch.finfo(dtype).eps * stream.norm(dim=-1)
    if bool(((lost - written).norm(dim=-1) > TOLERANCE * written.norm(dim=-1) + rounding).any()):
        raise not_direct_error(model)
