"""Results as HTML for notebooks: a table, and the page in a frame without access to anything else."""

import math
from html import escape
from importlib.util import find_spec

from headwise.page.columns import Columns
from headwise.page.contents import Contents
from headwise.page.write import page_html
from headwise.wording import counted

SHOWN_ROWS = 12
"""Number of rows of the table."""

SHOWN_STATISTICS = 8
"""Number of columns of numbers."""

LARGEST_PAGE = 4_000_000
"""Number of characters of a page above which a notebook shows the table alone."""

FRAME_HEIGHT = 760
"""Height of the frame, in pixels."""


def notebook_html(caption: str, columns: Columns, contents: Contents) -> str:
    """Return the first rows of columns as an HTML table, followed by the page with `contents` in a sandboxed frame. A
    page that is large, or that cannot be written because jinja2 is missing, is replaced by a sentence.

    The frame contains the whole page as text, so it needs no server and no network.
    """
    table = _table(caption, columns)
    if find_spec("jinja2") is None:
        return table + "<p>To show the page of these heads, install jinja2.</p>"
    page = page_html(contents)
    if len(page) > LARGEST_PAGE:
        size = f"{len(page) / 1e6:.0f} MB"
        return table + f"<p>The page of these heads has {size}; headwise.write_page writes it to a file.</p>"
    return table + (
        f'<iframe title="{escape(caption)}" sandbox="allow-scripts allow-downloads" srcdoc="{escape(page)}" '
        f'style="width: 100%; height: {FRAME_HEIGHT}px; border: 1px solid #8888; border-radius: 6px"></iframe>'
    )


def _table(caption: str, columns: Columns) -> str:
    """Return the first rows of columns as an HTML table, with all text escaped."""
    has_roles = any(role is not None for role in columns.roles)
    statistics = columns.statistics[:SHOWN_STATISTICS]
    names = ["head", *(["role"] if has_roles else []), *(statistic.name for statistic in statistics)]
    lines = []
    for index, head in enumerate(columns.page_heads()[:SHOWN_ROWS]):
        numbers = [_number(value) for value in columns.estimates.means[: len(statistics), index].tolist()]
        labels = [head.name, *([head.role or ""] if has_roles else [])]
        text = "".join(f'<td style="text-align: left">{escape(label)}</td>' for label in labels)
        lines.append(text + "".join(f'<td style="text-align: right">{number}</td>' for number in numbers))
    hidden = [
        counted(count, noun)
        for count, noun in (
            (len(columns.places) - SHOWN_ROWS, "more row"),
            (len(columns.statistics) - SHOWN_STATISTICS, "more column"),
        )
        if count > 0
    ]
    more = f"<p>{' and '.join(hidden)} in the result's table().</p>" if hidden else ""
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead>"
        f"<tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>{more}"
    )


def _number(value: float) -> str:
    """Return a number with two decimals, or with two significant digits if it is small; empty for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"
