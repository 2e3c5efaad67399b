"""All statistics of an attention call from the native kernels, in the pass that computes its output."""

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.native.parts import Options
from headwise.attention.masks.key_ranges import Matrix, Part, Ranges32, visible_keys
from headwise.attention.problem import Answer, Problem
from headwise.shapes import Float, Int
from headwise.statistics.further_sums import MeasuredRows
from headwise.statistics.kernel_inputs import KernelInputs, kernel_inputs
from headwise.statistics.registry import LARGEST, STATISTICS
from headwise.statistics.tally import Tally

ROWS = (
    *("entropy", "confidence", "distance", "self", "previous", "next", "first"),
    *("special", "duplicate", "induction", "confidence_content", "max_logit", "max_logit_uncapped"),
    *("output_norm", "written_norm", "visible keys"),
)
"""Names of the numbers that the kernels compute for each query row, in their order."""

COMPUTED = frozenset(ROWS) - {"visible keys"} | {"evenness", "received"}
"""Names of the statistics that the kernels' results give."""

RECEIVED_UNIT = 2.0**-40
"""Unit of the kernels' sums of weights: integers, whose sums do not depend on the order of threads."""


def why_not(problem: Problem, context: CallContext) -> str | None:
    """Return the reason that the kernels cannot compute the statistics of a problem, in one sentence; None if they can.

    Args:
        problem: the attention call.
        context: its tokens and padding.
    """
    if STATISTICS.keys() != COMPUTED:
        return "a statistic was added or removed, and the native kernels compute the others"
    if _needs_grad(problem):
        return "the native kernels have no gradient of an output with statistics"
    if problem.return_weights or 0 in (*problem.q.shape, *problem.k.shape):
        return "there are no rows of weights to compute, or the matrix is asked for"
    if native.why_not(problem) is None and kernel_inputs(context, problem) is None:
        return "the native kernels know positions that ascend one by one"
    return native.why_not(problem)


def attend_tallied(problem: Problem, context: CallContext, tally: Tally) -> Answer | None:
    """Compute one attention call with the native kernels, add the statistics of its weights to `tally`, and return its
    answer. If a row or its projection is not finite, return None, and leave the tally unchanged: one bad value would
    spread to rows that do not attend to it.

    Args:
        problem: the attention call; `why_not` must have returned None for it.
        context: its tokens and padding.
        tally: sums to add to.
    """
    inputs = kernel_inputs(context, problem)
    assert inputs is not None
    gram = None if tally.gram is None else tally.gram.float().contiguous()
    with torch.no_grad(), without_autocast(problem.q.device):
        out, lse, rows, received, seen_by = _attend(problem, inputs, gram)
        if inputs.has_position is not None and bool((seen_by * ~inputs.has_position[:, None]).any()):
            return None
        values = dict(zip(ROWS, rows.unbind(0), strict=True))
        indicators = ("entropy", "output_norm") if gram is None else ("entropy", "output_norm", "written_norm")
        if not all(bool(values[name].sum().isfinite()) for name in indicators):
            return None
        if problem.softcap is None:
            del values["max_logit_uncapped"]
        tally.merge(_tally(values, received, seen_by, context, inputs, tally))
    return Answer(out, lse if problem.return_lse else None, None)


def _attend(problem: Problem, inputs: KernelInputs, gram: Float[Tensor, "heads _ _"] | None) -> tuple[Tensor, ...]:
    """Return the results of the operator for a problem: output, log-sum-exp, numbers of rows, and sums of keys."""
    visible = visible_keys(problem.mask, problem.grid)
    parts = visible.parts()
    q, k, v, scale, head_scale, softcap, sinks, _, _, bias = native.arguments(problem, None, None)
    options = Options(scale, head_scale, softcap, sinks, bias)

    def compute(part: Part, ranges: Ranges32 | None, matrix: Matrix | None) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = torch.ops.headwise.attend_statistics(
            *(*part.of(q, k, v), *options.arguments(part, ranges, matrix), *inputs.arguments(part), gram)
        )
        return results

    if parts is None:
        whole = Part(range(problem.grid.queries), range(problem.grid.keys))
        return compute(whole, visible.ranges, visible.matrix())
    by_rows = []
    sums = [torch.zeros(*q.shape[:2], k.shape[2], dtype=dtype) for dtype in (torch.int64, torch.int32)]
    for part in parts:
        *results, received, seen_by = compute(part, *visible.of_part(part))
        by_rows.append(results)
        for total, of_part in zip(sums, (received, seen_by), strict=True):
            total[:, :, part.columns.start : part.columns.stop] += of_part
    out, lse, rows = (torch.cat(each, axis) for each, axis in zip(zip(*by_rows, strict=True), (2, 2, 3), strict=True))
    return out, lse, rows, *sums


def _tally(
    values: dict[str, Float[Tensor, "batch heads queries"]],
    received: Int[Tensor, "batch heads keys"],
    seen_by: Int[Tensor, "batch heads keys"],
    context: CallContext,
    inputs: KernelInputs,
    like: Tally,
) -> Tally:
    """Return the sums of every statistic over the query rows of a call, from the numbers of each row and key. Further
    sums of the tally `like` are added to it.
    """
    visible = values.pop("visible keys")
    values["evenness"] = values["entropy"] / visible.clamp(min=2.0).log()
    counted = visible > 0
    if context.real_queries is not None:
        counted &= context.real_queries[:, None]
    missing = set(context.left_out)
    missing |= set() if context.is_special is not None else {"special", "confidence_content"}
    missing |= set() if inputs.key_tokens is not None else {"duplicate", "induction"}
    missing |= set() if like.gram is not None else {"written_norm"}
    largest = {name: values.pop(name) for name in LARGEST if name in values}
    names = tuple(name for name in STATISTICS if name in values and name not in missing)
    has_value = {**inputs.has_value, "evenness": visible > 1}
    in_mean = torch.stack([counted & has_value[name] if name in has_value else counted for name in names])
    # In float64, since thousands of rows in float32 would lose the digits in which heads differ.
    of_rows = torch.stack([values[name] for name in names])
    sums = of_rows.double().masked_fill(~in_mean, 0.0).sum(-1)
    tally = Tally(like.gram, like.first_token, names, torch.stack([sums, in_mean.sum(-1).double()]))
    if like.further is not None:
        batch, heads, queries = of_rows.shape[1:]
        like.further.add(MeasuredRows(names, of_rows, in_mean, slice(0, batch), slice(0, heads), range(queries)), None)
    for name, of_rows in largest.items():
        if name not in missing:
            tally.other_sums[name] = (of_rows.double().masked_fill(~counted, -torch.inf).amax(-1),)
    if "received" not in missing:
        tally.other_sums["received"] = received.double().mul_(RECEIVED_UNIT), seen_by.double()
    return tally


def _needs_grad(problem: Problem) -> bool:
    """Return True if a gradient of the output may be asked for."""
    tensors = (problem.q, problem.k, problem.v, problem.bias, problem.sinks, problem.scale)
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors)
