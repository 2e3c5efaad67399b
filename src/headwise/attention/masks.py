"""Which keys a query may attend to: the algebra of masks.

A mask is a rule, not a matrix. It answers for any block of the score grid, so a backend can ask about the
block it works on and never hold the whole. True means *attends*. Query row i stands at key position
i + (keys - queries): the last query sees the last key, with a cache and without. The rules themselves are in
`rules.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True)
class Grid:
    """The grid of scores that a mask is laid over, and the device its blocks are made on."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device = torch.device("cpu")

    @property
    def offset(self) -> int:
        """The key position of query row 0; negative when there are more queries than keys."""
        return self.keys - self.queries


class Coverage(Enum):
    """How much of a block a mask leaves. PARTIAL may also mean "not known without making the block"."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


class Mask(ABC):
    """A rule for which keys each query attends to. A new one needs `allowed`; the rest is optional."""

    @abstractmethod
    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Whether query row `i` attends to key `j`, for all pairs of a block at once."""

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Whether a block is empty or full, told without making it. Never wrong, possibly undecided."""
        return Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` when the mask cannot be laid over `grid`."""

    def extent(self) -> Grid:
        """The grid the mask itself speaks of; 0 along the axes where it fits any size."""
        return Grid(0, 0, 0, 0)

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """The mask's values on `rows` x `columns` of the grid (all of it unless given)."""
        self.check(grid)
        rows = range(grid.queries) if rows is None else rows
        columns = range(grid.keys) if columns is None else columns
        i = torch.arange(rows.start, rows.stop, device=grid.device)[:, None]
        j = torch.arange(columns.start, columns.stop, device=grid.device)[None, :]
        allowed = self.allowed(grid, i, j)
        return allowed[(None,) * (4 - allowed.ndim)].expand(-1, -1, len(rows), len(columns))

    def picture(self, grid: Grid | None = None) -> str:
        """The mask drawn with ■ (attends) and ·, one drawing for each sequence and head that differ.

        Without a grid, a size that shows the mask: its own where it has one, otherwise 6 x 6.
        """
        if grid is None:
            own = self.extent()
            keys = own.keys or own.queries or 6
            grid = Grid(own.batch or 1, own.heads or 1, own.queries or keys, keys, own.device)
        drawings = self.block(grid).flatten(0, 1).tolist()
        return "\n\n".join(
            "\n".join(" ".join("■" if attends else "·" for attends in row) for row in drawing) for drawing in drawings
        )

    def __str__(self) -> str:
        return self.picture()

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise InputError("mask", expected="&, | and ~ to combine masks", got="and, or, not, or a truth test")


# -- combinations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Combined(Mask):
    @property
    def parts(self) -> tuple[Mask, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def check(self, grid: Grid) -> None:
        for part in self.parts:
            part.check(grid)

    def extent(self) -> Grid:
        extents = [part.extent() for part in self.parts]
        batch, heads, queries, keys = (
            max(getattr(extent, axis) for extent in extents) for axis in ("batch", "heads", "queries", "keys")
        )
        device = next((extent.device for extent in extents if extent.device.type != "cpu"), torch.device("cpu"))
        return Grid(batch, heads, queries, keys, device)


@dataclass(frozen=True)
class Both(_Combined):
    """Keys that both masks allow: `left & right`."""

    left: Mask
    right: Mask

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        return self.left.allowed(grid, i, j) & self.right.allowed(grid, i, j)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        both = {part.coverage(grid, rows, columns) for part in self.parts}
        if Coverage.EMPTY in both:
            return Coverage.EMPTY
        return Coverage.FULL if both == {Coverage.FULL} else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class Either(_Combined):
    """Keys that either mask allows: `left | right`."""

    left: Mask
    right: Mask

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        return self.left.allowed(grid, i, j) | self.right.allowed(grid, i, j)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        both = {part.coverage(grid, rows, columns) for part in self.parts}
        if Coverage.FULL in both:
            return Coverage.FULL
        return Coverage.EMPTY if both == {Coverage.EMPTY} else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True)
class Not(_Combined):
    """Keys that the mask does not allow: `~mask`."""

    mask: Mask

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        return ~self.mask.allowed(grid, i, j)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        opposite = {Coverage.EMPTY: Coverage.FULL, Coverage.FULL: Coverage.EMPTY}
        coverage = self.mask.coverage(grid, rows, columns)
        return opposite.get(coverage, coverage)

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


# -- shared with the additive bias ------------------------------------------------------------------------------


def four_dimensional(name: str, values: Tensor) -> Tensor:
    """`(queries, keys)` as `(1, 1, queries, keys)`; three dimensions are refused, since they could be two things."""
    if values.ndim == 2:
        return values[None, None]
    if values.ndim != 4:
        raise InputError(
            name,
            expected="2 dimensions (queries, keys) or 4 (batch, heads, queries, keys)",
            got=f"{values.ndim} dimensions {tuple(values.shape)}",
            remedy="unsqueeze the batch or the head axis" if values.ndim == 3 else None,
        )
    return values


def require_broadcast(name: str, values: Tensor, grid: Grid) -> None:
    """Raise `InputError` unless every axis of `values` is the grid's or 1."""
    sizes = (grid.batch, grid.heads, grid.queries, grid.keys)
    if any(have not in (1, want) for have, want in zip(values.shape, sizes, strict=True)):
        raise InputError(
            name,
            expected=f"a shape that broadcasts to (batch, heads, queries, keys) = {sizes}",
            got=tuple(values.shape),
            remedy="a padding mask (batch, keys) goes in as mask[:, None, None, :]"
            if tuple(values.shape) == (1, 1, grid.batch, grid.keys)
            else None,
        )
    if values.device != grid.device:
        raise InputError(name, expected=f"a tensor on {grid.device} like q", got=values.device)
