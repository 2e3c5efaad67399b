"""Which keys a query may attend to: small objects that combine with `&`, `|` and `~`.

A mask is a rule, not a matrix. It answers for any block of the score grid, so a backend can ask about the
block it works on and never hold the whole. True means *attends*. Query row i stands at key position
i + (keys - queries): the last query sees the last key, with a cache and without.

    >>> print(causal() & window(2))
    ■ · · · · ·
    ■ ■ · · · ·
    · ■ ■ · · ·
    · · ■ ■ · ·
    · · · ■ ■ ·
    · · · · ■ ■
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Literal

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
            grid = Grid(own.batch or 1, own.heads or 1, own.queries or keys, keys)
        drawings = self.block(grid).flatten(0, 1).tolist()
        return "\n\n".join(
            "\n".join(" ".join("■" if attends else "·" for attends in row) for row in drawing) for drawing in drawings
        )

    def __str__(self) -> str:
        return self.picture()

    def __and__(self, other: "Mask") -> "Mask":
        return All(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Any(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)


# -- leaves ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band(Mask):
    """Keys at a distance of 0 to `width` - 1 tokens before the query; without a width, all before it."""

    width: int | None = None

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "rows columns"]:
        back = i + grid.offset - j
        return back >= 0 if self.width is None else (back >= 0) & (back < self.width)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        # Every distance between the nearest and the farthest occurs in the block, so the answer is exact.
        nearest = rows.start + grid.offset - (columns.stop - 1)
        farthest = rows.stop - 1 + grid.offset - columns.start
        width = float("inf") if self.width is None else self.width
        if farthest < 0 or nearest >= width:
            return Coverage.EMPTY
        return Coverage.FULL if nearest >= 0 and farthest < width else Coverage.PARTIAL

    def __repr__(self) -> str:
        return "causal()" if self.width is None else f"window({self.width})"


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """The first (or, padded on the left, the last) `lengths[b]` keys of sequence b."""

    lengths: Int[Tensor, " batch"]
    side: Literal["right", "left"]

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
        return j < lengths if self.side == "right" else j >= grid.keys - lengths

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
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
        if self._span[1] > grid.keys:
            raise InputError("padding(lengths)", expected=f"lengths of 0 to {grid.keys} (the keys)", got=self._span[1])

    def extent(self) -> Grid:
        return Grid(len(self.lengths), 0, 0, self._span[1])

    def __repr__(self) -> str:
        return f"padding({self.lengths.tolist()}, side={self.side!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean matrix, given whole."""

    values: Bool[Tensor, "batch heads queries keys"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        return self.values.expand(-1, -1, grid.queries, grid.keys)[..., i, j]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        values = self.values.expand(-1, -1, grid.queries, grid.keys)
        block = values[..., rows.start : rows.stop, columns.start : columns.stop]
        if not block.any():
            return Coverage.EMPTY
        return Coverage.FULL if block.all() else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        require_broadcast("mask", self.values, grid)

    def extent(self) -> Grid:
        batch, heads, queries, keys = (size if size > 1 else 0 for size in self.values.shape)
        return Grid(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"dense(<{' x '.join(map(str, self.values.shape))}>)"


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
        return Grid(batch, heads, queries, keys)


@dataclass(frozen=True)
class All(_Combined):
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
class Any(_Combined):
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


# -- what a user writes ---------------------------------------------------------------------------------------


def causal() -> Mask:
    """Each query attends to its own position and those before it, aligned so that the last query sees all."""
    return Band()


def window(width: int) -> Mask:
    """Each query attends to itself and the `width` - 1 keys before it: `width` keys.

    Raises `InputError` when `width` is not a positive whole number.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise InputError("window(width)", expected="a whole number of keys, 1 or more", got=repr(width))
    return Band(width)


def padding(lengths: Sequence[int] | Tensor, side: Literal["right", "left"] = "right") -> Mask:
    """Sequence b of the batch holds `lengths[b]` keys; the rest, on `side`, is padding nobody attends to.

    Raises `InputError` when the lengths are not whole numbers of 0 or more in one dimension.
    """
    if side not in ("right", "left"):
        raise InputError("padding(side)", expected="'right' or 'left', where the padding is", got=repr(side))
    lengths = torch.as_tensor(lengths)
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise InputError(
            "padding(lengths)",
            expected="one whole number for each sequence",
            got=f"{lengths.dtype} of shape {tuple(lengths.shape)}",
        )
    if (lengths < 0).any():
        raise InputError("padding(lengths)", expected="lengths of 0 or more", got=int(lengths.min()))
    return Padding(lengths, side)


def dense(values: Tensor) -> Mask:
    """A boolean mask given whole: `(queries, keys)` or `(batch, heads, queries, keys)`, 1 where all are alike.

    Raises `InputError` for another dtype or number of dimensions.
    """
    if values.dtype != torch.bool:
        raise InputError(
            "mask",
            expected="a boolean tensor, True where a query attends",
            got=str(values.dtype),
            remedy="pass a float tensor as bias= to have it added to the scores",
        )
    return Dense(four_dimensional("mask", values))


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
        )
    if values.device != grid.device:
        raise InputError(name, expected=f"a tensor on {grid.device} like q", got=values.device)
