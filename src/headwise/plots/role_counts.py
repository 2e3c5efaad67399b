"""Stacked bars: the number of heads of each role in every layer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.plots.canvas import (
    axes_for,
    label_ticks,
    put_legend_right,
    require_finite,
    set_title,
    without_upper_frame,
)
from headwise.plots.role_colours import in_legend_order, role_style
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
