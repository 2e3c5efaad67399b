"""Rules that state the step at which a curve of a training changes. The page states when they were fixed."""

from collections.abc import Sequence

LAST = 5
"""Number of last measurements whose mean is the final value of a curve."""

WINDOW = 100
"""Number of steps over which a change is measured."""


def half_step(steps: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the step at which a curve first reaches half of its final value, interpolated between measurements; None
    if it does not rise above zero.

    Args:
        steps: steps of the measurements, in order.
        values: values at these steps.
    """
    last = values[-LAST:]
    half = 0.5 * sum(last) / len(last)
    if half <= 0:
        return None
    for index, value in enumerate(values):
        if value >= half:
            if index == 0:
                return float(steps[0])
            before, start = values[index - 1], steps[index - 1]
            return start + (half - before) / (value - before) * (steps[index] - start)
    return None


def steepest_step(
    steps: Sequence[int], values: Sequence[float], *, window: int = WINDOW, start: int = 0
) -> float | None:
    """Return the middle of the window of `window` steps in which a curve rises most; None if it rises in none. Negate
    the values for the window in which it falls most.

    Args:
        steps: steps of the measurements, in order.
        values: values at these steps.
        window: number of steps of a window.
        start: step from which windows may start.
    """
    value_at = dict(zip(steps, values, strict=True))
    rises = [(value_at[step + window] - value_at[step], step) for step in steps if step + window in value_at]
    rise, first = max(((rise, -step) for rise, step in rises if step >= start), default=(0.0, 0))
    return -first + window / 2 if rise > 0 else None
