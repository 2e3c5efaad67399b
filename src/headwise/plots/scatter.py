"""Scatter plot of two numbers: one point per head, coloured and marked by role, or coloured by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.plots.canvas import (
    INK,
    SOFT,
    add_colour_bar,
    axes_for,
    layer_colours,
    put_legend_right,
    require_finite,
    set_title,
    without_upper_frame,
)
from headwise.plots.role_colours import in_legend_order, role_style
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class PlottedNumbers:
    """Numbers along one axis of a plot.

    Attributes:
        statistic: name of the numbers.
        values: number of each head.
        sems: standard error of each number, NaN where there is none; empty if there are none.
        label: label of the axis; the name of the numbers by default.
    """

    statistic: str
    values: Sequence[float]
    sems: Sequence[float] = ()
    label: str | None = None

    def bars(self, errors: float) -> list[float]:
        """Return half the length of each error bar, `errors` standard errors; 0 where there is no standard error, and
        an empty list if there are no standard errors at all.
        """
        bars = [errors * sem if math.isfinite(sem) else 0.0 for sem in self.sems]
        return bars if any(bars) else []

    def axis_label(self, errors: float) -> str:
        """Return the label of the axis, with the length of error bars of `errors` standard errors if there are any."""
        label = self.label or self.statistic
        unit = "standard error" if errors == 1 else "standard errors"
        return f"{label}\nbars: ±{errors:g} {unit}" if self.bars(errors) else label


def draw_scatter(
    x: PlottedNumbers,
    y: PlottedNumbers,
    *,
    heads: Sequence[tuple[int, int]],
    roles: Sequence[str] | None = None,
    title: str = "",
    errors: float = 0.0,
    top: int = 0,
    named_by: Sequence[float] | None = None,
    with_diagonal: bool = False,
    ax: Any = None,
) -> "Axes":
    """Draw one point per head, with one number along each axis, and return the axes. Points are coloured and marked by
    role, or coloured by layer if there are no roles. Heads with a NaN or infinite number are left out.

    Args:
        x: numbers along the x-axis, in their own units.
        y: numbers of the same heads along the y-axis.
        heads: each head's `(layer, head)`, zero-based.
        roles: name of each head's role.
        title: title after the number of heads.
        errors: length of the error bars to each side, in standard errors; 0 draws none.
        top: number of heads that are named, those with the largest absolute number in `named_by`.
        named_by: a number of each head; `y` by default.
        with_diagonal: draw the line on which both numbers are equal.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: no head has two finite numbers, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> x, y = PlottedNumbers("entropy", [1.0, 2.0]), PlottedNumbers("distance", [3.0, 9.0])
        >>> draw_scatter(x, y, heads=[(0, 0), (0, 1)], roles=["mixed", "broad"])  # doctest: +SKIP
    """
    pairs = [a + b for a, b in zip(x.values, y.values, strict=True)]
    require_finite(f"{y.statistic} against {x.statistic}", pairs)
    shown = [index for index, pair in enumerate(pairs) if math.isfinite(pair)]
    axes = axes_for(ax, 6.4 if roles is not None else 5.6, 4.2)
    if with_diagonal:
        axes.axline((0.0, 0.0), slope=1.0, linewidth=0.8, color=SOFT, linestyle="--", zorder=0)
    _draw_error_bars(axes, x, y, shown, errors)
    if roles is None:
        _draw_by_layer(axes, x, y, heads, shown)
    else:
        _draw_by_role(axes, x, y, roles, shown)
    sizes = y.values if named_by is None else named_by
    for index in sorted(shown, key=lambda index: -abs(sizes[index]))[:top]:
        name, place = "{}.{}".format(*heads[index]), (x.values[index], y.values[index])
        axes.annotate(name, place, (4, 3), textcoords="offset points", fontsize=7, color=INK)
    axes.set_xlabel(x.axis_label(errors), parse_math=False)
    axes.set_ylabel(y.axis_label(errors), parse_math=False)
    without_upper_frame(axes)
    set_title(axes, counted(len(shown), "head"), title)
    return axes


def _draw_error_bars(axes: "Axes", x: PlottedNumbers, y: PlottedNumbers, shown: list[int], errors: float) -> None:
    """Draw error bars of `errors` standard errors along both axes, for the heads with the indices `shown`."""
    bars: dict[str, Any] = {
        name: [of_all[index] for index in shown] for name, of_all in _bars_by_axis(x, y, errors).items()
    }
    if bars:
        x_values, y_values = ([numbers.values[index] for index in shown] for numbers in (x, y))
        axes.errorbar(x_values, y_values, **bars, fmt="none", elinewidth=0.6, ecolor="0.7", zorder=1)


def _bars_by_axis(x: PlottedNumbers, y: PlottedNumbers, errors: float) -> dict[str, list[float]]:
    """Return half the lengths of the error bars along each axis that has any, by the name of matplotlib's argument."""
    by_axis = {"xerr": x.bars(errors), "yerr": y.bars(errors)}
    return {name: bars for name, bars in by_axis.items() if bars}


def _draw_by_role(axes: "Axes", x: PlottedNumbers, y: PlottedNumbers, roles: Sequence[str], shown: list[int]) -> None:
    """Draw the heads with the indices `shown` as points with the colours and markers of their roles, and a legend with
    the number of heads of each role.
    """
    for role in in_legend_order(roles[index] for index in shown):
        members, style = [index for index in shown if roles[index] == role], role_style(role)
        axes.scatter(
            [x.values[index] for index in members],
            [y.values[index] for index in members],
            s=34,
            marker=style.marker,
            color=style.colour,
            edgecolors="white",
            linewidths=0.4,
            label=f"{role} ({len(members)})",
            zorder=2,
        )
    put_legend_right(axes)


def _draw_by_layer(
    axes: "Axes", x: PlottedNumbers, y: PlottedNumbers, heads: Sequence[tuple[int, int]], shown: list[int]
) -> None:
    """Draw the heads with the indices `shown` as points with colours by layer, and a colour bar of layers."""
    layers = [heads[index][0] for index in shown]
    x_values, y_values = ([numbers.values[index] for index in shown] for numbers in (x, y))
    options: dict[str, Any] = {"cmap": layer_colours(), "s": 22, "edgecolors": "white", "linewidths": 0.4, "zorder": 2}
    points = axes.scatter(x_values, y_values, c=layers, vmin=min(layers), vmax=max(layers), **options)
    if len(set(layers)) > 1:
        add_colour_bar(axes, points, "layer")
