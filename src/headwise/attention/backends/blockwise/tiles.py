"""The plan of blockwise attention and its tiles.

A plan lists the blocks of the score matrix with at least one visible key, from the mask alone. The mask is asked for
the coverage of ever smaller ranges of columns. Sequences and heads whose masks differ are planned separately where that
leaves fewer scores to compute.

A tile is a rectangle that is computed at once, in reused memory: some sequences and heads of one block of the plan. It
stacks the query rows of all heads that share a key/value head, so that one product serves the whole group.
"""

import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Coverage, Grid
from headwise.attention.tensors import Bias, Stacked
from headwise.checks import has_readable_values
from headwise.shapes import Bool, Float

# -- plan --------------------------------------------------------------------------------------------------------------

COLUMNS = 64
"""Smallest number of key columns that is planned separately."""

LEAST_ROWS, MOST_ROWS = 64, 512
"""Smallest and largest number of query rows of a block, unless the caller sets it."""


class KeyRange(NamedTuple):
    """Range of adjacent key columns in a block of the score matrix. `masked` is True if some row of the block may not
    attend to some of the keys.
    """

    columns: range
    masked: bool


class PlannedBlock(NamedTuple):
    """Block of the score matrix to compute: a range of query rows, and ascending ranges of key columns. The ranges
    contain every key that any of the rows may attend to.
    """

    rows: range
    parts: tuple[KeyRange, ...]

    @property
    def spans(self) -> list[range]:
        """Ranges of adjacent key columns of the block, as long as possible. Adjacent ranges of `parts`, masked or not,
        are joined, so that one matrix product computes all scores of a range.
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
        """Number of key columns in the block."""
        return sum(len(part.columns) for part in self.parts)


class MaskGroup(NamedTuple):
    """Adjacent sequences and adjacent heads that share one mask (None if it hides nothing), with the blocks of the
    score matrix to compute for them. `grid` has the sizes and positions for which the mask is evaluated. It has one
    sequence if the masks of sequences were evaluated separately, and one head if those of heads were.
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
    """Return a plan: the blocks of the score matrix that contain a visible key. Each block has `rows` query rows, by
    default the number that is expected to be fastest, up to `most_rows`. Sequences are planned either together or
    separately, and so are heads; the plan with the lowest cost is returned. The cost is the number of scores, plus
    `overhead` for each block.
    """
    separations = [(False, False)]
    if mask is not None and grid.uses_default_positions:
        sequences = len(_runs([mask.for_sequence(index) for index in range(grid.batch)])) > 1
        heads = len(_runs([mask.for_head(index) for index in range(grid.heads)])) > 1
        separations = [(s, h) for s in {False, sequences} for h in {False, heads}]
    plans = [_plan(mask, grid, overhead, rows, most_rows, *separate) for separate in separations]
    return min(plans, key=lambda plan: cost_of(plan, overhead))


