"""Mask in which each head has its own rule."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.attention.masks.base import Index, Mask
from headwise.attention.masks.grid import Coverage, Grid
from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True)
class PerHead(Mask):
    """Mask with one rule for each head: a query of head h attends to the keys that `masks[h]` allows.

    Attributes:
        masks: one mask for each head, in the order of the heads.
    """

    masks: tuple[Mask, ...]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch heads rows columns"]:
        """Return a boolean tensor: for head h, True where the mask `masks[h]` lets a query row in `i` attend to a key
        in `j`.
        """
        one_head = replace(grid, heads=1)
        blocks = [self.for_head(head).allowed(one_head, i, j) for head in range(len(self.masks))]
        blocks = [block[(None,) * (4 - block.ndim)].expand(-1, -1, i.shape[0], j.shape[1]) for block in blocks]
        batch = grid.batch if any(block.shape[0] == grid.batch for block in blocks) else 1
        return torch.cat([block.expand(batch, -1, -1, -1) for block in blocks], dim=1)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        one_head = replace(grid, heads=1)
        allows = self.for_head(0).allows(one_head, b, h * 0, i, j) & (h == 0)
        for head in range(1, len(self.masks)):
            allows = allows | (self.for_head(head).allows(one_head, b, h * 0, i, j) & (h == head))
        return allows

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return the coverage of a block (EMPTY, PARTIAL or FULL) if all heads have the same one, otherwise PARTIAL."""
        coverages = {mask.coverage(grid, rows, columns) for mask in dict.fromkeys(self.masks)}
        return coverages.pop() if len(coverages) == 1 else Coverage.PARTIAL

    @property
    def stored_values(self) -> int:
        """Number of matrix elements that the masks of all heads store together."""
        return sum(mask.stored_values for mask in self.masks)

    def check(self, grid: Grid) -> None:
        """Raise `InputError` unless there is one mask for each head of the score grid, and each of them fits it."""
        if len(self.masks) != grid.heads:
            raise InputError("per_head(masks)", expected=f"one for each of {grid.heads} heads", got=len(self.masks))
        for mask in self.masks:
            mask.check(replace(grid, heads=1))

    def for_sequence(self, index: int) -> Mask:
        """Return the per-head mask of sequence `index` alone, for a grid whose batch is 1."""
        return PerHead(tuple(mask.for_sequence(index) for mask in self.masks))

    def for_head(self, index: int) -> Mask:
        """Return the mask of head `index` alone, for a grid with one head."""
        own = index if len(self.masks) > 1 else 0  # one rule within the rule of a head
        return self.masks[own].for_head(index)

    def natural_grid(self) -> Grid:
        """Return a grid with the number of heads, and for other axes the largest size that a head's mask prescribes."""
        grids = [mask.natural_grid() for mask in self.masks]
        batch, queries, keys = (max(getattr(grid, axis) for grid in grids) for axis in ("batch", "queries", "keys"))
        device = next((grid.device for grid in grids if grid.device.type != "cpu"), torch.device("cpu"))
        return Grid(batch, len(self.masks), queries, keys, device)

    def __repr__(self) -> str:
        return f"per_head({list(self.masks)})"
