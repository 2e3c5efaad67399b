"""Masks that may differ between sequences: how long each is, its documents, a matrix, any rule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headwise.attention.masks.base import Coverage, Grid, Mask, can_be_read, require_broadcast
from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """The first (or, padded on the left, the last) `lengths[b]` keys of sequence b."""

    lengths: Int[Tensor, " batch"]
    side: Literal["right", "left"]
    bounded: bool = True
    """Whether a length beyond the keys is a mistake: that of a padding, and not that of a prefix still to come."""

    @cached_property
    def _span(self) -> tuple[int, int]:
        """The shortest and the longest length: read once, since on a GPU reading them waits for it."""
        if not self.lengths.numel():
            return 0, 0
        return int(self.lengths.min()), int(self.lengths.max())

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch 1 1 columns"]:
        lengths = self.lengths.to(grid.device)[:, None, None, None]
        return grid.key_position(j) < lengths if self.side == "right" else j >= grid.keys - lengths

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if not grid.aligned or not can_be_read(self.lengths):
            return Coverage.PARTIAL
        shortest, longest = self._span
        # Counted from the side where the tokens are, so that both sides read alike.
        first, last = columns.start, columns.stop - 1
        if self.side == "left":
            first, last = grid.keys - 1 - last, grid.keys - 1 - first
        if first >= longest:
            return Coverage.EMPTY
        return Coverage.FULL if last < shortest else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        if len(self.lengths) != grid.batch:
            raise InputError(
                "padding(lengths)", expected=f"one length for each of {grid.batch} sequences", got=len(self.lengths)
            )
        if self.side == "left" and not grid.aligned:
            raise InputError(
                "padding(side)", expected="'right' where keys have positions of their own, as in a cache", got="'left'"
            )
        if self.bounded and grid.aligned and can_be_read(self.lengths) and self._span[1] > grid.keys:
            raise InputError("padding(lengths)", expected=f"lengths of 0 to {grid.keys} (the keys)", got=self._span[1])

    def of_sequence(self, index: int) -> Mask:
        return Padding(self.lengths[index : index + 1], self.side, self.bounded)

    def extent(self) -> Grid:
        return Grid(len(self.lengths), 0, 0, self._span[1])

    def __repr__(self) -> str:
        if not self.bounded:
            return f"prefix({self.lengths.tolist()})"
        return f"padding({self.lengths.tolist()}, side={self.side!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Keys whose id is that of the key at the query's position. There is none before the first id or after the last."""

    ids: Int[Tensor, "#batch keys"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch 1 rows columns"]:
        if 0 in (i.shape[0], j.shape[1], self.ids.shape[1]):
            return torch.zeros(1, 1, i.shape[0], j.shape[1], dtype=torch.bool, device=grid.device)
        position, other = grid.query_position(i), grid.key_position(j)
        own, last = self._at(position.mT).mT, self.ids.shape[1] - 1
        return (own == self._at(other)) & (position >= 0) & (position <= last) & (other <= last)

    def _at(self, positions: Int[Tensor, "*#batch 1 some"]) -> Int[Tensor, "#batch 1 1 some"]:
        """The ids at these positions, of each sequence; those of the first or last key where there is none."""
        ids = self.ids.to(positions.device)
        positions = positions.flatten(0, -2).clamp(0, ids.shape[1] - 1)
        # torch.take_along_dim would fix the lengths while compiling.
        batch = ids.shape[0] if positions.shape[0] == 1 else positions.shape[0]
        return ids.expand(batch, -1).gather(1, positions.expand(batch, -1))[:, None, None]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if not grid.aligned or not can_be_read(self.ids):
            return Coverage.PARTIAL
        if not (rows and columns):
            return Coverage.EMPTY
        first = max(rows.start + grid.offset, 0)
        own, other = self.ids[:, first : rows.stop + grid.offset], self.ids[:, columns.start : columns.stop]
        if rows.stop + grid.offset <= 0 or bool(((own.amin(1) > other.amax(1)) | (own.amax(1) < other.amin(1))).all()):
            return Coverage.EMPTY
        alike = bool((own == other[:, :1]).all()) and bool((other == other[:, :1]).all())
        return Coverage.FULL if alike and rows.start + grid.offset >= 0 else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        batch, keys = self.ids.shape
        # Beside a cache with room to spare, positions run as far as there are ids.
        if batch not in (1, grid.batch) or (grid.aligned and keys != grid.keys):
            raise InputError(
                "segments(ids)",
                expected=f"one id for each of {grid.keys} keys in 1 or {grid.batch} sequences",
                got=f"shape {(batch, keys)}",
            )

    def of_sequence(self, index: int) -> Mask:
        return self if self.ids.shape[0] == 1 else Segments(self.ids[index : index + 1])

    def extent(self) -> Grid:
        return Grid(self.ids.shape[0] if self.ids.shape[0] > 1 else 0, 0, 0, self.ids.shape[1])

    def __repr__(self) -> str:
        return f"segments({self.ids.tolist()})"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean matrix, given whole."""

    values: Bool[Tensor, "batch heads queries keys"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        return self.values.expand(-1, -1, grid.queries, grid.keys)[..., i, j]

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        self.check(grid)  # then a slice, where the general way would gather
        values = self.values.expand(-1, -1, grid.queries, grid.keys)
        if rows is not None:
            values = values[:, :, rows.start : rows.stop]
        return values if columns is None else values[..., columns.start : columns.stop]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if not can_be_read(self.values):
            return Coverage.PARTIAL
        block = self.block(grid, rows, columns)
        if not block.any():
            return Coverage.EMPTY
        return Coverage.FULL if block.all() else Coverage.PARTIAL

    @property
    def stored(self) -> int:
        return self.values.numel()

    def check(self, grid: Grid) -> None:
        require_broadcast("mask", self.values, grid)

    def of_sequence(self, index: int) -> Mask:
        return self if self.values.shape[0] == 1 else Dense(self.values[index : index + 1])

    def of_head(self, index: int) -> Mask:
        return self if self.values.shape[1] == 1 else Dense(self.values[:, index : index + 1])

    def extent(self) -> Grid:
        batch, heads, queries, keys = (size if size > 1 else 0 for size in self.values.shape)
        return Grid(batch, heads, queries, keys, self.values.device)

    def __repr__(self) -> str:
        return f"dense(<{' x '.join(map(str, self.values.shape))}>)"


@dataclass(frozen=True)
class MaskRule(Mask):
    """A rule given as a function."""

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    first_sequence: int = 0
    first_head: int = 0

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch heads rows columns"]:
        batch = self.first_sequence + torch.arange(grid.batch, device=grid.device)[:, None, None, None]
        head = self.first_head + torch.arange(grid.heads, device=grid.device)[:, None, None]
        allowed = self.rule(batch, head, grid.query_position(i), grid.key_position(j))
        whole = (grid.batch, grid.heads, i.shape[0], j.shape[1])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("mask_rule(rule)", expected="a function that returns a boolean tensor", got=got)
        try:
            return allowed.expand(whole)
        except RuntimeError:
            raise InputError(
                "mask_rule(rule)", expected=f"a result that broadcasts to {whole}", got=tuple(allowed.shape)
            ) from None

    def of_sequence(self, index: int) -> Mask:
        return MaskRule(self.rule, self.first_sequence + index, self.first_head)

    def of_head(self, index: int) -> Mask:
        return MaskRule(self.rule, self.first_sequence, self.first_head + index)

    def __repr__(self) -> str:
        return f"mask_rule({getattr(self.rule, '__name__', repr(self.rule))})"
