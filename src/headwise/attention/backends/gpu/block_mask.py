"""FlexAttention's block mask of a mask of headwise, without a matrix of queries x keys.

A block of `BLOCK` queries and keys is left out if no query may attend to a key of it, full if every query may attend to
every key, and partial otherwise; then FlexAttention evaluates the rule of the mask. The blocks follow from the first
and last key of each range. Everything is computed by tensor operations, and nothing is read on the host, so that a GPU
is not waited for.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.gpu.flex_rules import visibility_rule
from headwise.attention.backends.gpu.spans import in_blocks, spans_of_rows
from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import VisibleKeys, is_constant, visible_keys
from headwise.checks import has_values
from headwise.shapes import Bool, Int

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Number of queries and of keys of a block."""

MOST_EVALUATED = 2**28
"""Largest number of elements of a mask that is no ranges for which blocks are found by evaluating it."""

EVALUATED_AT_ONCE = 2**24
"""Largest number of elements that are evaluated at a time, unless one row of blocks has more."""

Blocks = Bool[Tensor, "#batch #heads row_blocks key_blocks"]


def block_mask_of(mask: Mask, grid: Grid) -> "BlockMask":
    """Return the block mask of a mask on a grid. That of a mask made of numbers alone is cached: all layers of a model
    have the same mask.
    """
    if is_constant(mask) and grid.uses_default_positions and has_values(torch.empty(0, device=grid.device)):
        return _constant_block_mask(mask, grid)
    return _block_mask(mask, grid)


@lru_cache(maxsize=32)
def _constant_block_mask(mask: Mask, grid: Grid) -> "BlockMask":
    """Return the block mask of a constant mask, which is cached."""
    with torch.inference_mode(False), torch.no_grad():
        return _block_mask(mask, grid)


def _block_mask(mask: Mask, grid: Grid) -> "BlockMask":
    """Return the block mask of a mask."""
    from torch.nn.attention.flex_attention import BlockMask  # takes long to import

    visible = visible_keys(mask, grid)
    some, every = visible_blocks(visible)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=visibility_rule(visible),
        seq_lengths=(grid.queries, grid.keys),
    )


def visible_blocks(visible: VisibleKeys) -> tuple[Blocks, Blocks]:
    """Return two tensors: True for blocks in which some query may attend to a key, and for those in which every query
    may attend to every key. The first may also be True for a block without a visible key, and the second is False for
    blocks that the last query or key leaves incomplete.
    """
    grid = visible.grid
    row_blocks, key_blocks = -(-grid.queries // BLOCK), -(-grid.keys // BLOCK)
    some = torch.ones(1, 1, row_blocks, key_blocks, dtype=torch.bool, device=grid.device)
    whole_rows, whole_keys = (
        torch.arange(blocks, device=grid.device) < length // BLOCK
        for blocks, length in ((row_blocks, grid.queries), (key_blocks, grid.keys))
    )
    every = (whole_rows[:, None] & whole_keys)[None, None]
    if visible.ranges is not None:
        some_in_ranges, every_in_ranges = _blocks_of_ranges(visible.ranges, grid.keys)
        some, every = some & some_in_ranges, every & every_in_ranges
    if visible.others:
        evaluated = _evaluated_blocks(visible)
        some, every = (some, every & False) if evaluated is None else (some & evaluated[0], every & evaluated[1])
    return some, every


def _blocks_of_ranges(ranges: Int[Tensor, "#batch #heads queries ranges 2"], keys: int) -> tuple[Blocks, Blocks]:
    """Return the blocks in which some, and every, query has a key in its ranges."""
    key_blocks = -(-keys // BLOCK)
    block = torch.arange(key_blocks, device=ranges.device)
    first, stop = spans_of_rows(ranges, keys, BLOCK, BLOCK)[..., None].unbind(-2)
    some = ((block >= first) & (block < stop)).any(3)
    starts, stops = ranges.clamp(0, keys).unbind(-1)
    missing = -starts.shape[2] % BLOCK
    latest = in_blocks(F.pad(starts, (0, 0, 0, missing)), 2, BLOCK).amax(3)[..., None]
    earliest = in_blocks(F.pad(stops, (0, 0, 0, missing), value=keys), 2, BLOCK).amin(3)[..., None]
    every = ((block * BLOCK >= latest) & ((block + 1) * BLOCK <= earliest)).any(3)
    return some, every


def _evaluated_blocks(visible: VisibleKeys) -> tuple[Blocks, Blocks] | None:
    """Return the blocks in which the masks that are no ranges allow some, and every, pair, by evaluating them for some
    rows at a time; None if that would take long, or while compiling.
    """
    grid = visible.grid
    first = visible.evaluate(range(min(2, grid.queries)))
    batch, heads, rows, _ = first.shape
    per_row = batch * heads * grid.keys
    if not has_values(first) or per_row * grid.queries > MOST_EVALUATED:
        return None
    if rows == 1:  # the same for all queries
        blocks = in_blocks(_with_whole_blocks(first, grid.keys), 3, BLOCK)
        return blocks.any(4), blocks.all(4)
    step = max(EVALUATED_AT_ONCE // per_row // BLOCK, 1) * BLOCK
    parts = []
    for start in range(0, grid.queries, step):
        matrix = visible.evaluate(range(start, min(start + step, grid.queries)))
        matrix = F.pad(_with_whole_blocks(matrix, grid.keys), (0, 0, 0, -matrix.shape[2] % BLOCK))
        blocks = in_blocks(in_blocks(matrix, 3, BLOCK), 2, BLOCK)
        parts.append((blocks.any(5).any(3), blocks.all(5).all(3)))
    some, every = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return some, every


def _with_whole_blocks(
    matrix: Bool[Tensor, "#batch #heads rows #keys"], keys: int
) -> Bool[Tensor, "#batch #heads rows padded_keys"]:
    """Return a matrix for all keys, with hidden keys at its end that complete the last block."""
    return F.pad(matrix.expand(-1, -1, -1, keys), (0, -keys % BLOCK))


def _ordered(
    blocks: Blocks,
) -> tuple[Int[Tensor, "#batch #heads row_blocks"], Int[Tensor, "#batch #heads row_blocks key_blocks"]]:
    """Return the number of True in each row, and the indices of all columns, those that are True first."""
    numbers = blocks.to(torch.int8)
    return numbers.sum(-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).int()
