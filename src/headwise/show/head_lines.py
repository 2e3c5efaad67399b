"""Figure of selected heads of a view: lines from each word to the words it attends to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.analysis.view_result import View
from headwise.errors import require
from headwise.show.html import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_WEIGHT = 0.03
"""Weights below this are not drawn."""


def plot_heads(view: View, heads: Sequence[tuple[int, int]]) -> "Figure":
    """Return a matplotlib figure with one panel for each `(layer, head)` in `heads`. A panel shows the words of the
    view's text in two columns, with lines from each word to the words it attends to most. Width and opacity of a line
    show the attention weight.

    Raises:
        InputError: the view does not contain a head.
        MissingExtra: matplotlib is not installed.
    """
    matplotlib_figure = require("matplotlib.figure", purpose="drawing heads", extra="plot")
    figure: Figure = matplotlib_figure.Figure(
        figsize=(2.9 * len(heads), 0.27 * len(view.words) + 0.9), layout="constrained"
    )
    for axes, (layer, head) in zip(figure.subplots(1, len(heads), squeeze=False)[0], heads, strict=True):
        _plot_head(axes, view, layer, head)
    return figure


def _plot_head(axes: "Axes", view: View, layer: int, head: int) -> None:
    """Draw one head of a view on `axes`: the words as queries on the left and as keys on the right, and lines from each
    query to the keys with its largest attention weights. Weights below 0.03 are not drawn.
    """
    shown = view.head(layer, head)
    colour = COLOURS[shown.role.name]
    axes.set_title(f"{layer}.{head}  {view.role_title(shown.role)}", fontsize=10, color=colour, fontweight="bold")
    axes.set_xlim(-0.75, 1.75)
    axes.set_ylim(len(view.words) - 0.4, -0.6)
    axes.axis("off")
    for query, word in enumerate(view.words):
        shade = "#667085" if word.special else "#1d2330"
        axes.text(-0.06, query, word.text, ha="right", va="center", fontsize=9, color=shade)
        axes.text(1.06, query, word.text, ha="left", va="center", fontsize=9, color=shade)
        top = zip(shown.top_keys[query].tolist(), shown.top_weights[query].tolist(), strict=True)
        for key, weight in top:
            if weight >= MIN_WEIGHT:
                axes.plot([0, 1], [query, key], color=colour, linewidth=0.4 + 2.2 * weight, alpha=min(1.0, weight))
