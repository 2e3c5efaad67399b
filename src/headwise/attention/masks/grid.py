"""Score grid that a mask is evaluated on, tensors that have the shape of such a grid, and ranges of positions on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.tensors import KeyPositions, QueryPositions
from headwise.checks import has_readable_values
from headwise.errors import InputError
from headwise.shapes import Int

Index = Int[Tensor, "..."]
"""Indices or positions of sequences, heads, query rows or keys: tensors that broadcast, or single numbers."""


@dataclass(frozen=True)
class Grid:
    """Sizes of a score tensor `(batch, heads, queries, keys)`, its device, and the positions of its queries and keys.

    By default key j is at position j, and query i at position `i + keys - queries`, so that the last query is aligned
    with the last key. A cache passes positions of its own, where keys have been dropped, where slots are empty, or
    where sequences have different lengths. Position -1 marks an empty slot or padding.

    Attributes:
        batch: number of sequences.
        heads: number of query heads.
        queries: number of query rows.
        keys: number of keys.
        device: of the blocks of a mask.
        query_positions: `(batch, queries)` or `(1, queries)`; None for the default.
        key_positions: `(batch, keys)` or `(1, keys)`; None for the default.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device = torch.device("cpu")
    query_positions: QueryPositions | None = field(default=None, compare=False)
    key_positions: KeyPositions | None = field(default=None, compare=False)

    @property
    def scores(self) -> int:
        """Number of scores, batch x heads x queries x keys, including those that a mask hides."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def offset(self) -> int:
        """Default position of query row 0, `keys - queries`; negative when there are more queries than keys."""
        return self.keys - self.queries

    @property
    def uses_default_positions(self) -> bool:
        """True if the positions of queries and keys were not passed, but follow from the sizes."""
        return self.query_positions is None and self.key_positions is None

    def query_position(self, i: Index, b: Index | None = None) -> Index:
        """Return the position of query row `i` in sequence `b`, for indices that are single numbers or tensors that
        broadcast. Without `b`, the indices `i` have shape `(1, rows)`, and the result has their positions in all
        sequences, `(#batch, rows)`.
        """
        if self.query_positions is None:
            return i + self.offset
        return self.query_positions[:, i[0]] if b is None else elements(self.query_positions, b, i)

    def key_position(self, j: Index, b: Index | None = None) -> Index:
        """Return the position of key `j` in sequence `b`, for indices that are single numbers or tensors that
        broadcast. Without `b`, the indices `j` have shape `(1, keys)`, and the result has their positions in all
        sequences.
        """
        if self.key_positions is None:
            return j
        return self.key_positions[:, j[0]] if b is None else elements(self.key_positions, b, j)


class Coverage(Enum):
    """Share of the query-key pairs of a block that a mask allows: none (EMPTY), all (FULL), or some (PARTIAL).

    PARTIAL may also mean that the share is unknown without evaluating the block.
    """

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


def elements(values: Tensor, *indices: Index | int) -> Tensor:
    """Return the elements of `values` at the given indices, one for each axis: single numbers or tensors that
    broadcast. On an axis of size 1, along which the tensor repeats, the index is ignored.
    """
    return values[tuple(n if size != 1 else 0 for n, size in zip(indices, values.shape, strict=True))]


def with_four_axes(name: str, values: Tensor) -> Tensor:
    """Return a mask or bias with four axes: axes of size 1 are added to a tensor `(queries, keys)`. Raise `InputError`
    unless it has 2 or 4 axes. With 3, it would be unclear which axis is missing.
    """
    if values.ndim == 2:
        return values[None, None]
    if values.ndim != 4:
        raise InputError(
            name,
            expected="2 dimensions (queries, keys) or 4 (batch, heads, queries, keys)",
            got=f"{values.ndim} dimensions {tuple(values.shape)}",
            remedy="unsqueeze the batch or the head axis" if values.ndim == 3 else None,
        )
    return values


def require_broadcast(name: str, values: Tensor, grid: Grid) -> None:
    """Raise `InputError` unless a tensor of four axes broadcasts to the scores `(batch, heads, queries, keys)` of a
    grid, and is on the grid's device.
    """
    sizes = (grid.batch, grid.heads, grid.queries, grid.keys)
    if any(size not in (1, wanted) for size, wanted in zip(values.shape, sizes, strict=True)):
        raise InputError(
            name,
            expected=f"a shape that broadcasts to (batch, heads, queries, keys) = {sizes}",
            got=tuple(values.shape),
            remedy="a padding mask (batch, keys) goes in as mask[:, None, None, :]"
            if tuple(values.shape) == (1, 1, grid.batch, grid.keys)
            else None,
        )
    if values.device != grid.device:
        raise InputError(name, expected=f"a tensor on {grid.device} like q", got=values.device)


# -- ranges of positions -----------------------------------------------------------------------------------------------

MAX_DISTANCE = 2**62
"""Bound above every position and distance: a larger number limits nothing, and would overflow int64 arithmetic."""

MOST_RANGES = 4
"""Largest number of ranges for each query; masks that need more are evaluated as matrices."""

Edges = Int[Tensor, "#batch #heads #queries"]


class Range(NamedTuple):
    """One range of positions or keys for each query: `start`, which is included, and `stop`, which is not. A range
    whose stop is not above its start is empty.
    """

    start: Edges
    stop: Edges


Ranges = list[Range]
"""Disjoint ranges, whose union a query attends to."""


def query_positions(grid: Grid) -> Edges:
    """Return the position of each query, `(1 or batch, 1, queries)`."""
    if grid.query_positions is not None:
        return grid.query_positions[:, None].long()
    return (torch.arange(grid.queries, device=grid.device) + grid.offset)[None, None]


def end_of_positions(grid: Grid) -> int:
    """Return a number above the positions of all keys: the number of keys, if each key's position equals its index;
    otherwise `MAX_DISTANCE`.
    """
    return grid.keys if grid.key_positions is None else MAX_DISTANCE


def constant_range(start: int, stop: int, grid: Grid) -> Range:
    """Return the range from `start` to `stop` for every query, as tensors of shape `(1, 1, 1)`."""
    edges = (torch.full((1, 1, 1), min(edge, MAX_DISTANCE), device=grid.device) for edge in (start, stop))
    return Range(*edges)


def within(ranges: Ranges, grid: Grid) -> Ranges:
    """Return ranges cut to the positions that exist in a grid. Ranges that are known to be empty for every query are
    left out.
    """
    end = end_of_positions(grid)
    cut = [Range(each.start.clamp(0, end), each.stop.clamp(0, end)) for each in ranges]
    if not all(has_readable_values(edge) for each in cut for edge in each):
        return cut
    return [each for each in cut if bool((each.stop > each.start).any())]


def intersect(left: Ranges, right: Ranges, grid: Grid) -> Ranges:
    """Return the intersection of two unions of ranges, as a list of ranges."""
    pairs = [(a, b) for a in left for b in right]
    return within([Range(torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop)) for a, b in pairs], grid)


def subtract(ranges: Ranges, removed: Ranges, grid: Grid) -> Ranges:
    """Return the positions that are in `ranges` and not in `removed`, as a list of ranges."""
    for hole in within(removed, grid):
        before = [Range(each.start, torch.minimum(each.stop, hole.start)) for each in ranges]
        after = [Range(torch.maximum(each.start, hole.stop), each.stop) for each in ranges]
        # Without the second term, an empty hole would leave every range twice.
        after = [
            Range(each.start, torch.where(hole.stop > hole.start, each.stop, 0).expand_as(each.start + each.stop))
            for each in after
        ]
        is_empty = hole.stop <= hole.start
        before = [
            Range(each.start, torch.where(is_empty, full.stop, each.stop))
            for each, full in zip(before, ranges, strict=True)
        ]
        ranges = within(before + after, grid)
    return ranges


def stack_heads(ranges: Sequence[Range]) -> Range:
    """Return one range that has an axis of heads, given one range for each head."""
    edges = [torch.broadcast_tensors(*each) for each in zip(*ranges, strict=True)]  # type: ignore[no-untyped-call]
    start, stop = (torch.cat(list(each), 1) for each in edges)
    return Range(*torch.broadcast_tensors(start, stop))  # type: ignore[no-untyped-call]
