"""Markdown of the reports: tables, pictures, and paragraphs in lines of limited length."""

import textwrap
from collections.abc import Sequence


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table, and an empty line after it."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [*(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def picture(file: str, description: str) -> list[str]:
    """Return the line that shows a picture of docs/pictures in a report, and an empty line after it."""
    return [f"![{description}](../pictures/{file}.png)", ""]


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
