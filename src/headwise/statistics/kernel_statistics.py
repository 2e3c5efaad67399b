"""All statistics of an attention call from kernels that keep no weights: native ones on a CPU, in the pass that
computes the output, and Triton kernels on a GPU, next to the engine that computes the output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backend_choice import choose_fastest
from headwise.attention.backends import reference
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.gpu import statistics as gpu
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.native.parts import Options
from headwise.attention.backends.plain_statistics import RECEIVED_UNIT, ROWS, StatisticsCall
from headwise.attention.masks.key_ranges import Matrix, Part, Ranges32, visible_keys
from headwise.attention.problem import Answer, Problem
from headwise.shapes import Bool, Float, Int
from headwise.statistics.further_sums import MeasuredRows
from headwise.statistics.kernel_inputs import KernelInputs, kernel_inputs
from headwise.statistics.registry import LARGEST, STATISTICS
from headwise.statistics.tally import NOT_FINITE, Tally

COMPUTED = frozenset(ROWS) - {"visible keys"} | {"evenness", "received"}
"""Names of the statistics that the kernels' results give."""

ROWS_AT_ONCE = 2**16
"""Largest number of query rows of all sequences and heads whose statistics are added up at a time, in float64, unless
there are more sequences and heads.
"""


def why_not(problem: Problem, context: CallContext) -> str | None:
    """Return the reason that the kernels cannot compute the statistics of a problem, in one sentence; None if they can.

    Args:
        problem: the attention call.
        context: its tokens and padding.
    """
    if STATISTICS.keys() != COMPUTED:
        return "a statistic was added or removed, and the kernels compute the others"
    if problem.return_weights or 0 in (*problem.q.shape, *problem.k.shape):
        return "there are no rows of weights to compute, or the matrix is asked for"
    reason = _why_not_gpu(problem) if is_on_gpu(problem) else _why_not_native(problem)
    if reason is None and kernel_inputs(context, problem) is None:
        return "the kernels know positions that ascend one by one"
    return reason


def is_on_gpu(problem: Problem) -> bool:
    """Return True if the Triton kernels are those for a problem."""
    return problem.q.device.type == "cuda"


def _why_not_gpu(problem: Problem) -> str | None:
    """Return the reason that the Triton kernels cannot compute the statistics of a problem; None if they can."""
    return gpu.why_not(problem) or gpu.why_not_registered()


def _why_not_native(problem: Problem) -> str | None:
    """Return the reason that the native kernels cannot compute the statistics of a problem; None if they can."""
    if problem.needs_grad:
        return "the native kernels have no gradient of an output with statistics"
    return native.why_not(problem)


def fastest_or_reference(problem: Problem) -> Answer:
    """Return the answer of the fastest backend to a problem, or that of the reference where none of the others can
    compute it.
    """
    if problem.talking is not None:
        return reference.run(problem)
    return choose_fastest(problem).run(problem)


def attend_tallied(
    problem: Problem,
    context: CallContext,
    tally: Tally,
    compute: Callable[[Problem], Answer] = fastest_or_reference,
) -> Answer | None:
    """Compute one attention call, add the statistics of its weights to `tally`, and return its answer: that of the
    native kernels on a CPU, and that of `compute` on a GPU.

    On a CPU, if a row or its projection is not finite, return None, and leave the tally unchanged: one bad value would
    spread to rows that do not attend to it. The Triton kernels read no values, so a bad query or key changes the rows
    that may attend to it alone.

    Args:
        problem: the attention call; `why_not` must have returned None for it.
        context: its tokens and padding.
        tally: sums to add to.
        compute: function that computes the output on a GPU; by default the fastest backend.
    """
    inputs = kernel_inputs(context, problem)
    assert inputs is not None
    gram = None if tally.gram is None else tally.gram.float().contiguous()
    on_gpu = is_on_gpu(problem)
    answer = compute(problem) if on_gpu else None
    with torch.no_grad(), without_autocast(problem.q.device):
        if answer is None:
            out, lse, rows, received, seen_by = _in_parts(problem, inputs, partial(_native_part, gram=gram))
            answer = Answer(out, lse if problem.return_lse else None, None)
        else:
            of_part = partial(_gpu_part, out=answer.out.detach(), gram=gram)
            rows, received, seen_by = _in_parts(problem, inputs, of_part)
        if inputs.has_position is not None and bool((seen_by * ~inputs.has_position[:, None]).any()):
            return None
        values = dict(zip(ROWS, rows.unbind(0), strict=True))
        indicators = [name for name in NOT_FINITE if gram is not None or name != "written_norm"]
        if not on_gpu and not all(bool(values[name].sum().isfinite()) for name in indicators):
            return None
        if problem.softcap is None:
            del values["max_logit_uncapped"]
        tally.merge(_tally(values, received, seen_by, context, inputs, tally))
    return answer


OfPart = Callable[[Part, tuple[Any, ...]], tuple[Tensor, ...]]
"""Function of a part of the score matrix and the arguments of the operator for it, without `gram`."""


