"""Statistics of an attention call from kernels that keep no weights: native ones on a CPU, in the pass that computes
the output, and Triton kernels on a GPU, next to the engine that computes the output. Row blocks compute the statistics
that the kernels do not know.
"""

import math
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backend_choice import choose_fastest
from headwise.attention.backends import reference
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.tiles import full_width_tile
from headwise.attention.backends.gpu import statistics as gpu
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.native import library
from headwise.attention.backends.native.parts import Options
from headwise.attention.backends.plain_statistics import RECEIVED_UNIT, ROWS, StatisticsCall
from headwise.attention.masks.key_ranges import Part, visible_keys
from headwise.attention.problem import Answer, Problem
from headwise.attention.tensors import KeyRanges, Matrix
from headwise.shapes import Bool, Float, Int
from headwise.statistics.registry import LARGEST, STATISTICS, MeanOfRows
from headwise.statistics.tally import NOT_FINITE, MeasuredRows, Tally

COMPUTED = frozenset(ROWS) - {"visible keys"} | {"evenness", "received"}
"""Names of the statistics that follow from the results of the native and the Triton kernels, which are those of one
operator.
"""

ENTROPY, VISIBLE = ROWS.index("entropy"), ROWS.index("visible keys")
"""Places of two numbers in the results of the kernels for each row."""

LARGEST_ROWS = ("max_logit", "max_logit_uncapped")
"""Names of the numbers of rows of which the kernels return the largest, in this order."""

INDICATORS = [ROWS.index(name) for name in NOT_FINITE]
"""Places of the numbers that are NaN or infinite where attention weights or head outputs are."""

ROWS_AT_ONCE = 2**16
"""Largest number of query rows of all sequences and heads whose statistics are added up at a time, in float64, unless
there are more sequences and heads.
"""


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """Tokens, positions and padding of an attention call in the form that the statistics kernels read. All layers of a
    model share one object. The fields up to `is_counted` are arguments of the kernels' operator; `StatisticsCall`
    describes them.

    Attributes:
        has_value: True at the rows in which a statistic is defined, by its name, for those not defined in all.
        has_position: True at keys that have a position; None if all have one.
    """

    positions: Int[Tensor, "batch queries"]
    first_key: Int[Tensor, "batch queries"]
    is_special: Bool[Tensor, "batch keys"] | None
    key_tokens: Int[Tensor, "batch keys"] | None
    query_tokens: Int[Tensor, "batch queries"] | None
    token_count: int
    is_counted: Bool[Tensor, "batch queries"] | None
    has_value: dict[str, Bool[Tensor, "#batch 1 queries"]]
    has_position: Bool[Tensor, "#batch keys"] | None

    _means: dict[Hashable, tuple[frozenset[str], "_Means"]] = field(default_factory=dict, init=False, repr=False)

    def means(
        self, context: CallContext, has_projection: bool, has_softcap: bool, measured: frozenset[str] | None
    ) -> tuple[frozenset[str], "_Means"]:
        """Return two values for the attention call that this object describes. The first is the names of the statistics
        that the call does not have, or that are not wanted. The second states, for all other statistics that are means
        over query rows, which number of the kernels is averaged, and over which rows.

        Args:
            context: tokens and padding of the call.
            has_projection: True if the output projection of the heads is known.
            has_softcap: True if the call has a softcap.
            measured: names of the wanted statistics; None for all.
        """
        kind = has_projection, has_softcap, measured
        if kind not in self._means:
            missing = set(context.left_out)
            missing |= set() if context.is_special is not None else {"special", "confidence_content"}
            missing |= set() if self.key_tokens is not None else {"duplicate", "induction"}
            missing |= set() if has_projection else {"written_norm"}
            missing |= set() if has_softcap else {"max_logit_uncapped"}
            missing |= set() if measured is None else STATISTICS.keys() - measured
            names = tuple(name for name in STATISTICS if name in COMPUTED - LARGEST - {"received"} - missing)
            device, every_row = self.positions.device, self.positions.new_ones(1, 1, 1, dtype=torch.bool)
            rows = [self.has_value.get(name, every_row) for name in names]
            rows.append(every_row.expand(1, 1, self.positions.shape[1]))
            self._means[kind] = (
                frozenset(missing),
                _Means(
                    names,
                    torch.tensor([(*ROWS, "evenness").index(name) for name in names], device=device),
                    torch.stack(torch.broadcast_tensors(*rows)[:-1]),  # type: ignore[no-untyped-call]
                    names.index("evenness") if "evenness" in names else None,
                ),
            )
        return self._means[kind]

    @cached_property
    def whole(self) -> tuple[Tensor | int | None, ...]:
        """Arguments with which the kernels' operator computes the statistics of the whole score matrix: tokens,
        positions and padding.
        """
        return tuple(
            each.contiguous() if isinstance(each, Tensor) else each
            for each in (
                *(self.positions, self.first_key, self.is_special, self.key_tokens, self.query_tokens),
                *(self.token_count, self.is_counted),
            )
        )

    def arguments(self, part: Part) -> tuple[Tensor | int | None, ...]:
        """Return the arguments with which the kernels' operator computes the statistics of `part`, a rectangle of the
        score matrix. Key indices among them are counted from the first column of the rectangle.
        """
        rows, columns = (slice(axis.start, axis.stop) for axis in part)
        return (
            *((each[:, rows] - columns.start).contiguous() for each in (self.positions, self.first_key)),
            *(None if each is None else each[:, columns].contiguous() for each in (self.is_special, self.key_tokens)),
            None if self.query_tokens is None else self.query_tokens[:, rows].contiguous(),
            self.token_count,
            None if self.is_counted is None else self.is_counted[:, rows].contiguous(),
        )


