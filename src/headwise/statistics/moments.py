"""Mean and variance of values that arrive in parts, some of which may not be independent of each other."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.shapes import Bool, Float, Int

Clusters = Int[Tensor, "_"]
"""Number of the cluster of each sequence. Sequences of one document form a cluster. A sequence that is the only one in
cluster c has the number -1 - c: its value is independent of all others, unless a module attends to it several times.
"""

ALONE = -1
"""Number of a sequence that is the only one in cluster 0. That of the only one in cluster c is `ALONE - c`."""

MOST_CLUSTERS = 1024
"""Largest number of clusters whose sums are kept. Further documents share clusters, which keeps clusters independent;
the standard error then has a random error of its own of 1 / sqrt(2 * 1024) = 2 %.
"""


def clusters_of(documents: Sequence[Hashable]) -> Clusters:
    """Return a cluster number for each sequence, so that sequences of the same document have the same number.
    `documents` has the document of each sequence of a data set. The returned number is negative if no other sequence is
    from the same document.
    """
    counts = Counter(documents)
    shared_first = sorted(counts, key=lambda document: counts[document] == 1)
    numbers = {document: index % MOST_CLUSTERS for index, document in enumerate(shared_first)}
    return torch.tensor(
        [numbers[each] if counts[each] > 1 else ALONE - numbers[each] for each in documents], dtype=torch.int64
    )


@lru_cache(maxsize=8)  # all layers of a model have the same sequences
def separate_clusters(sequences: range) -> Clusters:
    """Return a cluster number for each of the given sequences, which all count as independent. This is for a data set
    whose documents are unknown.
    """
    return ALONE - torch.arange(sequences.start, sequences.stop) % MOST_CLUSTERS


def with_several_values(clusters: Clusters) -> Clusters:
    """Return the cluster numbers for data with several values per sequence, which depend on each other. In `clusters`,
    a negative number marks a sequence that is the only one of its cluster. It becomes nonnegative, because the cluster
    now has several values, all of this sequence.
    """
    return torch.where(clusters < 0, ALONE - clusters, clusters)


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of independent values, for each head. The mean is 0 if there are no
    values. The moments of two sets of values can be merged exactly (Chan, Golub and LeVeque 1983).
    """

    count: Float[Tensor, " heads"]
    mean: Float[Tensor, " heads"]
    deviations: Float[Tensor, " heads"]

    @staticmethod
    def of(values: Float[Tensor, "values heads"], is_value: Bool[Tensor, "values heads"]) -> "Moments":
        """Return the count, mean and squared deviations of each head's values. Only values at which `is_value` is True
        are included, even if they are NaN.
        """
        count = is_value.sum(0).double()
        mean = values.masked_fill(~is_value, 0.0).sum(0) / count.clamp(min=1)
        return Moments(count, mean, ((values - mean).masked_fill(~is_value, 0.0) ** 2).sum(0))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments (count, mean, squared deviations) of the union of two sets of values of the same heads."""
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        difference = other.mean - self.mean
        deviations = self.deviations + other.deviations + difference**2 * self.count * share
        return Moments(count, self.mean + difference * share, deviations)


@dataclass
class ClusterSums:
    """Number and sum of the values in each cluster, for each head. A cluster is a group of values that may depend on
    each other, such as those of one document.
    """

    counts: Float[Tensor, "clusters heads"]
    sums: Float[Tensor, "clusters heads"]

    @staticmethod
    def of(
        values: Float[Tensor, "values heads"], is_value: Bool[Tensor, "values heads"], clusters: Int[Tensor, " values"]
    ) -> "ClusterSums":
        """Return the number and the sum of each head's values in each cluster. Only values at which `is_value` is True
        are included. `clusters` has the cluster number of each row of `values`.
        """
        empty = values.new_zeros(int(clusters.max()) + 1 if len(clusters) else 0, values.shape[1])
        return ClusterSums(
            empty.index_add(0, clusters, is_value.to(values.dtype)),
            empty.index_add(0, clusters, values.masked_fill(~is_value, 0.0)),
        )

    def merge(self, other: "ClusterSums") -> "ClusterSums":
        """Return the numbers and sums of the values in each cluster, for the union of two sets of values. A cluster has
        the same number in both sets.
        """
        size = max(len(self.counts), len(other.counts))
        padded = [
            [F.pad(each, (0, 0, 0, size - len(each))) for each in (sums.counts, sums.sums)] for sums in (self, other)
        ]
        return ClusterSums(padded[0][0] + padded[1][0], padded[0][1] + padded[1][1])


@dataclass
class RunningMoments:
    """Sums from which the mean of each head's values and its standard error are computed. Values of one cluster, such
    as the sequences of one document, may depend on each other. The sums of two sets of values can be merged.

    The standard error is that of the jackknife over clusters. With n values, their mean m, and G clusters of n_g
    values, its square is (G - 1) / G times the sum over clusters of (sum over the cluster of x - m)^2 / (n - n_g)^2
    (Cameron and Miller 2015, section VI.B, CR3, for a regression on a constant alone). If all clusters have equally
    many values, this is the usual standard error.

    Attributes:
        alone: moments of the values that are independent of all others.
        clustered: sums of the other values, by cluster.
        is_clustered: False if it is unknown which values depend on each other; there is no standard error then.
    """

    alone: Moments
    clustered: ClusterSums
    is_clustered: bool = True

    @staticmethod
    def from_values(
        values: Float[Tensor, "sequences heads"],
        is_value: Bool[Tensor, "sequences heads"] | None = None,
        clusters: Clusters | None = None,
    ) -> "RunningMoments":
        """Return the running moments (for mean and standard error) of each head's values, with one value per sequence.
        Only values at which `is_value` is True are included, by default all that are not NaN. `clusters` states which
        sequences depend on each other; None if all are independent.
        """
        is_value = ~values.isnan() if is_value is None else is_value
        is_clustered = clusters is None or len(clusters) == len(values)
        if clusters is None or not is_clustered or bool((clusters < 0).all()):
            empty = values.new_zeros(0, values.shape[1])
            return RunningMoments(Moments.of(values, is_value), ClusterSums(empty, empty), is_clustered)
        is_alone = clusters < 0
        alone = Moments.of(values[is_alone], is_value[is_alone])
        return RunningMoments(alone, ClusterSums.of(values[~is_alone], is_value[~is_alone], clusters[~is_alone]))

    def parts(self, widths: list[int]) -> "list[RunningMoments]":
        """Split the columns (such as heads) into consecutive groups of the given widths, and return the moments of each
        group.
        """
        count, mean, deviations, counts, sums = (
            each.split(widths, -1)  # type: ignore[no-untyped-call]
            for each in (
                self.alone.count,
                self.alone.mean,
                self.alone.deviations,
                self.clustered.counts,
                self.clustered.sums,
            )
        )
        alone, clustered = map(Moments, count, mean, deviations), map(ClusterSums, counts, sums)
        return [RunningMoments(*part, self.is_clustered) for part in zip(alone, clustered, strict=True)]

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Return the running moments (for mean and standard error) of the union of two sets of values, for the same
        heads.
        """
        assert type(other) is type(self), "two kinds of one statistic"
        is_clustered = self.is_clustered and other.is_clustered
        return RunningMoments(self.alone.merge(other.alone), self.clustered.merge(other.clustered), is_clustered)

    @property
    def count(self) -> Float[Tensor, " heads"]:
        """Number of each head's values."""
        return self.alone.count + self.clustered.counts.sum(0)

    @property
    def documents(self) -> Float[Tensor, " heads"]:
        """Number of independent samples among each head's values. All values of one cluster (such as those of one
        document) count as one sample; every value without a cluster counts as one.
        """
        return self.alone.count + (self.clustered.counts > 0).sum(0)

    @property
    def value(self) -> Float[Tensor, " heads"]:
        """Mean of each head's values. It is NaN if the head has no values, or if one of them is NaN or infinite."""
        counts, sums, mean = self.clustered.counts.sum(0), self.clustered.sums.sum(0), self.alone.mean
        mean = mean + (sums - counts * mean) / self.count.clamp(min=1)
        return mean.masked_fill((self.count == 0) | ~mean.isfinite(), math.nan)

    @property
    def standard_error(self) -> Float[Tensor, " heads"]:
        """Standard error of the mean of each head's values. It is NaN if the values are from fewer than two documents,
        or if it is unknown which values are of the same document.
        """
        if not self.is_clustered:
            return torch.full_like(self.value, math.nan)
        alone, clustered, mean, count = self.alone, self.clustered, self.value, self.count
        others = (count - clustered.counts).clamp(min=1)
        squares = ((clustered.sums - clustered.counts * mean) / others).square().sum(0)
        of_alone = alone.deviations + alone.count * (alone.mean - mean) ** 2
        squares = squares + of_alone / (count - 1).clamp(min=1) ** 2
        variance = squares * (self.documents - 1) / self.documents.clamp(min=1)
        return variance.sqrt().masked_fill(self.documents < 2, math.nan)

    @property
    def degrees_of_freedom(self) -> Float[Tensor, " heads"]:
        """Degrees of freedom of each head's standard error: the effective number of clusters, n^2 / (sum of n_g^2),
        minus one (Kish 1992). Here n_g is the number of values in cluster g, and n is the number of all values. If all
        clusters have equally many values, this is the number of clusters minus one. It is 0 where there is no standard
        error.
        """
        squares = self.alone.count + self.clustered.counts.square().sum(0)
        degrees = self.count**2 / squares.clamp(min=1) - 1
        return degrees.masked_fill(self.standard_error.isnan(), 0.0)


