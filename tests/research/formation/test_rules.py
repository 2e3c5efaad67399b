"""The rules for the step at which a curve changes, on curves whose answer is known."""

import pytest

from research.formation.rules import half_step, steepest_step

STEPS = list(range(0, 420, 20))


def test_a_line_reaches_half_in_its_middle():
    values = [min(step, 200) / 200 for step in STEPS]
    assert half_step(STEPS, values) == pytest.approx(100)


def test_half_is_interpolated_between_measurements():
    values = [0.0 if step < 200 else 1.0 for step in STEPS]
    assert half_step(STEPS, values) == pytest.approx(190)


def test_a_curve_that_starts_at_its_final_value_changes_at_the_start():
    assert half_step(STEPS, [1.0] * len(STEPS)) == 0.0


def test_a_curve_below_zero_has_no_half():
    assert half_step(STEPS, [-1.0] * len(STEPS)) is None


def test_the_steepest_window_surrounds_a_jump():
    values = [0.001 * step + (3.0 if step >= 250 else 0.0) for step in STEPS]
    found = steepest_step(STEPS, values)
    assert abs(found - 250) <= 50
    assert steepest_step(STEPS, [-value for value in values]) is None


def test_windows_before_the_start_do_not_count():
    values = [5.0 if step >= 40 else 0.0 for step in STEPS]
    values = [value + (1.0 if step >= 300 else 0.0) for value, step in zip(values, STEPS, strict=True)]
    assert steepest_step(STEPS, values) < 100
    assert 250 <= steepest_step(STEPS, values, start=100) <= 350