class _Means(NamedTuple):
    """Statistics that are means over query rows, each with its place in the list of numbers that the kernels compute
    for a row.

    Attributes:
        names: their names.
        numbers: their places in `ROWS`; `evenness`, which follows from the numbers, comes after the last place.
        has_value: True at the rows for which they are defined by their positions.
        evenness: place of `evenness` among the names; None without.
    """

    names: tuple[str, ...]
    numbers: Int[Tensor, " means"]
    has_value: Bool[Tensor, "means #batch 1 queries"]
    evenness: int | None


_cached: WeakKeyDictionary[CallContext, dict[tuple[int, int, int], KernelInputs]] = WeakKeyDictionary()
"""Kernel inputs of call contexts, by the sizes of the call."""


def kernel_inputs(context: CallContext, problem: Problem) -> KernelInputs | None:
    """Return the tokens, positions and padding of an attention call in the form that the statistics kernels read.
    Return None if the key positions do not ascend one by one. The result is cached for the calls of other layers,
    unless the positions were passed to this call only.
    """
    grid = problem.grid
    is_of_context = context.positions is not None or grid.uses_default_positions
    cached, sizes = _cached.setdefault(context, {}), (grid.batch, grid.queries, grid.keys)
    if is_of_context and sizes in cached:
        return cached[sizes]
    visibility = context.visibility(full_width_tile(grid, range(grid.queries)), grid)
    of_queries, key = visibility.query_positions, torch.arange(grid.keys, device=grid.device)
    positions = grid if context.positions is None else context.positions  # it may have fewer keys than the call
    has_position = key[None] < positions.keys
    if positions.key_positions is not None:
        of_keys = torch.nn.functional.pad(positions.key_positions, (0, grid.keys - positions.keys), value=-1)
        has_position = of_keys >= 0
        first = has_position.int().argmax(1, keepdim=True)
        shift = first - of_keys.gather(1, first)
        if not torch.equal(of_keys + shift, torch.where(has_position, key, of_keys + shift)):
            return None
        of_queries = of_queries + shift
    key_tokens, query_tokens, token_count = None, None, 0
    if visibility.has_earlier_copy is not None and context.distinct_ids is not None:
        tokens, numbers = torch.unique(context.distinct_ids, return_inverse=True)
        of_positions = numbers[:, of_queries[0].clamp(min=0)].masked_fill(of_queries[0] < 0, -1)
        key_tokens, query_tokens, token_count = numbers.int(), of_positions.int(), len(tokens)
    counted = {
        each.name: each.counted(visibility)
        for each in STATISTICS.values()
        if isinstance(each, MeanOfRows) and each.name in COMPUTED and each.name != "evenness"  # of the mask
    }
    inputs = KernelInputs(
        positions=of_queries.expand(grid.batch, -1).int().contiguous(),
        first_key=visibility.first_key.expand(grid.batch, grid.queries).int().contiguous(),
        is_special=None if context.is_special is None else context.is_special[:, : grid.keys],
        key_tokens=None if key_tokens is None else key_tokens[:, : grid.keys],
        query_tokens=query_tokens,
        token_count=token_count,
        is_counted=context.real_queries,
        has_value={name: rows for name, rows in counted.items() if rows is not None},
        has_position=None if bool(has_position.all()) else has_position,
    )
    if is_of_context:
        cached[sizes] = inputs
    return inputs


