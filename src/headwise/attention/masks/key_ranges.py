"""Masks as ranges: the keys that each query attends to, as a few half-open ranges of keys for each query.

Causal masks, windows, prefixes, lengths, chunks and packed documents are one range of positions for each query, and so
is what `&` makes of them. `causal() & (window(w) | prefix(4))` is two ranges. Kernels read ranges instead of a matrix:
a few numbers for each query, from which they also know which blocks of the score matrix they can leave out.

A mask that is no such ranges is a boolean matrix. It is evaluated for some rows of queries at a time, so that a mask
computed by a function needs little memory at any length.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.base import And, Mask
from headwise.attention.masks.grid import (
    MAX_DISTANCE,
    MOST_RANGES,
    Grid,
    Range,
    Ranges,
    constant_range,
    intersect,
    query_positions,
    within,
)
from headwise.attention.masks.kinds import Dense, HasPosition
from headwise.attention.tensors import KeyRanges, Matrix
from headwise.checks import has_readable_values, has_values, known_to_be_true
from headwise.shapes import Float, Int

MATRIX_ELEMENTS = 2**24
"""Largest number of elements of a matrix that is evaluated at once, 16 MiB, unless the caller stores a larger one."""

PIECE_ELEMENTS = 2**18
"""Number of elements that a mask is evaluated for in one step. Rules compute with int64 numbers, of eight bytes."""

CACHED_ELEMENTS = 2**22
"""Largest number of elements of a matrix that is cached for other layers."""

ROW_STEP, COLUMN_STEP = 64, 128
"""The rows and the columns of a part begin at multiples of these numbers, as do the blocks and tiles of kernels."""


class Part(NamedTuple):
    """Rectangle of the score matrix: some query rows, and a range of keys that contains every key that these rows
    attend to.
    """

    rows: range
    columns: range

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values that belong to this rectangle of the score matrix."""
        return self.rows_of(q), self.columns_of(k), self.columns_of(v)

    def rows_of(self, tensor: Float[Tensor, "batch heads queries *_"]) -> Float[Tensor, "batch heads rows *_"]:
        """Return the query rows of this rectangle of the score matrix, from the third axis of a tensor."""
        return tensor[:, :, self.rows.start : self.rows.stop]

    def columns_of(self, tensor: Float[Tensor, "batch heads keys *_"]) -> Float[Tensor, "batch heads columns *_"]:
        """Return the keys of this rectangle of the score matrix, from the third axis of a tensor."""
        return tensor[:, :, self.columns.start : self.columns.stop]


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """Keys that each query attends to, in the form that kernels read: ranges of keys for each query, and further masks.
    A query attends to a key if the key is in one of the query's ranges and all further masks allow the key.

    Attributes:
        ranges: starts and stops, int32; None if the ranges exclude no key.
        others: masks that are not ranges.
        grid: sizes and positions that these masks are evaluated for.
    """

    ranges: KeyRanges | None
    others: tuple[Mask, ...]
    grid: Grid

    @property
    def needs_no_evaluation(self) -> bool:
        """True if no mask has to be evaluated: the ranges state all visible keys, or the only further mask is stored as
        a boolean matrix.
        """
        # torch cannot compile a truth test of a tuple.
        return len(self.others) == 0 or (len(self.others) == 1 and isinstance(self.others[0], Dense))

    def parts(self) -> list[Part] | None:
        """Divide the score matrix into parts (rectangles), in the order of their rows, so that the mask's boolean
        matrix of each part has at most `MATRIX_ELEMENTS` elements. Return None if that is not needed: no matrix is
        evaluated, or the whole one is small enough. While compiling, also return None if the size is unknown.
        """
        grid, queries = self.grid, self.grid.queries
        elements = grid.batch * grid.heads * queries * grid.keys
        if self.needs_no_evaluation or not known_to_be_true(elements > MATRIX_ELEMENTS):
            return None
        batch, heads, rows, keys = self.evaluate(range(min(2, queries)), None).shape
        if rows == 1 or not known_to_be_true(batch * heads * queries * keys > MATRIX_ELEMENTS):
            return None
        parts, stop, step = [], 0, ROW_STEP
        while stop < queries:
            part = self._part(range(stop, min(stop + 2 * step, queries)))
            while batch * heads * len(part.rows) * len(part.columns) > MATRIX_ELEMENTS and len(part.rows) > ROW_STEP:
                part = self._part(range(stop, stop + max(len(part.rows) // 2 // ROW_STEP, 1) * ROW_STEP))
            parts.append(part)
            stop, step = part.rows.stop, len(part.rows)
        return parts

    def of_part(self, part: Part) -> tuple[KeyRanges | None, Matrix | None]:
        """Return the ranges of keys and the boolean mask matrix of a part (rectangle of the score matrix). The ranges
        are counted from the first column of the part. Either is None if it excludes no key.
        """
        rows, columns = part
        ranges = None
        if self.ranges is not None:
            ranges = (self.ranges[:, :, rows.start : rows.stop] - columns.start).contiguous()
        return ranges, None if len(self.others) == 0 else self._evaluate_in_pieces(part)

    def matrix(self) -> Matrix | None:
        """Return the boolean matrix of the masks that are not stated as ranges. It may be True at keys that the ranges
        hide. Return None if there are no such masks.
        """
        if len(self.others) == 0:
            return None
        if self.needs_no_evaluation:
            return unexpanded(self.others[0].block(self.grid))
        if not _can_evaluate(self.grid):
            return self.evaluate(None, None)
        is_small = self.grid.heads * self.grid.queries * self.grid.keys <= CACHED_ELEMENTS
        if is_small and self.grid.uses_default_positions and all(mask.is_constant for mask in self.others):
            return _constant_matrix(self.others, self.grid)
        return self._evaluate_in_pieces(Part(range(self.grid.queries), range(self.grid.keys)))

    def _part(self, rows: range) -> Part:
        """Return the rectangle of the score matrix that consists of the query rows `rows` and the keys in the ranges of
        these rows.
        """
        first, stop = 0, self.grid.keys
        if self.ranges is not None and has_readable_values(self.ranges):
            starts, stops = self.ranges[:, :, rows.start : rows.stop].unbind(-1)
            is_empty = stops <= starts
            first = int(starts.masked_fill(is_empty, self.grid.keys).amin())
            stop = int(stops.masked_fill(is_empty, 0).amax())
        # One key more, since statistics read the token before a key.
        first = max(min(first, stop) - 1, 0) // COLUMN_STEP * COLUMN_STEP
        return Part(rows, range(first, max(stop, first)))

    def evaluate(self, rows: range | None, columns: range | None = None) -> Matrix:
        """Return the boolean matrix of the masks that are not stated as ranges, for some rows and columns. An axis
        along which this matrix repeats has size 1.
        """
        return reduce(torch.logical_and, (unexpanded(mask.block(self.grid, rows, columns)) for mask in self.others))

    def _evaluate_in_pieces(self, part: Part) -> Matrix:
        """Return the boolean matrix of the masks that are not stated as ranges, for a part (rectangle) of the score
        matrix. To save memory, they are evaluated for few rows at a time, and only for the keys in the ranges of these
        rows.
        """
        if not _can_evaluate(self.grid) or 0 in (self.grid.batch, self.grid.heads):
            return self.evaluate(*part)
        (first, last), origin = (part.rows.start, part.rows.stop), part.columns.start
        matrix = torch.zeros(1, 1, len(part.rows), len(part.columns), dtype=torch.bool, device=self.grid.device)
        step = max(PIECE_ELEMENTS // (self.grid.batch * self.grid.heads * len(part.columns) + 1), 1)
        while first < last:
            rows, columns = self._part(range(first, min(first + step, last)))
            piece = self.evaluate(rows, columns)
            batch, heads = (max(sizes) for sizes in zip(matrix.shape[:2], piece.shape[:2], strict=True))
            if matrix.shape[:2] != (batch, heads):
                matrix = matrix.expand(batch, heads, -1, -1).contiguous()
            within_rows = slice(first - part.rows.start, rows.stop - part.rows.start)
            matrix[:, :, within_rows, columns.start - origin : columns.stop - origin] = piece
            first = rows.stop
            per_row = piece.shape[0] * piece.shape[1] * len(columns)
            step = min(max(PIECE_ELEMENTS // (per_row + 1), 1), 2 * step)
        return matrix


def visible_keys(mask: Mask | None, grid: Grid) -> VisibleKeys:
    """Return the keys that a mask lets each query attend to: as ranges of keys as far as possible, and otherwise as
    further masks. The result is cached for masks that are made of numbers alone.
    """
    if mask is None:
        return VisibleKeys(None, (), grid)
    if not (_can_evaluate(grid) and grid.uses_default_positions and mask.is_constant):
        return _visible_keys(mask, grid)
    with torch.inference_mode(False):  # later calls may save these tensors for a backward pass
        return _constant_visible_keys(mask, grid)


@lru_cache(maxsize=8)
def _constant_matrix(masks: tuple[Mask, ...], grid: Grid) -> Matrix:
    """Return the boolean matrix of masks that are made of numbers alone. It is cached, since all layers of a model have
    the same mask.
    """
    with torch.inference_mode(False):
        return VisibleKeys(None, masks, grid)._evaluate_in_pieces(Part(range(grid.queries), range(grid.keys)))


def _visible_keys(mask: Mask, grid: Grid) -> VisibleKeys:
    """Split a mask into ranges of keys for each query, and further masks that cannot be stated as ranges. The result, a
    `VisibleKeys`, is computed without a cache.
    """
    runs = None if grid.key_positions is None else _ascending_runs(grid.key_positions)
    if grid.key_positions is not None and (runs is None or not _requires_positions(mask)):
        return VisibleKeys(None, (mask,), grid)
    ranges, others = _split(mask, grid)
    if ranges is not None and runs is not None:
        ranges = [_keys_at(each, run) for each in ranges for run in runs]
        if len(ranges) > MOST_RANGES:
            ranges, others = None, (mask,)
    if ranges is None:
        return VisibleKeys(None, others, grid)
    ranges = ranges or [constant_range(0, 0, grid)]
    edges = [edge for each in ranges for edge in each]
    edges = list(torch.broadcast_tensors(*edges, query_positions(grid)[:1]))[:-1]  # type: ignore[no-untyped-call]
    stacked = torch.stack(edges, -1).int()
    return VisibleKeys(stacked.view(*stacked.shape[:3], len(ranges), 2).contiguous(), others, grid)


_constant_visible_keys = lru_cache(maxsize=32)(_visible_keys)  # all layers of a model have the same mask


def _split(mask: Mask, grid: Grid) -> tuple[Ranges | None, tuple[Mask, ...]]:
    """Split a mask into ranges of keys for each query, and further masks. The mask allows a key that is in one of the
    ranges, and that all further masks allow. The ranges are None if they would exclude no key.
    """
    ranges = mask.few_ranges(grid)
    if ranges is not None:
        return ranges, ()
    if isinstance(mask, And):
        (left, left_masks), (right, right_masks) = (_split(part, grid) for part in mask.parts)
        both = right if left is None else left if right is None else intersect(left, right, grid)
        if both is None or len(both) <= MOST_RANGES:
            return both, (*left_masks, *right_masks)
    hull = mask.hull(grid)
    return None if hull is None else within(hull, grid), (mask,)


def _requires_positions(mask: Mask) -> bool:
    """Return True if a mask is known to hide all keys at position -1: padding and empty slots of a cache. That is known
    if the mask is `HasPosition`, or joins it with other masks by `&`.
    """
    if isinstance(mask, And):
        return any(map(_requires_positions, mask.parts))
    return isinstance(mask, HasPosition)


def _ascending_runs(positions: Int[Tensor, "batch keys"]) -> list[Int[Tensor, "batch keys"]] | None:
    """Divide the keys that exist, at position 0 or above, into runs of adjacent keys whose positions ascend. Return one
    tensor `(batch, keys)` for each run, with the positions of the keys in the run. Keys before the run get a negative
    number, and keys after it `MAX_DISTANCE`, so that each row ascends. Return None if there are more than `MOST_RANGES`
    runs, or if positions cannot be read.
    """
    if not has_readable_values(positions) or positions.shape[1] == 0:
        return None
    positions = positions.long()
    exists, previous = positions >= 0, F.pad(positions, (1, 0), value=-1)[:, :-1]
    starts_run = exists & ((previous < 0) | (positions < previous))
    count = int(starts_run.sum(1).max()) if len(positions) else 0
    if count > MOST_RANGES:
        return None
    numbers = torch.where(exists, starts_run.cumsum(1), 0)
    index = torch.arange(positions.shape[1], device=positions.device)
    runs = []
    for number in range(1, count + 1):
        inside = numbers == number
        start = inside.int().argmax(1, keepdim=True)
        stop = start + inside.sum(1, keepdim=True)
        runs.append(positions.masked_fill(index < start, -1).masked_fill(index >= stop, MAX_DISTANCE))
    return runs


def _keys_at(positions: Range, run: Int[Tensor, "batch keys"]) -> Range:
    """Return the range of those keys of a run (adjacent keys with ascending positions) whose positions are in the range
    `positions`. The tensor `run` has the position of each key; it is negative for keys before the run, and
    `MAX_DISTANCE` for keys after it.
    """
    start, stop = torch.broadcast_tensors(*positions)  # type: ignore[no-untyped-call]
    batch = max(len(start), len(run))
    run = run.expand(batch, -1).contiguous()
    sizes = (batch, *start.shape[1:])
    flat = (each.expand(sizes).reshape(batch, -1).contiguous() for each in (start, stop))
    return Range(*(torch.searchsorted(run, each).view(sizes) for each in flat))


def unexpanded(matrix: Matrix) -> Matrix:
    """Return a view of a matrix in which each axis with a stride of 0, such as `expand` makes, has size 1."""
    for axis, stride in enumerate(matrix.stride()):
        if stride == 0 and matrix.shape[axis] > 1:
            matrix = matrix.narrow(axis, 0, 1)
    return matrix


def _can_evaluate(grid: Grid) -> bool:
    """Return True if masks can be evaluated now: torch is neither compiling nor tracing."""
    return has_values(torch.empty(0, device=grid.device))
