"""Interface of sums over query rows that a tally adds up in addition to the sums of its own statistics."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Float

HeadSlices = Float[Tensor, "heads value_dim width"]
"""Slice of the output projection of each query head, in float32 at least: a head's output times its slice is its part
of the projection's output, without the bias, which belongs to no head.
"""

Values = dict[str, tuple[Float[Tensor, "batch columns"], Bool[Tensor, "batch columns"]]]
"""Numbers of each sequence by the name of a statistic, and True at those that are defined."""


class MeasuredRows(NamedTuple):
    """Statistics in some query rows of an attention call, one value for each row, before they are averaged.

    Attributes:
        names: names of the statistics.
        values: value of each statistic in each row.
        counted: True at the rows that the mean of a statistic includes.
        sequences: slice of the batch axis.
        heads: slice of the axis of query heads.
        rows: the query rows, as indices into the queries of the call.
    """

    names: tuple[str, ...]
    values: Float[Tensor, "means batch heads rows"]
    counted: Bool[Tensor, "means #batch #heads rows"]
    sequences: slice
    heads: slice
    rows: range


@runtime_checkable
class FurtherSums(Protocol):
    """Sums over query rows of one attention call, or of calls that continue its sequences."""

    @property
    def needs_weights(self) -> bool:
        """True if the sums need attention weights, and not only the statistics of each row."""

    @property
    def refused(self) -> str | None:
        """Reason that the sums of the rows so far cannot be computed, as the result of `FurtherStatistics.start`; None
        if they can.
        """

    def add(self, measured: MeasuredRows, row_block: RowBlock | None) -> None:
        """Add some query rows, in place; `row_block` has their attention weights, or is None if they are not needed."""

    def merge(self, other: Any) -> None:
        """Add the sums of other query rows of the same sequences, in place."""

    def values(self) -> Values:
        """Return the numbers of each sequence that follow from the sums, by the name of a statistic."""


@runtime_checkable
class FurtherStatistics(Protocol):
    """Statistics that are computed from sums in addition to those of a tally."""

    @property
    def measured(self) -> frozenset[str] | None:
        """Names of the statistics of `STATISTICS` that the tally computes; None for all."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the further statistics."""

    @property
    def unconfirmed(self) -> str | None:
        """Reason for modules whose output projection was not seen to map the outputs of their heads; None if the
        statistics do not need the projection.
        """

    def start(self, grid: Grid, context: CallContext, slices: HeadSlices | None) -> FurtherSums | str:
        """Return empty sums for an attention call, or the reason that they cannot be computed for its module: the start
        of a sentence that ends with module paths. The `slices` of the output projection are None if it is unknown, or
        if the statistics do not need them.
        """
