"""Statistics of every head against the position of the query."""

import math
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from headwise.analysis.curves.head_curves import DRAWN, HeadCurves
from headwise.analysis.head_pass import head_rows, head_statistics, measure_further, require_some
from headwise.checks import LARGEST_INTEGER, collection_of, whole_number
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRegistry
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.significance import in_errors
from headwise.statistics.by_position import BY_POSITION, SLOPE, PositionStatistics
from headwise.statistics.columns import Column
from headwise.statistics.registry import row_statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOPE_SUFFIX = "_slope"
"""Suffix of the name of a statistic's slope in tables."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PositionRow(HeadRow):
    """Table row: the attention statistics of a head over the queries whose positions are in one bin (range of
    positions).

    Attributes:
        position_from: first position of the bin, counted from 0 at the first token of a sequence.
        position_to: last position of the bin.
    """

    position_from: int
    position_to: int


class PositionSlopes(HeadTable[HeadRow]):
    """Table with one row per head: the slope of each attention statistic against the logarithm of the query's position.

    With y_i the value of a statistic in the row of the query at position i, counted from 0, and x_i = ln(i + 1), the
    slope of a sequence is that of the straight line through the points (x_i, y_i) by least squares. Each column is the
    mean of the slopes over sequences, such as `entropy_slope` in nats, with the p-value (`_p`) and the adjusted p-value
    (`_q`) of the test against zero. A slope of b means that the statistic rises by 0.69 b when the position doubles.
    """

    NAME = "position_slopes"
    COLUMNS = tuple(
        Column(
            name + SLOPE_SUFFIX,
            "Mean slope of the statistic on the logarithm of the position of the query.",
            is_signed=True,
            is_tested=True,
        )
        for name in row_statistics()
    )


@dataclass(frozen=True, repr=False)
class PositionCurves(HeadCurves[PositionRow]):
    """Table of the attention statistics of each head by the position of the query, one row per head and bin of
    positions. Statistics are averaged first over the queries of a sequence in the bin, then over all sequences that
    have queries in the bin. Standard errors are over documents.

    Attributes:
        slopes: the slope of each statistic on the logarithm of the position, one row per head.
    """

    slopes: PositionSlopes = field(default=PositionSlopes((), {}), repr=False)

    NAME = "position_curves"
    ROW_TYPE = PositionRow
    PARTS = (("slopes", PositionSlopes),)
    UNIT = "bin"

    def plot(
        self,
        statistic: str = "entropy",
        *,
        heads: Collection[tuple[int, int]] | None = None,
        errors: float = 1.96,
        ax: Any = None,
    ) -> "Axes":
        """Draw a statistic of some heads against the position of the query, with error bars, and return the matplotlib
        axes. The x-coordinate of a bin of positions is the geometric mean of the bin's first and last position, counted
        from 1.

        Args:
            statistic: name of a statistic of the table.
            heads: the heads `(layer, head)`; by default the 6 with the steepest slopes in standard errors.
            errors: length of the error bars to each side, in standard errors; 0 draws none.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such statistic or head, or nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.position_curves(model, texts).plot("entropy", heads=[(0, 1)])  # doctest: +SKIP
        """
        return self._draw(statistic, heads, x="position of the query, counted from 1", errors=errors, ax=ax)

    def _place(self, row: PositionRow) -> float:
        return math.sqrt((row.position_from + 1) * (row.position_to + 1))

    def _drawn(self, statistic: str) -> list[tuple[int, int]]:
        """Return the heads that are drawn by default, as `(layer, head)`: those with the largest absolute ratio of the
        statistic's slope to its standard error. With a single document there are no standard errors, and the heads with
        the largest absolute slopes are returned.
        """
        name = statistic + SLOPE_SUFFIX
        rows = [row for row in self.slopes.rows if math.isfinite(row.statistics[name].value)]
        has_errors = any(math.isfinite(in_errors(row.statistics[name])) for row in rows)

        def size(row: HeadRow) -> float:
            measured: MeanEstimate = row.statistics[name]
            ratio = in_errors(measured) if has_errors else measured.value
            return abs(ratio) if math.isfinite(ratio) else -1.0

        return [(row.layer, row.head) for row in sorted(rows, key=size, reverse=True)[:DRAWN]]


POWERS_OF_TWO = (0, *(2**power for power in range(32)))
"""Default edges of bins: 0, 1, 2 to 3, 4 to 7, 8 to 15, ..."""


def position_curves(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    edges: Collection[int] | None = None,
    special: Collection[int] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> PositionCurves:
    """Measure how the attention statistics of each head, such as entropy, depend on the position of the query in its
    sequence. Return the mean of each statistic in bins of positions, and the slope of each statistic against the
    logarithm of the position.

        curves = hw.position_curves(model, texts)
        curves.table()                          # one row per head and bin: position_from, position_to, entropy, ...
        curves.slopes.table()                   # one row per head: entropy_slope, entropy_slope_p, entropy_slope_q, ...
        curves.plot("entropy")

    The statistics are those of `profile` that have a value for each query; `received` is not one of them. Positions are
    counted from 0 at the first token that is not padding, in each document where a mask separates packed documents, and
    continue through calls with cached keys. The attention matrix is never in memory. The model runs in evaluation mode
    without gradients and is unchanged afterwards.

    Args:
        model: any module that `watch` supports. For texts, an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches in the same order each time: mappings of the model's arguments, or tensors.
        edges: first position of each bin, in ascending order, and the position after the last bin; by default bins of
            powers of two: 0, 1, 2 to 3, 4 to 7, ... Slopes are over all positions, also over those outside of the bins.
        special: ids of special tokens; by default those of the tokenizer.
        out: folder for the tables; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Returns:
        The curves, with `slopes`. Bins that no sequence reaches are left out.

    Raises:
        InputError: an argument cannot be used, or in no module of the model the positions of queries are known.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.

    Warns:
        UserWarning: of modules without curves, because the positions of their queries are unknown; if no sequence
            reaches a bin.
    """
    checked = _edges(edges)
    options: dict[str, Any] = {"special": special, "out": out, "force": force, "progress": progress, "title": title}
    options["edges"] = None if edges is None else list(checked)

    def make_tables(registry: SiteRegistry, metadata: dict[str, Any]) -> PositionCurves:
        names = [name for name in row_statistics() if any(name + SLOPE in each.statistics for each in registry.records)]
        in_bins = [name + BY_POSITION for name in names]
        require_some(registry, in_bins, "positions of queries that can be established")
        bins = list(pairwise(checked))
        rows = [
            PositionRow(
                **labels,
                position_from=first,
                position_to=stop - 1,
                statistics={name.removesuffix(BY_POSITION): each[index] for name, each in of_head.items()},
            )
            for labels, of_head in head_statistics(registry, in_bins, len(bins))
            for index, (first, stop) in enumerate(bins)
        ]
        reached = {row.position_from for row in rows if any(each.n for each in row.statistics.values())}
        if not reached:
            reason = f"no sequence reaches position {checked[0]}, where the bins start: curves are empty"
            warnings.warn(reason, stacklevel=3)
        slopes = PositionSlopes(head_rows(registry, {name + SLOPE: name + SLOPE_SUFFIX for name in names}), metadata)
        return PositionCurves(tuple(row for row in rows if row.position_from in reached), metadata, slopes)

    return measure_further(model, dataset, PositionStatistics(checked), PositionCurves, make_tables, **options)


def _edges(edges: Any) -> tuple[int, ...]:
    """Check that the edges of position bins are whole numbers in ascending order, and return them; by default 0 and the
    powers of two.
    """
    if edges is None:
        return POWERS_OF_TWO
    of = "positions in ascending order"
    checked = tuple(
        whole_number("edges", edge, least=0, most=LARGEST_INTEGER) for edge in collection_of("edges", edges, of=of)
    )
    if len(checked) < 2 or any(one >= other for one, other in pairwise(checked)):
        raise InputError("edges", expected=f"two or more {of}", got=list(checked))
    return checked
