"""Masks as ranges of positions: the positions that each query attends to, as a union of a few half-open ranges.

Causal masks, windows, prefixes, lengths, chunks and packed documents are one range of positions for each query, and so
is what `&` makes of them. `causal() & (window(w) | prefix(4))` is two ranges.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.base import And, Mask, Not, Or
from headwise.attention.masks.by_head import PerHead
from headwise.attention.masks.by_position import MAX_DISTANCE, Band, Chunked, HasPosition, Prefix
from headwise.attention.masks.by_sequence import Padding, Segments
from headwise.attention.masks.grid import Grid
from headwise.checks import has_readable_values
from headwise.shapes import Int

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


def position_ranges(mask: Mask, grid: Grid) -> Ranges | None:
    """Return the key positions that a mask allows, as ranges for each query. Return None if the positions are unknown,
    or if a query needs more than `MOST_RANGES` ranges. Keys at position -1, which do not exist, are in no range.
    """
    ranges = None
    if isinstance(mask, Band):
        ranges = _hull_of_band(mask, grid) if mask.dilation == 1 else None
    elif isinstance(mask, Prefix):
        ranges = [constant_range(0, mask.length, grid)]
    elif isinstance(mask, HasPosition):
        exists = query_positions(grid) >= 0
        ranges = [Range(torch.zeros_like(exists, dtype=torch.long), exists * end_of_positions(grid))]
    elif isinstance(mask, Chunked):
        size = min(mask.size, MAX_DISTANCE)
        chunk = query_positions(grid).div(size, rounding_mode="floor")
        ranges = [Range(chunk * size, (chunk + 1) * size)]
    elif isinstance(mask, Padding):
        lengths = mask.lengths_on(grid.device)[:, None, None]
        zeros, keys = torch.zeros_like(lengths), torch.full_like(lengths, grid.keys)
        ranges = [Range(zeros, lengths) if mask.side == "right" else Range(keys - lengths, keys)]
    elif isinstance(mask, Segments):
        ranges = _hull_of_segments(mask, grid) if mask.is_one_piece_each else None
    elif isinstance(mask, PerHead):
        ranges = _ranges_per_head(mask, grid)
    elif isinstance(mask, And | Or | Not):
        ranges = _combined_ranges(mask, grid)
    return None if ranges is None else at_most(MOST_RANGES, within(ranges, grid))


def hull(mask: Mask, grid: Grid) -> Ranges | None:
    """Return ranges that contain all positions that a mask allows, and others, for masks that are no ranges themselves:
    dilated windows, and documents that are, or may be, in several pieces. None for other masks.
    """
    if isinstance(mask, Band):
        return within(_hull_of_band(mask, grid), grid)
    if isinstance(mask, Segments) and mask.ids.shape[1] > 0:
        return within(_hull_of_segments(mask, grid), grid)
    return None


def _combined_ranges(mask: And | Or | Not, grid: Grid) -> Ranges | None:
    """Return the ranges of a mask made by `&`, `|` or `~`; None if those of a part are unknown."""
    parts = [position_ranges(part, grid) for part in mask.parts]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    everything = [constant_range(0, end_of_positions(grid), grid)]
    if isinstance(mask, Not):
        return _subtract(everything, known[0], grid)
    if isinstance(mask, And):
        return intersect(known[0], known[1], grid)
    return known[0] + _subtract(known[1], known[0], grid)


def _hull_of_band(mask: Band, grid: Grid) -> Ranges:
    """Return the range from the first to the last position of a causal mask or a window."""
    position = query_positions(grid)
    ahead = min(mask.ahead * mask.dilation, MAX_DISTANCE)
    if mask.width is None:
        return [Range(torch.zeros_like(position), position + ahead + 1)]
    return [Range(position - min((mask.width - 1) * mask.dilation, MAX_DISTANCE), position + ahead + 1)]


def _hull_of_segments(mask: Segments, grid: Grid) -> Ranges:
    """Return the range from the first to the last position of each query's document."""
    ids = mask.ids_on(grid.device)
    sorted_ids, order = ids.sort(dim=1, stable=True)
    index = torch.arange(ids.shape[1], device=grid.device).expand_as(ids)
    changes = sorted_ids.diff(dim=1) != 0
    first = torch.where(F.pad(changes, (1, 0), value=True), index, 0).cummax(1).values
    is_last = F.pad(changes, (0, 1), value=True)
    last = torch.where(is_last, index, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    edges = (torch.empty_like(order).scatter(1, order, order.gather(1, each)) for each in (first, last))
    position = query_positions(grid)[:, 0]
    batch = max(len(ids), len(position))
    position = position.expand(batch, -1)
    exists = (position >= 0) & (position < ids.shape[1])
    position = position.clamp(0, ids.shape[1] - 1)
    start, end = (each.expand(batch, -1).gather(1, position)[:, None] for each in edges)
    return [Range(start, torch.where(exists[:, None], end + 1, 0))]


def _ranges_per_head(mask: PerHead, grid: Grid) -> Ranges | None:
    """Return the ranges of a mask with one rule for each head; None if those of one of the rules are unknown."""
    one_head = replace(grid, heads=1)
    per_head = [position_ranges(mask.for_head(head), one_head) for head in range(len(mask.masks))]
    known = [ranges for ranges in per_head if ranges is not None]
    if len(known) < len(per_head):
        return None
    count = max(len(ranges) for ranges in known)
    padded = [ranges + [constant_range(0, 0, grid)] * (count - len(ranges)) for ranges in known]
    return [_stack_heads([ranges[number] for ranges in padded]) for number in range(count)]


def _stack_heads(ranges: Sequence[Range]) -> Range:
    """Return one range with a head axis from the ranges of single heads."""
    edges = [torch.broadcast_tensors(*each) for each in zip(*ranges, strict=True)]  # type: ignore[no-untyped-call]
    start, stop = (torch.cat(list(each), 1) for each in edges)
    return Range(*torch.broadcast_tensors(start, stop))  # type: ignore[no-untyped-call]


def intersect(left: Ranges, right: Ranges, grid: Grid) -> Ranges:
    """Return the ranges of what is in both unions of ranges."""
    pairs = [(a, b) for a in left for b in right]
    return within([Range(torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop)) for a, b in pairs], grid)


