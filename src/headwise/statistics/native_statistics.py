"""All statistics of an attention call from the native kernels, in the pass that computes its output."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.native import backend as native
from headwise.attention.masks.key_ranges import visible_keys
from headwise.attention.problem import Answer, Problem
from headwise.shapes import Bool, Float, Int
from headwise.statistics.registry import STATISTICS
from headwise.statistics.tally import Tally

ROWS = (
    *("entropy", "confidence", "distance", "self", "previous", "next", "first"),
    *("special", "duplicate", "induction", "output_norm", "written_norm", "visible keys"),
)
"""Names of the numbers that the kernels compute for each query row, in their order."""

COMPUTED = frozenset(ROWS) - {"visible keys"} | {"evenness", "received"}
"""Names of the statistics that the kernels' results give."""

RECEIVED_UNIT = 2.0**-40
"""Unit of the kernels' sums of weights: integers, whose sums do not depend on the order of threads."""

_NEIGHBOURS = {"self": 0, "previous": 1, "next": -1}
"""Distance of the key from the query, by the statistic of its weight."""


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """Data of a call context in the form that the kernels read, and the rows in which statistics are defined. All
    layers of a model share one.

    Attributes:
        first_key: index of the key of the first token, -1 if it is not among the keys.
        key_tokens: numbers of the keys' tokens, from 0 on; None if unknown.
        query_tokens: numbers of the queries' tokens; -1 where a query has none.
        token_count: number of different tokens.
        has_value: True at the rows in which a statistic is defined, by its name, for those not defined in all.
    """

    first_key: Int[Tensor, " batch"]
    key_tokens: Int[Tensor, "batch keys"] | None
    query_tokens: Int[Tensor, "batch queries"] | None
    token_count: int
    has_value: dict[str, Bool[Tensor, "#batch 1 queries"]]


_inputs: WeakKeyDictionary[CallContext, dict[tuple[int, int, int], KernelInputs]] = WeakKeyDictionary()
"""Kernel inputs of call contexts, by the sizes of the call."""


def why_not(problem: Problem, context: CallContext) -> str | None:
    """Return the reason that the kernels cannot compute the statistics of a problem, in one sentence; None if they can.

    Args:
        problem: the attention call.
        context: its tokens and padding.
    """
    if STATISTICS.keys() != COMPUTED:
        return "a statistic was added or removed, and the native kernels compute the others"
    if not problem.grid.uses_default_positions or context.positions is not None:
        return "the native kernels know default positions only"
    if context.first_keys is not None and context.first_keys.shape[1] != 1:
        return "the native kernels know one first token for each sequence"
    if _needs_grad(problem):
        return "the native kernels have no gradient of an output with statistics"
    if problem.return_weights or 0 in (*problem.q.shape, *problem.k.shape):
        return "there are no rows of weights to compute, or the matrix is asked for"
    return native.why_not(problem)


def attend_tallied(problem: Problem, context: CallContext, tally: Tally) -> Answer | None:
    """Compute one attention call with the native kernels, add the statistics of its weights to `tally`, and return its
    answer. If a row is not finite, return None, and leave the tally unchanged: one bad value would spread to rows that
    do not attend to it.

    Args:
        problem: the attention call; `why_not` must have returned None for it.
        context: its tokens and padding.
        tally: sums to add to.
    """
    inputs = _kernel_inputs(context, problem)
    visible = visible_keys(problem.mask, problem.grid)
    with torch.no_grad(), without_autocast(problem.q.device):
        out, lse, rows, received, seen_by = torch.ops.headwise.attend_statistics(
            *native.arguments(problem, visible.ranges, visible.matrix()),
            inputs.first_key,
            _contiguous(context.is_special),
            inputs.key_tokens,
            inputs.query_tokens,
            inputs.token_count,
            _contiguous(context.real_queries),
            None if tally.gram is None else tally.gram.float().contiguous(),
        )
        values = dict(zip(ROWS, rows.unbind(0), strict=True))
        if not bool((values["entropy"] + values["output_norm"]).sum().isfinite()):
            return None
        tally.merge(_tally(values, received, seen_by, context, inputs, tally))
    return Answer(out, lse if problem.return_lse else None, None)


