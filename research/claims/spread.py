"""Means with their spread over seeds or sequences, and what that allows to say."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import scipy.stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, and the interval that holds the true mean with `CONFIDENCE`, by Student's t."""

    mean: float
    error: float
    low: float
    high: float
    number: int

    @property
    def sign(self) -> int:
        """1 where all of the interval is above 0, -1 where all is below, 0 where nothing can be told."""
        return (self.low > 0) - (self.high < 0)

    def within(self, room: float) -> bool:
        """Whether all of the interval is nearer to 0 than that."""
        return -room < self.low and self.high < room

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Of two values or more; of one, or where one is infinite, the interval is all numbers."""
        mean, number = statistics.fmean(values), len(values)
        if number < 2 or not math.isfinite(mean):
            return cls(mean, math.nan, -math.inf, math.inf, number)
        error = statistics.stdev(values) / math.sqrt(number)
        room = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, number - 1)) * error
        return cls(mean, error, mean - room, mean + room, number)


def slope(values: Mapping[int, float]) -> float:
    """How much a value rises when the number of heads doubles: the line of least squares over log2 of the number."""
    x = [math.log2(heads) for heads in values]
    return statistics.linear_regression(x, list(values.values())).slope


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Of pairs taken in the same round: the lower quartile of their ratios, the median, the upper quartile."""
    found = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return low, middle, high