@dataclass
class RunningLargest(RunningMoments):
    """Largest value of each head, in place of the mean that `RunningMoments` has; -inf if there are no values. Values
    and independent samples are counted, and two sets of values can be merged. A largest value has no standard error.
    """

    largest: Float[Tensor, " heads"] = field(kw_only=True)

    @staticmethod
    def of_moments(
        moments: RunningMoments, values: Float[Tensor, "sequences heads"], is_value: Bool[Tensor, "sequences heads"]
    ) -> "RunningLargest":
        """Return the largest of each head's values at which `is_value` is True. `moments` are the moments of the same
        values.
        """
        empty = values.new_full((1, values.shape[1]), -math.inf)
        largest = torch.cat([empty, values.masked_fill(~is_value, -math.inf)]).amax(0)
        return RunningLargest(moments.alone, moments.clustered, moments.is_clustered, largest=largest)

    def merge(self, other: RunningMoments) -> "RunningLargest":
        """Return the largest values of the union of two sets of values, for the same heads."""
        assert isinstance(other, RunningLargest), "two kinds of one statistic"
        both = super().merge(other)
        largest = torch.maximum(self.largest, other.largest)
        return RunningLargest(both.alone, both.clustered, both.is_clustered, largest=largest)

    @property
    def value(self) -> Float[Tensor, " heads"]:
        """Largest of each head's values. It is NaN if the head has no values, or if the largest is NaN or infinite."""
        return self.largest.masked_fill(~self.largest.isfinite(), math.nan)

    @property
    def standard_error(self) -> Float[Tensor, " heads"]:
        """NaN for each head, because a largest value has no standard error."""
        return torch.full_like(self.largest, math.nan)
