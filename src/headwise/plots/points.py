"""Points with error bars, one for each head: two numbers against each other, or one number in descending order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.checks import finite_number, whole_number
from headwise.errors import InputError
from headwise.plots.canvas import (
    INK,
    SOFT,
    add_colour_bar,
    axes_for,
    layer_scale,
    put_legend_right,
    require_finite,
    set_title,
    without_upper_frame,
)
from headwise.plots.grids import in_legend_order, role_style
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TICKS = 40
"""Largest number of heads of a ranking whose names are written along the x-axis."""

COLOUR, COLOUR_OF_NAMED = "#0072b2", "#b34700"
"""Colours of the points of a ranking, and of those that are named, with their names."""

NAMES_PER_LINE = 5
"""Number of names in one line of text."""


@dataclass(frozen=True)
class PlottedNumbers:
    """Numbers of all heads along one axis of a plot. A standard error is NaN where it is unknown; the list of standard
    errors is empty if all are unknown. By default, the label of the axis is the name of the statistic.

    Attributes:
        statistic: name of the numbers.
        values: number of each head.
        sems: standard error of each number, NaN where it is unknown; empty if all are.
        label: label of the axis; the name of the numbers by default.
    """

    statistic: str
    values: Sequence[float]
    sems: Sequence[float] = ()
    label: str | None = None

    def bars(self, errors: float) -> list[float]:
        """Return the lengths of error bars: `errors` times each standard error, or 0 where it is unknown. The list is
        empty if no bar has a length.
        """
        bars = [errors * sem if math.isfinite(sem) else 0.0 for sem in self.sems]
        return bars if any(bars) else []

    def axis_label(self, errors: float) -> str:
        """Return the label of the axis. If there are error bars, it also states their length, `errors` standard
        errors.
        """
        label = self.label or self.statistic
        unit = "standard error" if errors == 1 else "standard errors"
        return f"{label}\nbars: ±{errors:g} {unit}" if self.bars(errors) else label


def standard_errors(errors: Any) -> float:
    """Return the option `errors`, the length of error bars in standard errors, as a float. Raise `InputError` unless it
    is a finite number of 0 or more.
    """
    number = finite_number("errors", errors)
    if number < 0:
        raise InputError("errors", expected="a number of standard errors, 0 or more", got=repr(errors))
    return number


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
    """Draw one point for each head `(layer, head)`, at its numbers `x` and `y`, with error bars of `errors` standard
    errors. Points are coloured and marked by role, or coloured by layer if there are no roles. Heads with a NaN or
    infinite number are left out. Names are written at the `top` heads with the largest absolute number in `named_by`
    (by default `y`).
    """
    errors, top = standard_errors(errors), whole_number("top", top, least=0)
    pairs = [a + b for a, b in zip(x.values, y.values, strict=True)]
    require_finite(f"{y.statistic} against {x.statistic}", pairs)
    shown = [index for index, pair in enumerate(pairs) if math.isfinite(pair)]
    axes = axes_for(ax, 6.4 if roles is not None else 5.6, 4.2)
    if with_diagonal:
        axes.axline((0.0, 0.0), slope=1.0, linewidth=0.8, color=SOFT, linestyle="--", zorder=0)
    x_values, y_values = ([numbers.values[index] for index in shown] for numbers in (x, y))
    bars = {"xerr": x.bars(errors), "yerr": y.bars(errors)}
    lengths: dict[str, Any] = {name: [of_all[index] for index in shown] for name, of_all in bars.items() if of_all}
    if lengths:
        axes.errorbar(x_values, y_values, **lengths, fmt="none", elinewidth=0.6, ecolor="0.7", zorder=1)
    style: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.4, "zorder": 2}
    if roles is None:
        layers = [heads[index][0] for index in shown]
        scale = layer_scale(layers)
        points = axes.scatter(x_values, y_values, c=layers, s=22, cmap=scale.cmap, norm=scale.norm, **style)
        if len(set(layers)) > 1:
            add_colour_bar(axes, points, "layer")
    else:
        for role in in_legend_order(roles[index] for index in shown):
            members = [index for index in shown if roles[index] == role]
            x_values, y_values = ([numbers.values[index] for index in members] for numbers in (x, y))
            look = role_style(role)
            style |= {"marker": look.marker, "color": look.colour, "label": f"{role} ({len(members)})"}
            axes.scatter(x_values, y_values, s=34, **style)
        put_legend_right(axes)
    sizes = y.values if named_by is None else named_by
    for index in sorted(shown, key=lambda index: -abs(sizes[index]))[:top]:
        name, place = "{}.{}".format(*heads[index]), (x.values[index], y.values[index])
        axes.annotate(name, place, (4, 3), textcoords="offset points", fontsize=7, color=INK)
    axes.set_xlabel(x.axis_label(errors), parse_math=False)
    axes.set_ylabel(y.axis_label(errors), parse_math=False)
    without_upper_frame(axes)
    set_title(axes, counted(len(shown), "head"), title)
    return axes


def draw_ranking(
    numbers: PlottedNumbers,
    names: Sequence[str],
    *,
    title: str = "",
    noun: str = "head",
    errors: float = 1.96,
    top: int = 10,
    ax: Any = None,
) -> "Axes":
    """Draw one number per head in descending order, with error bars of `errors` standard errors. Heads with a NaN or
    infinite number are left out, and counted in the title. Up to 40 heads are named along the x-axis. If there are
    more, only the first `top` are named, in a list. `noun` is the singular of what is ranked, by default "head".
    """
    errors, top = standard_errors(errors), whole_number("top", top, least=0)
    require_finite(numbers.statistic, numbers.values)
    order = sorted(
        (index for index, value in enumerate(numbers.values) if math.isfinite(value)),
        key=lambda index: -numbers.values[index],
    )
    values, bars = [numbers.values[index] for index in order], numbers.bars(errors)
    ranks, names = range(1, len(order) + 1), [names[index] for index in order]
    axes = axes_for(ax, min(max(2.0 + 0.16 * len(order), 4.8), 7.4), 3.6)
    axes.axhline(0.0, color=SOFT, linewidth=0.8, zorder=0)
    lengths = [bars[index] for index in order] if bars else None
    style: dict[str, Any] = {"fmt": "o", "markersize": 4 if len(order) <= MOST_TICKS else 2.4, "elinewidth": 0.9}
    axes.errorbar(ranks, values, yerr=lengths, color=COLOUR, ecolor=f"{COLOUR}80", **style)
    without_upper_frame(axes)
    if len(order) <= MOST_TICKS:
        axes.set_xticks(ranks, names, rotation=90 if max(map(len, names)) > 2 else 0, parse_math=False)
        axes.set_xlabel(noun)
    else:
        axes.set_xlabel("rank")
    if top and len(order) > MOST_TICKS:
        # The names are in the upper right corner, which a descending line leaves free.
        named = names[:top]
        axes.plot(ranks[:top], values[:top], "o", markersize=3.4, color=COLOUR_OF_NAMED, zorder=3)
        lines = [", ".join(named[start : start + NAMES_PER_LINE]) for start in range(0, len(named), NAMES_PER_LINE)]
        text: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8, "linespacing": 1.5, "parse_math": False}
        text["bbox"] = {"facecolor": "white", "alpha": 0.85, "linewidth": 0}
        listed = "largest: " + ",\n".join(lines)
        axes.text(0.99, 0.98, listed, transform=axes.transAxes, color=COLOUR_OF_NAMED, **text)
    axes.set_ylabel(numbers.axis_label(errors), parse_math=False)
    axes.margins(x=0.02)
    missing = len(numbers.values) - len(order)
    left_out = f" ({missing} without a number)" if missing else ""
    set_title(axes, f"{numbers.statistic} of {counted(len(order), noun)}{left_out}", title)
    return axes
