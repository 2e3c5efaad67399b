"""Places of heads in the parameters of an attention module."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from headwise.shapes import Int

HeadKind = Literal["query", "kv"]
"""Query heads, or key/value heads, which several query heads may share."""

HeadPart = Literal["query", "key", "value", "output"]
"""Features of heads that a block of a projection computes or, for "output", reads."""


@dataclass(frozen=True)
class KeptHeads:
    """Heads of one attention module that remain.

    Attributes:
        query: indices of the query heads, ascending.
        kv: indices of the key/value heads, ascending; each remaining one is attended with by equally many query heads.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...]

    def of(self, kind: HeadKind) -> tuple[int, ...]:
        """Return the remaining heads of one kind."""
        return self.query if kind == "query" else self.kv


@dataclass(frozen=True)
class HeadBlocks:
    """Consecutive blocks along one axis of a parameter, one block per head.

    Attributes:
        kind: heads that the blocks belong to.
        heads: number of these heads.
        width: length of one block.
        part: features of the heads; None for other numbers of a head, such as gates and sinks, and where queries, keys
            and values share a block.
    """

    kind: HeadKind
    heads: int
    width: int
    part: HeadPart | None = None

    @property
    def length(self) -> int:
        """Length of all blocks together."""
        return self.heads * self.width


@dataclass(frozen=True)
class HeadAxis:
    """Axis of a parameter along which the heads of an attention module stand side by side, such as the output rows of a
    query projection; or, in a fused projection, first all query heads, then the key heads and the value heads.

    Attributes:
        parameter: path of the parameter in the model.
        axis: the axis.
        blocks: the blocks of heads along it, in order.
    """

    parameter: str
    axis: int
    blocks: tuple[HeadBlocks, ...]

    @property
    def length(self) -> int:
        """Length of the axis."""
        return sum(each.length for each in self.blocks)

    def kept_indices(self, kept: KeptHeads) -> Int[torch.Tensor, " kept"]:
        """Return the indices along the axis that belong to remaining heads, in ascending order."""
        indices: list[int] = []
        start = 0
        for blocks in self.blocks:
            for head in kept.of(blocks.kind):
                indices.extend(range(start + head * blocks.width, start + (head + 1) * blocks.width))
            start += blocks.length
        return torch.tensor(indices, dtype=torch.int64)


def kept_heads(query: Sequence[int], num_heads: int, num_kv_heads: int) -> KeptHeads | None:
    """Return the remaining heads of a module of which the query heads `query` remain, with the key/value heads that
    they attend with. Return None if remaining key/value heads would serve different numbers of query heads.
    """
    group = num_heads // num_kv_heads
    sizes = [sum(head // group == kv for head in query) for kv in range(num_kv_heads)]
    kv = tuple(index for index, size in enumerate(sizes) if size)
    if len({size for size in sizes if size}) != 1:
        return None
    return KeptHeads(tuple(sorted(query)), kv)
