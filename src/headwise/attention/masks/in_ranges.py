"""Mask that is stored as ranges of keys for each query."""

from dataclasses import dataclass

from torch import Tensor

from headwise.attention.masks.base import Index, Mask
from headwise.attention.masks.grid import Coverage, Grid
from headwise.checks import has_readable_values
from headwise.shapes import Bool, Int


@dataclass(frozen=True, eq=False)
class InRanges(Mask):
    """Mask by which a query attends to the keys in its ranges: those of `key_ranges.VisibleKeys`.

    Attributes:
        ranges: start and stop of each range; a range whose stop is not above its start has no key.
    """

    ranges: Int[Tensor, "#batch #heads queries ranges 2"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """Return True where a key in `j` is in a range of a query row in `i`."""
        starts, stops = self.ranges[:, :, i[:, 0]].unbind(-1)
        key = j[..., None]
        return ((key >= starts[..., None, :]) & (key < stops[..., None, :])).any(-1)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        batch, heads, rows, count, _ = self.ranges.shape
        sequence, head, row = b if batch > 1 else b * 0, h if heads > 1 else h * 0, i if rows > 1 else i * 0
        inside = j < 0
        for number in range(count):
            start, stop = (self.ranges[sequence, head, row, number, edge] for edge in (0, 1))
            inside = inside | ((j >= start) & (j < stop))
        return inside

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY if no range of the query rows has a key of the block, FULL if each row has a range with all of
        them, otherwise PARTIAL. Return PARTIAL also where the ranges cannot be read, as on a GPU.
        """
        if not has_readable_values(self.ranges):
            return Coverage.PARTIAL
        starts, stops = self.ranges[:, :, rows.start : rows.stop].unbind(-1)
        if ((starts <= columns.start) & (stops >= columns.stop)).any(-1).all():
            return Coverage.FULL
        has_key = (starts < columns.stop) & (stops > columns.start) & (starts < stops)
        return Coverage.PARTIAL if has_key.any() else Coverage.EMPTY

    def for_sequence(self, index: int) -> Mask:
        """Return the mask of sequence `index` alone, for a grid whose batch is 1."""
        return self if len(self.ranges) == 1 else InRanges(self.ranges[index : index + 1])

    def for_head(self, index: int) -> Mask:
        """Return the mask of head `index` alone, for a grid with one head."""
        return self if self.ranges.shape[1] == 1 else InRanges(self.ranges[:, index : index + 1])
