"""Write the table of statistics in docs/watch.md.

python -m research.tables.statistics
"""

from pathlib import Path

from headwise.statistics.registry import STATISTICS, Statistic
from research.markdown import markdown_table

PAGE = Path(__file__).parent.parent.parent / "docs" / "watch.md"

HEADERS = ("statistic", "definition", "unit")


def row(statistic: Statistic) -> tuple[str, ...]:
    """Return the cells of a statistic in the table."""
    return f"`{statistic.name}`", statistic.definition, statistic.unit


def page_with_table(text: str) -> str:
    """Return the text of the page with a row for every statistic in its table."""
    lines = markdown_table(HEADERS, [row(statistic) for statistic in STATISTICS.values()])
    before, _, rest = text.partition(lines[0])
    return before + "\n".join([*lines, ""]) + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
