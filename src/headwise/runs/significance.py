"""Tests of means against zero, corrected for the number of tests."""

import math
from collections.abc import Sequence

from headwise.errors import require
from headwise.runs.rows import MeanEstimate

PURPOSE = "tests of significance"

FALSE_DISCOVERY_RATE = 0.05
"""Largest adjusted p-value of a head that is reported as found."""

ROUNDING = 1e-12
"""Standard error, relative to the mean, below which the samples differ by rounding alone."""


def p_values(ratios: Sequence[float], degrees: Sequence[float]) -> list[float]:
    """Return the two-sided p-value of each mean by Student's t-test against zero, from the mean divided by its standard
    error and the degrees of freedom of the error; NaN where a ratio is NaN.
    """
    stats = require("scipy.stats", purpose=PURPOSE, extra="tables")
    return [float(2.0 * stats.t.sf(abs(ratio), df)) for ratio, df in zip(ratios, degrees, strict=True)]


def false_discovery_rates(p: Sequence[float]) -> list[float]:
    """Return the p-values, adjusted for their number (Benjamini and Hochberg 1995): of the tests with an adjusted value
    of at most x, an expected share of at most x finds an effect where there is none. Values of NaN stay, and do not
    count. The tests may be independent or positively dependent (Benjamini and Yekutieli 2001).
    """
    stats = require("scipy.stats", purpose=PURPOSE, extra="tables")
    known = [value for value in p if not math.isnan(value)]
    adjusted = iter(stats.false_discovery_control(known).tolist() if known else [])
    return [value if math.isnan(value) else next(adjusted) for value in p]


def in_errors(measured: MeanEstimate) -> float:
    """Return a mean divided by its standard error; NaN if one of them is. For a standard error of 0 return 0 if the
    mean is 0, otherwise infinity with the sign of the mean.
    """
    if measured.sem == 0.0:
        return measured.value * math.inf if measured.value else 0.0
    return measured.value / measured.sem


def zero_tests(name: str, measured: Sequence[MeanEstimate]) -> dict[str, list[float]]:
    """Return two columns for a statistic called `name`: the p-value of each mean by Student's t-test against zero, with
    the suffix `_p`, and the p-values adjusted for the number of rows, with the suffix `_q`. If all n samples have the
    same mean, which is not 0, their variance is unknown rather than 0, and the p-value is that of the sign test, 2 /
    2^n.
    """
    p = p_values([in_errors(each) for each in measured], [each.df for each in measured])
    p = [2 * 0.5**each.n if _is_constant(each) else own for each, own in zip(measured, p, strict=True)]
    return {f"{name}_p": p, f"{name}_q": false_discovery_rates(p)}


def one_sided_p_values(measured: Sequence[MeanEstimate], sign: int = 1, *, above: float = 0.0) -> list[float]:
    """Return the one-sided p-value of each mean by Student's t-test: small if the mean is larger than `above`, or
    smaller for a `sign` of -1; NaN where the mean or its standard error is. If all n samples have the same mean on that
    side, the p-value is that of the sign test, 1 / 2^n.
    """
    centred = [each._replace(value=each.value - above) for each in measured]
    ratios = [sign * in_errors(each) for each in centred]
    two_sided = p_values(ratios, [each.df for each in measured])
    p = [p / 2 if ratio > 0 else 1 - p / 2 for p, ratio in zip(two_sided, ratios, strict=True)]
    return [
        0.5**each.n if ratio > 0 and _is_constant(each) else own
        for each, ratio, own in zip(centred, ratios, p, strict=True)
    ]


def _is_constant(measured: MeanEstimate) -> bool:
    """Return True if samples have a mean other than 0, and differ from it by rounding alone."""
    return measured.value != 0.0 and has_no_variance(measured)


def has_no_variance(measured: MeanEstimate) -> bool:
    """Return True if samples differ from their mean by rounding alone."""
    return measured.sem <= ROUNDING * abs(measured.value)
