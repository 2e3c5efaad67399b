"""Mean and variance of values that arrive in parts."""

import math
from dataclasses import dataclass

from torch import Tensor

from headwise.shapes import Bool, Float


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations of a set of values, for each head. The moments of two sets of values
    can be merged into those of both sets together, without approximation.

    The merge formula is that of Chan, Golub and LeVeque (1983).

    Attributes:
        count: number of values.
        mean: their mean; 0 where there are none; NaN or infinite if a value is.
        deviations: sum of their squared deviations from the mean.
    """

    count: Float[Tensor, " heads"]
    mean: Float[Tensor, " heads"]
    deviations: Float[Tensor, " heads"]

    @staticmethod
    def from_values(
        values: Float[Tensor, "sequences heads"], is_value: Bool[Tensor, "sequences heads"] | None = None
    ) -> "RunningMoments":
        """Return the count, mean and sum of squared deviations of each head's values, of which there is one per
        sequence. Only values at which `is_value` is True are included, also if they are NaN; by default all that are
        not NaN.
        """
        is_value = ~values.isnan() if is_value is None else is_value
        count = is_value.sum(0).double()
        mean = values.masked_fill(~is_value, 0.0).sum(0) / count.clamp(min=1)
        return RunningMoments(count, mean, ((values - mean).masked_fill(~is_value, 0.0) ** 2).sum(0))

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Return the moments (count, mean and sum of squared deviations) of two sets of values together. `self` and
        `other` are the moments of each set alone, for the same heads.
        """
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        difference = other.mean - self.mean
        deviations = self.deviations + other.deviations + difference**2 * self.count * share
        return RunningMoments(count, self.mean + difference * share, deviations)

    @property
    def value(self) -> Float[Tensor, " heads"]:
        """Mean of each head's values; NaN for a head without values, or with a value that is NaN or infinite."""
        return self.mean.masked_fill((self.count == 0) | ~self.mean.isfinite(), math.nan)

    @property
    def standard_error(self) -> Float[Tensor, " heads"]:
        """Standard error of the mean of each head's values; NaN for a head with fewer than two values."""
        variance = self.deviations / (self.count - 1).clamp(min=1)
        return (variance / self.count.clamp(min=1)).sqrt().masked_fill(self.count < 2, math.nan)
