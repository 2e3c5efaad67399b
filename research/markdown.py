"""Markdown of the reports: tables and pictures."""

from collections.abc import Sequence


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table, and an empty line after it."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [*(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def picture(file: str, description: str) -> list[str]:
    """Return the line that shows a picture of docs/pictures in a report, and an empty line after it."""
    return [f"![{description}](../pictures/{file}.png)", ""]
