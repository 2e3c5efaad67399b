"""What blockwise attention computes at once: some sequences and heads of a block, in memory that is used again.

A tile stacks the query rows of all heads that share a key/value head, so that one product does for the group.
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
from headwise.shapes import Bool, Float

LOG2_E = math.log2(math.e)
"""A power of two is the exponential that torch vectorises on every CPU; scores are multiplied by this for it."""

LOWEST = -1e30
"""The score of what is hidden: finite, since its weight of 0 is to be multiplied by it."""

TILE_BYTES = 2**22
"""Size of the scores that are computed at once: they stay in the cache from one operation to the next."""


class Hidden(NamedTuple):
    """What is hidden in a block: from column `offset` on, the largest value that a score may have.

    Infinite where a key is allowed, `LOWEST` where it is hidden, and 0 in a row without any key: such a row is given
    weights, which an infinite total takes away, since nothing less nothing is NaN. Torch vectorises the smaller of two
    tensors; filling by a boolean mask takes forty times as long.
    """

    offset: int
    ceiling: Float[Tensor, "#batch #heads rows columns"]


class Tile(NamedTuple):
    """Some sequences and heads of a block, and what is hidden there.

    Tiles of one pattern that have the same block hide the same, in all sequences and heads; None stands for no other.
    """

    block: PlannedBlock
    sequences: slice
    heads: slice
    kv_heads: slice
    hidden: list[Hidden]
    alive: Bool[Tensor, "#batch #heads rows 1"] | None
    pattern: Hashable | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences, heads, rows)."""
        sequences, heads = (some.stop - some.start for some in (self.sequences, self.heads))
        return sequences, heads, len(self.block.rows)

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """Its place in a tensor `(batch, heads, queries, ...)`."""
        return self.sequences, self.heads, slice(self.block.rows.start, self.block.rows.stop)

    def rows_of(self, tensor: Float[Tensor, "batch heads queries width"]) -> Float[Tensor, "kv stacked width"]:
        """Its rows of q or what is shaped like it, those of a group one under the other."""
        part = tensor[self.where]
        return part.reshape(self._groups, -1, part.shape[-1])

    def put(self, into: Float[Tensor, "batch heads queries width"], rows: Float[Tensor, "kv stacked width"]) -> None:
        """What `rows_of` took, put back."""
        into[self.where] = self.by_head(rows)

    def keys_of(self, tensor: Float[Tensor, "batch kv_heads all width"], keys: range) -> Float[Tensor, "kv keys width"]:
        """Some keys of k or v, in its heads."""
        return tensor[self.sequences, self.kv_heads, keys.start : keys.stop].flatten(0, 1)

    def spans(self, scores: Float[Tensor, "*heads rows columns"]) -> Iterator[tuple[range, Tensor]]:
        """The keys of each span, and their columns of the scores."""
        offset = 0
        for keys in self.block.spans:
            yield keys, scores[..., offset : offset + len(keys)]
            offset += len(keys)

    def lower(self, scores: Float[Tensor, "kv stacked columns"], step: int = 1) -> None:
        """Puts the scores of what is hidden where no weight is; the scores are those of every `step`-th column."""
        for offset, whole in self.hidden:
            ceiling = whole[..., ::step]
            part = self.by_head(scores)[..., offset // step : offset // step + ceiling.shape[-1]]
            torch.minimum(part, ceiling, out=part)

    def by_head(self, stacked: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "batch heads rows columns"]:
        """The same rows with each head apart."""
        return stacked.view(*self.shape, stacked.shape[-1])

    @property
    def _groups(self) -> int:
        return self.shape[0] * int(self.kv_heads.stop - self.kv_heads.start)


def whole_tile(grid: Grid, rows: range, allowed: Bool[Tensor, "#batch #heads rows keys"]) -> Tile:
    """Some rows of every head, over all keys."""
    every, heads = slice(0, grid.batch), slice(0, grid.heads)
    hidden = Hidden(0, torch.where(allowed, torch.inf, LOWEST))
    return Tile(PlannedBlock(rows, (KeyRange(range(grid.keys), True),)), every, heads, heads, [hidden], None)


def tiles(plan: BlockwisePlan, q: Tensor, k: Tensor, holes: Tensor | None) -> Iterator[Tile]:
    """Every tile of a plan; `holes` is a bias that hides what it makes -inf."""
    found: dict[Any, tuple[list[Hidden], Tensor | None]] = {}
    for piece, block in _blocks_of(plan):
        pattern = _pattern(piece, block) if holes is None else None
        hidden, alive = found.get(pattern) or _hidden(piece, block, holes, q)
        if pattern is not None:
            found[pattern] = hidden, alive
        for sequences, heads, kv_heads in _shares(piece, block, q, k):
            own = (_shifted(sequences, piece.sequences), _shifted(heads, piece.heads))
            ceilings = [Hidden(offset, pick(ceiling, *own)) for offset, ceiling in hidden]
            here = None if alive is None else pick(alive, *own)
            yield Tile(block, sequences, heads, kv_heads, ceilings, here, pattern)


class Pool:
    """Memory that every tile uses again, each name as much as the largest needs: fresh memory is the slowest.

    Each thread keeps what it had, up to `TILE_BYTES` of each name, for its next call.
    """

    _kept = threading.local()

    def __init__(self, plan: BlockwisePlan, q: Tensor, k: Tensor) -> None:
        self._like = q
        self._size = max((_size(*where, q, k) for where in _blocks_of(plan)), default=0)
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, tile: Tile, rows: Float[Tensor, "kv stacked _"]) -> Float[Tensor, "kv stacked columns"]:
        """Room for the scores of these rows, with whatever was left in it."""
        if name not in self._held:
            self._held[name] = self._room(name)
        shape = (*rows.shape[:2], tile.block.width)
        return self._held[name][: math.prod(shape)].view(shape)

    def _room(self, name: str) -> Tensor:
        """As much as the largest tile needs."""
        size = self._size * self._like.element_size()
        if self._like.device.type != "cpu" or size > TILE_BYTES:
            return self._like.new_empty(self._size)
        kept: dict[str, Tensor] = vars(self._kept)
        if name not in kept or kept[name].numel() < size:
            with torch.inference_mode(False):  # so that it serves inside that mode and outside
                kept[name] = torch.empty(size, dtype=torch.uint8)
        return kept[name][:size].view(self._like.dtype)


