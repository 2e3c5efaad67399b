"""Heads as a grid of layers and heads: a number of each head, its role, and the similarity of every two heads.

Roles have colours and markers that readers with any colour vision can distinguish. The colours are near those of the
schemes of Paul Tol (2021, "Colour schemes", SRON/EPS/TN/09-002) and of Okabe and Ito (2008), and darker where these are
pale on white. A test simulates deficiencies of colour vision and measures how much the colours differ, and their
contrast to white. Markers repeat what colours show.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from headwise.errors import require
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
    put_legend_right,
    require_finite,
    separate_cells,
    set_title,
    without_upper_frame,
)
from headwise.shapes import Float
from headwise.wording import counted

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
    """Draw a heat map of one number per head `(layer, head)`, with a row for each layer and a column for each head
    index. A cell without a head is grey; a head with a NaN or infinite number is a grey cell with a cross. `label` is
    the text of the colour bar, by default the name of the statistic.
    """
    require_finite(statistic, list(values.values()))
    axes, row_of, heads = _axes_of_heads(values, ax)
    matrix = [[values.get((layer, head), math.nan) for head in range(heads)] for layer in row_of]
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", **colour_scale(values.values(), centred))
    axes.set_facecolor(BLANK)
    undefined = [(head, row_of[layer]) for (layer, head), value in values.items() if not math.isfinite(value)]
    if undefined:
        columns, rows = zip(*undefined, strict=True)
        axes.scatter(columns, rows, marker="x", s=14, linewidths=0.8, color=SOFT)
    _label_cells(axes, row_of, heads)
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
    """Draw a matrix with the similarity of every two heads. `layers` has the layer of each head; ticks are at the first
    head of each layer. Pairs that were not compared have the value NaN, and are grey.
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


def _axes_of_heads(
    places: Collection[tuple[int, int]], ax: Any, further_width: float = 0.0
) -> tuple["Axes", dict[int, int], int]:
    """Return axes for a picture with one cell per head. Return also the row of each layer, and the number of columns.
    `places` are the heads `(layer, head)`.
    """
    row_of = {layer: row for row, layer in enumerate(sorted({layer for layer, _ in places}))}
    heads = 1 + max(head for _, head in places)
    width, height = min(max(1.9 + 0.31 * heads, 3.8), 12.0), min(max(1.1 + 0.25 * len(row_of), 2.4), 10.0)
    return axes_for(ax, width + further_width, height), row_of, heads


def _label_cells(axes: "Axes", layers: Collection[int], heads: int) -> None:
    """Label the axes of a picture with one cell per head, where each row is a layer, and draw lines between the
    cells.
    """
    axes.set(xlabel="head", ylabel="layer")
    label_ticks(axes, "x", [str(head) for head in range(heads)])
    label_ticks(axes, "y", [str(layer) for layer in layers])
    separate_cells(axes, len(layers), heads)


def colour_scale(values: Iterable[float], centred: bool) -> dict[str, Any]:
    """Return a colour map and its limits for some numbers. The map diverges around 0 if `centred` is True or a number
    is negative.
    """
    shown = finite(values)
    if centred or min(shown) < 0:
        limit = max(abs(value) for value in shown) or 1.0
        return {"cmap": DIVERGING, "vmin": -limit, "vmax": limit}
    return {"cmap": SEQUENTIAL, "vmin": min(shown), "vmax": max(shown)}


class RoleStyle(NamedTuple):
    """Style of a role (name for what a head attends to) in plots: a colour `#rrggbb`, a matplotlib marker, and the
    similar colour of terminals.
    """

    colour: str
    marker: str
    terminal: str


ROLE_STYLES = {
    "previous token": RoleStyle("#332288", "<", "cyan"),
    "next token": RoleStyle("#2d8ddf", ">", "blue"),
    "induction": RoleStyle("#bc7200", "^", "magenta"),
    "duplicate token": RoleStyle("#9c4294", "D", "bright_magenta"),
    "same token": RoleStyle("#000000", "v", "green"),
    "mixed": RoleStyle("#74797c", "o", "yellow"),
    "broad": RoleStyle("#7a4e00", "h", "white"),
    "sink on the first token": RoleStyle("#17421a", "s", "bright_black"),
    "sink on special tokens": RoleStyle("#6a9f52", "P", "bright_black"),
}
"""Colours and marker of each role by the role's name, in the order of legends."""

