"""Means over sequences, with standard errors clustered by document."""

import math
from collections.abc import Hashable, Sequence

from headwise.runs.rows import NO_ESTIMATE, MeanEstimate


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[MeanEstimate, int]:
    """Return the mean of values with a standard error clustered by document, and the number of documents. Values of NaN
    are left out.

    With residuals e_i, n values and G clusters, the variance of the mean is G / (G - 1) times the sum over clusters of
    (sum of e_i in the cluster)^2, divided by n^2 (Cameron and Miller 2015, section II.B, for a regression on a constant
    alone). With clusters of one value each, this is the usual standard error; of one cluster it is NaN.

    Args:
        values: one number per sequence.
        clusters: the document of each sequence.
    """
    pairs = [(value, cluster) for value, cluster in zip(values, clusters, strict=True) if not math.isnan(value)]
    if not pairs:
        return NO_ESTIMATE, 0
    mean = math.fsum(value for value, _ in pairs) / len(pairs)
    residuals: dict[Hashable, list[float]] = {}
    for value, cluster in pairs:
        residuals.setdefault(cluster, []).append(value - mean)
    count = len(residuals)
    if count < 2:
        return MeanEstimate(mean, math.nan, len(pairs)), count
    squares = math.fsum(math.fsum(each) ** 2 for each in residuals.values())
    return MeanEstimate(mean, math.sqrt(squares * count / (count - 1)) / len(pairs), len(pairs)), count