def products(
    name: str,
    tile: Tile,
    rows: Float[Tensor, "kv stacked width"],
    right: Float[Tensor, "batch kv_heads width keys"],
    factor: float,
    pool: Pool,
) -> Float[Tensor, "kv stacked columns"]:
    """`factor rows right`, over the keys of the tile, each rounded once, in the pool's memory of that name."""
    products = pool.take(name, tile, rows)
    for keys, span in tile.spans(products):
        columns = tile.keys_of(right.mT, keys)
        if columns.stride(-1) == 1:
            columns = columns.contiguous()  # or the product would copy it the other way round, which is slower
        torch.baddbmm(span, rows, columns.mT, beta=0.0, alpha=factor, out=span)
    return products


def _blocks_of(plan: BlockwisePlan) -> Iterator[tuple[MaskGroup, PlannedBlock]]:
    """Every block of the plan, with its piece."""
    return ((piece, block) for piece in plan for block in piece.blocks)


def _size(piece: MaskGroup, block: PlannedBlock, q: Tensor, k: Tensor) -> int:
    """The number of scores in the largest tile of a block, which is its first."""
    sequences, heads, _ = next(_shares(piece, block, q, k))
    return int((sequences.stop - sequences.start) * (heads.stop - heads.start)) * len(block.rows) * block.width


def _shares(piece: MaskGroup, block: PlannedBlock, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Sequences, heads and key/value heads that a block is computed in: as many at once as `TILE_BYTES` holds."""
    group = q.shape[1] // k.shape[1]
    first, last = piece.heads.start, piece.heads.stop
    kv_heads = range(first // group, -(-last // group))
    room = TILE_BYTES // (len(block.rows) * block.width * group * q.element_size())
    threads = torch.get_num_threads()
    room = max(room // threads * threads, threads)  # so that no thread waits for another's last head
    # A piece that ends inside a group goes head by head of k.
    step = 1 if first % group or last % group else min(room, len(kv_heads))
    together = max(room // step, 1) if step == len(kv_heads) else 1
    for start in range(piece.sequences.start, piece.sequences.stop, together):
        sequences = slice(start, min(start + together, piece.sequences.stop))
        for at in range(kv_heads.start, kv_heads.stop, step):
            end = min(at + step, kv_heads.stop)
            yield sequences, slice(max(at * group, first), min(end * group, last)), slice(at, end)


def _pattern(piece: MaskGroup, block: PlannedBlock) -> Any:
    """What blocks have in common that hide the same, where the mask goes by distance; otherwise None."""
    if piece.mask is None or not (piece.mask.depends_on_distance_only and piece.grid.uses_default_positions):
        return None
    start = block.rows.start
    parts = tuple((columns.start - start, len(columns), masked) for columns, masked in block.parts)
    return piece.mask, piece.grid, len(block.rows), parts


def _hidden(
    piece: MaskGroup, block: PlannedBlock, holes: Float[Tensor, "#batch #heads #queries #keys"] | None, like: Tensor
) -> tuple[list[Hidden], Bool[Tensor, "#batch #heads rows 1"] | None]:
    """The ceilings of a block's parts, and which rows have a key at all; None where all have one."""
    allowed, offset = [], 0
    for columns, masked in block.parts:
        if piece.mask is not None and masked:
            allowed.append((offset, piece.mask.block(piece.grid, block.rows, columns)))
        if holes is not None:
            there = _bias_at(holes, piece.sequences, piece.heads, block.rows, columns) > -torch.inf
            there = there.expand(-1, -1, len(block.rows), len(columns))
            allowed.append((offset, there & allowed.pop()[1] if masked else there))
        offset += len(columns)
    alive = None
    if len(allowed) == len(block.parts):
        alive = reduce(torch.logical_or, (part.any(-1, keepdim=True) for _, part in allowed))
    if alive is not None and bool(alive.all()):
        alive = None
    inf = torch.full((), torch.inf, dtype=like.dtype, device=like.device)
    ceilings = [(offset, torch.where(part, inf, LOWEST)) for offset, part in allowed]
    if alive is not None:
        ceilings = [(offset, torch.where(alive, ceiling, inf.new_zeros(()))) for offset, ceiling in ceilings]
    return [Hidden(*ceiling) for ceiling in ceilings], alive


def _bias_at(
    bias: Float[Tensor, "#batch #heads #queries #keys"], sequences: range, heads: range, rows: range, columns: range
) -> Float[Tensor, "..."]:
    """A block of the bias; axes of length 1 stay."""
    return pick(bias, *(slice(some.start, some.stop) for some in (sequences, heads, rows, columns)))


def pick(tensor: Tensor, *slices: slice) -> Tensor:
    """These slices of the first axes, where they are not of length 1 and stand for all."""
    return tensor[tuple(slice(None) if size == 1 else some for size, some in zip(tensor.shape, slices, strict=False))]


def _shifted(part: slice, whole: range) -> slice:
    """The part, counted from where the whole starts."""
    return slice(part.start - whole.start, part.stop - whole.start)
