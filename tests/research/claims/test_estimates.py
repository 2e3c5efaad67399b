"""Means with intervals, slopes over doublings of the heads, and quartiles of ratios."""

import math

import numpy as np
import pytest
import scipy.stats
from claims_examples import HEADS

from research.claims.estimates import Estimate, ratios, slope


@pytest.mark.parametrize("number", [2, 3, 5, 11])
def test_an_estimate_is_the_t_interval(number):
    values = np.random.default_rng(number).normal(0.3, 2.0, number)
    found = Estimate.of(values.tolist())
    low, high = scipy.stats.t.interval(0.95, number - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    wanted = (values.mean(), values.std(ddof=1) / number**0.5, low, high, number)
    assert (found.mean, found.error, found.low, found.high, found.number) == pytest.approx(wanted, rel=1e-12)


def test_an_estimate_worked_out_by_hand():
    """Squares 2.25, 0.25, 0.25, 2.25 over 3: variance 5/3, error sqrt(5/12); t of 3 degrees is 3.18245."""
    found = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.error) == pytest.approx((2.5, math.sqrt(5 / 12)))
    assert (found.low, found.high) == pytest.approx((2.5 - 2.054260, 2.5 + 2.054260), abs=1e-5)
    assert str(found) == "2.500 ± 0.645"


def test_of_one_value_nothing_can_be_told():
    found = Estimate.of([7.0])
    assert (found.mean, found.low, found.high, found.number) == (7.0, -math.inf, math.inf, 1)
    assert math.isnan(found.error)
    assert found.sign == 0
    assert not found.within(1e9)


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
def test_the_sign_of_an_interval_and_whether_it_is_near_nothing(low, high, sign, within):
    found = Estimate((low + high) / 2, 0.1, low, high, 3)
    assert (found.sign, found.within(1.0)) == (sign, within)


@pytest.mark.parametrize("heads", [HEADS, (1, 4, 32), (2, 3, 16, 5)])
def test_the_slope_is_that_of_least_squares_over_doublings(heads):
    values = np.random.default_rng(7).normal(size=len(heads))
    wanted = np.polyfit(np.log2(heads), values, 1)[0]
    assert slope(dict(zip(heads, values.tolist(), strict=True))) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    ("over", "under", "wanted"),
    [
        ([5.0, 1.0, 3.0, 2.0, 4.0], [1.0] * 5, (2.0, 3.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0], [1.0] * 4, (1.75, 2.5, 3.25)),
        ([2.0, 9.0, 4.0], [1.0, 3.0, 1.0], (2.5, 3.0, 3.5)),
    ],
)
def test_quartiles_of_ratios_of_pairs(over, under, wanted):
    assert ratios(over, under) == pytest.approx(wanted)
