"""Words for numbers, in output and messages, and texts without passwords."""

import math
import re

UNKNOWN = "\N{EN DASH}"
"""Text of an unknown number, such as the mean of no samples."""

HIDDEN = "***"
"""Text that takes the place of a password."""

PASSWORDS = re.compile(r"(?P<before>://[^\s/:@'\"]*:)[^\s'\"]+(?=@)|(?P<name>[?&](?:password|passwd|pwd)=)[^\s'\"&]+")
"""A password in a URL, as in `postgresql://user:secret@host` or `postgresql://host?password=secret`. A password may
contain `@`: it ends at the last `@` before a blank or quote."""


def counted(number: int, noun: str) -> str:
    """Return a number followed by a noun, in the plural unless the number is 1, such as `1 seed` or `2,000 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def number(value: float | None, form: str = "z.4f") -> str:
    """Return a number as text, by default with four decimals. Return a dash for None and NaN, which stand for an
    unknown number.
    """
    return UNKNOWN if value is None or math.isnan(value) else format(value, form)


def quotient(value: float, form: str) -> str:
    """Return a quotient as text, or a dash if it is NaN or infinite, which means that its divisor is unknown or 0."""
    return number(value if math.isfinite(value) else None, form)


def without_passwords(text: str) -> str:
    """Return a text in which the password of every URL, such as `postgresql://user:secret@host`, is replaced by
    `***`.
    """
    return PASSWORDS.sub(lambda match: (match["before"] or match["name"]) + HIDDEN, text)


def without_passwords_of(url: str, text: str) -> str:
    """Return `text` with every password that occurs in `url` replaced by `***`. If a password contains `@`, its parts
    between `@` are replaced, too.
    """
    for match in PASSWORDS.finditer(url):
        password = match[0].removeprefix(match["before"] or match["name"])
        for part in sorted({password, *password.split("@")} - {""}, key=len, reverse=True):
            text = text.replace(part, HIDDEN)
    return text
