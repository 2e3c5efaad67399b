"""Roles of heads as colours and markers, which readers with any colour vision can distinguish: a grid, and bars.

The colours are near those of the schemes of Paul Tol (2021, "Colour schemes", SRON/EPS/TN/09-002) and of Okabe and Ito
(2008), and darker where these are pale on white. A test simulates deficiencies of colour vision and measures how much
the colours differ, and their contrast to white. Markers repeat what colours show.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.errors import require
from headwise.plots.canvas import (
    axes_for,
    label_ticks,
    put_legend_right,
    require_finite,
    set_title,
    without_upper_frame,
)
from headwise.plots.matrices import heatmap_size, label_head_grid
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RoleStyle(NamedTuple):
    """Colour and marker by which plots show a role of heads.

    Attributes:
        colour: colour as `#rrggbb`.
        marker: name of a matplotlib marker, such as "o".
    """

    colour: str
    marker: str


ROLE_STYLES = {
    "previous token": RoleStyle("#332288", "<"),
    "next token": RoleStyle("#2d8ddf", ">"),
    "induction": RoleStyle("#bc7200", "^"),
    "duplicate token": RoleStyle("#9c4294", "D"),
    "same token": RoleStyle("#000000", "v"),
    "mixed": RoleStyle("#74797c", "o"),
    "broad": RoleStyle("#7a4e00", "h"),
    "sink on the first token": RoleStyle("#17421a", "s"),
    "sink on special tokens": RoleStyle("#6a9f52", "P"),
}
"""Colour and marker of each role by the role's name, in the order of legends."""

UNKNOWN_ROLE = RoleStyle("#424242", "X")
"""Style of a role with a name that is not in `ROLE_STYLES`."""

MOST_MARKERS = 450
"""Largest number of heads whose cells have a marker."""


def role_style(role: str) -> RoleStyle:
    """Return the colour and marker of a role by the role's name; grey for an unknown name.

    >>> role_style("induction")
    RoleStyle(colour='#bc7200', marker='^')
    """
    return ROLE_STYLES.get(role, UNKNOWN_ROLE)


def in_legend_order(roles: Iterable[str]) -> list[str]:
    """Return the different names in `roles` in the order of legends: roles that headwise assigns, then other names in
    alphabetical order.
    """
    distinct = set(roles)
    return [role for role in ROLE_STYLES if role in distinct] + sorted(distinct - ROLE_STYLES.keys())


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


def draw_role_counts(roles: Mapping[tuple[int, int], str], *, title: str = "", ax: Any = None) -> "Axes":
    """Draw one bar for each layer, stacked from the numbers of heads of each role, and return the axes. The legend has
    the number of heads of each role in the whole model.

    Args:
        roles: name of each head's role by `(layer, head)`, zero-based.
        title: title of the plot, such as the model.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_role_counts({(0, 0): "induction", (0, 1): "mixed"})  # doctest: +SKIP
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
