"""Matrices of numbers: one number per head with layers down and heads across, and the similarity of every two heads."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.plots.canvas import (
    BLANK,
    DIVERGING,
    SEQUENTIAL,
    SOFT,
    add_colour_bar,
    axes_for,
    explain_blank,
    finite,
    label_ticks,
    require_finite,
    separate_cells,
    set_title,
)
from headwise.shapes import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_heatmap(
    values: Mapping[tuple[int, int], float],
    *,
    statistic: str,
    label: str | None = None,
    title: str = "",
    centred: bool = False,
    ax: Any = None,
) -> "Axes":
    """Draw a heat map of one number per head, with layers down and heads across, and return the axes. Cells without a
    head are grey. A head whose number is NaN or infinite is a grey cell with a cross. If there are such heads, or all
    numbers are equal, a line below the map says so.

    Args:
        values: the number of each head by `(layer, head)`, zero-based.
        statistic: name of the numbers.
        label: label of the colour bar; the name of the numbers by default.
        title: title after the name, such as that of the model.
        centred: use colours around 0, for effects and differences; they are also used if a number is negative.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_heatmap({(0, 0): 0.5, (0, 1): 1.5}, statistic="entropy").figure.savefig("x.svg")  # doctest: +SKIP
    """
    require_finite(statistic, list(values.values()))
    layers = sorted({layer for layer, _ in values})
    heads = 1 + max(head for _, head in values)
    matrix = [[values.get((layer, head), math.nan) for head in range(heads)] for layer in layers]
    axes = axes_for(ax, *heatmap_size(len(layers), heads))
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", **colour_scale(values.values(), centred))
    axes.set_facecolor(BLANK)
    undefined = [(head, layers.index(layer)) for (layer, head), value in values.items() if not math.isfinite(value)]
    if undefined:
        columns, rows = zip(*undefined, strict=True)
        axes.scatter(columns, rows, marker="x", s=14, linewidths=0.8, color=SOFT)
    label_head_grid(axes, layers, heads)
    explain_blank(axes, list(values.values()))
    set_title(axes, statistic, title)
    add_colour_bar(axes, image, label or statistic)
    return axes


def draw_similarity(
    values: Float[Tensor, "heads heads"],
    layers: Sequence[int],
    *,
    measure: str,
    title: str = "",
    centred: bool = False,
    ax: Any = None,
) -> "Axes":
    """Draw the similarity of every two heads as a matrix, and return the axes. Ticks stand at the first head of each
    layer. Pairs of heads that were not compared are grey.

    Args:
        values: similarity of every two heads; NaN for pairs that were not compared.
        layers: layer of each head, zero-based, in the order of the rows.
        measure: name of the measure of similarity.
        title: end of the title, such as the model.
        centred: use colours around 0; they are also used if a number is negative.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there is no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_similarity(torch.eye(4), [0, 0, 1, 1], measure="cka")  # doctest: +SKIP
    """
    numbers = values.flatten().tolist()
    require_finite(measure, numbers)
    side = min(3.2 + 0.04 * len(layers), 9.0)
    axes = axes_for(ax, side + 0.9, side)
    image = axes.imshow(values.tolist(), interpolation="nearest", **colour_scale(numbers, centred))
    axes.set_facecolor(BLANK)
    first_heads = [index for index in range(len(layers)) if not index or layers[index] != layers[index - 1]]
    labels = [str(layers[index]) for index in first_heads]
    axes.set_xticks(first_heads, labels)
    axes.set_yticks(first_heads, labels)
    axes.set(xlabel="layer", ylabel="layer")
    explain_blank(axes, numbers, "pair")
    axes.tick_params(labelsize=7)
    axes.spines[:].set_visible(False)
    add_colour_bar(axes, image, measure)
    set_title(axes, measure, title)
    return axes


def heatmap_size(layers: int, heads: int) -> tuple[float, float]:
    """Return width and height in inches of a figure with a cell for each head."""
    return min(max(1.9 + 0.31 * heads, 3.8), 12.0), min(max(1.1 + 0.25 * layers, 2.4), 10.0)


def label_head_grid(axes: "Axes", layers: list[int], heads: int) -> None:
    """Label the axes of a picture with layers down and heads across, and separate its cells."""
    axes.set(xlabel="head", ylabel="layer")
    label_ticks(axes, "x", [str(head) for head in range(heads)])
    label_ticks(axes, "y", [str(layer) for layer in layers])
    separate_cells(axes, len(layers), heads)


def colour_scale(values: Iterable[float], centred: bool) -> dict[str, Any]:
    """Return the colour map of numbers and its limits, as arguments of matplotlib: a sequential map from the smallest
    to the largest number, or, with `centred` or negative numbers, a diverging map with 0 in the middle.
    """
    shown = finite(values)
    if centred or min(shown) < 0:
        limit = max(abs(value) for value in shown) or 1.0
        return {"cmap": DIVERGING, "vmin": -limit, "vmax": limit}
    return {"cmap": SEQUENTIAL, "vmin": min(shown), "vmax": max(shown)}