def why_not(problem: Problem, context: CallContext, measured: frozenset[str] | None = None) -> str | None:
    """Return the reason that headwise's kernels cannot compute the statistics of one attention call, as one sentence.
    Return None if they can compute those statistics that `COMPUTED` names. `measured` has the names of the wanted
    statistics; None means all.
    """
    wanted = STATISTICS.keys() if measured is None else measured
    if wanted.isdisjoint(COMPUTED):
        return f"the kernels do not compute the statistics {', '.join(sorted(wanted))}"
    if problem.return_weights or 0 in (*problem.q.shape, *problem.k.shape):
        return "there are no rows of weights to compute, or the matrix is asked for"
    if is_on_gpu(problem):
        reason = gpu.why_not(problem) or gpu.why_not_registered()
    elif problem.needs_grad:
        reason = "the native kernels have no gradient of an output with statistics"
    else:
        reason = native.why_not(problem)
    if reason is None and kernel_inputs(context, problem) is None:
        return "the kernels know positions that ascend one by one"
    return reason


def left_to_blocks(measured: frozenset[str] | None = None) -> Set[str]:
    """Return the names of the statistics that the kernels do not compute. They are computed from row blocks (attention
    weights of some query rows) instead. `measured` has the names of the wanted statistics; None means all.
    """
    return (STATISTICS.keys() if measured is None else measured) - COMPUTED


def explain(problem: Problem, context: CallContext, measured: frozenset[str] | None = None) -> str:
    """Return a text that states how the statistics of an attention call are computed, and why: by kernels, or from row
    blocks (attention weights of some query rows). `measured` has the names of the wanted statistics; None means all.
    """
    reason = why_not(problem, context, measured)
    if reason is not None:
        return f"row blocks: {reason}"
    engine = "Triton kernels" if is_on_gpu(problem) else "native kernels"
    others = ", ".join(sorted(left_to_blocks(measured)))
    return f"{engine}, and row blocks for {others}, which the kernels do not compute" if others else engine


def is_on_gpu(problem: Problem) -> bool:
    """Return True if the tensors of an attention call are on a CUDA GPU, where the Triton kernels compute its
    statistics.
    """
    return problem.q.device.type == "cuda"


