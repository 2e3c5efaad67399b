"""Means with standard errors and confidence intervals, slopes over doublings of the heads, and ratios of pairs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import scipy.stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and its confidence interval by Student's t.

    Attributes:
        mean: of the values.
        error: standard error of the mean; NaN for a single value.
        low, high: ends of the interval that contains the true mean with probability `CONFIDENCE`.
        number: of values.
    """

    mean: float
    error: float
    low: float
    high: float
    number: int

    @property
    def sign(self) -> int:
        """1 if the whole interval is above 0, -1 if it is below 0, and 0 if it contains 0."""
        return (self.low > 0) - (self.high < 0)

    def within(self, distance: float) -> bool:
        """Return whether the whole interval is closer to 0 than `distance`."""
        return -distance < self.low and self.high < distance

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean of values. For one value, or with an infinite one, the interval is unbounded."""
        mean, number = statistics.fmean(values), len(values)
        if number < 2 or not math.isfinite(mean):
            return cls(mean, math.nan, -math.inf, math.inf, number)
        error = statistics.stdev(values) / math.sqrt(number)
        half_width = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, number - 1)) * error
        return cls(mean, error, mean - half_width, mean + half_width, number)


def slope(values: Mapping[int, float]) -> float:
    """Return the change of a value for each doubling of the number of heads, by least squares.

    Args:
        values: by number of heads.
    """
    doublings = [math.log2(heads) for heads in values]
    return statistics.linear_regression(doublings, list(values.values())).slope


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of the ratios of pairs.

    Args:
        over: numerators, one for each round.
        under: denominators, measured in the same rounds.
    """
    of_pairs = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(of_pairs, n=4, method="inclusive")
    return low, middle, high
