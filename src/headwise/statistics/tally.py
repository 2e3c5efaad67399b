"""Sums of every statistic over the row blocks of one attention call, or of calls that continue its sequences, and the
interface of further sums, which a tally adds up in addition.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext, TileVisibility
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Float, Int
from headwise.statistics.registry import STATISTICS, FromSums, MeanOfRows, Sums

NOT_FINITE = ("entropy", "output_norm", "written_norm")
"""Statistics that are NaN or infinite in a query row whose attention weights or head output are."""

HeadSlices = Float[Tensor, "heads value_dim width"]
"""Slice of the output projection of each query head, in float32 at least: a head's output times its slice is its part
of the projection's output, without the bias, which belongs to no head.
"""

Values = dict[str, tuple[Float[Tensor, "batch columns"], Bool[Tensor, "batch columns"]]]
"""Numbers of each sequence by the name of a statistic, and True at those that are defined."""


class MeasuredRows(NamedTuple):
    """Values of statistics for some query rows of an attention call, before they are averaged: one value per statistic,
    sequence, head and row.

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


class FurtherSums:
    """Base class of sums over query rows from which additional statistics (`FurtherStatistics`) are computed. The rows
    are from one attention call, or also from later calls with the next tokens of the same sequences. Rows that are
    padding or have no visible key are left out. The sums of a module stay in memory until the module's next call, which
    may continue them.

    Attributes:
        needs_weights: True if the sums need attention weights, and not only the statistics of each row.
        refused: reason that the sums of the rows so far cannot be computed, as the result of `FurtherStatistics.start`;
            None if they can. It is read after each call from the sums of this call: a reason that `merge` sets on the
            sums of earlier calls is not reported.
    """

    needs_weights: bool = False
    refused: str | None = None

    def add(self, measured: MeasuredRows, row_block: RowBlock | None) -> None:
        """Add the values of statistics for some query rows to the sums, in place. `row_block` has the attention weights
        of these rows, or is None if the sums do not need them. If `needs_weights` is False, the same rows may be added
        again with values of other statistics.
        """
        raise NotImplementedError

    def merge(self, other: Any) -> None:
        """Add the sums in `other` to these sums, in place. `other` has different query rows of the same sequences."""
        raise NotImplementedError

    def values(self) -> Values:
        """Return the values of the additional statistics for each sequence, computed from these sums, by the
        statistic's name.
        """
        raise NotImplementedError