def fastest_or_reference(problem: Problem) -> Answer:
    """Compute an attention call by the fastest backend that supports it, and return the answer. Calls that mix heads
    (talking heads) are computed by the reference backend.
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
    """Compute one attention call and return its answer. Also add statistics of its attention weights, those that
    `COMPUTED` names, to `tally`. On a CPU, native kernels compute the answer and the statistics. On a GPU, `compute`
    computes the answer, and Triton kernels the statistics.

    On a CPU, if a row or its projection is not finite, return None, and leave the tally unchanged: one bad value would
    spread to rows that do not attend to it. The Triton kernels read no values, so a bad query or key changes the rows
    that may attend to it alone. `why_not` must have returned None for the problem.
    """
    inputs = kernel_inputs(context, problem)
    assert inputs is not None
    gram = None if tally.gram is None else tally.gram.float().contiguous()
    on_gpu = is_on_gpu(problem)
    answer = compute(problem) if on_gpu else None
    with torch.no_grad(), without_autocast(problem.q.device):
        if answer is None:

            def native_part(_part: Part, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
                *results, received, seen_by = library.operator("attend_statistics")(*arguments, gram)
                return *results, received.double().mul_(RECEIVED_UNIT), seen_by

            out, lse, rows, received, seen_by = _in_parts(problem, inputs, native_part)
            answer = Answer(out, lse if problem.return_lse else None, None)
        else:
            whole_out = answer.out.detach()

            def gpu_part(part: Part, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
                call = StatisticsCall(*arguments)._replace(gram=gram)
                return tuple(gpu.weight_statistics(call, part.rows_of(whole_out))[1:])

            rows, received, seen_by = _in_parts(problem, inputs, gpu_part)
        if inputs.has_position is not None and bool((seen_by * ~inputs.has_position[:, None]).any()):
            return None
        added = _tally(rows, received, seen_by, problem, context, inputs, tally)
        if added is None:
            return None
        tally.merge(added)
    return answer


def _in_parts(
    problem: Problem, inputs: KernelInputs, compute: Callable[[Part, tuple[Any, ...]], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the results of the statistics kernels for a whole attention call. `compute` runs the kernels on one
    rectangle of the score matrix. This is normally the whole matrix, but if the mask is too large to be evaluated at
    once, there are several rectangles. The last two results are sums for each key. The one before them has the query
    rows on its last axis, the others on their third.
    """
    visible = None if problem.mask is None else visible_keys(problem.mask, problem.grid)
    parts = None if visible is None else visible.parts()
    if visible is None or parts is None:
        of_mask = (None, None) if visible is None else (visible.ranges, visible.matrix())
        whole = Part(range(problem.grid.queries), range(problem.grid.keys))
        return compute(whole, (*native.arguments(problem, *of_mask), *inputs.whole))
    q, k, v, scale, head_scale, softcap, sinks, _, _, bias = native.arguments(problem, None, None)
    options = Options(scale, head_scale, softcap, sinks, bias)

    def of_part(part: Part, ranges: KeyRanges | None, matrix: Matrix | None) -> tuple[Tensor, ...]:
        tensors = part.of(q, k, v)
        return compute(part, (*tensors, *options.arguments(part, ranges, matrix), *inputs.arguments(part)))

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
    rows: Float[Tensor, "numbers batch heads queries"],
    received: Float[Tensor, "batch heads keys"],
    seen_by: Int[Tensor, "batch heads keys"],
    problem: Problem,
    context: CallContext,
    inputs: KernelInputs,
    like: Tally,
) -> Tally | None:
    """Return a new tally: the sums of the statistics over the query rows of a call. The sums are computed from the
    kernels' results for each row (`rows`, the numbers in `ROWS`) and each key (`received` and `seen_by`). The tally
    `like` states which statistics are wanted; its additional statistics (`further`) are updated, too. On a CPU, return
    None if some rows are not finite.
    """
    missing, means = inputs.means(context, like.gram is not None, problem.softcap is not None, like.measured)
    tally = Tally(like.gram, like.first_token)
    batch, heads, queries = rows.shape[1:]
    if "received" not in missing:
        tally.other_sums["received"] = received, seen_by.double()
    on_gpu = is_on_gpu(problem)
    if not on_gpu and like.further is None:
        is_counted = None if context.real_queries is None else context.real_queries.contiguous()
        sums, largest, is_finite = library.operator("row_sums")(rows, is_counted, means.numbers, means.has_value)
        tally.mean_names, tally.row_sums = means.names, sums
        tally.other_sums |= {name: (of_heads,) for name, of_heads in zip(LARGEST_ROWS, largest, strict=True)}
        for name in missing.intersection(LARGEST_ROWS):
            del tally.other_sums[name]
        return tally if is_finite else None
    if not on_gpu and not math.isfinite(rows[INDICATORS].sum()):  # `written_norm` is 0 without a projection
        return None
    visible = rows[VISIBLE]
    counted = visible > 0
    if context.real_queries is not None:
        counted &= context.real_queries[:, None]
    step = max(ROWS_AT_ONCE // (batch * heads), 1)
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        of_rows, seen, is_counted = rows[..., part], visible[..., part], counted[..., part]
        evenness = of_rows[ENTROPY] / seen.clamp(min=2.0).log()
        values = torch.cat([of_rows, evenness[None]])[means.numbers]
        in_mean = is_counted & means.has_value[..., part]
        if means.evenness is not None:
            in_mean[means.evenness] &= seen > 1
        measured = MeasuredRows(
            means.names, values, in_mean, slice(0, batch), slice(0, heads), range(part.start, part.stop)
        )
        if like.further is not None:
            like.further.add(measured, None)
        tally.add_rows(measured, batch, heads)
    for name in LARGEST - missing:
        tally.other_sums[name] = (rows[ROWS.index(name)].masked_fill(~counted, -torch.inf).amax(-1).double(),)
    return tally
