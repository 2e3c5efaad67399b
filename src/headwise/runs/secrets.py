"""Removal of passwords from texts that are printed or saved."""

import re

HIDDEN = "***"
"""Text that takes the place of a password."""


def without_passwords(text: str) -> str:
    """Return a text in which the password of every URL is replaced by `***`: `secret` in
    `postgresql://user:secret@host` and in `postgresql://host?password=secret`.

    A password may contain `@`: it ends at the last `@` before a blank or quote.
    """
    text = re.sub(r"(://[^\s/:@'\"]*:)[^\s'\"]+(?=@)", rf"\g<1>{HIDDEN}", text)
    return re.sub(r"([?&](?:password|passwd|pwd)=)[^\s'\"&]+", rf"\g<1>{HIDDEN}", text)
