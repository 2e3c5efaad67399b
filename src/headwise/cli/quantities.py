"""Values on the command line: paths, choices, lists of numbers, amounts such as 1.5M, and durations such as 30m."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from headwise.settings import ROW_STATISTICS


def path(text: str) -> Path:
    """Return a path; raise `typer.BadParameter` for an empty text, which would mean the current folder, and for a null
    character.
    """
    if not text.strip() or "\0" in text:
        raise typer.BadParameter(f"expected a path, got {text!r}")
    return Path(text)


def choice(names: Iterable[str], others: Callable[[], Iterable[str]] = tuple) -> dict[str, Any]:
    """Return the arguments of `typer.Option` for an option whose value is one of `names`: its parser, its completion
    and its placeholder in the help. The parser also accepts the names that `others` returns, which is called only if
    the value is not one of `names`.
    """
    allowed = tuple(names)

    def parse(text: str) -> str:
        """Return the text if it is an allowed name; otherwise raise `typer.BadParameter`."""
        if text not in allowed and text not in (known := (*allowed, *others())):
            raise typer.BadParameter(f"expected one of {', '.join(known)}, got {text!r}")
        return text

    return {"parser": parse, "autocompletion": lambda: list(allowed), "metavar": "|".join(allowed)}


def added_statistics() -> list[str]:
    """Return the names of the statistics of query rows that the help of commands does not list."""
    from headwise.statistics.registry import row_statistics

    return [name for name in row_statistics() if name not in ROW_STATISTICS]


def head_name(text: str) -> int | str:
    """Return the index of a head, such as 11, as a number, or the name of a head, such as 5.11, unchanged. A text of
    another form raises `typer.BadParameter`.
    """
    if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        raise typer.BadParameter(f"expected a head such as 5.11 (layer 5, head 11) or 11, got {text!r}")
    return text if "." in text else int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Parse integers separated by commas, such as 1,2,4, and return them as a tuple. A text of another form raises
    `typer.BadParameter`.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, got {text!r}") from None


def shares(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas, such as 0.5,0.9, and return them as a tuple. A text of another form raises
    `typer.BadParameter`.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 0.5,0.9, got {text!r}") from None


def amount(text: str) -> int:
    """Parse a positive amount such as 300k or 1.5M (k = 1e3, M = 1e6, G or B = 1e9), and return it rounded to an
    integer. A text of another form raises `typer.BadParameter`.
    """
    return round(_scaled(text, {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}, "an amount such as 1.5M or 300k"))


def seconds(text: str) -> float:
    """Parse a positive duration such as 90s, 30m, 2h or 1d, and return it in seconds; a number without a unit is in
    seconds. A text of another form raises `typer.BadParameter`.
    """
    return _scaled(text, {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}, "a time such as 30m, 90s or 2h")


def _scaled(text: str, units: dict[str, float], expected: str) -> float:
    """Parse a positive number that may be followed by a one-letter unit, and return the number times the unit's factor
    in `units`. A text of another form raises `typer.BadParameter`, with `expected` in its message.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z]?)", text.strip().lower())
    if match is None or match[2] not in units or not float(match[1]):
        raise typer.BadParameter(f"expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2]]