def rows_of(mask: Mask | None, grid: Grid, overhead: int, tile_count: int) -> int:
    """Return the number of query rows of a block, from 64 to 512, that is expected to be fastest for a mask.
    `tile_count` is the number of pairs of a sequence and a head for which each block is computed.

    More rows make products faster, but add columns that only some of the rows need. Gain and loss are about equal at a
    quarter of the columns that the last 64 rows need. A lower bound keeps the overhead of blocks from dominating: under
    a window, a block of r rows computes about n r^2 scores too many for n pairs, and costs its overhead.
    """
    last = range(max(grid.queries - LEAST_ROWS, 0), grid.queries)
    width = sum(len(part.columns) for part in parts_of(mask, grid, last, range(grid.keys)))
    rows = max(width // 4, math.isqrt(overhead // tile_count))
    return min(max(1 << max(rows - 1, 0).bit_length(), LEAST_ROWS), MOST_ROWS)


def parts_of(mask: Mask | None, grid: Grid, rows: range, columns: range) -> list[KeyRange]:
    """Return the ranges of key `columns` that at least one of the query `rows` may attend to. A range with both visible
    and hidden query-key pairs is halved, down to a width of 64 columns. If such a short range has both, it is marked as
    masked.
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


def _blocks_of(plan: BlockwisePlan) -> list[tuple[MaskGroup, PlannedBlock]]:
    """Return every block of a plan (the blocks of the score matrix to compute). Each block is returned with its group:
    the sequences and heads that share the block's mask.
    """
    return [(group, block) for group in plan for block in group.blocks]


def score_count(plan: BlockwisePlan) -> int:
    """Return the number of scores (query-key products) in all blocks of a plan, over all sequences and heads."""
    return sum(len(group.sequences) * len(group.heads) * len(b.rows) * b.width for group, b in _blocks_of(plan))


def reads_most_keys(plan: BlockwisePlan) -> bool:
    """Return True if some block of a plan (the blocks of the score matrix to compute) contains at least half of all
    keys. It is then faster to copy the keys to another memory layout first.
    """
    return any(2 * block.width >= group.grid.keys for group, block in _blocks_of(plan))


def cost_of(plan: BlockwisePlan, overhead: int) -> int:
    """Return the cost of a plan (the blocks of the score matrix to compute): the number of scores in the blocks, plus
    `overhead` for each block. The unit is the cost of one score.
    """
    return score_count(plan) + overhead * len(_blocks_of(plan))


def _plan(
    mask: Mask | None,
    grid: Grid,
    overhead: int,
    rows: int | None,
    most_rows: int,
    separate_sequences: bool,
    separate_heads: bool,
) -> BlockwisePlan:
    """Return a plan (the blocks of the score matrix to compute) in which sequences and heads are planned separately or
    together, as the two flags state. Adjacent sequences or heads with equal masks form one group.
    """
    group_grid = replace(grid, batch=1 if separate_sequences else grid.batch, heads=1 if separate_heads else grid.heads)
    masks = [mask] * grid.batch
    if mask is not None and separate_sequences:
        masks = [mask.for_sequence(index) for index in range(grid.batch)]
    groups = []
    for sequences in _runs(masks):
        shared = masks[sequences.start]
        head_masks = [shared] * grid.heads
        if shared is not None and separate_heads:
            head_masks = [shared.for_head(index) for index in range(grid.heads)]
        for heads in _runs(head_masks):
            head_mask, size = head_masks[heads.start], rows
            if size is None:
                size = min(rows_of(head_mask, group_grid, overhead, len(sequences) * len(heads)), most_rows)
            row_ranges = (range(at, min(at + size, grid.queries)) for at in range(0, grid.queries, size))
            blocks = (
                PlannedBlock(each, tuple(parts_of(head_mask, group_grid, each, range(grid.keys))))
                for each in row_ranges
            )
            groups.append(MaskGroup(sequences, heads, head_mask, group_grid, tuple(b for b in blocks if b.parts)))
    return tuple(groups)


def _runs(masks: Sequence[Mask | None]) -> list[range]:
    """Divide a list of masks into runs of adjacent equal masks. Return the range of indices of each run."""
    starts = [index for index in range(len(masks)) if index == 0 or masks[index] != masks[index - 1]]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(masks)], strict=True)]


# -- tiles -------------------------------------------------------------------------------------------------------------

LOG2_E = math.log2(math.e)
"""Factor from nats to units of ln 2. Scores are kept in these units, since torch vectorises exp2 on every CPU."""

TILE_BYTES = 2**22
"""Target size of the scores of one tile, which stay in the cache from one operation to the next."""


class Ceiling(NamedTuple):
    """A mask in the form of upper bounds of the scores, in some columns of a block (rectangle of the score matrix),
    starting at column `offset`. A score above its bound is lowered to the bound. The bounds of visible keys change no
    score; those of hidden keys are so low that the weight becomes 0.

    A bound is infinite where a key is visible, and `score_of_hidden_key` where it is hidden. It is 0 in a row without
    any visible key: the difference of two infinities would be NaN, so such a row gets weights, which an infinite sum
    turns to 0. Torch vectorises the minimum of two tensors; filling by a boolean mask takes forty times as long.
    """

    offset: int
    bounds: Float[Tensor, "#batch #heads rows columns"]


class Tile(NamedTuple):
    """Rectangle of the score matrix that is computed at once: query rows, key columns, some sequences and some heads.
    It includes upper bounds (`ceilings`) to which the scores of hidden keys are lowered.

    Attributes:
        block: the query rows and the key columns.
        heads: slice of the axis of query heads.
        kv_heads: slice of the axis of key/value heads.
        ceilings: bounds of the scores of the block's masked parts.
        has_key: True at rows with a visible key; None if all rows have one.
        pattern: key that is equal for tiles whose masks are equal, relative to the block; None if there is no such key.
    """

    block: PlannedBlock
    sequences: slice
    heads: slice
    kv_heads: slice
    ceilings: list[Ceiling]
    has_key: Bool[Tensor, "#batch #heads rows 1"] | None
    pattern: Hashable | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of sequences, query heads and query rows in the tile."""
        sequences, heads = (part.stop - part.start for part in (self.sequences, self.heads))
        return sequences, heads, len(self.block.rows)

    @property
    def row_slices(self) -> tuple[slice, slice, slice]:
        """Slices that select the tile's rows from a tensor `(batch, heads, queries, ...)`."""
        return self.sequences, self.heads, slice(self.block.rows.start, self.block.rows.stop)

    @property
    def is_visible(self) -> Bool[Tensor, "#batch #heads rows columns"]:
        """True where a query row of the tile may attend to the key of a column. The tensor is computed at each use.
        It may be on the CPU if the scores are not.
        """
        parts = [
            torch.ones(1, 1, 1, len(columns), dtype=torch.bool) if allowed is None else allowed
            for columns, allowed in self.visible_parts()
        ]
        sizes = torch.broadcast_shapes((1, 1, len(self.block.rows)), *(part.shape[:3] for part in parts))  # type: ignore[no-untyped-call]
        return torch.cat([part.expand(*sizes, -1).to(parts[0].device) for part in parts], -1)

    def visible_parts(self) -> Iterator[tuple[range, Bool[Tensor, "#batch #heads rows columns"] | None]]:
        """Yield each range of key columns of the tile, with a boolean mask of the keys that each row may attend to. The
        mask is None if every row may attend to every key of the range.
        """
        bounds_at, offset = dict(self.ceilings), 0
        for columns, _ in self.block.parts:
            yield columns, bounds_at[offset] > 0 if offset in bounds_at else None
            offset += len(columns)

    def stack_rows(self, tensor: Float[Tensor, "batch heads queries width"]) -> Float[Tensor, "kv stacked width"]:
        """Return the tile's query rows of a tensor, stacked for matrix products with keys. The first axis has one index
        for each pair of a sequence and a key/value head. The second axis has the rows of all query heads that share
        this key/value head.
        """
        rows = tensor[self.row_slices]
        return rows.reshape(self._groups, -1, rows.shape[-1])

    def write(
        self, target: Float[Tensor, "batch heads queries width"], rows: Float[Tensor, "kv stacked width"]
    ) -> None:
        """Copy `rows` to the query rows of the tile in `target`. `rows` are stacked for matrix products: the first axis
        has one index for each pair of a sequence and a key/value head, the second the rows of all query heads that
        share it.
        """
        target[self.row_slices] = self.by_head(rows)

    def select_keys(
        self, tensor: Float[Tensor, "batch kv_heads all width"], keys: range
    ) -> Float[Tensor, "kv keys width"]:
        """Return the keys in the range `keys` from a tensor such as k or v, for the tile's sequences and key/value
        heads. The axes of sequences and of key/value heads are joined to one.
        """
        return tensor[self.sequences, self.kv_heads, keys.start : keys.stop].flatten(0, 1)

    def spans(self, scores: Float[Tensor, "*heads rows columns"]) -> Iterator[tuple[range, Tensor]]:
        """Yield each range of adjacent keys of the tile, with a view of the columns of `scores` that belong to these
        keys.
        """
        offset = 0
        for keys in self.block.spans:
            yield keys, scores[..., offset : offset + len(keys)]
            offset += len(keys)

    def hide(self, scores: Stacked) -> None:
        """Lower the scores of hidden keys in place, to a very negative finite number. In a row without any visible key,
        lower them to at most 0 instead.
        """
        for offset, bounds in self.ceilings:
            part = self.by_head(scores)[..., offset : offset + bounds.shape[-1]]
            torch.minimum(part, bounds, out=part)

    def by_head(self, stacked: Stacked) -> Float[Tensor, "batch heads rows columns"]:
        """Return a view of a stacked tensor with separate axes for sequences, query heads and rows. In the stacked
        tensor, the rows of all query heads that share a key/value head are joined to one axis.
        """
        return stacked.view(*self.shape, stacked.shape[-1])

    @property
    def _groups(self) -> int:
        """Number of pairs of a sequence and a key/value head in the tile."""
        return self.shape[0] * int(self.kv_heads.stop - self.kv_heads.start)


def score_of_hidden_key(dtype: torch.dtype) -> float:
    """Return the score that hidden keys get: a quarter of the most negative finite number of `dtype`. It must be
    finite, since statistics multiply it by the key's weight of 0.

    It is below every score whose differences are finite.
    """
    return torch.finfo(dtype).min / 4


def full_width_tile(grid: Grid, rows: range, allowed: Bool[Tensor, "#batch #heads rows keys"] | None = None) -> Tile:
    """Return the tile (rectangle of the score matrix) of the query rows `rows`, with all sequences, heads and keys.
    `allowed` is True where a row may attend to a key; without it, no key is hidden.
    """
    sequences, heads, ceilings = slice(0, grid.batch), slice(0, grid.heads), []
    if allowed is not None:
        ceilings = [Ceiling(0, torch.where(allowed, torch.inf, score_of_hidden_key(torch.float32)))]
    return Tile(PlannedBlock(rows, (KeyRange(range(grid.keys), True),)), sequences, heads, heads, ceilings, None)


def threads_of(dropout: float) -> int:
    """Return the number of threads for which the size of tiles is chosen. It is 1 with dropout, since random numbers
    are drawn for one tile at a time and must not depend on the number of threads.
    """
    return 1 if dropout > 0 else torch.get_num_threads()


def iterate_tiles(
    plan: BlockwisePlan, q: Tensor, k: Tensor, hiding_bias: Tensor | None, threads: int
) -> Iterator[Tile]:
    """Yield every tile of a plan, always in the same order. The plan lists the blocks of the score matrix to compute; a
    tile is a part of a block that is computed at once. A tile hides the keys that the mask hides, and those at which
    `hiding_bias` is -inf.
    """
    cache: dict[Any, tuple[list[Ceiling], Tensor | None]] = {}
    for group, block in _blocks_of(plan):
        pattern: Any = None  # equal for blocks whose masks, counted from the first row and key, are equal
        is_relative = group.mask is not None and group.mask.depends_on_distance_only
        if is_relative and group.grid.uses_default_positions and hiding_bias is None:
            start = block.rows.start
            parts = tuple((columns.start - start, len(columns), masked) for columns, masked in block.parts)
            pattern = group.mask, group.grid, len(block.rows), parts
        ceilings, has_key = cache.get(pattern) or _ceilings(group, block, hiding_bias, q)
        if pattern is not None:
            cache[pattern] = ceilings, has_key
        for sequences, heads, kv_heads in _tile_slices(group, block, q, k, threads):
            pairs = ((sequences, group.sequences.start), (heads, group.heads.start))
            within = tuple(slice(part.start - start, part.stop - start) for part, start in pairs)
            tile_ceilings = [Ceiling(offset, select(bounds, *within)) for offset, bounds in ceilings]
            tile_has_key = None if has_key is None else select(has_key, *within)
            yield Tile(block, sequences, heads, kv_heads, tile_ceilings, tile_has_key, pattern)


class Pool:
    """Named buffers, each for the scores of one tile (rectangle of the score matrix). All tiles of an attention call
    reuse them, since allocating memory is slow. On a CPU, a thread keeps buffers of up to `TILE_BYTES` (4 MiB) for its
    next attention call.
    """

    _of_thread = threading.local()

    def __init__(self, plan: BlockwisePlan, q: Tensor, k: Tensor, threads: int) -> None:
        self._like = q
        self._size = max(
            (
                (sequences.stop - sequences.start) * (heads.stop - heads.start) * len(block.rows) * block.width
                for group, block in _blocks_of(plan)
                for sequences, heads, _ in _tile_slices(group, block, q, k, threads)
            ),
            default=0,
        )
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, tile: Tile, rows: Float[Tensor, "kv stacked _"]) -> Stacked:
        """Return the buffer called `name` (memory that tiles reuse), in the shape of a tile's scores for the stacked
        query rows `rows`. Its old content is not cleared.
        """
        if name not in self._buffers:
            self._buffers[name] = self._allocate(name)
        shape = (*rows.shape[:2], tile.block.width)
        return self._buffers[name][: math.prod(shape)].view(shape)

    def _allocate(self, name: str) -> Tensor:
        """Return flat memory for the scores of the call's largest tile. On a CPU, it is memory that the thread keeps
        between calls, if at most `TILE_BYTES` are needed.
        """
        size = self._size * self._like.element_size()
        if self._like.device.type != "cpu" or size > TILE_BYTES:
            return self._like.new_empty(self._size)
        buffers: dict[str, Tensor] = vars(self._of_thread)
        if name not in buffers or buffers[name].numel() < size:
            with torch.inference_mode(False):  # so that the buffer can be written to inside that mode and outside
                buffers[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffers[name][:size].view(self._like.dtype)


def products(
    name: str,
    tile: Tile,
    rows: Float[Tensor, "kv stacked width"],
    right: Float[Tensor, "batch kv_heads width keys"],
    factor: float,
    pool: Pool,
) -> Stacked:
    """Return `factor * rows @ right`, where only the tile's keys of `right` are used. The result is written to the
    buffer `name` of `pool`, and is rounded only after it is multiplied by `factor`.
    """
    result = pool.buffer(name, tile, rows)
    for keys, span in tile.spans(result):
        columns = tile.select_keys(right.mT, keys)
        if columns.stride(-1) == 1:
            columns = columns.contiguous()  # otherwise the product copies it in the other order, which is slower
        torch.baddbmm(span, rows, columns.mT, beta=0.0, alpha=factor, out=span)
    return result


def select(tensor: Tensor, *slices: slice) -> Tensor:
    """Return a tensor whose first axes are cut by the given slices, one slice for each axis. Axes of size 1 broadcast
    and are not cut.
    """
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, slices, strict=False))]