class FurtherStatistics:
    """Base class of additional statistics. A `Tally` (sums over the query rows of attention calls) computes them after
    its standard ones, from sums that a subclass defines.

    Attributes:
        measured: names of the statistics of `STATISTICS` that the tally computes; None for all. Include "entropy"
            and "output_norm", by which weights and outputs that are not finite are recognised.
        unconfirmed: reason for modules whose output projection was not seen to map the outputs of their heads; None if
            the statistics do not need the projection.
    """

    measured: frozenset[str] | None = None
    unconfirmed: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the additional statistics that this object computes."""
        raise NotImplementedError

    def start(self, grid: Grid, context: CallContext, slices: HeadSlices | None) -> FurtherSums | str:
        """Return empty sums for the additional statistics of one attention call. If they cannot be computed for the
        call's module, return the reason instead: the start of a sentence that ends with module paths. `slices` are the
        heads' slices of the output projection, or None if they are unknown or not needed.
        """
        raise NotImplementedError


@dataclass
class Tally:
    """Sums of every statistic over the query rows of one attention call, for each sequence and head. Rows are added in
    blocks. Two tallies of different rows of the same sequences can be merged, such as those of a first call and of a
    later call with cached keys.

    Attributes:
        gram: `W_h^T W_h` of each head's slice of the output projection, for `written_norm`; None if unknown.
        first_token: number of the token that the first key stands for, counted from the start of its sequence.
        mean_names: names of the means of rows that have a value in this call.
        row_sums: for each of these, the sum of its values and the number of rows.
        nonfinite_rows: number of query rows that count and whose attention weights or head output are NaN or infinite.
        other_sums: sums of each other statistic, by name.
        measured: names of the statistics to compute; None for all.
        further: sums of further statistics; None if there are none.
    """

    gram: Float[Tensor, "heads value_dim value_dim"] | None = None
    first_token: int = 0
    mean_names: tuple[str, ...] = ()
    row_sums: Float[Tensor, "sum_and_count means batch heads"] | None = None
    nonfinite_rows: Int[Tensor, ""] | int = 0
    other_sums: dict[str, Sums] = field(default_factory=dict)
    measured: frozenset[str] | None = None
    further: FurtherSums | None = None

    def add(self, row_block: RowBlock) -> None:
        """Add the sums of every statistic over one row block (some query rows of the call) to this tally, in place."""
        if self.gram is not None:
            row_block = replace(row_block, gram=self.gram)
        grid, (sequences, heads) = row_block.grid, row_block.sequences_and_heads
        left_out: Collection[str] = row_block.call_context.left_out
        if self.measured is not None:
            left_out = {*left_out, *(STATISTICS.keys() - self.measured)}
        means = [each for each in STATISTICS.values() if isinstance(each, MeanOfRows) and each.name not in left_out]
        measured = {each.name: each.measure(row_block) for each in means}
        known = {name: values for name, values in measured.items() if values is not None}
        if known:
            values, counted = torch.stack(list(known.values())), _counted_rows(row_block.visibility, tuple(known))
            rows = MeasuredRows(tuple(known), values, counted, sequences, heads, row_block.rows)
            if self.further is not None:
                self.further.add(rows, row_block)
            self.add_rows(rows, grid.batch, grid.heads)
        for statistic in _other_statistics(left_out):
            contribution = statistic.contribute(row_block)
            if contribution is None:
                continue
            if statistic.name not in self.other_sums:
                self.other_sums[statistic.name] = tuple(
                    part.new_full((grid.batch, grid.heads, *part.shape[2:]), statistic.start) for part in contribution
                )
            for total, part in zip(self.other_sums[statistic.name], contribution, strict=True):
                total[sequences, heads] = statistic.merge(total[sequences, heads], part)

    def add_rows(self, rows: MeasuredRows, batch: int, heads: int) -> None:
        """Add the values of statistics for some query rows, `rows`, to the sums of this tally, in place. The attention
        call has `batch` sequences and `heads` query heads.

        All means are summed at once: a few operations for each would cost as much as the attention products. Sums are
        in float64, since thousands of rows in float32 would lose the digits in which heads differ.
        """
        indicators = [index for index, name in enumerate(rows.names) if name in NOT_FINITE]
        is_finite = rows.values[indicators].sum(0).isfinite()
        self.nonfinite_rows = self.nonfinite_rows + (~is_finite & rows.counted[indicators].any(0)).sum()
        sums = rows.values.masked_fill(~rows.counted, 0.0).sum(-1, dtype=torch.float64)
        sums = torch.stack([sums, rows.counted.sum(-1).double().expand_as(sums)])
        if self.row_sums is None:
            self.mean_names, self.row_sums = rows.names, sums.new_zeros(*sums.shape[:2], batch, heads)
        self.row_sums[:, :, rows.sequences, rows.heads] += sums

    def merge(self, other: "Tally") -> None:
        """Add the sums in `other` to this tally, in place. `other` is a tally of different query rows of the same
        sequences. Statistics that only one of the two tallies has are removed, since they would lack some of the rows.
        """
        if other.row_sums is None:
            return
        if self.further is not None and other.further is not None:
            self.further.merge(other.further)
        self.nonfinite_rows = self.nonfinite_rows + other.nonfinite_rows
        if self.row_sums is None:
            self.first_token, self.mean_names, self.row_sums = other.first_token, other.mean_names, other.row_sums
            self.other_sums = dict(other.other_sums)
            return
        names = tuple(name for name in self.mean_names if name in other.mean_names)
        own_sums, other_sums = (
            tally.row_sums[:, [tally.mean_names.index(name) for name in names]]
            for tally in (self, other)
            if tally.row_sums is not None
        )
        self.mean_names, self.row_sums = names, own_sums + other_sums
        first_token = min(self.first_token, other.first_token)
        self.other_sums = {
            statistic.name: tuple(
                statistic.merge(*_of_same_keys(statistic, (self.first_token, own), (other.first_token, part)))
                for own, part in zip(self.other_sums[statistic.name], other.other_sums[statistic.name], strict=True)
            )
            for statistic in _other_statistics()
            if statistic.name in self.other_sums and statistic.name in other.other_sums
        }
        self.first_token = first_token

    @property
    def size(self) -> int:
        """Number of sums that this tally stores."""
        return sum(part.numel() for sums in self.other_sums.values() for part in sums) + (
            0 if self.row_sums is None else self.row_sums.numel()
        )

    @staticmethod
    def joined(tallies: "Sequence[Tally]") -> "Tally":
        """Return a tally with the sequences of several tallies, in their order. The tallies must have the same
        statistics and the same number of keys, and no further statistics that a caller of `watch` has added.
        """
        first = tallies[0]
        return Tally(
            first_token=first.first_token,
            mean_names=first.mean_names,
            row_sums=torch.cat([each.row_sums for each in tallies if each.row_sums is not None], 2),
            other_sums={
                name: tuple(
                    torch.cat(parts) for parts in zip(*(each.other_sums[name] for each in tallies), strict=True)
                )
                for name in first.other_sums
            },
        )

    def join(self, other: "Tally") -> None:
        """Add the sums in `other` to this tally, in place. `other` is a tally of other statistics for the same query
        rows.
        """
        if other.row_sums is not None:
            own = other.row_sums[:, :0] if self.row_sums is None else self.row_sums
            self.mean_names, self.row_sums = self.mean_names + other.mean_names, torch.cat([own, other.row_sums], 1)
        self.other_sums |= other.other_sums

    def means(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Return the value of each statistic for each sequence and head, by the statistic's name. The value is NaN if
        no query row counts, and NaN or infinite if the statistic is so in a row that counts.
        """
        if self.row_sums is None:
            return {}
        values = dict(zip(self.mean_names, self.row_sums[0] / self.row_sums[1], strict=True))
        for statistic in _other_statistics():
            if statistic.name in self.other_sums:
                values[statistic.name] = statistic.value(*self.other_sums[statistic.name])
        return {name: values[name] for name in STATISTICS if name in values}

    def counts(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Return, for each statistic that is a mean over query rows, the number of rows in the mean, for each sequence
        and head. The result is a dictionary by the statistic's name.
        """
        return {} if self.row_sums is None else dict(zip(self.mean_names, self.row_sums[1], strict=True))

    def has_value(self) -> dict[str, Bool[Tensor, "batch heads"]]:
        """Return, for each statistic by name, a mask over sequences and heads. It is True where the statistic has a
        value, because at least one query row counts.
        """
        counts = self.counts()
        if not counts:
            return {}
        has_rows = torch.stack(list(counts.values())).amax(0) > 0
        return {name: counts[name] > 0 if name in counts else has_rows for name in self.means()}


def _other_statistics(left_out: Collection[str] = ()) -> Iterator[FromSums]:
    """Yield the definitions of all statistics of attention weights that are not means over query rows, except those
    whose names are in `left_out`.
    """
    return (each for each in STATISTICS.values() if isinstance(each, FromSums) and each.name not in left_out)


def _of_same_keys(statistic: FromSums, *first_tokens_and_sums: tuple[int, Tensor]) -> list[Tensor]:
    """Return the sums of one statistic from several calls, aligned so that they can be merged. Each argument after the
    first is a call: the token number of its first key, and its tensor of sums. If the statistic has one sum per key,
    each tensor is extended to the keys of all calls.
    """
    sums = [part for _, part in first_tokens_and_sums]
    if not statistic.is_per_key:
        return sums
    start = min(first for first, _ in first_tokens_and_sums)
    stop = max(first + part.shape[-1] for first, part in first_tokens_and_sums)
    return [
        F.pad(part, (first - start, stop - first - part.shape[-1]), value=statistic.start)
        for first, part in first_tokens_and_sums
    ]


def _counted_rows(visibility: TileVisibility, names: tuple[str, ...]) -> Bool[Tensor, "means #batch #heads rows"]:
    """Return, for each statistic in `names`, a mask that is True at the query rows that its mean includes. These are
    the rows of one tile (rectangle of the score matrix) that are not padding, have a visible key, and for which the
    statistic is defined. The mask is cached in `visibility`.
    """

    def compute() -> Tensor:
        counted_rows, statistics = visibility.counted_rows, [STATISTICS[name] for name in names]
        has_value = [each.counted(visibility) for each in statistics if isinstance(each, MeanOfRows)]
        counted = [counted_rows if rows is None else counted_rows & rows for rows in has_value]
        return torch.stack(torch.broadcast_tensors(*counted))  # type: ignore[no-untyped-call]

    return visibility.cached(names, compute)
