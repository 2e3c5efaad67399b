"""Grid of the roles of heads: layers down and heads across, coloured by role."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.errors import require
from headwise.plots.canvas import axes_for, put_legend_right, require_finite, set_title
from headwise.plots.heatmap import heatmap_size, label_head_grid
from headwise.plots.role_colours import in_legend_order, role_style
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MARKERS = 450
"""Largest number of heads whose cells have a marker."""


def draw_role_grid(roles: Mapping[tuple[int, int], str], *, title: str = "", ax: Any = None) -> "Axes":
    """Draw the role of every head as a coloured cell, with layers down and heads across, and return the axes. The
    legend has the number of heads of each role. In models with up to 450 heads, each cell also has the marker of its
    role.

    Args:
        roles: name of each head's role by `(layer, head)`, zero-based.
        title: title of the plot, such as the model.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_role_grid({(0, 0): "induction", (0, 1): "mixed"})  # doctest: +SKIP
    """
    require_finite("role", [0.0] * len(roles))
    layers, heads = sorted({layer for layer, _ in roles}), 1 + max(head for _, head in roles)
    row_of = {layer: row for row, layer in enumerate(layers)}
    width, height = heatmap_size(len(layers), heads)
    axes = axes_for(ax, width + 1.2, height)
    colours = require("matplotlib.colors", purpose="a plot", extra="plot")
    lines = require("matplotlib.lines", purpose="a plot", extra="plot")
    cells = [[(1.0, 1.0, 1.0) for _ in range(heads)] for _ in layers]
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
    label_head_grid(axes, layers, heads)
    put_legend_right(axes, handles)
    set_title(axes, f"roles of {counted(len(roles), 'head')}", title)
    return axes
