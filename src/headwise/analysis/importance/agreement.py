"""Agreement between predicted and measured importance of heads: correlations and a scatter plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import TYPE_CHECKING, Any

from headwise.checks import pair_of
from headwise.errors import InputError, require
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.table import HeadTable, require_statistic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED_HEADS = 5
"""Number of heads that are labelled in the plot: those with the largest measured values."""


@dataclass(frozen=True)
class Agreement:
    """Values of a predicted and of a measured statistic, paired by head, with their correlations over heads.

    Attributes:
        names: names of the predicted and the measured statistic.
        heads: name of each head that has both values, "layer.head".
        predicted: predicted value of each of these heads.
        measured: measured value of each of these heads.
    """

    names: tuple[str, str]
    heads: tuple[str, ...]
    predicted: tuple[MeanEstimate, ...]
    measured: tuple[MeanEstimate, ...]

    @property
    def pearson(self) -> float:
        """Pearson correlation of predicted with measured values over heads; NaN for fewer than two heads, or if all
        predicted or all measured values are equal.
        """
        x, y = self._values
        return math.nan if self._is_constant else correlation(x, y)

    @property
    def spearman(self) -> float:
        """Spearman rank correlation of predicted with measured values over heads, where equal values share their mean
        rank; NaN for fewer than two heads, or if all predicted or all measured values are equal.

        Raises:
            MissingExtra: scipy is not installed.
        """
        scipy_stats = require("scipy.stats", purpose="a Spearman correlation", extra="tables")
        return math.nan if self._is_constant else float(scipy_stats.spearmanr(*self._values).statistic)

    @property
    def _values(self) -> tuple[list[float], list[float]]:
        """Predicted values of all heads, and measured values of the same heads, without their standard errors."""
        return [estimate.value for estimate in self.predicted], [estimate.value for estimate in self.measured]

    @property
    def _is_constant(self) -> bool:
        """True if all predicted values or all measured values are equal, as for a single head; their correlation is
        undefined then.
        """
        return any(len(set(values)) < 2 for values in self._values)

    def plot(self) -> "Figure":
        """Return a matplotlib scatter plot of the measured against the predicted importance of each head: one point per
        head with standard errors, the line of equal values, and the Spearman and Pearson correlations in the title.

        Raises:
            MissingExtra: matplotlib or scipy is not installed.
        """
        matplotlib_figure = require("matplotlib.figure", purpose="drawing heads", extra="plot")
        figure: Figure = matplotlib_figure.Figure(figsize=(5.2, 4.8), layout="constrained")
        axes = figure.subplots()
        x, y = self._values
        x_error, y_error = (_error_bars(estimates) for estimates in (self.predicted, self.measured))
        axes.errorbar(x, y, xerr=x_error, yerr=y_error, fmt="o", markersize=3, elinewidth=0.6, alpha=0.7)
        axes.axline((0.0, 0.0), slope=1.0, linewidth=0.6, color="0.5", linestyle="--")
        for index in sorted(range(len(y)), key=lambda index: -abs(y[index]))[:LABELLED_HEADS]:
            axes.annotate(self.heads[index], (x[index], y[index]), (3, 3), textcoords="offset points", fontsize=7)
        title = f"{len(y)} heads: Spearman {self.spearman:.2f}, Pearson {self.pearson:.2f}"
        axes.set(title=title, xlabel=self.names[0], ylabel=self.names[1])
        return figure


def agreement(
    predicted: HeadTable[Any], measured: HeadTable[Any], statistics: tuple[str, str] | None = None
) -> Agreement:
    """Pair a statistic of the table `predicted` with a statistic of the table `measured`, head by head, and return the
    pairs as an `Agreement`, which computes their correlations. `statistics` names the two statistics. Heads for which
    either value is missing or NaN are left out.

        scores = hw.importance(model, texts, hw.next_token_loss)
        effects = hw.ablate(model, texts, hw.next_token_loss)
        hw.agreement(scores, effects).spearman

    Args:
        predicted: a table of heads, such as `importance(model, dataset, loss)`.
        measured: a table of heads, such as `ablate(model, dataset, loss)`.
        statistics: names of the predicted and the measured statistic. By default `first_order`, if `predicted` has it,
            or else its first statistic; and the first statistic of `measured`.

    Raises:
        InputError: a table does not have the statistic; no head has a value in both tables.
    """
    for name, table in (("predicted", predicted), ("measured", measured)):
        if not isinstance(table, HeadTable):
            raise InputError(name, expected="a table of heads", got=type(table).__name__)
    if not predicted.rows or not measured.rows:
        raise InputError("predicted", expected="tables of heads", got="an empty one")
    if statistics is None:
        first = "first_order" if "first_order" in predicted.statistics else predicted.statistics[0]
        statistics = (first, measured.statistics[0])
    statistics = pair_of("statistics", statistics, of="the names of two statistics")
    require_statistic(statistics[0], predicted.statistics)
    require_statistic(statistics[1], measured.statistics)
    measured_value = {_site_and_head(row): row.statistics[statistics[1]] for row in measured.heads}
    pairs = [
        (row.name, row.statistics[statistics[0]], measured_value[_site_and_head(row)])
        for row in predicted.heads
        if _site_and_head(row) in measured_value
    ]
    pairs = [pair for pair in pairs if not any(math.isnan(estimate.value) for estimate in pair[1:])]
    if not pairs:
        raise InputError("predicted", expected="heads that were measured too", got="none")
    names, predicted_values, measured_values = zip(*pairs, strict=True)
    return Agreement(statistics, names, predicted_values, measured_values)


def _site_and_head(row: HeadRow) -> tuple[str, int, str]:
    """Return a row's module path, head index and kind (self or cross), which identify a head in tables of one model."""
    return row.module, row.head, row.kind


def _error_bars(estimates: Sequence[MeanEstimate]) -> list[float]:
    """Return the standard error of each estimate, with 0 in place of NaN (the standard error of a single example)."""
    return [0.0 if math.isnan(estimate.sem) else estimate.sem for estimate in estimates]
