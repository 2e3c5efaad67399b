"""Base class of all masks, and their combinations with `&`, `|` and `~`.

A mask is a rule, not a matrix. A backend evaluates it for the block of scores that it works on, so the whole matrix
never exists. True means that the query attends to the key.

Users call the functions in `factories.py`. The classes that those functions return are in the other modules of this
package.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from headwise.attention.masks.grid import Coverage, Grid
from headwise.errors import InputError
from headwise.shapes import Bool, Int

Index = Int[Tensor, "..."]
"""Indices of sequences, heads, query rows or keys."""


class Mask(ABC):
    """Rule that states for each query the keys it attends to; it is evaluated for one block of scores at a time.

    A new mask must define `allowed`, and `allows` for the backend `flex`. The other methods have defaults that are
    correct for every mask.

    Attributes:
        depends_on_distance_only: True if the mask allows a query-key pair by the difference of their positions
            alone, in every sequence and head.
    """

    depends_on_distance_only: ClassVar[bool] = False

    @abstractmethod
    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Return a boolean tensor, True where a query attends to a key, for all query rows in `i` and keys in `j`.

        A mask that goes by positions reads them from `grid.query_position(i)` and `grid.key_position(j)`.
        """

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        """Return True where query row `i` attends to key `j` in sequence `b` and head `h`, for indices that broadcast,
        or that are single numbers. FlexAttention compiles this rule into its kernel. Unlike `allowed`, it makes no
        matrix for a batch or for heads.
        """
        raise NotImplementedError

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: the mask allows none, all or some of the query-key pairs of a block. PARTIAL
        also stands for unknown, since the block is not evaluated. The base class returns PARTIAL for every block.

        EMPTY and FULL are always right. Masks that go by positions
        decide only on a grid with default positions, where a range of rows or columns is a range of positions.
        """
        return Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` when the sizes or the device of the mask do not fit the score grid. The base class accepts
        every grid.
        """

    def for_sequence(self, index: int) -> "Mask":
        """Return the mask of sequence `index` alone, for a grid whose batch is 1. By default it is this mask itself."""
        return self

    def for_head(self, index: int) -> "Mask":
        """Return the mask of head `index` alone, for a grid with one head. By default it is this mask itself."""
        return self

    @property
    def stored_values(self) -> int:
        """Number of matrix elements that the mask stores and `coverage` has to read; 0 for a mask that is computed."""
        return 0

    def natural_grid(self) -> Grid:
        """Return a grid with the sizes that the mask itself prescribes, and 0 for each axis that may have any size. By
        default all sizes are 0.
        """
        return Grid(0, 0, 0, 0)

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """Return the mask as a boolean tensor for a range of query rows and of keys; by default for all of them."""
        self.check(grid)
        i = _indices(rows, grid.queries, grid.device)[:, None]
        j = _indices(columns, grid.keys, grid.device)[None, :]
        allowed = self.allowed(grid, i, j)
        return allowed[(None,) * (4 - allowed.ndim)].expand(-1, -1, i.shape[0], j.shape[1])

    def picture(self, grid: Grid | None = None) -> str:
        """Return the mask on a grid drawn as text with ■ (attends) and ·, one drawing for each sequence and head. If
        the mask is the same for all sequences, or for all heads, they share a drawing. By default the grid has the
        sizes that the mask prescribes, and 6 queries and keys if it prescribes none.

        Raises:
            InputError: parts of the mask that fit no common grid, or tensors without values, on the meta device.
        """
        if grid is None:
            own = self.natural_grid()
            keys = own.keys or own.queries or 6
            grid = Grid(own.batch or 1, own.heads or 1, own.queries or keys, keys, own.device)
        block = self.block(grid)
        if block.is_meta:
            raise InputError("mask", expected="a mask with values", got="tensors on meta")
        drawings = block.flatten(0, 1).tolist()
        return "\n\n".join(
            "\n".join(" ".join("■" if attends else "·" for attends in row) for row in drawing) for drawing in drawings
        )

    def __str__(self) -> str:
        try:
            return self.picture()
        except InputError:
            return repr(self)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise InputError("mask", expected="&, | and ~ to combine masks", got="and, or, not, or a truth test")


def _indices(indices: range | None, count: int, device: torch.device) -> Int[Tensor, " indices"]:
    """Return the indices of a range as a tensor; None stands for the range from 0 to `count`.

    While compiling, `count` may be a symbol, from which no Python range can be made.
    """
    if indices is None:
        return torch.arange(count, device=device)
    return torch.arange(indices.start, indices.stop, device=device)


