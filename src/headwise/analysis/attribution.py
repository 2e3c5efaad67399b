"""Direct logit attribution: the part of an answer's logit that each head adds by itself.

Heads, MLPs and embeddings write into one residual stream (Elhage et al. 2021). The final norm and the output embedding
turn its sum into logits. With the scale of the final norm held constant at each token, logits are linear in the stream.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.gate import GateInterceptor, HeadGate
from headwise.analysis.prompts import AnswerTokens, one_batch
from headwise.analysis.recording import RecordedRun
from headwise.analysis.replacements import zero
from headwise.analysis.residual_stream import (
    ModuleOutputs,
    ResidualStream,
    not_direct_error,
    projection_weight,
    require_direct,
)
from headwise.checks import require_module
from headwise.data.batches import call_model, evaluation_mode
from headwise.intercept.install import intercepted
from headwise.runs.fingerprint import run_settings
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.shapes import Float
from headwise.statistics.columns import Column


class Attribution(HeadTable[HeadRow]):
    """Table of the direct logit attribution of each head, one row per head. Its column `logit` is what the head adds
    directly to the logit of a prompt's answer, as a mean over prompts. Effects of the head through later layers are not
    included. If there are wrong answers, what the head adds to the wrong answer's logit is subtracted.

    A head with output o adds

        u . (g / s) (W o - c)

    to the logit of a token with output embedding u (nostalgebraist 2020, "logit lens"; Wang et al. 2022, section 3). W
    is the head's slice of the output projection, g and s are the weight and the scale of the final norm at the token,
    and c is the mean of W o if the norm subtracts means. The parts of all heads, embeddings, MLPs and biases sum to the
    logit, before any later processing of logits such as capping.
    """

    NAME = "attribution"
    COLUMNS = (Column("logit", "What the head adds directly to the logit of the answer.", "logit", is_signed=True),)
    SAMPLES = "prompt"


def logit_attribution(
    model: nn.Module, batch: Tensor | Mapping[str, Any], *, answer: Any, wrong: Any = None, at: Any = -1
) -> Attribution:
    """Measure how much each head adds directly to the logit of the token `answer`, as a mean over a batch of prompts.
    This is the effect of what the head writes into the residual stream, without its effect through later layers. If
    `wrong` is given, the logit of `answer` minus that of `wrong` is attributed instead.

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
    parts, logit, heads = logit_parts(model, batch, AnswerTokens.from_arguments(answer, wrong, at))
    rows = [
        HeadRow(**labels, statistics={"logit": MeanEstimate.of(parts[:, index].tolist())})
        for index, labels in enumerate(heads)
    ]
    measured = {"sequences": len(parts), "logit": logit.mean().item(), "heads": parts.sum(1).mean().item()}
    return Attribution(tuple(rows), {**run_settings(model, None, None, wrong=wrong is not None), "measured": measured})


def logit_parts(
    model: nn.Module, batch: Any, tokens: AnswerTokens
) -> tuple[Float[Tensor, "prompts heads"], Float[Tensor, " prompts"], list[dict[str, Any]]]:
    """Return three results for a batch of prompts: what each head adds directly to the logit of each prompt's answer,
    this logit itself, and the labels of the heads. If there is a wrong answer, its logit, and what heads add to it, are
    subtracted. The class `Attribution` states the formula.
    """
    require_module(model)
    inputs = one_batch(model, batch)
    norms = ModuleOutputs(module for module in model.modules() if "norm" in type(module).__name__.lower())
    with evaluation_mode(model), torch.no_grad():
        run, stream = RecordedRun(model), ResidualStream(model)
        with intercepted(model, run), norms.recorded(), stream.followed():
            call_model(model, inputs)
        run.require_attention()
        positions, before_norm, direction, logit = stream.end(tokens, inputs)
        shape, prompts = stream.final_norm_call().input.shape, torch.arange(len(positions), device=positions.device)
        parts, written = [], torch.zeros_like(before_norm)
        for record in run.records:
            of_calls = run.by_site[record.site]
            if any((len(outputs), outputs.shape[2]) != shape[:2] for outputs in of_calls):
                raise not_direct_error(model)  # of other prompts, or of another length, than the residual stream
            out = torch.stack([outputs[prompts, :, positions].to(before_norm.dtype) for outputs in of_calls]).sum(0)
            weight = projection_weight(model, record.site.path, out.shape[1:].numel(), before_norm)
            parts.append(((direction @ weight).view(out.shape) * out).sum(-1))
            written += out.flatten(1) @ weight.mT
        without_heads = GateInterceptor({record.site.label: [HeadGate(None, zero())] for record in run.records})
        with intercepted(model, without_heads), norms.replayed(), stream.followed():
            call_model(model, inputs)
        remaining = stream.final_norm_call().input[prompts, positions]
        require_direct(model, before_norm - remaining, written, before_norm)
    return torch.cat(parts, 1), logit, [labels for _, labels in run.head_labels()]
