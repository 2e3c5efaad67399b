"""Agreement between predicted and measured effects of heads: correlations, overlap, and a scatter plot."""

import heapq
import math
from dataclasses import dataclass
from statistics import correlation
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.checks import finite_number, pair_of, require_one_of, whole_number
from headwise.errors import InputError, require
from headwise.plots.kinds import HeadNumbers
from headwise.plots.points import PlottedNumbers
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import MeanEstimate
from headwise.shapes import Float
from headwise.wording import counted, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELLED_HEADS = 5
"""Number of heads that are labelled in the plot: those with the largest measured effects."""

CORRELATIONS = ("spearman", "pearson")

SAMPLES_AT_ONCE = 1_000_000
"""Number of values that are resampled at once."""


@dataclass(frozen=True)
class Agreement:
    """Predicted and measured values of a statistic for the same heads, such as estimated and measured ablation effects.
    Its methods compute correlations over heads.

    Attributes:
        names: names of the predicted and the measured statistic.
        heads: name of each head that has both values, "layer.head".
        predicted: predicted value of each of these heads.
        measured: measured value of each of these heads.
        no_effect: predicted and measured value of a head without an effect, such as 1 for `recovered` of patching in
            the direction "noise".
    """

    names: tuple[str, str]
    heads: tuple[str, ...]
    predicted: tuple[MeanEstimate, ...]
    measured: tuple[MeanEstimate, ...]
    no_effect: tuple[float, float] = (0.0, 0.0)

    @property
    def pearson(self) -> float:
        """Pearson correlation of predicted with measured values over heads. NaN for fewer than two heads, or if all
        predicted or all measured values are equal.
        """
        x, y = self._values
        return math.nan if self._is_constant else correlation(x, y)

    @property
    def spearman(self) -> float:
        """Spearman rank correlation of predicted with measured values over heads; equal values have the mean of their
        ranks. NaN for fewer than two heads, or if all predicted or all measured values are equal.

        Raises:
            MissingExtra: scipy is not installed.
        """
        scipy_stats = require("scipy.stats", purpose="a Spearman correlation", extra="tables")
        return math.nan if self._is_constant else float(scipy_stats.spearmanr(*self._values).statistic)

    def interval(
        self, correlation: str = "spearman", *, level: float = 0.95, samples: int = 10_000
    ) -> tuple[float, float]:
        """Return the lower and upper end of a confidence interval for the correlation over heads. The ends are
        quantiles of the correlation over random samples of the heads (bootstrap; Efron and Tibshirani 1993, chapter
        13). Both are NaN if the correlation is NaN.

        The interval covers the choice of heads. It does not cover the choice of examples: a correlation of estimates
        with large standard errors is smaller than that of the values without noise. The samples have a fixed seed.

            agreement.interval("spearman")          # such as (0.81, 0.90)

        Args:
            correlation: "spearman" or "pearson".
            level: probability that the interval is to have, such as 0.95.
            samples: number of random samples.

        Raises:
            InputError: another correlation, level or number of samples.
        """
        if correlation not in CORRELATIONS:
            raise InputError("correlation", expected=" or ".join(map(repr, CORRELATIONS)), got=repr(correlation))
        if not 0.0 < finite_number("level", level) < 1.0:
            raise InputError("level", expected="a number between 0 and 1", got=repr(level))
        samples = whole_number("samples", samples, least=1)
        if self._is_constant:
            return math.nan, math.nan
        pairs = torch.tensor(self._values, dtype=torch.float64)
        generator, count = torch.Generator().manual_seed(0), pairs.shape[1]
        drawn, at_once = [], max(1, SAMPLES_AT_ONCE // count)
        for start in range(0, samples, at_once):
            index = torch.randint(count, (min(at_once, samples - start), count), generator=generator)
            x, y = pairs[:, index]
            drawn.append(_correlations(_ranks(x), _ranks(y)) if correlation == "spearman" else _correlations(x, y))
        values = torch.cat(drawn)
        values = values[values.isfinite()]  # samples in which x or y is constant have no correlation
        if not len(values):
            return math.nan, math.nan
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        low, high = values.quantile(ends).tolist()
        return low, high

    def overlap(self, top: int) -> float:
        """Return which share of the `top` heads with the largest measured effects is also among the `top` heads with
        the largest predicted effects. The share is 1 if both sets of heads are equal. For random sets, it is on average
        `top` divided by the number of heads.

        An effect is the absolute difference of a value from `no_effect`. For the direction "noise" of patching, that
        is the distance of `recovered` from 1.

        Args:
            top: number of heads of each set.

        Raises:
            InputError: `top` is not a number from 1 to the number of heads.
        """
        top = whole_number("top", top, least=1, most=len(self.heads))
        predicted, measured = (
            set(heapq.nlargest(top, range(len(effects)), key=effects.__getitem__)) for effects in self._effects
        )
        return len(predicted & measured) / top

    @property
    def _effects(self) -> tuple[list[float], list[float]]:
        """Absolute predicted effects and absolute measured effects of all heads. An effect is a value minus
        `no_effect`, the value without any effect.
        """
        predicted, measured = (
            [abs(value - no_effect) for value in values]
            for values, no_effect in zip(self._values, self.no_effect, strict=True)
        )
        return predicted, measured

    @property
    def _values(self) -> tuple[list[float], list[float]]:
        """Predicted values and measured values of all heads as two lists of numbers, without standard errors."""
        return [estimate.value for estimate in self.predicted], [estimate.value for estimate in self.measured]

    @property
    def _is_constant(self) -> bool:
        """True if the correlation is undefined because all predicted values or all measured values are equal, or there
        is only one head.
        """
        return any(len(set(values)) < 2 for values in self._values)

    def __repr__(self) -> str:
        names = f"{self.names[0]} predicts {self.names[1]}"
        return f"Agreement({counted(len(self.heads), 'head')}, {names}, Pearson {number(self.pearson, '.3f')})"

    def plot(self, *, errors: float = 1.0, top: int = LABELLED_HEADS, ax: Any = None) -> "Axes":
        """Draw the measured value of each head against its predicted value, one point per head, and return the
        matplotlib axes. The plot has error bars of standard errors, colours by layer, the line of equal values, and the
        correlations in its title.

        Args:
            errors: length of the error bars to each side, in standard errors; 0 draws none.
            top: number of heads that are named, those with the largest measured effects.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: `errors` or `top` is not a number of 0 or more, or `ax` is not axes.
            MissingExtra: matplotlib or scipy is not installed.

        Example:
            >>> hw.agreement(scores, effects).plot().figure.savefig("agreement.svg")  # doctest: +SKIP
        """
        labels = self.names
        if labels[0] == labels[1]:
            labels = (f"predicted {labels[0]}", f"measured {labels[1]}")
        axis_of = [
            PlottedNumbers(name, [each.value for each in estimates], [each.sem for each in estimates], label)
            for name, label, estimates in zip(self.names, labels, (self.predicted, self.measured), strict=True)
        ]
        heads = [(int(layer), int(head)) for layer, head in (name.split(".") for name in self.heads)]
        correlations = f"Spearman {number(self.spearman, '.2f')}, Pearson {number(self.pearson, '.2f')}"
        numbers = HeadNumbers(heads=heads, values={}, title=correlations)
        named_by = self._effects[1]
        return numbers.draw_pairs(*axis_of, errors=errors, top=top, named_by=named_by, with_diagonal=True, ax=ax)


def agreement(
    predicted: HeadTable[Any], measured: HeadTable[Any], statistics: tuple[str, str] | None = None
) -> Agreement:
    """Compare a statistic of the heads in the table `predicted` with a statistic of the same heads in the table
    `measured`. Return the pairs of values as an `Agreement`, which computes correlations. Heads with a missing or NaN
    value are left out.

        scores = hw.importance(model, texts, hw.next_token_loss)
        effects = hw.ablate(model, texts, hw.next_token_loss)
        hw.agreement(scores, effects).spearman

    Args:
        predicted: a table of heads, such as that of `importance` or `attribution_patching`.
        measured: a table of heads, such as that of `ablate` or `activation_patching`.
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
    require_one_of("statistic", statistics[0], predicted.statistics)
    require_one_of("statistic", statistics[1], measured.statistics)
    measured_value = {(row.module, row.head, row.kind): row.statistics[statistics[1]] for row in measured.heads}
    pairs = [
        (row.name, row.statistics[statistics[0]], measured_value[key])
        for row in predicted.heads
        if (key := (row.module, row.head, row.kind)) in measured_value
    ]
    pairs = [pair for pair in pairs if not any(math.isnan(estimate.value) for estimate in pair[1:])]
    if not pairs:
        raise InputError("predicted", expected="heads that were measured too", got="none")
    names, predicted_values, measured_values = zip(*pairs, strict=True)
    no_effect = predicted.no_effect(statistics[0]), measured.no_effect(statistics[1])
    return Agreement(statistics, names, predicted_values, measured_values, no_effect)


def _correlations(x: Float[Tensor, "samples pairs"], y: Float[Tensor, "samples pairs"]) -> Float[Tensor, " samples"]:
    """Return the Pearson correlation of each row of x with the same row of y. It is NaN if all numbers of one of the
    two rows are equal.
    """
    is_constant = ((x == x[:, :1]).all(1)) | ((y == y[:, :1]).all(1))
    x, y = (each - each.mean(1, keepdim=True) for each in (x, y))
    result = (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()
    return result.masked_fill(is_constant, math.nan)


def _ranks(values: Float[Tensor, "samples pairs"]) -> Float[Tensor, "samples pairs"]:
    """Return the rank of each value in its row, from 1 for the smallest. Equal values have the mean of their ranks."""
    ordered, values = values.sort(1).values.contiguous(), values.contiguous()
    smaller, not_larger = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (smaller + not_larger + 1).double() / 2
