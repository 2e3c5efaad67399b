"""View of a text as one HTML file that works offline: a heatmap of every head, and the links of each word."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.roles import ROLES
from headwise.analysis.view_result import HeadView, View
from headwise.errors import require

COLOURS = dict(
    zip(
        (role.name for role in ROLES),
        ("#0b7285", "#1c5fd0", "#a61e8f", "#c2255c", "#2b8a3e", "#b35c00", "#5f5a86", "#6b7280", "#7d6b5a"),
        strict=True,
    )
)
"""A colour for each role, dark enough for text on white."""

MAX_WORDS = 1024
"""Largest number of words whose links are drawn; heatmaps and statistics cover longer texts too."""

LINKS = 6
"""Number of links listed for a head."""

NUMBERS = (
    "entropy",
    "confidence",
    "distance",
    "self",
    "previous",
    "next",
    "first",
    "special",
    "duplicate",
    "induction",
)


def write_page(view: View, path: Path) -> None:
    """Write a view (the attention of every head on one text) to `path` as an interactive HTML page that works offline.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    require_jinja()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("headwise", "show")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    page = environment.get_template("page.html.jinja").render(title=view.title, text=view.text, data=page_data(view))
    path.write_text(page, encoding="utf-8")


def require_jinja() -> None:
    """Raise `MissingExtra` if jinja2, which is needed to write a page, is not installed."""
    require("jinja2", purpose="writing a page", extra="plot")


def page_data(view: View) -> dict[str, Any]:
    """Return the words, roles and heads of a view as JSON values for the HTML page. Words, and the keys that each of
    them attends to most, are included for the first 1024 words only. These keys, their attention weights and a small
    picture of all weights of each head are base64-encoded integers.
    """
    shown = [role for role in ROLES if any(head.role is role for head in view.heads)]
    return {
        "words": [{"text": word.text, "special": word.special} for word in view.words[:MAX_WORDS]],
        "wordCount": len(view.words),
        "tokens": view.tokens,
        "roles": [
            {"name": role.name, "title": view.role_title(role), "rule": role.rule, "colour": COLOURS[role.name]}
            for role in shown
        ],
        "heads": [_head_data(view, head) for head in view.heads],
    }


def _head_data(view: View, head: HeadView) -> dict[str, Any]:
    """Return the data of one head of a view as JSON values for the HTML page: layer, head and role, mean statistics
    (without NaN), strongest links between words, attention weights pooled to a small picture, and the strongest keys of
    the first 1024 words with their weights.
    """
    keys, weights = head.top_keys[:MAX_WORDS], head.top_weights[:MAX_WORDS]
    return {
        "layer": head.layer,
        "head": head.head,
        "role": head.role.name,
        # A statistic without valid rows is NaN, which JSON cannot represent.
        "means": {name: round(mean, 4) for name in NUMBERS if (mean := head.means[name]) == mean},
        "links": [
            {
                "query": view.words[link.query].text,
                "key": view.words[link.key].text,
                "weight": round(link.weight, 4),
                "back": None if link.back is None else round(link.back, 4),
            }
            for link in view.strongest_links(head, LINKS)
        ],
        "side": head.picture.shape[0],
        "top": head.top_keys.shape[1],
        "picture": _encoded(head.picture * 255, torch.uint8),
        "keys": _encoded(keys, torch.uint16),
        "weights": _encoded(weights * 255, torch.uint8),
    }


def _encoded(values: Tensor, dtype: torch.dtype) -> str:
    """Return a tensor's values, rounded to the integer type `dtype`, as base64-encoded little-endian bytes."""
    array = values.round().to(dtype).contiguous()
    return b64encode(bytes(array.flatten().view(torch.uint8).tolist())).decode()