@dataclass(frozen=True)
class _Combined(Mask):
    """Base class of the masks made by `&`, `|` and `~`; their dataclass fields are the masks that they combine."""

    @property
    def depends_on_distance_only(self) -> bool:  # type: ignore[override]
        """True if all combined masks depend on the difference of query and key position alone."""
        return all(part.depends_on_distance_only for part in self.parts)

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that are combined: two for `&` and `|`, one for `~`."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def stored_values(self) -> int:
        """Number of matrix elements that the combined masks store together."""
        return sum(part.stored_values for part in self.parts)

    def check(self, grid: Grid) -> None:
        """Raise `InputError` when the sizes or device of one of the combined masks do not fit the score grid."""
        for part in self.parts:
            part.check(grid)

    def for_sequence(self, index: int) -> Mask:
        """Return the combined mask (made by `&`, `|` or `~`) of sequence `index` alone, for a grid whose batch is 1."""
        return type(self)(*(part.for_sequence(index) for part in self.parts))

    def for_head(self, index: int) -> Mask:
        """Return the combined mask (made by `&`, `|` or `~`) of head `index` alone, for a grid with one head."""
        return type(self)(*(part.for_head(index) for part in self.parts))

    def natural_grid(self) -> Grid:
        """Return a grid with, for each axis, the largest size that any of the combined masks prescribes.
        Its device is that of the first of these masks that is not on the CPU.
        """
        grids = [part.natural_grid() for part in self.parts]
        batch, heads, queries, keys = (
            max(getattr(grid, axis) for grid in grids) for axis in ("batch", "heads", "queries", "keys")
        )
        device = next((grid.device for grid in grids if grid.device.type != "cpu"), torch.device("cpu"))
        return Grid(batch, heads, queries, keys, device)


@dataclass(frozen=True)
class And(_Combined):
    """Mask `left & right`: a query attends to the keys that both masks allow."""

    left: Mask
    right: Mask

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Return the boolean tensor of `left & right`: True where both of these masks let a query row in `i` attend to
        a key in `j`.
        """
        return self.left.allowed(grid, i, j) & self.right.allowed(grid, i, j)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return self.left.allows(grid, b, h, i, j) & self.right.allows(grid, b, h, i, j)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return the coverage of a block by `left & right` from the coverages by `left` and by `right`: EMPTY (no
        query-key pair is allowed) if at least one of the two is EMPTY, FULL (all pairs are allowed) if both are FULL,
        otherwise PARTIAL.
        """
        coverages = {part.coverage(grid, rows, columns) for part in self.parts}
        if Coverage.EMPTY in coverages:
            return Coverage.EMPTY
        return Coverage.FULL if coverages == {Coverage.FULL} else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class Or(_Combined):
    """Mask `left | right`: a query attends to the keys that at least one mask allows."""

    left: Mask
    right: Mask

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Return the boolean tensor of `left | right`: True where at least one of these masks lets a query row in `i`
        attend to a key in `j`.
        """
        return self.left.allowed(grid, i, j) | self.right.allowed(grid, i, j)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return self.left.allows(grid, b, h, i, j) | self.right.allows(grid, b, h, i, j)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return the coverage of a block by `left | right` from the coverages by `left` and by `right`: FULL (all
        query-key pairs are allowed) if at least one of the two is FULL, EMPTY (no pair is allowed) if both are EMPTY,
        otherwise PARTIAL.
        """
        coverages = {part.coverage(grid, rows, columns) for part in self.parts}
        if Coverage.FULL in coverages:
            return Coverage.FULL
        return Coverage.EMPTY if coverages == {Coverage.EMPTY} else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True)
class Not(_Combined):
    """Mask `~mask`: a query attends to all keys except those that the mask allows."""

    mask: Mask

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Return the boolean tensor of `~mask`: True where `mask` does not let a query row in `i` attend to a key in
        `j`.
        """
        return ~self.mask.allowed(grid, i, j)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return ~self.mask.allows(grid, b, h, i, j)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return the coverage of a block by `~mask` from the coverage by `mask`: FULL (all query-key pairs are allowed)
        if that is EMPTY (no pair is allowed), EMPTY if that is FULL, otherwise PARTIAL.
        """
        opposite = {Coverage.EMPTY: Coverage.FULL, Coverage.FULL: Coverage.EMPTY}
        coverage = self.mask.coverage(grid, rows, columns)
        return opposite.get(coverage, coverage)

    def __repr__(self) -> str:
        return f"~{self.mask!r}"
