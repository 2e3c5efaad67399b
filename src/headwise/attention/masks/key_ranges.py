"""Masks as ranges of keys: the keys that each query attends to, as a union of a few half-open ranges.

Causal masks, windows, prefixes, lengths, chunks and packed documents are one range of keys for each query, and so is
what `&` makes of them. `causal() & (window(w) | prefix(4))` is two ranges. Kernels read these instead of a matrix: a
few numbers for each query, from which they also know which blocks of the score matrix they can leave out.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks.base import And, Mask, Not, Or
from headwise.attention.masks.by_head import PerHead
from headwise.attention.masks.by_position import MAX_DISTANCE, Band, Chunked, Prefix
from headwise.attention.masks.by_sequence import Padding, Segments
from headwise.attention.masks.grid import Grid
from headwise.checks import has_readable_values
from headwise.shapes import Bool, Int

MOST_RANGES = 4
"""Largest number of ranges for each query; masks that need more are evaluated as matrices."""

Indices = Int[Tensor, "#batch #heads #queries"]


class KeyRange(NamedTuple):
    """One range of keys for each query: `start`, which is included, and `stop`, which is not. A range whose stop is not
    above its start is empty.
    """

    start: Indices
    stop: Indices


Ranges = list[KeyRange]
"""Disjoint ranges, whose union are the keys that a query attends to."""


class VisibleKeys(NamedTuple):
    """The keys that each query attends to: those in one of its ranges at which the matrix is True.

    Attributes:
        ranges: starts and stops, int32; None if the ranges exclude no key.
        matrix: boolean matrix; None if it excludes no further key.
    """

    ranges: Int[Tensor, "#batch #heads queries ranges 2"] | None
    matrix: Bool[Tensor, "#batch #heads queries keys"] | None


def visible_keys(mask: Mask | None, grid: Grid) -> VisibleKeys:
    """Return the keys that a mask lets each query of a grid attend to, as ranges as far as possible, otherwise as a
    boolean matrix. Of two masks that are combined with `&`, each may be one or the other.
    """
    if mask is None:
        return VisibleKeys(None, None)
    is_plain = has_readable_values(torch.empty(0, device=grid.device))  # not while compiling or tracing
    if is_plain and grid.uses_default_positions and _is_constant(mask):
        return _constant_visible_keys(mask, grid)
    return _visible_keys(mask, grid)


@lru_cache(maxsize=32)
def _constant_visible_keys(mask: Mask, grid: Grid) -> VisibleKeys:
    """Return the result of `_visible_keys`, which is cached: all layers of a model have the same mask."""
    return _visible_keys(mask, grid)


def _visible_keys(mask: Mask, grid: Grid) -> VisibleKeys:
    """Return the ranges and the matrix of a mask; see `visible_keys`."""
    ranges, matrix = _ranges_and_matrix(mask, grid) if grid.uses_default_positions else (None, mask.block(grid))
    return VisibleKeys(None if ranges is None else _as_tensor(ranges, grid), matrix)


def _ranges_and_matrix(mask: Mask, grid: Grid) -> tuple[Ranges | None, Tensor | None]:
    """Return the ranges of the parts of a mask that are ranges, and the matrix of the others; None where there are no
    such parts.
    """
    ranges = _ranges(mask, grid)
    if ranges is not None:
        return ranges, None
    if isinstance(mask, And):
        left, right = (_ranges_and_matrix(part, grid) for part in mask.parts)
        both = left[0] if right[0] is None else right[0] if left[0] is None else _intersect(left[0], right[0], grid)
        if both is not None and len(both) <= MOST_RANGES:
            matrices = [matrix for _, matrix in (left, right) if matrix is not None]
            return both, matrices[0] if len(matrices) == 1 else matrices[0] & matrices[1]
    return None, mask.block(grid)


def _ranges(mask: Mask, grid: Grid) -> Ranges | None:
    """Return a mask as ranges of keys for each query; None if they are unknown, or more than `MOST_RANGES`."""
    ranges = None
    if isinstance(mask, Band):
        ranges = _band_ranges(mask, grid)
    elif isinstance(mask, Prefix):
        ranges = [_constant_range(0, mask.length, grid)]
    elif isinstance(mask, Chunked):
        chunk = _positions(grid).div(min(mask.size, MAX_DISTANCE), rounding_mode="floor")
        ranges = [KeyRange(chunk * min(mask.size, MAX_DISTANCE), (chunk + 1) * min(mask.size, MAX_DISTANCE))]
    elif isinstance(mask, Padding):
        lengths = mask.lengths.to(grid.device)[:, None, None]
        zeros, keys = torch.zeros_like(lengths), torch.full_like(lengths, grid.keys)
        ranges = [KeyRange(zeros, lengths) if mask.side == "right" else KeyRange(keys - lengths, keys)]
    elif isinstance(mask, Segments):
        ranges = _segment_ranges(mask, grid)
    elif isinstance(mask, PerHead):
        ranges = _ranges_per_head(mask, grid)
    elif isinstance(mask, And | Or | Not):
        ranges = _combined_ranges(mask, grid)
    if ranges is None:
        return None
    ranges = _within(ranges, grid)
    return ranges if len(ranges) <= MOST_RANGES else None


def _combined_ranges(mask: And | Or | Not, grid: Grid) -> Ranges | None:
    """Return the ranges of a mask made by `&`, `|` or `~`; None if those of a part are unknown."""
    parts = [_ranges(part, grid) for part in mask.parts]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    everything = [_constant_range(0, grid.keys, grid)]
    if isinstance(mask, Not):
        return _subtract(everything, known[0], grid)
    if isinstance(mask, And):
        return _intersect(known[0], known[1], grid)
    return known[0] + _subtract(known[1], known[0], grid)


def _band_ranges(mask: Band, grid: Grid) -> Ranges | None:
    """Return the one range of a causal mask or a window; None for a window with a dilation."""
    if mask.dilation != 1:
        return None
    position = _positions(grid)
    start = torch.zeros_like(position) if mask.width is None else position - min(mask.width, MAX_DISTANCE) + 1
    return [KeyRange(start, position + min(mask.ahead, MAX_DISTANCE) + 1)]


def _segment_ranges(mask: Segments, grid: Grid) -> Ranges | None:
    """Return the range of each query's document; None if a document is in several pieces, or the documents cannot be
    read, as while compiling.
    """
    ids = mask.ids.to(grid.device)
    if not has_readable_values(ids) or grid.keys == 0:
        return None
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
    if any(int(starts.sum()) != len(row.unique()) for starts, row in zip(is_start, ids, strict=True)):
        return None
    index = torch.arange(grid.keys, device=grid.device).expand_as(ids)
    start = torch.where(is_start, index, 0).cummax(1).values
    is_stop = is_start.roll(-1, 1)
    is_stop[:, -1] = True
    stop = torch.where(is_stop, index + 1, grid.keys).flip(1).cummin(1).values.flip(1)
    position = _positions(grid)[0, 0]
    exists = position >= 0
    start, stop = (edge[:, position.clamp(min=0)].masked_fill(~exists, 0)[:, None] for edge in (start, stop))
    return [KeyRange(start, stop)]


def _ranges_per_head(mask: PerHead, grid: Grid) -> Ranges | None:
    """Return the ranges of a mask with one rule for each head; None if those of one of the rules are unknown."""
    one_head = replace(grid, heads=1)
    per_head = [_ranges(mask.for_head(head), one_head) for head in range(len(mask.masks))]
    known = [ranges for ranges in per_head if ranges is not None]
    if len(known) < len(per_head):
        return None
    count = max(len(ranges) for ranges in known)
    padded = [ranges + [_constant_range(0, 0, grid)] * (count - len(ranges)) for ranges in known]
    return [_stack_heads([ranges[number] for ranges in padded]) for number in range(count)]


def _stack_heads(ranges: Sequence[KeyRange]) -> KeyRange:
    """Return one range with a head axis from the ranges of single heads."""
    edges = [torch.broadcast_tensors(*each) for each in zip(*ranges, strict=True)]  # type: ignore[no-untyped-call]
    start, stop = (torch.cat(list(each), 1) for each in edges)
    return KeyRange(*torch.broadcast_tensors(start, stop))  # type: ignore[no-untyped-call]


def _intersect(left: Ranges, right: Ranges, grid: Grid) -> Ranges:
    """Return the ranges of the keys in both unions of ranges."""
    pairs = [(a, b) for a in left for b in right]
    return _within([KeyRange(torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop)) for a, b in pairs], grid)


def _subtract(ranges: Ranges, removed: Ranges, grid: Grid) -> Ranges:
    """Return the ranges of the keys in `ranges` that are in none of `removed`."""
    for hole in _within(removed, grid):
        before = [KeyRange(each.start, torch.minimum(each.stop, hole.start)) for each in ranges]
        after = [KeyRange(torch.maximum(each.start, hole.stop), each.stop) for each in ranges]
        # Without the second term, an empty hole would leave every range twice.
        after = [
            KeyRange(each.start, torch.where(hole.stop > hole.start, each.stop, 0).expand_as(each.start + each.stop))
            for each in after
        ]
        is_empty = hole.stop <= hole.start
        before = [
            KeyRange(each.start, torch.where(is_empty, full.stop, each.stop))
            for each, full in zip(before, ranges, strict=True)
        ]
        ranges = _within(before + after, grid)
    return ranges


def _within(ranges: Ranges, grid: Grid) -> Ranges:
    """Return ranges cut to the keys of the grid, without those that are empty for every query, where that is known."""
    cut = [KeyRange(each.start.clamp(0, grid.keys), each.stop.clamp(0, grid.keys)) for each in ranges]
    if not all(has_readable_values(edge) for each in cut for edge in each):
        return cut
    return [each for each in cut if bool((each.stop > each.start).any())]


def _positions(grid: Grid) -> Indices:
    """Return the position of each query, `(1, 1, queries)`."""
    return (torch.arange(grid.queries, device=grid.device) + grid.offset)[None, None]


def _constant_range(start: int, stop: int, grid: Grid) -> KeyRange:
    """Return the same range for every query, `(1, 1, 1)`."""
    edges = (torch.full((1, 1, 1), min(edge, MAX_DISTANCE), device=grid.device) for edge in (start, stop))
    return KeyRange(*edges)


def _as_tensor(ranges: Ranges, grid: Grid) -> Int[Tensor, "#batch #heads queries ranges 2"]:
    """Return ranges as one tensor, with a range without keys if there are none."""
    ranges = ranges or [_constant_range(0, 0, grid)]
    edges = [edge for each in ranges for edge in each]
    edges = list(torch.broadcast_tensors(*edges, _positions(grid)))[:-1]  # type: ignore[no-untyped-call]
    stacked = torch.stack(edges, -1).int()
    return stacked.view(*stacked.shape[:3], len(ranges), 2).contiguous()


def _is_constant(mask: Mask) -> bool:
    """Return True if a mask is made of numbers alone, not of tensors, whose values may change, or functions."""
    if isinstance(mask, And | Or | Not):
        return all(_is_constant(part) for part in mask.parts)
    if isinstance(mask, PerHead):
        return all(_is_constant(part) for part in mask.masks)
    return isinstance(mask, Band | Prefix | Chunked)
