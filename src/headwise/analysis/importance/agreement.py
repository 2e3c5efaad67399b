"""Whether a prediction of what heads cost agrees with what was measured, head by head: correlation, picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require
from headwise.runs.rows import MeanEstimate
from headwise.runs.table import HeadTable, require_statistic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 5
"""How many heads have their names in the picture: those of which most was measured."""


@dataclass(frozen=True)
class Agreement:
    """Two numbers of each head.

    Attributes:
        names: of the two.
        heads: `layer.head`, of those that have both.
        predicted, measured: of each of them.
    """

    names: tuple[str, str]
    heads: tuple[str, ...]
    predicted: tuple[MeanEstimate, ...]
    measured: tuple[MeanEstimate, ...]

    @property
    def pearson(self) -> float:
        """The correlation of the two; NaN of fewer than two heads, or where one is the same for all."""
        return _correlation(*self._values)

    @property
    def spearman(self) -> float:
        """The correlation of their ranks; heads that tie have the mean of theirs."""
        return _correlation(*(_ranks(values) for values in self._values))

    @property
    def _values(self) -> tuple[list[float], list[float]]:
        return [each.value for each in self.predicted], [each.value for each in self.measured]

    def plot(self) -> "Figure":
        """A matplotlib figure: a point a head with its standard errors, and the line where the two are the same.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        matplotlib_figure = require("matplotlib.figure", purpose="drawing heads", extra="plot")
        figure: Figure = matplotlib_figure.Figure(figsize=(5.2, 4.8), layout="constrained")
        axes = figure.subplots()
        (x, y), (x_error, y_error) = self._values, (_errors(each) for each in (self.predicted, self.measured))
        axes.errorbar(x, y, xerr=x_error, yerr=y_error, fmt="o", markersize=3, elinewidth=0.6, alpha=0.7)
        axes.axline((0.0, 0.0), slope=1.0, linewidth=0.6, color="0.5", linestyle="--")
        for index in sorted(range(len(y)), key=lambda index: -abs(y[index]))[:NAMED]:
            axes.annotate(self.heads[index], (x[index], y[index]), (3, 3), textcoords="offset points", fontsize=7)
        title = f"{len(y)} heads: Spearman {self.spearman:.2f}, Pearson {self.pearson:.2f}"
        axes.set(title=title, xlabel=self.names[0], ylabel=self.names[1])
        return figure


def agreement(
    predicted: HeadTable[Any], measured: HeadTable[Any], statistics: tuple[str, str] | None = None
) -> Agreement:
    """Hold a prediction against what was measured, of the heads that both tables have.

    Args:
        predicted: such as `importance(model, dataset, loss)`.
        measured: such as `ablate(model, dataset, loss)`.
        statistics: a name of each; by default the first order prediction, or else the first, and what is measured
            first.

    Raises:
        InputError: a statistic that a table does not have; no head that both have.
    """
    if not predicted.rows or not measured.rows:
        raise InputError("predicted", expected="tables of heads", got="an empty one")
    if statistics is None:
        first = "first_order" if "first_order" in predicted.statistics else predicted.statistics[0]
        statistics = (first, measured.statistics[0])
    require_statistic(statistics[0], predicted.statistics)
    require_statistic(statistics[1], measured.statistics)
    there = {_key(head): head.statistics[statistics[1]] for head in measured.heads}
    pairs = [
        (head.name, head.statistics[statistics[0]], there[_key(head)])
        for head in predicted.heads
        if _key(head) in there
    ]
    pairs = [pair for pair in pairs if not any(math.isnan(each.value) for each in pair[1:])]
    if not pairs:
        raise InputError("predicted", expected="heads that were measured too", got="none")
    names, x, y = zip(*pairs, strict=True)
    return Agreement(statistics, names, x, y)


def _key(head: Any) -> tuple[str, int, str]:
    return head.module, head.head, head.kind


def _errors(measured: Sequence[MeanEstimate]) -> list[float]:
    return [0.0 if math.isnan(each.sem) else each.sem for each in measured]


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0; those that tie have their mean."""
    return [sum(other < each for other in values) + (sum(other == each for other in values) - 1) / 2 for each in values]


def _correlation(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    products = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    spread = math.sqrt(math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y))
    return products / spread if spread else math.nan
