"""Lines between words: for some heads, each word and the words that it attends to most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.errors import InputError
from headwise.plots.canvas import INK, SOFT, axes_for
from headwise.shapes import Float, Int
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_WEIGHT = 0.03
"""Weights below this are not drawn."""

PANEL_WIDTH = 2.7
"""Distance between the panels of two heads, in units of the distance between the two columns of words."""


@dataclass(frozen=True)
class HeadLines:
    """Strongest attention weights of one head between words.

    Attributes:
        title: text above the words, such as the name of the head.
        colour: colour of the lines.
        queries: words that the head attends from.
        keys: words that the head attends to.
        top_keys: indices of the words that each word attends to most.
        top_weights: attention weights of these words, from 0 to 1.
        special: True for each special token among the queries; their words are written in grey.
    """

    title: str
    colour: str
    queries: Sequence[str]
    keys: Sequence[str]
    top_keys: Int[Tensor, "queries top"]
    top_weights: Float[Tensor, "queries top"]
    special: Sequence[bool] = ()


def draw_word_lines(heads: Sequence[HeadLines], *, ax: Any = None) -> "Axes":
    """Draw a panel for each head, next to each other on the same axes, and return the axes. A panel shows the words in
    two columns, as queries on the left and as keys on the right, with lines from each word to the words that it attends
    to most. Width and opacity of a line show the attention weight; weights below 0.03 are not drawn.

    Args:
        heads: the heads.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, the numbers of words differ, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> words = ["hello", "world"]
        >>> lines = HeadLines("0.0", "#0072b2", words, words, torch.tensor([[0], [0]]), torch.ones(2, 1))
        >>> draw_word_lines([lines])  # doctest: +SKIP
    """
    if not heads:
        raise InputError("heads", expected="at least one head to plot", got="none")
    for head in heads:
        if len(head.top_keys) != len(head.queries):
            expected = f"{counted(len(head.top_keys), 'word')}, as in the weights"
            raise InputError("queries", expected=expected, got=len(head.queries))
    lines = max(len(words) for head in heads for words in (head.queries, head.keys))
    axes = axes_for(ax, PANEL_WIDTH * 1.15 * len(heads), 0.27 * lines + 0.7)
    for index, head in enumerate(heads):
        _draw_panel(axes, head, index * PANEL_WIDTH)
    axes.set_xlim(-0.85, PANEL_WIDTH * (len(heads) - 1) + 1.85)
    axes.set_ylim(lines - 0.4, -1.6)
    axes.axis("off")
    return axes


def _draw_panel(axes: "Axes", head: HeadLines, left: float) -> None:
    """Draw the words and lines of one head, with its queries at the x-coordinate `left` and its keys 1 to the right."""
    axes.plot(left + 0.02, -1.15, "s", color=head.colour, markersize=6)
    title: dict[str, Any] = {"fontsize": 10, "fontweight": "bold", "color": INK, "va": "center", "parse_math": False}
    axes.text(left + 0.13, -1.13, head.title, ha="left", **title)
    special = {word for word, is_special in zip(head.queries, head.special, strict=False) if is_special}
    for x, words, side in ((left - 0.06, head.queries, "right"), (left + 1.06, head.keys, "left")):
        for row, word in enumerate(words):
            colour = SOFT if word in special else INK
            axes.text(x, row, word, ha=side, va="center", fontsize=9, color=colour, parse_math=False)
    for query in range(len(head.queries)):
        for key, weight in zip(head.top_keys[query].tolist(), head.top_weights[query].tolist(), strict=True):
            if weight >= MIN_WEIGHT:
                style: dict[str, Any] = {
                    "color": head.colour,
                    "alpha": min(1.0, 0.3 + weight),
                    "solid_capstyle": "round",
                }
                axes.plot([left, left + 1], [query, key], linewidth=0.4 + 2.2 * weight, **style)