UNKNOWN_ROLE = RoleStyle("#424242", "X", "white")
"""Style of a role with a name that is not in `ROLE_STYLES`."""

MOST_MARKERS = 450
"""Largest number of heads whose cells have a marker."""


def role_style(role: str) -> RoleStyle:
    """Return the colours and the marker of a role (name for what a head attends to); an unknown role is grey."""
    return ROLE_STYLES.get(role, UNKNOWN_ROLE)


def in_legend_order(roles: Iterable[str]) -> list[str]:
    """Return the different role names in the order of plot legends: known roles first, then others by alphabet."""
    distinct = set(roles)
    return [role for role in ROLE_STYLES if role in distinct] + sorted(distinct - ROLE_STYLES.keys())


def draw_role_grid(roles: Mapping[tuple[int, int], str], *, title: str = "", ax: Any = None) -> "Axes":
    """Draw the role of every head `(layer, head)` as a coloured cell, with a row for each layer and a column for each
    head index. With up to 450 heads, each cell also has the marker of its role. The legend states the number of heads
    of each role.
    """
    require_finite("role", [0.0] * len(roles))
    axes, row_of, heads = _axes_of_heads(roles, ax, 1.2)
    colours = require("matplotlib.colors", purpose="a plot", extra="plot")
    lines = require("matplotlib.lines", purpose="a plot", extra="plot")
    cells = [[(1.0, 1.0, 1.0) for _ in range(heads)] for _ in row_of]
    for (layer, head), role in roles.items():
        cells[row_of[layer]][head] = colours.to_rgb(role_style(role).colour)
    axes.imshow(cells, aspect="auto", interpolation="nearest")
    handles = []
    for role in in_legend_order(roles.values()):
        style, members = role_style(role), [place for place, of_head in roles.items() if of_head == role]
        if len(roles) <= MOST_MARKERS:
            x, y = [head for _, head in members], [row_of[layer] for layer, _ in members]
            axes.scatter(x, y, marker=style.marker, s=15, color="white", alpha=0.75, linewidths=0)
        label = f"{role} ({len(members)})"
        handles.append(lines.Line2D([], [], linestyle="", marker=style.marker, color=style.colour, label=label))
    _label_cells(axes, row_of, heads)
    put_legend_right(axes, handles)
    set_title(axes, f"roles of {counted(len(roles), 'head')}", title)
    return axes


def draw_role_counts(roles: Mapping[tuple[int, int], str], *, title: str = "", ax: Any = None) -> "Axes":
    """Draw one bar per layer, divided by role: each part shows the number of heads with this role. `roles` has the role
    of each head `(layer, head)`. The legend states the number of heads of each role in the whole model.
    """
    require_finite("role", [0.0] * len(roles))
    layers = sorted({layer for layer, _ in roles})
    axes = axes_for(ax, min(max(3.4 + 0.24 * len(layers), 4.6), 12.0), 3.2)
    below = [0] * len(layers)
    for role in in_legend_order(roles.values()):
        heights = [sum(of_head == role for (at, _), of_head in roles.items() if at == layer) for layer in layers]
        style: dict[str, Any] = {"color": role_style(role).colour, "edgecolor": "white", "linewidth": 0.5}
        axes.bar(range(len(layers)), heights, 0.9, bottom=below, label=f"{role} ({sum(heights)})", **style)
        below = [bottom + height for bottom, height in zip(below, heights, strict=True)]
    axes.set(xlabel="layer", ylabel="heads", xlim=(-0.6, len(layers) - 0.4))
    axes.locator_params(axis="y", integer=True)
    without_upper_frame(axes)
    label_ticks(axes, "x", [str(layer) for layer in layers])
    put_legend_right(axes, reverse=True)
    set_title(axes, f"roles of {counted(len(roles), 'head')}", title)
    return axes