def _subtract(ranges: Ranges, removed: Ranges, grid: Grid) -> Ranges:
    """Return the ranges of what is in `ranges` and in none of `removed`."""
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


def within(ranges: Ranges, grid: Grid) -> Ranges:
    """Return ranges cut to the positions of the grid, without those that are empty for every query, where that is
    known.
    """
    end = end_of_positions(grid)
    cut = [Range(each.start.clamp(0, end), each.stop.clamp(0, end)) for each in ranges]
    if not all(has_readable_values(edge) for each in cut for edge in each):
        return cut
    return [each for each in cut if bool((each.stop > each.start).any())]


def at_most(count: int, ranges: Ranges) -> Ranges | None:
    """Return the ranges if there are at most `count` of them, otherwise None."""
    return ranges if len(ranges) <= count else None


def end_of_positions(grid: Grid) -> int:
    """Return a number above the positions of all keys of a grid, and not above the number of keys where key j is at
    position j.
    """
    return grid.keys if grid.key_positions is None else MAX_DISTANCE


def query_positions(grid: Grid) -> Edges:
    """Return the position of each query, `(1 or batch, 1, queries)`."""
    if grid.query_positions is not None:
        return grid.query_positions[:, None].long()
    return (torch.arange(grid.queries, device=grid.device) + grid.offset)[None, None]


def constant_range(start: int, stop: int, grid: Grid) -> Range:
    """Return the same range for every query, `(1, 1, 1)`."""
    edges = (torch.full((1, 1, 1), min(edge, MAX_DISTANCE), device=grid.device) for edge in (start, stop))
    return Range(*edges)