def _native_part(
    _part: Part, arguments: tuple[Any, ...], gram: Float[Tensor, "heads _ _"] | None
) -> tuple[Tensor, ...]:
    """Return the results of the native operator for a part: output, log-sum-exp, numbers of rows, and sums of keys."""
    *results, received, seen_by = torch.ops.headwise.attend_statistics(*arguments, gram)
    return *results, received.double().mul_(RECEIVED_UNIT), seen_by


def _gpu_part(
    part: Part,
    arguments: tuple[Any, ...],
    out: Float[Tensor, "batch heads queries value_dim"],
    gram: Float[Tensor, "heads _ _"] | None,
) -> tuple[Tensor, ...]:
    """Return the numbers of rows and the sums of keys of a part from the Triton kernels. `out` is the whole output."""
    _, *results = gpu.weight_statistics(StatisticsCall(*arguments)._replace(gram=gram), part.rows_of(out))
    return tuple(results)


def _in_parts(problem: Problem, inputs: KernelInputs, compute: OfPart) -> tuple[Tensor, ...]:
    """Return the results of `compute` for a whole problem. A mask whose matrix is too large to be evaluated at once is
    evaluated part by part. The last two results are sums of keys, and the one before has the rows on its last axis;
    those of others have them on the third.
    """
    visible = visible_keys(problem.mask, problem.grid)
    parts = visible.parts()
    q, k, v, scale, head_scale, softcap, sinks, _, _, bias = native.arguments(problem, None, None)
    options = Options(scale, head_scale, softcap, sinks, bias)

    def of_part(part: Part, ranges: Ranges32 | None, matrix: Matrix | None) -> tuple[Tensor, ...]:
        tensors = part.of(q, k, v)
        return compute(part, (*tensors, *options.arguments(part, ranges, matrix), *inputs.arguments(part)))

    if parts is None:
        whole = Part(range(problem.grid.queries), range(problem.grid.keys))
        return of_part(whole, visible.ranges, visible.matrix())
    by_rows = []
    sizes = (*q.shape[:2], k.shape[2])
    sums = [torch.zeros(sizes, dtype=dtype, device=q.device) for dtype in (torch.float64, torch.int32)]
    for part in parts:
        *results, received, seen_by = of_part(part, *visible.of_part(part))
        by_rows.append(results)
        for total, of_columns in zip(sums, (received, seen_by), strict=True):
            total[:, :, part.columns.start : part.columns.stop] += of_columns
    *others, rows = zip(*by_rows, strict=True)
    return *(torch.cat(each, 2) for each in others), torch.cat(rows, 3), *sums


def _tally(
    values: dict[str, Float[Tensor, "batch heads queries"]],
    received: Float[Tensor, "batch heads keys"],
    seen_by: Int[Tensor, "batch heads keys"],
    context: CallContext,
    inputs: KernelInputs,
    like: Tally,
) -> Tally:
    """Return the sums of every statistic over the query rows of a call, from the numbers of each row and key. Further
    sums of the tally `like` are added to it.
    """
    counted = values["visible keys"] > 0
    if context.real_queries is not None:
        counted &= context.real_queries[:, None]
    missing = set(context.left_out)
    missing |= set() if context.is_special is not None else {"special", "confidence_content"}
    missing |= set() if inputs.key_tokens is not None else {"duplicate", "induction"}
    missing |= set() if like.gram is not None else {"written_norm"}
    missing |= set() if like.measured is None else STATISTICS.keys() - like.measured
    measured = (values.keys() | {"evenness"}) - missing
    tally = Tally(like.gram, like.first_token)
    names = tuple(name for name in STATISTICS if name in measured - LARGEST - {"received"})
    batch, heads, queries = counted.shape
    step = max(ROWS_AT_ONCE // (batch * heads), 1)
    for start in range(0, queries, step):
        rows = _measured_rows(names, values, counted, inputs, range(start, min(start + step, queries)))
        if like.further is not None:
            like.further.add(rows, None)
        tally.add_rows(rows, batch, heads)
    for name in LARGEST & measured:
        tally.other_sums[name] = (values[name].masked_fill(~counted, -torch.inf).amax(-1).double(),)
    if "received" not in missing:
        tally.other_sums["received"] = received, seen_by.double()
    return tally


def _measured_rows(
    names: tuple[str, ...],
    values: dict[str, Float[Tensor, "batch heads queries"]],
    counted: Bool[Tensor, "batch heads queries"],
    inputs: KernelInputs,
    rows: range,
) -> MeasuredRows:
    """Return the statistics in `names` of some query rows, given the numbers of each row and the rows that count."""
    part = slice(rows.start, rows.stop)
    of_rows = {name: each[..., part] for name, each in values.items()}
    visible, counted = of_rows["visible keys"], counted[..., part]
    of_rows["evenness"] = of_rows["entropy"] / visible.clamp(min=2.0).log()
    has_value = {name: each[..., part] for name, each in inputs.has_value.items()} | {"evenness": visible > 1}
    in_mean = [counted & has_value[name] if name in has_value else counted for name in names]
    batch, heads, _ = visible.shape
    measured = torch.stack([of_rows[name] for name in names]), torch.stack(in_mean)
    return MeasuredRows(names, *measured, slice(0, batch), slice(0, heads), rows)
