"""Sums of every statistic over the row blocks of one attention call."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.blockwise.visibility import TileVisibility
from headwise.shapes import Bool, Float
from headwise.statistics.registry import STATISTICS
from headwise.statistics.statistic import MeanOfRows, Statistic, Sums


@dataclass
class Tally:
    """Sums of every statistic over the query rows of one attention call, for each sequence and head. Rows are added in
    blocks; two tallies of different rows of the same call can be merged.

    Attributes:
        gram: `W_h^T W_h` of each head's slice of the output projection, for `written_norm`; None if unknown.
        mean_names: names of the means of rows that have a value in this call.
        row_sums: for each of these, the sum of its values and the number of rows.
        other_sums: sums of each other statistic, by name.
    """

    gram: Float[Tensor, "heads value_dim value_dim"] | None = None
    mean_names: tuple[str, ...] = ()
    row_sums: Float[Tensor, "sum_and_count means batch heads"] | None = None
    other_sums: dict[str, Sums] = field(default_factory=dict)

    def add(self, row_block: RowBlock) -> None:
        """Add the sums of every statistic over one row block (some query rows of the call) to this tally, in place."""
        if self.gram is not None:
            row_block = replace(row_block, gram=self.gram)
        grid, (sequences, heads) = row_block.grid, row_block.sequences_and_heads
        names, sums = _sums_of_means(row_block)
        if self.row_sums is None:
            self.mean_names, self.row_sums = names, sums.new_zeros(*sums.shape[:2], grid.batch, grid.heads)
        self.row_sums[:, :, sequences, heads] += sums
        for statistic in _other_statistics():
            contribution = statistic.contribute(row_block)
            if contribution is None:
                continue
            if statistic.name not in self.other_sums:
                self.other_sums[statistic.name] = tuple(
                    part.new_full((grid.batch, grid.heads, *part.shape[2:]), statistic.start) for part in contribution
                )
            for total, part in zip(self.other_sums[statistic.name], contribution, strict=True):
                total[sequences, heads] = statistic.merge(total[sequences, heads], part)

    def merge(self, other: "Tally") -> None:
        """Add to this tally, in place, the sums of `other`, a tally of other query rows of the same call."""
        if other.row_sums is None:
            return
        self.mean_names = other.mean_names
        self.row_sums = other.row_sums if self.row_sums is None else self.row_sums + other.row_sums
        for statistic in _other_statistics():
            name = statistic.name
            if name in self.other_sums and name in other.other_sums:
                self.other_sums[name] = tuple(map(statistic.merge, self.other_sums[name], other.other_sums[name]))
            elif name in other.other_sums:
                self.other_sums[name] = other.other_sums[name]

    def means(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Return, by the name of each statistic, its value for each sequence and head. Most values are means over the
        query rows that are not padding, have a visible key, and for which the statistic is defined. The others are
        computed from other sums over query rows. A value is NaN if there are no rows to include.
        """
        if self.row_sums is None:
            return {}
        values = dict(zip(self.mean_names, self.row_sums[0] / self.row_sums[1], strict=True))
        for statistic in _other_statistics():
            if statistic.name in self.other_sums:
                values[statistic.name] = statistic.value(*self.other_sums[statistic.name])
        return {name: values[name] for name in STATISTICS if name in values}

    def counts(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Return, by the name of each statistic that is a mean over query rows, the number of rows in this mean, for
        each sequence and head.
        """
        return {} if self.row_sums is None else dict(zip(self.mean_names, self.row_sums[1], strict=True))


def _other_statistics() -> Iterator[Statistic]:
    """Yield the definitions of all statistics that are not means over query rows."""
    return (statistic for statistic in STATISTICS.values() if isinstance(statistic, Statistic))


def _sums_of_means(row_block: RowBlock) -> tuple[tuple[str, ...], Float[Tensor, "sum_and_count means batch heads"]]:
    """Return two results for those statistics that are means over query rows and have values in a row block: their
    names; and a tensor `(2, means, batch, heads)` with the sum of each one's row values, and the number of rows in this
    sum.

    All means are summed at once: a few operations for each would cost as much as the attention products. Sums are in
    float64, since thousands of rows in float32 would lose the digits in which heads differ.
    """
    measured = {each.name: each.measure(row_block) for each in STATISTICS.values() if isinstance(each, MeanOfRows)}
    values = {name: value for name, value in measured.items() if value is not None}
    counted = _counted_rows(row_block.visibility, tuple(values))
    sums = torch.stack(list(values.values())).double().masked_fill_(~counted, 0.0).sum(-1)
    return tuple(values), torch.stack([sums, counted.sum(-1).double().expand_as(sums)])


def _counted_rows(visibility: TileVisibility, names: tuple[str, ...]) -> Bool[Tensor, "means #batch #heads rows"]:
    """Return, for each statistic in `names`, True at the query rows that are included in its mean: those that are not
    padding, have a visible key, and for which the statistic is defined. The rows are those of the tile (rectangle of
    scores) that `visibility` describes. Results are cached in `visibility`.
    """

    def compute() -> Tensor:
        counted_rows, statistics = visibility.counted_rows, [STATISTICS[name] for name in names]
        has_value = [each.counted(visibility) for each in statistics if isinstance(each, MeanOfRows)]
        counted = [counted_rows if rows is None else counted_rows & rows for rows in has_value]
        return torch.stack(torch.broadcast_tensors(*counted))  # type: ignore[no-untyped-call]

    return visibility.cached(names, compute)
