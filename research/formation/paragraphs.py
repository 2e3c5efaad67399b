"""Paragraphs and lists of a page, in lines of limited length."""

import textwrap


def wrap(text: str) -> str:
    """Return paragraphs and lists in lines of at most 120 characters."""
    return "\n\n".join(_wrapped(paragraph) for paragraph in text.split("\n\n"))


def _wrapped(paragraph: str) -> str:
    """Return one paragraph, or a list, in lines of at most 120 characters."""
    if not paragraph.startswith("- "):
        return textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False)
    items = paragraph.removeprefix("- ").split("\n- ")
    return "\n".join(
        textwrap.fill(" ".join(item.split()), 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for item in items
    )
