"""Removal of passwords from texts that are printed or saved."""

import re

HIDDEN = "***"
"""Text that takes the place of a password."""

PASSWORDS = re.compile(r"(?P<before>://[^\s/:@'\"]*:)[^\s'\"]+(?=@)|(?P<name>[?&](?:password|passwd|pwd)=)[^\s'\"&]+")
"""A password in a URL, as in `postgresql://user:secret@host` or `postgresql://host?password=secret`. A password may
contain `@`: it ends at the last `@` before a blank or quote."""


def without_passwords(text: str) -> str:
    """Return a text in which the password of every URL, such as `postgresql://user:secret@host`, is replaced by
    `***`.
    """
    return PASSWORDS.sub(lambda match: (match["before"] or match["name"]) + HIDDEN, text)


def without_passwords_of(url: str, text: str) -> str:
    """Return a text in which the passwords in `url`, and their parts between `@`, are replaced by `***` wherever they
    occur.
    """
    for match in PASSWORDS.finditer(url):
        password = match[0].removeprefix(match["before"] or match["name"])
        for part in sorted({password, *password.split("@")} - {""}, key=len, reverse=True):
            text = text.replace(part, HIDDEN)
    return text
