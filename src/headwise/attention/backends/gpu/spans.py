"""Blocks of the score matrix with a visible key, from ranges of keys, by tensor operations alone.

Nothing is read on the host, so a GPU is not waited for.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.tensors import KeyRanges
from headwise.shapes import Int

Ranges = KeyRanges


def in_blocks(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Return a tensor with one axis split into two: the blocks, and the `size` elements of each block."""
    blocks: Tensor = tensor.unflatten(axis, (-1, size))  # type: ignore[no-untyped-call]
    return blocks


def spans_of_rows(
    ranges: Ranges, keys: int, block_rows: int, block_keys: int
) -> Int[Tensor, "#batch #heads row_blocks ranges 2"]:
    """Return spans for each block of query rows: ranges of adjacent key blocks that together contain every key that any
    of the rows may attend to. A span is its first block and the block before which it stops. The spans of a block of
    rows do not overlap. A span whose stop is not above its first block is empty.
    """
    starts, stops = ranges.clamp(0, keys).unbind(-1)
    is_empty = stops <= starts
    missing = -starts.shape[2] % block_rows
    starts = F.pad(starts.masked_fill(is_empty, keys), (0, 0, 0, missing), value=keys)
    stops = F.pad(stops.masked_fill(is_empty, 0), (0, 0, 0, missing))
    starts, stops = (in_blocks(each, 2, block_rows) for each in (starts, stops))
    first, order = (starts.amin(3) // block_keys).sort(dim=-1)
    stop = ((stops.amax(3) + block_keys - 1) // block_keys).gather(-1, order)
    # In the order of their first blocks, each span begins where all spans before it have stopped.
    stopped = F.pad(stop.cummax(-1).values[..., :-1], (1, 0))
    return torch.stack([torch.maximum(first, stopped), stop], -1).int().contiguous()


def spans_of_keys(
    of_rows: Int[Tensor, "#batch #heads row_blocks ranges 2"], key_blocks: int
) -> Int[Tensor, "#batch #heads key_blocks 1 2"]:
    """Return one span for each of `key_blocks` blocks of keys: a range of adjacent blocks of query rows that contains
    every row that may attend to any of the keys. `of_rows` is the result of `spans_of_rows`: the key blocks that each
    block of rows attends to.

    A block of rows sees a span of key blocks. Such a span is the union of two, which may overlap, whose length is a
    power of two. So the first and the last block of rows are noted for spans of each power of two, and handed down from
    each span to its two halves.
    """
    batch, heads, row_blocks, count, _ = of_rows.shape
    start, stop = of_rows.long().view(batch * heads, row_blocks * count, 2).unbind(-1)
    length = stop - start
    power = torch.frexp(length.clamp(min=1).float()).exponent.long() - 1  # 2^power <= length < 2^(power + 1)
    powers = key_blocks.bit_length()
    nowhere = powers * key_blocks
    block = torch.arange(row_blocks, device=of_rows.device).repeat_interleave(count).expand_as(start)
    firsts = torch.full((batch * heads, nowhere + 1), row_blocks, device=of_rows.device)
    stops = torch.zeros_like(firsts)
    for begin in (start, stop - (1 << power)):
        at = torch.where(length > 0, power * key_blocks + begin, nowhere)
        firsts.scatter_reduce_(1, at, block, "amin")
        stops.scatter_reduce_(1, at, block + 1, "amax")
    firsts, stops = (each[:, :-1].view(batch, heads, powers, key_blocks) for each in (firsts, stops))
    for level in reversed(range(1, powers)):
        half = 1 << (level - 1)
        for each, combine in ((firsts, torch.minimum), (stops, torch.maximum)):
            longer, shorter = each[:, :, level], each[:, :, level - 1]
            shorter.copy_(combine(shorter, longer))
            if half < key_blocks:
                shorter[..., half:].copy_(combine(shorter[..., half:], longer[..., :-half]))
    return torch.stack([firsts[:, :, 0], stops[:, :, 0]], -1).int()[:, :, :, None].contiguous()
