"""Mask of packed sequences whose offsets are on a device from which nothing is read."""

from dataclasses import dataclass, replace

from torch import Tensor

from headwise.attention.masks.base import Index, Mask
from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Int


@dataclass(frozen=True, eq=False)
class InSequences(Mask):
    """Mask of packed sequences: a query attends to the keys of its own sequence, as far as another mask allows them by
    the positions within the sequences. The sequences of the queries may have other lengths than those of the keys.

    Attributes:
        query_sequences: number of the sequence of each query.
        key_sequences: number of the sequence of each key.
        query_positions: position of each query within its sequence.
        key_positions: position of each key within its sequence.
        mask: rule that goes by positions alone; None if a query attends to its whole sequence.
    """

    query_sequences: Int[Tensor, " queries"]
    key_sequences: Int[Tensor, " keys"]
    query_positions: Int[Tensor, "1 queries"]
    key_positions: Int[Tensor, "1 keys"]
    mask: Mask | None

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads rows columns"]:
        """Return True where a query row in `i` and a key in `j` are in the same sequence and the other mask allows the
        pair.
        """
        is_shared = self.query_sequences[i] == self.key_sequences[j]
        if self.mask is None:
            return is_shared
        by_position = replace(grid, query_positions=self.query_positions, key_positions=self.key_positions)
        return is_shared & self.mask.allowed(by_position, i, j)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        is_shared = self.query_sequences[i] == self.key_sequences[j]
        if self.mask is None:
            return is_shared
        by_position = replace(grid, query_positions=self.query_positions, key_positions=self.key_positions)
        return is_shared & self.mask.allows(by_position, b * 0, h, i, j)

    def for_head(self, index: int) -> Mask:
        """Return the mask of head `index` alone, for a grid with one head."""
        return self if self.mask is None else replace(self, mask=self.mask.for_head(index))
