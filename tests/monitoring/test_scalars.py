"""Scalars of a step for dashboards."""

import math

from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.callbacks import MOST_ALARMS, step_scalars
from histories import history

NAN = math.nan


def linear(layer, head, step):
    """Return a number that changes by 10 times the layer plus the head."""
    return (10 * layer + head) * step


def test_the_heads_that_changed_most_since_the_first_step_have_scalars():
    steps = history(2, 5, (0, 3, 7), linear)
    assert step_scalars(steps, 7, [], 2) == {
        "heads/alarms": 0.0,
        "heads/0/entropy_mean": 14.0,
        "heads/0/entropy_min": 0.0,
        "heads/0/entropy_max": 28.0,
        "heads/1/entropy_mean": 84.0,
        "heads/1/entropy_min": 70.0,
        "heads/1/entropy_max": 98.0,
        "heads/1.4/entropy": 98.0,
        "heads/1.3/entropy": 91.0,
    }
    assert not any("." in name for name in step_scalars(steps, 0, [], 2))
    assert not any("." in name for name in step_scalars(steps, 7, [], 0))
    assert sum("." in name for name in step_scalars(steps, 7, [], 100)) == 9  # one did not change


def test_values_that_are_not_finite_are_counted_and_not_averaged():
    numbers = {(0, 0): 1.0, (0, 1): NAN, (0, 2): 4.0, (1, 0): math.inf, (1, 1): NAN, (1, 2): NAN}
    scalars = step_scalars(history(2, 3, (0,), lambda layer, head, step: numbers[layer, head]), 0, [], ((0, 1),))
    assert scalars["heads/0/entropy_mean"] == 2.5
    assert scalars["heads/0/entropy_nonfinite"] == 1.0
    assert math.isnan(scalars["heads/0.1/entropy"])
    assert {name for name in scalars if name.startswith("heads/1/")} == {"heads/1/entropy_nonfinite"}
    assert scalars["heads/1/entropy_nonfinite"] == 3.0


def test_a_thousand_heads_with_alarms_do_not_flood_a_dashboard():
    steps = history(40, 25, (0, 1), lambda *_: 500.0, statistic="max_logit")
    alarms = list(AlarmLimits().alarms(steps.rows(1)))
    scalars = step_scalars(steps, 1, alarms, 4)
    assert len(alarms) == scalars["heads/alarms"] == 1000
    assert sum("." in name for name in scalars) == MOST_ALARMS == 32
    assert len(scalars) == 1 + 3 * 40 + 32