def _tally(
    values: dict[str, Float[Tensor, "batch heads queries"]],
    received: Int[Tensor, "batch heads keys"],
    seen_by: Int[Tensor, "batch heads keys"],
    context: CallContext,
    inputs: KernelInputs,
    like: Tally,
) -> Tally:
    """Return the sums of every statistic over the query rows of a call, from the numbers of each row and key."""
    visible = values.pop("visible keys")
    values["evenness"] = values["entropy"] / visible.clamp(min=2.0).log()
    counted = visible > 0
    if context.real_queries is not None:
        counted &= context.real_queries[:, None]
    missing = set(context.left_out)
    missing |= set() if context.is_special is not None else {"special"}
    missing |= set() if inputs.key_tokens is not None else {"duplicate", "induction"}
    missing |= set() if like.gram is not None else {"written_norm"}
    names = tuple(name for name in STATISTICS if name in values and name not in missing)
    has_value = {**inputs.has_value, "evenness": visible > 1}
    in_mean = torch.stack([counted & has_value[name] if name in has_value else counted for name in names])
    # In float64, since thousands of rows in float32 would lose the digits in which heads differ.
    sums = torch.stack([values[name] for name in names]).double().masked_fill_(~in_mean, 0.0).sum(-1)
    tally = Tally(like.gram, like.first_token, names, torch.stack([sums, in_mean.sum(-1).double()]))
    if "received" not in missing:
        tally.other_sums["received"] = received.double().mul_(RECEIVED_UNIT), seen_by.double()
    return tally


def _kernel_inputs(context: CallContext, problem: Problem) -> KernelInputs:
    """Return the data of a call context that the kernels read. They are cached for other layers."""
    grid = problem.grid
    cached, sizes = _inputs.setdefault(context, {}), (grid.batch, grid.queries, grid.keys)
    if sizes not in cached:
        cached[sizes] = _make_kernel_inputs(context, *sizes)
    return cached[sizes]


def _make_kernel_inputs(context: CallContext, batch: int, queries: int, keys: int) -> KernelInputs:
    """Return the data of a call context that the kernels read, for a call of these sizes."""
    position = torch.arange(queries) + keys - queries
    has_value = {}
    for name, lag in _NEIGHBOURS.items():
        neighbour = position - lag
        exists = ((neighbour >= 0) & (neighbour < keys))[None, None]
        if context.real_keys is not None:
            exists = exists & context.real_keys[:, None, neighbour.clamp(0, keys - 1)]
        has_value[name] = exists
    first_key = torch.zeros(batch, dtype=torch.int32)
    if context.first_keys is not None:
        first_key = context.first_keys[:, 0].int().contiguous()
    elif context.real_keys is not None:
        first_key = context.real_keys.int().argmax(-1).int()
    if context.is_repeat is None or context.distinct_ids is None:
        return KernelInputs(first_key, None, None, 0, has_value)
    exists = position >= 0
    has_copy = (context.is_repeat[:, position.clamp(min=0)] & exists)[:, None]
    has_value |= {"duplicate": has_copy, "induction": has_copy}
    tokens, numbers = torch.unique(context.distinct_ids, return_inverse=True)
    query_tokens = numbers[:, position.clamp(min=0)].masked_fill(~exists, -1)
    return KernelInputs(first_key, numbers.int(), query_tokens.int().contiguous(), len(tokens), has_value)


def _needs_grad(problem: Problem) -> bool:
    """Return True if a gradient of the output may be asked for."""
    tensors = (problem.q, problem.k, problem.v, problem.bias, problem.sinks, problem.scale)
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor that is contiguous in memory; copied only if necessary."""
    return None if tensor is None else tensor.contiguous()
