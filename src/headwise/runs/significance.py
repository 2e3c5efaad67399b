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
    """Return the two-sided p-value of each mean by Student's t-test against zero. `ratios` are the means divided by
    their standard errors, and `degrees` the errors' degrees of freedom. The p-value is NaN where the ratio is NaN.
    """
    stats = require("scipy.stats", purpose=PURPOSE, extra="tables")
    return [float(2.0 * stats.t.sf(abs(ratio), df)) for ratio, df in zip(ratios, degrees, strict=True)]


def false_discovery_rates(p: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for multiple testing by the method of Benjamini and Hochberg (1995). Among tests
    with an adjusted value of at most x, the expected share of false discoveries (tests without a real effect) is at
    most x. NaN stays NaN and does not count as a test. The tests may be independent or positively dependent (Benjamini
    and Yekutieli 2001).
    """
    stats = require("scipy.stats", purpose=PURPOSE, extra="tables")
    known = [value for value in p if not math.isnan(value)]
    adjusted = iter(stats.false_discovery_control(known).tolist() if known else [])
    return [value if math.isnan(value) else next(adjusted) for value in p]


def in_errors(measured: MeanEstimate) -> float:
    """Return a mean divided by its standard error, or NaN if either is NaN. If the standard error is 0, return 0 for a
    mean of 0, and otherwise infinity with the sign of the mean.
    """
    if measured.sem == 0.0:
        return measured.value * math.inf if measured.value else 0.0
    return measured.value / measured.sem


def zero_tests(name: str, measured: Sequence[MeanEstimate]) -> dict[str, list[float]]:
    """Test each mean against zero, and return two columns for the statistic `name`: p-values by Student's t-test
    (`_p`), and p-values adjusted for the number of rows (`_q`). If all n samples of a row have the same value other
    than 0, the variance is unknown rather than 0; the p-value is then that of the sign test, 2 / 2^n.
    """
    p = p_values([in_errors(each) for each in measured], [each.df for each in measured])
    p = [2 * 0.5**each.n if _is_constant(each) else own for each, own in zip(measured, p, strict=True)]
    return {f"{name}_p": p, f"{name}_q": false_discovery_rates(p)}


def one_sided_p_values(measured: Sequence[MeanEstimate], sign: int = 1, *, above: float = 0.0) -> list[float]:
    """Return the one-sided p-value of each mean by Student's t-test. It is small if the mean is larger than `above` or,
    for a `sign` of -1, smaller. It is NaN where the mean or its standard error is NaN. If all n samples have the same
    value, on the tested side of `above`, the p-value is that of the sign test, 1 / 2^n.
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
    """Return True if all samples behind a mean have the same value, up to rounding, and this value is not 0."""
    return measured.value != 0.0 and has_no_variance(measured)


def has_no_variance(measured: MeanEstimate) -> bool:
    """Return True if all samples behind a mean have the same value, up to rounding."""
    return measured.sem <= ROUNDING * abs(measured.value)
