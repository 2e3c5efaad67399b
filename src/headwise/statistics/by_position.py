"""Statistics of query rows against the position of the query in its sequence: means in bins, and a slope."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.shapes import Float, Int
from headwise.statistics.registry import row_statistics
from headwise.statistics.tally import FurtherStatistics, FurtherSums, HeadSlices, MeasuredRows, Values

BY_POSITION, SLOPE = " by position", " slope"
"""Suffixes of the names of a statistic's means in bins of positions, and of its slope."""

POSITIONS_UNKNOWN = (
    "positions of queries in their sequences could not be established, so these modules have no curves "
    "(see docs/positions.md)"
)
"""Reason for modules whose statistics are not known by position."""

SMALLEST_SPREAD = 1e-9
"""Least variance of the logarithm of the position, relative to its mean square, from which there is a slope."""

ROUNDING = 16.0
"""Rounding of the sum of products that a slope is computed from, in units of the values' epsilon times its terms."""


@dataclass(frozen=True)
class PositionStatistics(FurtherStatistics):
    """Statistics by query position: the mean of each statistic in bins of positions, and the slope of the statistic
    against the logarithm of the position. `edges` has the first position of each bin, in ascending order, and the
    position after the last bin.
    """

    edges: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name + suffix for name in row_statistics() for suffix in (BY_POSITION, SLOPE))

    def start(self, grid: Grid, context: CallContext, slices: HeadSlices | None = None) -> "PositionSums | str":
        """Return empty sums of the statistics by query position, for one attention call. If the positions of its
        queries are unknown, return the reason as text.
        """
        if context.query_positions is None:
            return POSITIONS_UNKNOWN
        return PositionSums(context.query_positions.expand(grid.batch, -1), self.edges, grid.heads)


@dataclass
class PositionSums(FurtherSums):
    """Sums of each statistic over the query rows in each bin of query positions. Further sums are those that a
    least-squares fit of the values against the logarithm of the position needs.

    Attributes:
        positions: position of each query in its sequence, from 0.
        names: names of the statistics that have values.
        sums: sums of the values, and numbers of rows. The last axis has the bins, and then the sum over all rows of
            each number times 1, x and x^2, where x is the logarithm of the position counted from 1.
        rounding: relative error of the values, of their least precise dtype.
    """

    positions: Int[Tensor, "batch queries"]
    edges: Sequence[int]
    heads: int
    names: tuple[str, ...] = ()
    sums: Float[Tensor, "sum_and_count means batch heads bins"] | None = field(default=None, repr=False)
    rounding: float = 0.0

    def add(self, measured: MeasuredRows, row_block: RowBlock | None = None) -> None:
        """Add values of statistics for some query rows, in place, to the sums of the bins that contain the rows'
        positions. The same rows may be added again with values of other statistics.
        """
        rows = slice(measured.rows.start, measured.rows.stop)
        self.rounding = max(self.rounding, ROUNDING * torch.finfo(measured.values.dtype).eps)
        positions = self.positions[measured.sequences, rows]
        bins = torch.searchsorted(torch.tensor(self.edges, device=positions.device), positions.contiguous(), right=True)
        in_bin = bins[..., None] - 1 == torch.arange(len(self.edges) - 1, device=positions.device)
        x = positions.clamp(min=0).add(1).double().log()
        # Factors of each row in each sum: 1 in its bin, and 1, x and x^2.
        features = torch.cat([in_bin.double(), torch.stack([torch.ones_like(x), x, x * x], -1)], -1)
        values = measured.values.double().masked_fill(~measured.counted, 0.0)
        sums = torch.einsum("mbhr,brk->mbhk", values, features)
        counted = measured.counted.double().expand(-1, len(features), -1, -1)
        counts = torch.einsum("mbhr,brk->mbhk", counted, features).expand_as(sums)
        if measured.names[0] not in self.names:
            zeros = sums.new_zeros(2, len(measured.names), len(self.positions), self.heads, sums.shape[-1])
            self.names += measured.names
            self.sums = zeros if self.sums is None else torch.cat([self.sums, zeros], 1)
        assert self.sums is not None
        first = self.names.index(measured.names[0])
        means = slice(first, first + len(measured.names))
        self.sums[:, means, measured.sequences, measured.heads] += torch.stack([sums, counts])

    def merge(self, other: "PositionSums") -> None:
        if other.sums is None:
            return
        self.rounding = max(self.rounding, other.rounding)
        if self.sums is None:
            self.names, self.sums = other.names, other.sums
            return
        names = tuple(name for name in self.names if name in other.names)
        own, further = (
            sums[:, [of_sums.index(name) for name in names]]
            for sums, of_sums in ((self.sums, self.names), (other.sums, other.names))
        )
        self.names, self.sums = names, own + further

    def values(self) -> Values:
        """Return two results per statistic, for each sequence and head: the mean in each bin of query positions, and
        the least-squares slope of the values against the logarithm of the position. The means have shape `(batch, heads
        * bins)`, with the bins of one head next to each other. A slope that could be due to rounding alone is set to 0.
        Rounding errors have the same sign in many sequences, so they would look like a real slope.
        """
        if self.sums is None:
            return {}
        found: Values = {}
        bins = len(self.edges) - 1
        for name, sums, counts in zip(self.names, *self.sums.unbind(0), strict=True):
            means = (sums[..., :bins] / counts[..., :bins]).flatten(1)
            found[name + BY_POSITION] = means, counts[..., :bins].flatten(1) > 0
            (y, xy, _), (n, x, xx) = (part[..., bins:].unbind(-1) for part in (sums, counts))
            spread = xx - x * x / n.clamp(min=1.0)
            product = xy - x * y / n
            product = product.masked_fill(product.abs() <= self.rounding * xy.abs(), 0.0)
            found[name + SLOPE] = product / spread, spread > SMALLEST_SPREAD * xx
        return found
