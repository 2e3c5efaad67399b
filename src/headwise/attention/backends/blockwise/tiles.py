"""Tiles of the score matrix: rectangles that blockwise attention computes at once, in reused memory.

A tile holds some sequences and heads of one block of the plan. It stacks the query rows of all heads that share a
key/value head, so that one product serves the whole group.
"""

import math
import threading
from collections.abc import Hashable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.plan import BlockwisePlan, KeyRange, MaskGroup, PlannedBlock
from headwise.attention.masks.grid import Grid
from headwise.checks import has_readable_values
from headwise.shapes import Bool, Float

LOG2_E = math.log2(math.e)
"""Factor from nats to units of ln 2. Scores are kept in these units, since torch vectorises exp2 on every CPU."""

TILE_BYTES = 2**22
"""Target size of the scores of one tile, which stay in the cache from one operation to the next."""


class Ceiling(NamedTuple):
    """Upper bounds of the scores in some columns of a block, starting at column `offset`. In a row with a visible key,
    the minimum of score and bound is the unchanged score at a visible key, and at a hidden key so low that its weight
    is 0.

    A bound is infinite where a key is visible, and `score_of_hidden_key` where it is hidden. It is 0 in a row without
    any visible key: the difference of two infinities would be NaN, so such a row gets weights, which an infinite sum
    turns to 0. Torch vectorises the minimum of two tensors; filling by a boolean mask takes forty times as long.
    """

    offset: int
    bounds: Float[Tensor, "#batch #heads rows columns"]


class Tile(NamedTuple):
    """Rectangle of the score matrix that is computed at once: query rows, key columns, some sequences and some heads.
    It carries upper bounds of scores (`ceilings`), which lower the scores of keys that the mask forbids.

    Attributes:
        block: the query rows and the key columns.
        sequences: slice of the batch axis.
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
        """True where a row may attend to the key of a column. The tensor is computed at each use."""
        bounds_at = {ceiling.offset: ceiling.bounds for ceiling in self.ceilings}
        parts, offset = [], 0
        for keys, _ in self.block.parts:
            allowed = bounds_at[offset] > 0 if offset in bounds_at else torch.ones(1, 1, 1, len(keys), dtype=torch.bool)
            parts.append(allowed)
            offset += len(keys)
        sizes = torch.broadcast_shapes((1, 1, len(self.block.rows)), *(part.shape[:3] for part in parts))  # type: ignore[no-untyped-call]
        return torch.cat([part.expand(*sizes, -1).to(parts[0].device) for part in parts], -1)

    def stack_rows(self, tensor: Float[Tensor, "batch heads queries width"]) -> Float[Tensor, "kv stacked width"]:
        """Return the tile's query rows of a tensor `(batch, heads, queries, width)`, stacked for products with keys.
        The first axis of the result is one for each pair of sequence and key/value head. The second joins the rows of
        all query heads that share the key/value head.
        """
        rows = tensor[self.row_slices]
        return rows.reshape(self._groups, -1, rows.shape[-1])

    def write(
        self, target: Float[Tensor, "batch heads queries width"], rows: Float[Tensor, "kv stacked width"]
    ) -> None:
        """Copy one row of numbers for each query row of the tile from `rows` to `target`, at the tile's sequences,
        query heads and queries. In `rows`, the query rows of all heads that share a key/value head are joined to one
        axis, as by `stack_rows`.
        """
        target[self.row_slices] = self.by_head(rows)

    def select_keys(
        self, tensor: Float[Tensor, "batch kv_heads all width"], keys: range
    ) -> Float[Tensor, "kv keys width"]:
        """Return the given range of `keys` in k or v, for the tile's sequences and key/value heads. The axes of
        sequences and of key/value heads are joined to one.
        """
        return tensor[self.sequences, self.kv_heads, keys.start : keys.stop].flatten(0, 1)

    def spans(self, scores: Float[Tensor, "*heads rows columns"]) -> Iterator[tuple[range, Tensor]]:
        """Yield each range of adjacent keys of the tile, together with a view of the columns of `scores` for these
        keys.
        """
        offset = 0
        for keys in self.block.spans:
            yield keys, scores[..., offset : offset + len(keys)]
            offset += len(keys)

    def hide(self, scores: Float[Tensor, "kv stacked columns"]) -> None:
        """Lower the scores of hidden keys to at most `score_of_hidden_key`, in place; other scores stay unchanged.
        There is one exception: in a row in which all keys are hidden and `has_key` is False, scores are lowered to at
        most 0 instead.
        """
        for offset, bounds in self.ceilings:
            part = self.by_head(scores)[..., offset : offset + bounds.shape[-1]]
            torch.minimum(part, bounds, out=part)

    def by_head(self, stacked: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "batch heads rows columns"]:
        """Return a view of `stacked` with separate axes for sequences, query heads and rows. In `stacked`, the query
        rows of all heads that share a key/value head are joined to one axis, as by `stack_rows`.
        """
        return stacked.view(*self.shape, stacked.shape[-1])

    @property
    def _groups(self) -> int:
        """Number of pairs of a sequence and a key/value head in the tile."""
        return self.shape[0] * int(self.kv_heads.stop - self.kv_heads.start)


def score_of_hidden_key(dtype: torch.dtype) -> float:
    """Return the score that hidden keys get: a quarter of the least number of `dtype`. It is finite, since statistics
    multiply it by the key's weight of 0, and below every score whose differences are finite.
    """
    return torch.finfo(dtype).min / 4


def full_width_tile(grid: Grid, rows: range, allowed: Bool[Tensor, "#batch #heads rows keys"] | None = None) -> Tile:
    """Return the tile (rectangle of scores) of a range of query rows, all sequences, heads and keys.
    `allowed` is its mask, True where a row attends to a key; None hides nothing.
    """
    sequences, heads, ceilings = slice(0, grid.batch), slice(0, grid.heads), []
    if allowed is not None:
        ceilings = [Ceiling(0, torch.where(allowed, torch.inf, score_of_hidden_key(torch.float32)))]
    return Tile(PlannedBlock(rows, (KeyRange(range(grid.keys), True),)), sequences, heads, heads, ceilings, None)


def threads_of(dropout: float) -> int:
    """Return the number of threads that tiles are made for: those of torch, or 1 with dropout, whose random numbers
    depend on the tiles and must be the same in the backward pass.
    """
    return 1 if dropout > 0 else torch.get_num_threads()


def iterate_tiles(
    plan: BlockwisePlan, q: Tensor, k: Tensor, hiding_bias: Tensor | None, threads: int
) -> Iterator[Tile]:
    """Yield every tile of a plan's blocks, in the same order each time. A tile is the part of a block, for some
    sequences and heads, that is computed at once. If `hiding_bias` is passed, keys are hidden where it is -inf, in
    addition to the mask.
    """
    cache: dict[Any, tuple[list[Ceiling], Tensor | None]] = {}
    for group, block in _blocks_of(plan):
        pattern = _pattern(group, block) if hiding_bias is None else None
        ceilings, has_key = cache.get(pattern) or _ceilings(group, block, hiding_bias, q)
        if pattern is not None:
            cache[pattern] = ceilings, has_key
        for sequences, heads, kv_heads in _tile_slices(group, block, q, k, threads):
            within = (_relative(sequences, group.sequences), _relative(heads, group.heads))
            tile_ceilings = [Ceiling(offset, select(bounds, *within)) for offset, bounds in ceilings]
            tile_has_key = None if has_key is None else select(has_key, *within)
            yield Tile(block, sequences, heads, kv_heads, tile_ceilings, tile_has_key, pattern)


class Pool:
    """Named buffers of memory, each for the scores of one tile. All tiles of a call reuse them, since allocating memory
    is slow.

    Each buffer has the size of the largest tile. Each thread keeps its buffers of up to `TILE_BYTES` for its next call.
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

    def buffer(self, name: str, tile: Tile, rows: Float[Tensor, "kv stacked _"]) -> Float[Tensor, "kv stacked columns"]:
        """Return the buffer called `name` as a view in the shape of a tile's scores: the first two axes of `rows`, and
        the tile's number of keys. The buffer is not cleared.
        """
        if name not in self._buffers:
            self._buffers[name] = self._allocate(name)
        shape = (*rows.shape[:2], tile.block.width)
        return self._buffers[name][: math.prod(shape)].view(shape)

    def _allocate(self, name: str) -> Tensor:
        """Return flat memory for the scores of the call's largest tile. On CPU, up to `TILE_BYTES` (4 MiB), it is the
        buffer called `name` that the thread keeps from one call to the next; otherwise it is new.
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
) -> Float[Tensor, "kv stacked columns"]:
    """Return `factor * rows @ right` for the columns of `right` that are a tile's keys, in the pool's buffer called
    `name`. The product is rounded once, after the factor.
    """
    result = pool.buffer(name, tile, rows)
    for keys, span in tile.spans(result):
        columns = tile.select_keys(right.mT, keys)
        if columns.stride(-1) == 1:
            columns = columns.contiguous()  # otherwise the product copies it in the other order, which is slower
        torch.baddbmm(span, rows, columns.mT, beta=0.0, alpha=factor, out=span)
    return result


def select(tensor: Tensor, *slices: slice) -> Tensor:
    """Return a tensor with its first axes sliced, one slice for each; axes of size 1, which broadcast, stay whole."""
    return tensor[tuple(slice(None) if size == 1 else part for size, part in zip(tensor.shape, slices, strict=False))]


def _blocks_of(plan: BlockwisePlan) -> Iterator[tuple[MaskGroup, PlannedBlock]]:
    """Yield every block of a plan with its group: the sequences and heads that share the block's mask."""
    return ((group, block) for group in plan for block in group.blocks)


