"""Which blocks of the scores hold something: the plan that blockwise attention follows, made from the mask alone.

The mask is asked about ever smaller ranges of columns. Sequences and heads whose masks differ are taken apart where
that leaves less to compute.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Coverage, Grid

COLUMNS = 64
"""The mask is not asked about fewer key columns than these."""

LEAST_ROWS, MOST_ROWS = 64, 512
"""Between these lies the number of rows of a block, unless it is given."""


class KeyRange(NamedTuple):
    """Key columns of a block that are alike: all allowed, or masked one by one."""

    columns: range
    masked: bool


class PlannedBlock(NamedTuple):
    """Some query rows and the key columns they may attend to, in order, without those that are empty."""

    rows: range
    parts: tuple[KeyRange, ...]

    @property
    def spans(self) -> list[range]:
        """The columns, neighbours joined: each is one product."""
        spans: list[range] = []
        for columns, _ in self.parts:
            if spans and spans[-1].stop == columns.start:
                spans[-1] = range(spans[-1].start, columns.stop)
            else:
                spans.append(columns)
        return spans

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(len(part.columns) for part in self.parts)


class MaskGroup(NamedTuple):
    """Sequences and heads under one mask, which is laid over `grid`."""

    sequences: range
    heads: range
    mask: Mask | None
    grid: Grid
    blocks: tuple[PlannedBlock, ...]


BlockwisePlan = tuple[MaskGroup, ...]


def plan_of(mask: Mask | None, grid: Grid, call: int, rows: int | None = None, most: int = MOST_ROWS) -> BlockwisePlan:
    """The blocks of `rows` query rows that hold something, sequences and heads taken apart where that is less work.

    The operations of a block cost as much as `call` scores beside their work. Unless given, the rows are `rows_of` each
    mask by itself, `most` at most.
    """
    plans = [_plan(mask, grid, call, rows, most, apart) for apart in _ways_apart(mask, grid)]
    return min(plans, key=lambda plan: cost_of(plan, call))


def rows_of(mask: Mask | None, grid: Grid, call: int, together: int) -> int:
    """How many query rows a block has, of so many sequences and heads together: 64, 128, 256 or 512.

    More rows are faster products, and more columns that only some of the rows need. What is gained and lost evens out
    at about a quarter of the columns that the last 64 rows hold. Nor are rows so few that the calls cost most: under a
    window, each block of r rows of n heads computes about n r^2 scores too many, and costs its calls.
    """
    last = range(max(grid.queries - LEAST_ROWS, 0), grid.queries)
    width = sum(len(part.columns) for part in parts_of(mask, grid, last, range(grid.keys)))
    rows = max(width // 4, math.isqrt(call // together))
    return min(max(1 << max(rows - 1, 0).bit_length(), LEAST_ROWS), MOST_ROWS)


def _ways_apart(mask: Mask | None, grid: Grid) -> list[tuple[bool, bool]]:
    """Whether to take (sequences, heads) apart: every way in which more may be found empty."""
    if mask is None or not grid.uses_default_positions:
        return [(False, False)]
    sequences = len(_runs([mask.for_sequence(index) for index in range(grid.batch)])) > 1
    heads = len(_runs([mask.for_head(index) for index in range(grid.heads)])) > 1
    return [(s, h) for s in {False, sequences} for h in {False, heads}]


def _plan(
    mask: Mask | None, grid: Grid, call: int, rows: int | None, most: int, apart: tuple[bool, bool]
) -> BlockwisePlan:
    """The plan in which sequences, heads or both are taken apart."""
    if mask is None:
        blocks = _blocks(None, grid, call, rows, most, grid.batch * grid.heads)
        return (MaskGroup(range(grid.batch), range(grid.heads), None, grid, blocks),)
    part = replace(grid, batch=1 if apart[0] else grid.batch, heads=1 if apart[1] else grid.heads)
    masks = [mask.for_sequence(index) for index in range(grid.batch)] if apart[0] else [mask] * grid.batch
    pieces = []
    for sequences in _runs(masks):
        own = masks[sequences.start]
        of_heads = [own.for_head(index) for index in range(grid.heads)] if apart[1] else [own] * grid.heads
        for heads in _runs(of_heads):
            mask = of_heads[heads.start]
            blocks = _blocks(mask, part, call, rows, most, len(sequences) * len(heads))
            pieces.append(MaskGroup(sequences, heads, mask, part, blocks))
    return tuple(pieces)


def _runs(masks: list[Mask]) -> list[range]:
    """Neighbours that are equal."""
    starts = [at for at in range(len(masks)) if at == 0 or masks[at] != masks[at - 1]]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(masks)], strict=True)]


def _blocks(
    mask: Mask | None, grid: Grid, call: int, rows: int | None, most: int, together: int
) -> tuple[PlannedBlock, ...]:
    """The blocks of one mask that hold something."""
    rows = min(rows_of(mask, grid, call, together), most) if rows is None else rows
    ranges = (range(start, min(start + rows, grid.queries)) for start in range(0, grid.queries, rows))
    blocks = (PlannedBlock(some, tuple(parts_of(mask, grid, some, range(grid.keys)))) for some in ranges)
    return tuple(block for block in blocks if block.parts)


def parts_of(mask: Mask | None, grid: Grid, rows: range, columns: range) -> list[KeyRange]:
    """The columns that are not empty, found by halving what the mask does not decide as a whole."""
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
    """How many scores a plan computes."""
    return sum(
        len(piece.sequences) * len(piece.heads) * len(block.rows) * block.width
        for piece in plan
        for block in piece.blocks
    )


def reads_most(plan: BlockwisePlan) -> bool:
    """Whether some block reads half of the keys or more, so that it pays to lay them out for it."""
    return any(2 * block.width >= piece.grid.keys for piece in plan for block in piece.blocks)


def cost_of(plan: BlockwisePlan, call: int) -> int:
    """What a plan costs, in scores: those it computes, and `call` for each block."""
    return score_count(plan) + call * sum(len(piece.blocks) for piece in plan)
