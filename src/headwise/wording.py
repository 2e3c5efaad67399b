"""Words for numbers, in output and messages."""


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural, such as `1 seed` or `2,000 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
