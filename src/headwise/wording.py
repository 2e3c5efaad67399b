"""Words for numbers, in output and messages."""

import math

UNKNOWN = "\N{EN DASH}"
"""Text of an unknown number, such as the mean of no samples."""


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural, such as `1 seed` or `2,000 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def number(value: float | None, form: str = "z.4f") -> str:
    """Return a number as text, by default with four decimals, and a dash for an unknown one, which is None or NaN."""
    return UNKNOWN if value is None or math.isnan(value) else format(value, form)


def quotient(value: float, form: str) -> str:
    """Return a quotient as text, and a dash for an unknown or infinite one, whose divisor is unknown or 0."""
    return number(value if math.isfinite(value) else None, form)
