"""Rows of result tables: means over sequences with their standard errors, for one head or another unit."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from headwise.statistics.moments import RunningMoments
from headwise.wording import number

SEM_SUFFIX = "_sem"
"""Suffix of the column with the standard error of a statistic."""

SUFFIXES = ("", SEM_SUFFIX, "_n", "_df")
"""Suffixes of the columns with the parts of an estimate, in their order."""


class MeanEstimate(NamedTuple):
    """A mean over sequences (or other samples) with its standard error, the number of independent samples, and the
    degrees of freedom of the standard error.

    Sequences of one document are not independent. Where documents are known, the standard error is clustered by
    document, and `n` counts documents.

    Attributes:
        value: the mean; NaN of no samples.
        sem: the standard error of the mean; NaN of fewer than two independent samples.
        n: the number of independent samples that had a value.
        df: the degrees of freedom of the standard error, for Student's t-test and for intervals: `n - 1` if all
            documents have the same number of values, fewer if some have more than others; 0 without a standard error.
    """

    value: float
    sem: float
    n: int
    df: float

    def text(self, form: str = "z.4f") -> str:
        """Return the mean as text, by default with four decimals. If the standard error is known, `±` and the error
        with two digits follow. An unknown mean becomes a dash.
        """
        error = f"{self.sem:.2g}" if self.sem < 100 else f"{self.sem:,.0f}"
        has_error = math.isfinite(self.value) and math.isfinite(self.sem)
        return f"{number(self.value, form)} ± {error}" if has_error else number(self.value, form)

    @staticmethod
    def of(values: Iterable[float], documents: Sequence[Hashable] | None = None) -> "MeanEstimate":
        """Return the mean of the values that are not NaN, and its standard error. Values of the same document may
        depend on each other. The error is therefore computed by the jackknife, which leaves out one document at a time.

        Document g has n_g of the n values, and r_g is the sum of their differences from the mean. Without this
        document, the mean differs by r_g / (n - n_g). With G documents, the variance of the mean is (G - 1) / G times
        the sum of the squares of these differences (Cameron and Miller 2015, section VI.B, CR3, for a regression on a
        constant alone). If all documents have equally many values, this is the usual standard error. The degrees of
        freedom are n^2 / (sum of n_g^2) - 1: the effective number of documents (Kish 1992), less one.

        Args:
            values: one number per sequence.
            documents: the document of each value; by default each has a document of its own.
        """
        values = list(values)
        pairs = zip(values, range(len(values)) if documents is None else documents, strict=True)
        valid = [(value, document) for value, document in pairs if not math.isnan(value)]
        if not valid:
            return NO_ESTIMATE
        mean = math.fsum(value for value, _ in valid) / len(valid)
        residuals: dict[Hashable, list[float]] = {}
        for value, document in valid:
            residuals.setdefault(document, []).append(value - mean)
        if len(residuals) < 2:
            return MeanEstimate.exact(mean, len(residuals))
        count, total = len(residuals), len(valid)
        squares = math.fsum((math.fsum(each) / (total - len(each))) ** 2 for each in residuals.values())
        effective = total**2 / sum(len(each) ** 2 for each in residuals.values())
        return MeanEstimate(mean, math.sqrt(squares * (count - 1) / count), count, effective - 1)

    def columns(self, name: str) -> dict[str, float]:
        """Return the parts of this estimate as columns of a result table, for a statistic called `name`: the mean under
        the name itself, and the standard error, sample size and degrees of freedom with the suffixes `_sem`, `_n` and
        `_df`.
        """
        return {name + suffix: part for suffix, part in zip(SUFFIXES, self, strict=True)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]], name: str, row: int) -> "MeanEstimate":
        """Return the estimate of the statistic `name` from row number `row` of a result table, whose columns are passed
        by name.
        """
        return cls(*(columns[name + suffix][row] for suffix in SUFFIXES))

    @staticmethod
    def exact(value: float, n: int = 1) -> "MeanEstimate":
        """Return an estimate of a number without a standard error, because the number has no sampling error or its
        error is unknown. An example is a number that follows from a model's weights alone.
        """
        return MeanEstimate(value, math.nan, n, 0.0)


NO_ESTIMATE = MeanEstimate.exact(math.nan, 0)
"""The estimate from no samples at all."""


def moment_estimates(moments: RunningMoments) -> list[MeanEstimate]:
    """Return one estimate for each head, or other column of values, from running sums. The estimate is the mean with
    its standard error or, for the sums of a `RunningLargest`, the largest value.
    """
    columns = moments.value, moments.standard_error, moments.documents.long(), moments.degrees_of_freedom
    return [MeanEstimate(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


MOST_SHOWN = 4
"""Largest number of statistics whose means are in the `repr` of a row."""


@dataclass(frozen=True, repr=False)
class Row:
    """Row of a result table. Its fields identify what was measured, such as one head of a model, and each statistic has
    an estimate with mean, standard error and sample size.

    A subclass adds the identifying fields; they become the first columns of the table.

    Attributes:
        statistics: the estimate of each statistic, by name.
    """

    statistics: Mapping[str, MeanEstimate]

    def __repr__(self) -> str:
        statistics = ", ".join(f"{name} {number(estimate.value, '.4g')}" for name, estimate in self.statistics.items())
        if len(self.statistics) > MOST_SHOWN:
            statistics = f"{len(self.statistics)} statistics"
        return f"{type(self).__name__}({', '.join([*self._described(), statistics])})"

    def _described(self) -> list[str]:
        """Return the parts of the row's `repr` that identify it, such as "layer=3"."""
        return [f"{name}={value!r}" for name, value in self.identifiers.items()]

    @property
    def identifiers(self) -> dict[str, Any]:
        """Values of the columns that identify this row, such as layer and head, by column name."""
        return {name: getattr(self, name) for name in self.identifier_columns()}

    @classmethod
    def identifier_columns(cls) -> list[str]:
        """Return the names of the columns that identify a row, such as layer and head, in order."""
        return [field.name for field in fields(cls) if field.name != "statistics"]


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadRow(Row):
    """Row of a result table for one attention head: the head's position in the model, and for each statistic an
    estimate with mean, standard error and sample size.

    Attributes:
        layer: the layer's number, zero-based.
        head: the query head within the layer, zero-based.
        kv_head: the key/value head that it attends with, zero-based.
        module: the path of the attention module in the model.
        kind: "self" or "cross" attention.
    """

    layer: int
    head: int
    kv_head: int
    module: str
    kind: str

    @property
    def name(self) -> str:
        """Name of the head: its layer and its number in the layer, both zero-based, joined by a dot, such as `3.5`."""
        return f"{self.layer}.{self.head}"

    def _described(self) -> list[str]:
        return [self.name]
