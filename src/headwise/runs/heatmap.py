"""Heatmap of one number per head: layers down, heads across."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headwise.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_heatmap(values: Mapping[tuple[int, int], float], title: str) -> "Figure":
    """Draw a heatmap of one number per head, layers down and heads across, and return the matplotlib figure. `values`
    maps `(layer, head)` to the numbers; cells without a head stay blank.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    matplotlib_figure = require("matplotlib.figure", purpose="drawing heads", extra="plot")
    layers = sorted({layer for layer, _ in values})
    heads = 1 + max(head for _, head in values)
    matrix = [[values.get((layer, head), math.nan) for head in range(heads)] for layer in layers]
    size = (1.6 + 0.32 * heads, 1.2 + 0.24 * len(layers))
    figure: Figure = matplotlib_figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, aspect="auto")
    axes.set(title=title, xlabel="head", ylabel="layer")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.tick_params(labelsize=7)
    figure.colorbar(image)
    return figure
