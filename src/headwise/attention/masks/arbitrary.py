"""Masks of any form: a boolean matrix, and a function of the indices."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.masks.base import Index, Mask
from headwise.attention.masks.grid import Coverage, Grid, require_broadcast
from headwise.checks import has_readable_values
from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Mask stored as a boolean tensor: in sequence b and head h, query i attends to key j where `values[b, h, i, j]` is
    True.

    Attributes:
        values: `(batch, heads, queries, keys)`, 1 on an axis along which the mask is constant.
    """

    values: Bool[Tensor, "batch heads queries keys"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """Return the stored values of all pairs of a query row in `i` and a key in `j`; True means "attends"."""
        return self.values.expand(-1, -1, grid.queries, grid.keys)[..., i, j]

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        indices = (b, h, i, j)
        return self.values[tuple(n if size > 1 else n * 0 for n, size in zip(indices, self.values.shape, strict=True))]

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """Return a view of the stored values for a range of query rows and of keys; by default for all of them."""
        self.check(grid)
        values = self.values.expand(-1, -1, grid.queries, grid.keys)
        if rows is not None:
            values = values[:, :, rows.start : rows.stop]
        return values if columns is None else values[..., columns.start : columns.stop]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: none, all or some of the stored values of a block of the grid are True.
        PARTIAL is returned as well where the values cannot be read, as while compiling.
        """
        if not has_readable_values(self.values):
            return Coverage.PARTIAL
        block = self.block(grid, rows, columns)
        if not block.any():
            return Coverage.EMPTY
        return Coverage.FULL if block.all() else Coverage.PARTIAL

    @property
    def stored_values(self) -> int:
        """Number of elements of the stored boolean tensor."""
        return self.values.numel()

    def check(self, grid: Grid) -> None:
        """Raise `InputError` unless the stored tensor broadcasts to the score grid and is on the device of the grid."""
        require_broadcast("mask", self.values, grid)

    def for_sequence(self, index: int) -> Mask:
        """Return the stored mask of sequence `index` alone, for a grid whose batch is 1."""
        return self if self.values.shape[0] == 1 else Dense(self.values[index : index + 1])

    def for_head(self, index: int) -> Mask:
        """Return the stored mask of head `index` alone, for a grid with one head."""
        return self if self.values.shape[1] == 1 else Dense(self.values[:, index : index + 1])

    def natural_grid(self) -> Grid:
        """Return a grid with the sizes and device of the stored tensor; an axis of size 1 becomes 0, which stands for
        any size.
        """
        batch, heads, queries, keys = (size if size > 1 else 0 for size in self.values.shape)
        return Grid(batch, heads, queries, keys, self.values.device)

    def __repr__(self) -> str:
        return f"dense(<{' x '.join(map(str, self.values.shape))}>)"


@dataclass(frozen=True)
class MaskRule(Mask):
    """Mask computed by a function: in sequence b and head h, the query at position q attends to the key at position k
    where `rule(b, h, q, k)` is True.

    Attributes:
        rule: function of the indices of sequence and head and the positions of query and key.
        first_sequence: index that `rule` receives for the first sequence of the grid.
        first_head: index that `rule` receives for the first head of the grid.
    """

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    first_sequence: int = 0
    first_head: int = 0

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch heads rows columns"]:
        """Return the result of the rule for each sequence, each head, each query row in `i` and each key in `j`.

        Raises:
            InputError: the rule returns no boolean tensor, or one of another shape.
        """
        batch = self.first_sequence + torch.arange(grid.batch, device=grid.device)[:, None, None, None]
        head = self.first_head + torch.arange(grid.heads, device=grid.device)[:, None, None]
        allowed = self.rule(batch, head, grid.query_position(i), grid.key_position(j))
        shape = (grid.batch, grid.heads, i.shape[0], j.shape[1])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("mask_rule(rule)", expected="a function that returns a boolean tensor", got=got)
        try:
            return allowed.expand(shape)
        except RuntimeError:
            expected = f"a result that broadcasts to {shape}"
            raise InputError("mask_rule(rule)", expected=expected, got=tuple(allowed.shape)) from None

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        positions = grid.position_of_query(b, i), grid.position_of_key(b, j)
        return self.rule(b + self.first_sequence, h + self.first_head, *positions)

    def for_sequence(self, index: int) -> Mask:
        """Return the mask of sequence `index` alone; the rule still receives that index, not 0, as its sequence."""
        return MaskRule(self.rule, self.first_sequence + index, self.first_head)

    def for_head(self, index: int) -> Mask:
        """Return the mask of head `index` alone; the rule still receives that index, not 0, as its head."""
        return MaskRule(self.rule, self.first_sequence, self.first_head + index)

    def __repr__(self) -> str:
        return f"mask_rule({getattr(self.rule, '__name__', repr(self.rule))})"
