"""Tokens, padding and positions of an attention call in the form that kernels read for their statistics."""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import Part
from headwise.attention.problem import Problem
from headwise.shapes import Bool, Int

_NEIGHBOURS = {"self": 0, "previous": 1, "next": -1}
"""Distance of the key from the query, by the statistic of its weight."""


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """Data of a call context in the form that the kernels read, and the rows in which statistics are defined. All
    layers of a model share one.

    Attributes:
        positions: index that a key has, or would have, at the position of each query.
        first_key: index of the key of the first token, for each query; -1 if it is not among the keys.
        is_special: True at keys that are special tokens; None if unknown.
        key_tokens: numbers of the keys' tokens, from 0 on; None if unknown.
        query_tokens: numbers of the queries' tokens; -1 where a query has none.
        token_count: number of different tokens.
        is_counted: True at queries that statistics include; None for all.
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

    def arguments(self, part: Part) -> tuple[Tensor | int | None, ...]:
        """Return the arguments of the operator for a part of the score matrix. Indices of keys count from its first
        column.
        """
        rows, columns = (slice(axis.start, axis.stop) for axis in part)
        return (
            *((each[:, rows] - columns.start).contiguous() for each in (self.positions, self.first_key)),
            *(None if each is None else each[:, columns].contiguous() for each in (self.is_special, self.key_tokens)),
            None if self.query_tokens is None else self.query_tokens[:, rows].contiguous(),
            self.token_count,
            None if self.is_counted is None else self.is_counted[:, rows].contiguous(),
        )


_cached: WeakKeyDictionary[CallContext, dict[tuple[int, int, int], KernelInputs]] = WeakKeyDictionary()
"""Kernel inputs of call contexts, by the sizes of the call."""


def kernel_inputs(context: CallContext, problem: Problem) -> KernelInputs | None:
    """Return the data of a call context that the kernels read; None if its keys have positions that do not ascend one
    by one. The data are cached for other layers, except where the positions are those of the problem alone.
    """
    grid = problem.grid
    if context.positions is None and not grid.uses_default_positions:
        return _make(context, grid, grid)
    cached, sizes = _cached.setdefault(context, {}), (grid.batch, grid.queries, grid.keys)
    if sizes not in cached:
        made = _make(context, grid if context.positions is None else context.positions, grid)
        if made is None:
            return None
        cached[sizes] = made
    return cached[sizes]


def _make(context: CallContext, positions: Grid, grid: Grid) -> KernelInputs | None:
    """Return the data of a call context that the kernels read.

    Args:
        context: tokens and padding of the call.
        positions: grid whose positions the statistics use; it may have fewer keys than the call.
        grid: sizes of the call.
    """
    query, key = (torch.arange(count, device=grid.device) for count in (grid.queries, grid.keys))
    of_queries = positions.query_position(query[None])
    has_position = key[None] < positions.keys
    if positions.key_positions is not None:
        of_keys = torch.nn.functional.pad(positions.key_positions, (0, grid.keys - positions.keys), value=-1)
        has_position = of_keys >= 0
        first = has_position.int().argmax(1, keepdim=True)
        shift = first - of_keys.gather(1, first)
        if not torch.equal(of_keys + shift, torch.where(has_position, key, of_keys + shift)):
            return None
        of_queries = of_queries + shift
    inputs = KernelInputs(
        positions=of_queries.expand(grid.batch, -1).int().contiguous(),
        first_key=_first_key(context, positions, of_queries).expand(grid.batch, grid.queries).int().contiguous(),
        is_special=context.is_special,
        key_tokens=None,
        query_tokens=None,
        token_count=0,
        is_counted=context.real_queries,
        has_value={name: _has_key(context, of_queries, has_position, lag) for name, lag in _NEIGHBOURS.items()},
        has_position=None if bool(has_position.all()) else has_position,
    )
    if context.is_repeat is None or context.distinct_ids is None or not positions.uses_default_positions:
        return inputs
    position = of_queries[0]
    exists = position >= 0
    has_copy = (context.is_repeat[:, position.clamp(min=0)] & exists)[:, None]
    tokens, numbers = torch.unique(context.distinct_ids, return_inverse=True)
    return replace(
        inputs,
        key_tokens=numbers.int(),
        query_tokens=numbers[:, position.clamp(min=0)].masked_fill(~exists, -1).int(),
        token_count=len(tokens),
        has_value=inputs.has_value | {"duplicate": has_copy, "induction": has_copy},
    )


def _first_key(
    context: CallContext, positions: Grid, of_queries: Int[Tensor, "#batch queries"]
) -> Int[Tensor, "#batch #queries"]:
    """Return the index of the key of the first token, for each sequence or each row; -1 if it is not among the keys."""
    if context.first_keys is not None:
        return context.first_keys
    if positions.key_positions is not None:
        is_first = positions.key_positions == 0
        return is_first.int().argmax(1, keepdim=True).masked_fill(~is_first.any(1, keepdim=True), -1)
    if context.real_keys is not None:
        return context.real_keys.int().argmax(1, keepdim=True)
    return torch.zeros(1, 1, dtype=torch.int64, device=of_queries.device)


def _has_key(
    context: CallContext, of_queries: Int[Tensor, "#batch queries"], has_position: Bool[Tensor, "#batch keys"], lag: int
) -> Bool[Tensor, "#batch 1 queries"]:
    """Return True at rows for which a key is `lag` positions before the query, is not padding, and belongs to the same
    document.
    """
    keys, wanted = has_position.shape[1], of_queries - lag
    batch = max(len(wanted), len(has_position))
    at = wanted.clamp(0, keys - 1).expand(batch, -1)
    exists = (wanted >= 0) & (wanted < keys) & has_position.expand(batch, -1).gather(1, at)
    if context.positions is not None and not context.positions.uses_default_positions:
        return exists[:, None]
    if context.real_keys is not None:
        exists = exists & context.real_keys.gather(1, at.expand(len(context.real_keys), -1))
    first_keys = context.first_keys
    if first_keys is not None and first_keys.shape[1] == keys > 1:  # of each row
        own = of_queries.clamp(0, keys - 1)
        one, other = (first_keys.gather(1, each.expand(len(first_keys), -1)) for each in (own, at))
        exists = exists & (one == other)
    return exists[:, None]
