"""Which keys a query may attend to: the algebra of masks.

A mask is a rule, not a matrix. It answers for any block of the score grid, so a backend can ask about the
block it works on and never hold the whole. True means *attends*. Unless it is said where queries and keys stand,
query row i stands at key position i + (keys - queries): the last query sees the last key, with a cache and without.
Users call the functions of `rules.py`; the masks that those return are in `masks_by_position.py` and
`masks_by_sequence.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True)
class Grid:
    """The grid of scores that a mask is laid over, and the device its blocks are made on.

    Positions are given where a cache knows better than the layout: when keys have been dropped or have room
    between them, or when sequences have come to different lengths. -1 is the position of what is not there.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device = torch.device("cpu")
    query_positions: Int[Tensor, "#batch queries"] | None = field(default=None, compare=False)
    key_positions: Int[Tensor, "#batch keys"] | None = field(default=None, compare=False)

    @property
    def offset(self) -> int:
        """The key position of query row 0, unless it is given; negative when there are more queries than keys."""
        return self.keys - self.queries

    @property
    def aligned(self) -> bool:
        """Whether positions follow from the layout alone."""
        return self.query_positions is None and self.key_positions is None

    def query_position(self, i: Int[Tensor, "rows 1"]) -> Int[Tensor, "*#batch rows 1"]:
        """Where query rows stand, `(rows, 1)` or `(batch, 1, rows, 1)`."""
        if self.query_positions is None:
            return i + self.offset
        return self.query_positions[:, None, i[:, 0], None]

    def key_position(self, j: Int[Tensor, "1 columns"]) -> Int[Tensor, "*#batch 1 columns"]:
        """Where keys stand, `(1, columns)` or `(batch, 1, 1, columns)`."""
        if self.key_positions is None:
            return j
        return self.key_positions[:, None, None, j[0]]


class Coverage(Enum):
    """How much of a block a mask leaves. PARTIAL may also mean "not known without making the block"."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


class Mask(ABC):
    """A rule for which keys each query attends to. A new one needs `allowed`; the rest is optional."""

    by_distance: ClassVar[bool] = False
    """Whether the distance of a query and a key alone decides, for all sequences and heads."""

    @abstractmethod
    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Whether query row `i` attends to key `j`, for all pairs of a block at once.

        A rule of positions asks `grid.query_position(i)` and `grid.key_position(j)`.
        """

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Whether a block is empty or full, told without making it: never wrong, maybe undecided.

        What goes by positions decides on an aligned grid alone, where a range of rows or columns is one of positions.
        """
        return Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` when the mask cannot be laid over `grid`."""

    def of_sequence(self, index: int) -> "Mask":
        """The mask as sequence `index` of the batch has it, for a batch of that one."""
        return self

    def of_head(self, index: int) -> "Mask":
        """The mask as head `index` has it, for a grid of that one."""
        return self

    @property
    def stored(self) -> int:
        """How many values it holds as a matrix, which only reading tells the blocks of."""
        return 0

    def extent(self) -> Grid:
        """The grid the mask itself speaks of; 0 along the axes where it fits any size."""
        return Grid(0, 0, 0, 0)

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """The mask's values on `rows` x `columns` of the grid (all of it unless given)."""
        self.check(grid)
        i = _indices(rows, grid.queries, grid.device)[:, None]
        j = _indices(columns, grid.keys, grid.device)[None, :]
        allowed = self.allowed(grid, i, j)
        return allowed[(None,) * (4 - allowed.ndim)].expand(-1, -1, i.shape[0], j.shape[1])

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


def _indices(some: range | None, count: int, device: torch.device) -> Int[Tensor, " some"]:
    """The indices of a range, or of all. A length that is only a symbol, while compiling, never enters a range."""
    if some is None:
        return torch.arange(count, device=device)
    return torch.arange(some.start, some.stop, device=device)


def can_be_read(values: Tensor) -> bool:
    """Whether the values may decide what Python does next: not while compiling, under `vmap`, or without any (meta)."""
    if torch.compiler.is_compiling() or values.is_meta:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(values)


# -- combinations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Combined(Mask):
    @property
    def by_distance(self) -> bool:  # type: ignore[override]
        return all(part.by_distance for part in self.parts)

    @property
    def parts(self) -> tuple[Mask, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def stored(self) -> int:
        return sum(part.stored for part in self.parts)

    def check(self, grid: Grid) -> None:
        for part in self.parts:
            part.check(grid)

    def of_sequence(self, index: int) -> Mask:
        return type(self)(*(part.of_sequence(index) for part in self.parts))

    def of_head(self, index: int) -> Mask:
        return type(self)(*(part.of_head(index) for part in self.parts))

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


@dataclass(frozen=True)
class PerHead(Mask):
    """The masks of the heads, one after the other."""

    masks: tuple[Mask, ...]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch heads rows columns"]:
        one = replace(grid, heads=1)
        blocks = [self.of_head(head).allowed(one, i, j) for head in range(len(self.masks))]
        whole = [block[(None,) * (4 - block.ndim)].expand(-1, -1, i.shape[0], j.shape[1]) for block in blocks]
        batch = grid.batch if any(block.shape[0] == grid.batch for block in whole) else 1
        return torch.cat([block.expand(batch, -1, -1, -1) for block in whole], dim=1)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        found = {mask.coverage(grid, rows, columns) for mask in dict.fromkeys(self.masks)}
        return found.pop() if len(found) == 1 else Coverage.PARTIAL

    @property
    def stored(self) -> int:
        return sum(mask.stored for mask in self.masks)

    def check(self, grid: Grid) -> None:
        if len(self.masks) != grid.heads:
            raise InputError("per_head(masks)", expected=f"one for each of {grid.heads} heads", got=len(self.masks))
        for mask in self.masks:
            mask.check(replace(grid, heads=1))

    def of_sequence(self, index: int) -> Mask:
        return PerHead(tuple(mask.of_sequence(index) for mask in self.masks))

    def of_head(self, index: int) -> Mask:
        return self.masks[index].of_head(index)

    def extent(self) -> Grid:
        extents = [mask.extent() for mask in self.masks]
        batch, queries, keys = (max(getattr(e, axis) for e in extents) for axis in ("batch", "queries", "keys"))
        return Grid(batch, len(self.masks), queries, keys)

    def __repr__(self) -> str:
        return f"per_head({list(self.masks)})"


# -- what is not there ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Present(Mask):
    """Queries and keys that have a position. Every grid whose positions are given is under this mask."""

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        return (grid.query_position(i) >= 0) & (grid.key_position(j) >= 0)


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
