"""Means with confidence intervals, slopes over doublings of the heads, and quartiles of ratios."""

import math

import numpy as np
import pytest
import scipy.stats
from claims_examples import HEADS

from research.claims.estimates import Estimate, ratios, slope


@pytest.mark.parametrize("number", [2, 3, 5, 11])
def test_interval_of_an_estimate_is_students_t_interval(number):
    values = np.random.default_rng(number).normal(0.3, 2.0, number)
    estimate = Estimate.of(values.tolist())
    low, high = scipy.stats.t.interval(0.95, number - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    expected = (values.mean(), values.std(ddof=1) / number**0.5, low, high, number)
    assert (estimate.mean, estimate.error, estimate.low, estimate.high, estimate.number) == pytest.approx(
        expected, rel=1e-12
    )


def test_estimate_equals_an_example_computed_by_hand():
    """The squared deviations are 2.25, 0.25, 0.25, 2.25; divided by 3 the variance is 5/3 and the error sqrt(5/12).
    Student's t for 3 degrees of freedom is 3.18245.
    """
    estimate = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert (estimate.mean, estimate.error) == pytest.approx((2.5, math.sqrt(5 / 12)))
    assert (estimate.low, estimate.high) == pytest.approx((2.5 - 2.054260, 2.5 + 2.054260), abs=1e-5)
    assert str(estimate) == "2.500 ± 0.645"


def test_interval_of_one_value_is_infinite():
    estimate = Estimate.of([7.0])
    assert (estimate.mean, estimate.low, estimate.high, estimate.number) == (7.0, -math.inf, math.inf, 1)
    assert math.isnan(estimate.error)
    assert estimate.sign == 0
    assert not estimate.within(1e9)


@pytest.mark.parametrize(
    ("low", "high", "sign", "within"),
    [
        (0.1, 0.9, 1, True),
        (-0.9, -0.1, -1, True),
        (-0.9, 0.9, 0, True),
        (0.0, 0.9, 0, True),
        (-0.9, 0.0, 0, True),
        (-0.1, 1.0, 0, False),
        (-1.0, -0.1, -1, False),
        (1.5, 2.0, 1, False),
    ],
)
def test_sign_of_an_interval_and_whether_it_is_within_a_margin(low, high, sign, within):
    estimate = Estimate((low + high) / 2, 0.1, low, high, 3)
    assert (estimate.sign, estimate.within(1.0)) == (sign, within)


@pytest.mark.parametrize("heads", [HEADS, (1, 4, 32), (2, 3, 16, 5)])
def test_slope_is_the_least_squares_slope_over_doublings(heads):
    values = np.random.default_rng(7).normal(size=len(heads))
    expected = np.polyfit(np.log2(heads), values, 1)[0]
    assert slope(dict(zip(heads, values.tolist(), strict=True))) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("over", "under", "expected"),
    [
        ([5.0, 1.0, 3.0, 2.0, 4.0], [1.0] * 5, (2.0, 3.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0], [1.0] * 4, (1.75, 2.5, 3.25)),
        ([2.0, 9.0, 4.0], [1.0, 3.0, 1.0], (2.5, 3.0, 3.5)),
    ],
)
def test_ratios_are_quartiles_over_pairs(over, under, expected):
    assert ratios(over, under) == pytest.approx(expected)