def _tile_slices(
    group: MaskGroup, block: PlannedBlock, q: Tensor, k: Tensor, threads: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Yield three slices for each tile of a block: its sequences, its query heads and its key/value heads. The scores
    of a tile take about `TILE_BYTES`, or more where a thread would otherwise get less than one key/value head.
    """
    heads_per_kv = q.shape[1] // k.shape[1]
    first, last = group.heads.start, group.heads.stop
    kv_heads = range(first // heads_per_kv, -(-last // heads_per_kv))
    room = TILE_BYTES // (len(block.rows) * block.width * heads_per_kv * q.element_size())
    room = max(room // threads * threads, threads)  # so that no thread waits for another's last head
    # A group whose heads end between two key/value heads is computed one key/value head at a time.
    step = 1 if first % heads_per_kv or last % heads_per_kv else min(room, len(kv_heads))
    sequences_per_tile = max(room // step, 1) if step == len(kv_heads) else 1
    for start in range(group.sequences.start, group.sequences.stop, sequences_per_tile):
        sequences = slice(start, min(start + sequences_per_tile, group.sequences.stop))
        for kv_start in range(kv_heads.start, kv_heads.stop, step):
            kv_stop = min(kv_start + step, kv_heads.stop)
            heads = slice(max(kv_start * heads_per_kv, first), min(kv_stop * heads_per_kv, last))
            yield sequences, heads, slice(kv_start, kv_stop)


def _ceilings(
    group: MaskGroup, block: PlannedBlock, hiding_bias: Bias | None, q: Tensor
) -> tuple[list[Ceiling], Bool[Tensor, "#batch #heads rows 1"] | None]:
    """Return upper bounds of a block's scores, which hide keys: they are very low where a row may not attend to a key.
    Also return a boolean mask of the rows with a visible key, or None if all rows are known to have one.
    """
    visible, offset = [], 0
    for columns, masked in block.parts:
        if group.mask is not None and masked:
            visible.append((offset, group.mask.block(group.grid, block.rows, columns)))
        if hiding_bias is not None:
            ranges = (group.sequences, group.heads, block.rows, columns)
            bias = select(hiding_bias, *(slice(part.start, part.stop) for part in ranges))
            not_hidden = (bias > -torch.inf).expand(-1, -1, len(block.rows), len(columns))
            visible.append((offset, not_hidden & visible.pop()[1] if masked else not_hidden))
        offset += len(columns)
    has_key = None
    if len(visible) == len(block.parts):
        has_key = reduce(torch.logical_or, (part.any(-1, keepdim=True) for _, part in visible))
    if has_key is not None and has_readable_values(has_key) and bool(has_key.all()):
        has_key = None
    inf = torch.full((), torch.inf, dtype=q.dtype, device=q.device)
    lowest = score_of_hidden_key(q.dtype)
    ceilings = [(offset, torch.where(part, inf, lowest)) for offset, part in visible]
    if has_key is not None:
        ceilings = [(offset, torch.where(has_key, bounds, inf.new_zeros(()))) for offset, bounds in ceilings]
    return [Ceiling(*ceiling) for ceiling in ceilings], has_key
