"""Rules of positions alone: the same for every sequence, and for any length."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.masks import Coverage, Grid, Mask
from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True)
class Band(Mask):
    """Keys from `width` - 1 steps before the query (all before it, without a width) to `ahead` after it."""

    width: int | None
    ahead: int = 0
    dilation: int = 1

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        back = grid.query_position(i) - grid.key_position(j)
        inside = back >= -self.ahead * self.dilation
        if self.width is not None:
            inside = inside & (back < self.width * self.dilation)
        return inside if self.dilation == 1 else inside & (back % self.dilation == 0)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
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
        own = range((rows.start + grid.offset) // self.size, (rows.stop - 1 + grid.offset) // self.size + 1)
        other = range(columns.start // self.size, (columns.stop - 1) // self.size + 1)
        if own.stop <= other.start or other.stop <= own.start:
            return Coverage.EMPTY
        return Coverage.FULL if len(own) == len(other) == 1 else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"chunked({self.size})"


@dataclass(frozen=True)
class Where(Mask):
    """A rule given as a function."""

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    first_sequence: int = 0

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch heads rows columns"]:
        batch = self.first_sequence + torch.arange(grid.batch, device=grid.device)[:, None, None, None]
        head = torch.arange(grid.heads, device=grid.device)[:, None, None]
        allowed = self.rule(batch, head, grid.query_position(i), grid.key_position(j))
        whole = (grid.batch, grid.heads, i.shape[0], j.shape[1])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("where(rule)", expected="a function that returns a boolean tensor", got=got)
        try:
            return allowed.expand(whole)
        except RuntimeError:
            raise InputError(
                "where(rule)", expected=f"a result that broadcasts to {whole}", got=tuple(allowed.shape)
            ) from None

    def of_sequence(self, index: int) -> Mask:
        return Where(self.rule, self.first_sequence + index)

    def __repr__(self) -> str:
        return f"where({getattr(self.rule, '__name__', repr(self.rule))})"
