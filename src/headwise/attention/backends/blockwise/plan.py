"""The plan of blockwise attention: the blocks of the score matrix with at least one visible key, from the mask alone.

The mask is asked for the coverage of ever smaller ranges of columns. Sequences and heads whose masks differ are planned
separately where that leaves fewer scores to compute.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Coverage, Grid

COLUMNS = 64
"""Smallest number of key columns that is planned separately."""

LEAST_ROWS, MOST_ROWS = 64, 512
"""Smallest and largest number of query rows of a block, unless the caller sets it."""


class KeyRange(NamedTuple):
    """Range of adjacent key columns in a block of the score matrix.

    Attributes:
        columns: indices of the keys.
        masked: True if some row of the block may not attend to some of the keys.
    """

    columns: range
    masked: bool


class PlannedBlock(NamedTuple):
    """Block of the score matrix to compute: a range of query rows, and the ranges of key columns to compute for these
    rows, in ascending order. The ranges include every key that at least one of the rows may attend to.
    """

    rows: range
    parts: tuple[KeyRange, ...]

    @property
    def spans(self) -> list[range]:
        """Ranges of the block's key columns, as long as possible. Adjacent ranges of the attribute `parts`, which
        separates columns that need a mask from others, are joined, so that one matrix product can compute all scores of
        a range.
        """
        spans: list[range] = []
        for columns, _ in self.parts:
            if spans and spans[-1].stop == columns.start:
                spans[-1] = range(spans[-1].start, columns.stop)
            else:
                spans.append(columns)
        return spans

    @property
    def width(self) -> int:
        """Number of key columns in the block, over all its ranges."""
        return sum(len(part.columns) for part in self.parts)


class MaskGroup(NamedTuple):
    """Adjacent sequences and adjacent heads that share one mask, and the blocks of the score matrix to compute for
    them.

    Attributes:
        sequences: indices of the sequences.
        heads: indices of the query heads.
        mask: their mask; None if it hides nothing.
        grid: the score grid on which the mask is evaluated, for one sequence or head if these are planned separately.
        blocks: the blocks with at least one visible key.
    """

    sequences: range
    heads: range
    mask: Mask | None
    grid: Grid
    blocks: tuple[PlannedBlock, ...]


BlockwisePlan = tuple[MaskGroup, ...]


def plan_of(
    mask: Mask | None, grid: Grid, overhead: int, rows: int | None = None, most_rows: int = MOST_ROWS
) -> BlockwisePlan:
    """Return the blocks of the score matrix to compute for a mask, grouped by the sequences and heads that share one
    mask. Blocks are planned for all sequences together or for each one separately, and likewise for heads, whichever
    has the lower cost: the number of scores plus `overhead` for each block.

    Args:
        mask: the mask; None if it hides nothing.
        grid: the score grid.
        overhead: fixed cost of one block, in scores.
        rows: query rows of each block; by default `rows_of` chooses them for each mask.
        most_rows: largest number of rows that is chosen by default.
    """
    separations = [(False, False)]
    if mask is not None and grid.uses_default_positions:
        sequences = len(_runs([mask.for_sequence(index) for index in range(grid.batch)])) > 1
        heads = len(_runs([mask.for_head(index) for index in range(grid.heads)])) > 1
        separations = [(s, h) for s in {False, sequences} for h in {False, heads}]
    plans = [_plan(mask, grid, overhead, rows, most_rows, *separate) for separate in separations]
    return min(plans, key=lambda plan: cost_of(plan, overhead))


def rows_of(mask: Mask | None, grid: Grid, overhead: int, tile_count: int) -> int:
    """Return the number of query rows of a block that is expected to be fastest for a mask: 64, 128, 256 or 512.
    The blocks are for `tile_count` pairs of a sequence and a head; `overhead` is a block's fixed cost, in scores.

    More rows make products faster, but add columns that only some of the rows need. Gain and loss are about equal at a
    quarter of the columns that the last 64 rows need. A lower bound keeps the overhead of blocks from dominating: under
    a window, a block of r rows computes about n r^2 scores too many for n pairs, and costs its overhead.
    """
    last = range(max(grid.queries - LEAST_ROWS, 0), grid.queries)
    width = sum(len(part.columns) for part in parts_of(mask, grid, last, range(grid.keys)))
    rows = max(width // 4, math.isqrt(overhead // tile_count))
    return min(max(1 << max(rows - 1, 0).bit_length(), LEAST_ROWS), MOST_ROWS)


def parts_of(mask: Mask | None, grid: Grid, rows: range, columns: range) -> list[KeyRange]:
    """Return the ranges of key `columns` that at least one of the query `rows` may attend to under the mask. A range
    with both visible and hidden pairs of query and key is halved, down to 64 columns, and marked as masked if it still
    has both. Ranges without a visible pair are left out.
    """
    if mask is None or not columns:
        return [KeyRange(columns, False)] if columns else []
    coverage = mask.coverage(grid, rows, columns)
    if coverage is not Coverage.PARTIAL:
        return [] if coverage is Coverage.EMPTY else [KeyRange(columns, False)]
    if len(columns) <= COLUMNS:
        return [KeyRange(columns, True)]
    middle = columns.start + -(-len(columns) // (2 * COLUMNS)) * COLUMNS
    left = parts_of(mask, grid, rows, range(columns.start, middle))
    right = parts_of(mask, grid, rows, range(middle, columns.stop))
    if left and right and left[-1].masked == right[0].masked and left[-1].columns.stop == right[0].columns.start:
        joined = KeyRange(range(left[-1].columns.start, right[0].columns.stop), left[-1].masked)
        return [*left[:-1], joined, *right[1:]]
    return left + right


def score_count(plan: BlockwisePlan) -> int:
    """Return the number of scores (query-key products) in all blocks of a plan, over sequences and heads."""
    return sum(
        len(group.sequences) * len(group.heads) * len(block.rows) * block.width
        for group in plan
        for block in group.blocks
    )


def reads_most_keys(plan: BlockwisePlan) -> bool:
    """Return True if some block of a plan includes at least half of the keys. Copying keys and values to a memory
    layout that is faster to read then saves more time than it takes.
    """
    return any(2 * block.width >= group.grid.keys for group in plan for block in group.blocks)


def cost_of(plan: BlockwisePlan, overhead: int) -> int:
    """Return the cost of a plan, with one score as unit: the number of scores, plus `overhead` for each block."""
    return score_count(plan) + overhead * sum(len(group.blocks) for group in plan)


def _plan(
    mask: Mask | None,
    grid: Grid,
    overhead: int,
    rows: int | None,
    most_rows: int,
    separate_sequences: bool,
    separate_heads: bool,
) -> BlockwisePlan:
    """Return the blocks of `rows` query rows to compute for a mask as a plan, which is a tuple of `MaskGroup`. The two
    flags say if sequences, and if heads, are planned separately. Adjacent sequences or heads with equal masks form one
    group. If `rows` is None, it is chosen for each group from the mask and `overhead`, the fixed cost of a block in
    scores, up to `most_rows`.
    """
    if mask is None:
        blocks = _blocks(None, grid, overhead, rows, most_rows, grid.batch * grid.heads)
        return (MaskGroup(range(grid.batch), range(grid.heads), None, grid, blocks),)
    group_grid = replace(grid, batch=1 if separate_sequences else grid.batch, heads=1 if separate_heads else grid.heads)
    masks = [mask.for_sequence(index) if separate_sequences else mask for index in range(grid.batch)]
    groups = []
    for sequences in _runs(masks):
        shared = masks[sequences.start]
        head_masks = [shared.for_head(index) if separate_heads else shared for index in range(grid.heads)]
        for heads in _runs(head_masks):
            head_mask = head_masks[heads.start]
            blocks = _blocks(head_mask, group_grid, overhead, rows, most_rows, len(sequences) * len(heads))
            groups.append(MaskGroup(sequences, heads, head_mask, group_grid, blocks))
    return tuple(groups)


def _runs(masks: list[Mask]) -> list[range]:
    """Return the ranges of indices in which adjacent masks of a list are equal; together the ranges cover the list."""
    starts = [index for index in range(len(masks)) if index == 0 or masks[index] != masks[index - 1]]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(masks)], strict=True)]


def _blocks(
    mask: Mask | None, grid: Grid, overhead: int, rows: int | None, most_rows: int, tile_count: int
) -> tuple[PlannedBlock, ...]:
    """Return the blocks of the score matrix to compute under one mask, of `rows` query rows each. Blocks without a
    visible key are left out. If `rows` is None, the number expected to be fastest is chosen, up to `most_rows`. This
    choice depends on `overhead`, the fixed cost of a block in scores, and `tile_count`, the number of pairs of a
    sequence and a head that share the mask.
    """
    rows = min(rows_of(mask, grid, overhead, tile_count), most_rows) if rows is None else rows
    row_ranges = (range(start, min(start + rows, grid.queries)) for start in range(0, grid.queries, rows))
    blocks = (PlannedBlock(each, tuple(parts_of(mask, grid, each, range(grid.keys)))) for each in row_ranges)
    return tuple(block for block in blocks if block.parts)