def _tile_slices(
    group: MaskGroup, block: PlannedBlock, q: Tensor, k: Tensor, threads: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Yield for each tile of a block its slices of the sequences, the query heads and the key/value heads. The scores
    of a tile take about `TILE_BYTES` (4 MiB), or more where a number of threads would otherwise get less than one
    key/value head each.
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


def _pattern(group: MaskGroup, block: PlannedBlock) -> Any:
    """Return a dictionary key. Two blocks with the same key have equal masks when query rows and key columns are
    counted from the first row of each block. The key is None if the block has no mask, or one that does not depend on
    distance alone, or if the caller passed positions.
    """
    if group.mask is None or not (group.mask.depends_on_distance_only and group.grid.uses_default_positions):
        return None
    start = block.rows.start
    parts = tuple((columns.start - start, len(columns), masked) for columns, masked in block.parts)
    return group.mask, group.grid, len(block.rows), parts


def _ceilings(
    group: MaskGroup, block: PlannedBlock, hiding_bias: Float[Tensor, "#batch #heads #queries #keys"] | None, q: Tensor
) -> tuple[list[Ceiling], Bool[Tensor, "#batch #heads rows 1"] | None]:
    """Return a block's ceilings, which are upper bounds that hide scores, and a boolean mask that is True at rows with
    a visible key. Keys are hidden by the mask, and where `hiding_bias` is -inf. The boolean mask is None if all rows
    are known to have a visible key.
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


def _relative(part: slice, outer: range) -> slice:
    """Return a slice with its start and stop counted from the start of the range that contains it."""
    return slice(part.start - outer.start, part.stop - outer.start)
