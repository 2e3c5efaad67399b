"""Pages that commands write in addition to their output."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headwise as hw
from headwise.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from headwise.runs.head_table import HeadTable


def require_writable_page(html: Path | None) -> None:
    """Raise `InputError` if no page can be written to the path `html`; do nothing if it is None."""
    if html is None:
        return
    from headwise.page.write import require_jinja

    require_jinja()
    if html.is_dir() or not html.parent.is_dir() or not os.access(html if html.exists() else html.parent, os.W_OK):
        raise InputError("html", expected="a file in an existing, writable folder", got=repr(str(html)))


def write_example_page(
    html: Path | None,
    table: "HeadTable[Any]",
    model: "nn.Module",
    texts: "hw.Texts",
    title: str,
    statistic: str | None = None,
) -> None:
    """Write a page to the path `html` with a table of heads, and the attention of these heads on some of the texts; do
    nothing if `html` is None. The page opens on `statistic`, by default as `write_page` states.
    """
    if html is not None:
        hw.write_page(html, hw.view_examples(model, texts, title=title), table, statistic=statistic)
