"""Masks of positions alone: the same for every sequence, and for any length."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headwise.attention.masks.base import Coverage, Grid, Mask
from headwise.shapes import Bool, Int


@dataclass(frozen=True)
class Band(Mask):
    """Keys from `width` - 1 steps before the query (all before it, without a width) to `ahead` after it."""

    width: int | None
    ahead: int = 0
    dilation: int = 1

    by_distance: ClassVar[bool] = True

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        back = grid.query_position(i) - grid.key_position(j)
        inside = back >= -self.ahead * self.dilation
        if self.width is not None:
            inside = inside & (back < self.width * self.dilation)
        return inside if self.dilation == 1 else inside & (back % self.dilation == 0)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if not grid.aligned:
            return Coverage.PARTIAL
        # Every distance between the nearest and the farthest occurs in the block: exact, without a dilation.
        nearest = rows.start + grid.offset - (columns.stop - 1)
        farthest = rows.stop - 1 + grid.offset - columns.start
        first = -self.ahead * self.dilation
        last = float("inf") if self.width is None else (self.width - 1) * self.dilation
        if farthest < first or nearest > last:
            return Coverage.EMPTY
        full = nearest >= first and farthest <= last and self.dilation == 1
        return Coverage.FULL if full else Coverage.PARTIAL

    def __repr__(self) -> str:
        if self == Band(None):
            return "causal()"
        options = [f"{name}={value}" for name, value, usual in self._options() if value != usual]
        return f"window({', '.join([str(self.width), *options])})"

    def _options(self) -> tuple[tuple[str, int, int], ...]:
        return ("ahead", self.ahead, 0), ("dilation", self.dilation, 1)


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` keys of every sequence."""

    length: int

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        return grid.key_position(j) < self.length

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if not grid.aligned:
            return Coverage.PARTIAL
        if columns.start >= self.length:
            return Coverage.EMPTY
        return Coverage.FULL if columns.stop <= self.length else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True)
class Chunked(Mask):
    """Keys of the query's own chunk."""

    size: int

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        return grid.query_position(i) // self.size == grid.key_position(j) // self.size

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if not grid.aligned:
            return Coverage.PARTIAL
        own = range((rows.start + grid.offset) // self.size, (rows.stop - 1 + grid.offset) // self.size + 1)
        other = range(columns.start // self.size, (columns.stop - 1) // self.size + 1)
        if own.stop <= other.start or other.stop <= own.start:
            return Coverage.EMPTY
        return Coverage.FULL if len(own) == len(other) == 1 else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"chunked({self.size})"
