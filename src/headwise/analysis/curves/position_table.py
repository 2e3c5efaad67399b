"""Tables of statistics by position: the mean of each head in each bin of positions, and its slope."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.analysis.curves.heads import head_pairs
from headwise.errors import InputError
from headwise.plots.curves import Curve, draw_curves
from headwise.plots.kinds import require_name
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.significance import in_errors, zero_tests
from headwise.runs.table import Table
from headwise.statistics.registry import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOPE_SUFFIX = "_slope"
"""Suffix of the name of a statistic's slope in tables."""

DRAWN = 6
"""Number of heads that a plot shows by default."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PositionRow(HeadRow):
    """Row of a table of curves: the statistics of one head over the queries in one bin of positions.

    Attributes:
        position_from: first position of the bin, counted from 0 at the first token of a sequence.
        position_to: last position of the bin.
    """

    position_from: int
    position_to: int


class PositionSlopes(HeadTable[HeadRow]):
    """Table of the slopes of statistics on the logarithm of the query's position, one row per head.

    With y_i the value of a statistic in the row of the query at position i, counted from 0, and x_i = ln(i + 1), the
    slope of a sequence is that of the straight line through the points (x_i, y_i) by least squares. Each column is the
    mean of the slopes over sequences, such as `entropy_slope` in nats, with the p-value (`_p`) and the adjusted p-value
    (`_q`) of the test against zero. A slope of b means that the statistic rises by 0.69 b when the position doubles.
    """

    NAME = "position_slopes"
    ROW_TYPE = HeadRow

    def tests(self) -> dict[str, list[float]]:
        """Return, for each slope, the p-value of Student's t-test against zero and the p-value adjusted for the number
        of heads (Benjamini and Hochberg 1995), with the suffixes `_p` and `_q`.

        Raises:
            MissingExtra: scipy is not installed.
        """
        columns: dict[str, list[float]] = {}
        for name in self.statistics:
            columns |= zero_tests(name, [row.statistics[name] for row in self.rows])
        return columns

    def _head_numbers(self) -> Any:
        return replace(super()._head_numbers(), signed=self.statistics)


@dataclass(frozen=True, repr=False)
class PositionCurves(Table[PositionRow]):
    """Table of the statistics of each head against the position of the query, one row per head and bin of positions:
    the mean of each statistic over the queries of a sequence in the bin, averaged over the sequences that reach it. The
    standard errors are over documents.

    Attributes:
        slopes: the slope of each statistic on the logarithm of the position, one row per head.
    """

    slopes: PositionSlopes = field(default=PositionSlopes((), {}), repr=False)

    NAME = "position_curves"
    ROW_TYPE = PositionRow
    UNIT = "bin"

    def curve(self, layer: int, head: int) -> list[PositionRow]:
        """Return the rows of one head, by position.

        Raises:
            InputError: the table has no such head.
        """
        rows = [row for row in self.rows if (row.layer, row.head) == (layer, head)]
        if not rows:
            raise InputError("head", expected="a (layer, head) of these curves", got=(layer, head))
        return rows

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write the curves and the slopes to two Parquet files in a folder, `position_curves.parquet` and
        `position_slopes.parquet`; otherwise as `Table.save`.
        """
        self.slopes.save(folder, force=force)
        super().save(folder, force=force)

    @classmethod
    def load(cls, folder: str | Path) -> "PositionCurves":
        """Return the curves and the slopes that `save` wrote to a folder.

        Raises:
            InputError: the folder has no such files, or they cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        return replace(super().load(folder), slopes=PositionSlopes.load(folder))

    def plot(
        self,
        statistic: str = "entropy",
        *,
        heads: Collection[tuple[int, int]] | None = None,
        errors: float = 1.96,
        ax: Any = None,
    ) -> "Axes":
        """Draw a statistic of some heads against the position, with error bars, and return the matplotlib axes. A point
        is at the geometric middle of its bin, where positions are counted from 1.

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
        require_name("statistic", statistic, dict.fromkeys(self.statistics))
        chosen = self._steepest(statistic) if heads is None else head_pairs(heads)
        curves = []
        for layer, head in chosen:
            points = [row for row in self.curve(layer, head) if math.isfinite(row.statistics[statistic].value)]
            measured = [row.statistics[statistic] for row in points]
            places = [math.sqrt((row.position_from + 1) * (row.position_to + 1)) for row in points]
            name = f"{layer}.{head}"
            curves.append(Curve(name, places, [each.value for each in measured], [each.sem for each in measured]))
        unit = unit_of(statistic)
        label = f"{statistic}, {unit}" if unit in ("nats", "tokens") else statistic
        axes = draw_curves(
            curves, x="position of the query, counted from 1", y=label, title=self.model_name, errors=errors, ax=ax
        )
        axes.set_xscale("log", base=2)
        return axes

    def _steepest(self, statistic: str) -> list[tuple[int, int]]:
        """Return the heads with the largest slopes of a statistic in standard errors; with a single document, by the
        size of the slope.
        """
        name = statistic + SLOPE_SUFFIX
        rows = [row for row in self.slopes.rows if math.isfinite(row.statistics[name].value)]
        has_errors = any(math.isfinite(in_errors(row.statistics[name])) for row in rows)

        def size(row: HeadRow) -> float:
            measured: MeanEstimate = row.statistics[name]
            ratio = in_errors(measured) if has_errors else measured.value
            return abs(ratio) if math.isfinite(ratio) else -1.0

        return [(row.layer, row.head) for row in sorted(rows, key=size, reverse=True)[:DRAWN]]
