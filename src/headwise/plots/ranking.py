"""Ranking of heads: one number per head in descending order, with error bars and the names of the first heads."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.plots.canvas import SOFT, axes_for, require_finite, set_title, without_upper_frame
from headwise.plots.scatter import PlottedNumbers
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TICKS = 40
"""Largest number of heads whose names are written along the x-axis."""

COLOUR, COLOUR_OF_NAMED = "#0072b2", "#b34700"
"""Colours of the points, and of those that are named, with their names."""

NAMES_PER_LINE = 5
"""Number of names in one line of text."""


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
    """Draw one number per head in descending order, with error bars, and return the axes. The names of the first `top`
    heads are listed; with up to 40 heads, the names of all are written along the x-axis. The title has the number of
    heads. Heads with a NaN or infinite number are left out, and counted in the title.

    Args:
        numbers: numbers of the heads, in their own units, with standard errors.
        names: name of each head.
        title: end of the title, such as the model.
        noun: noun of what is ranked, in the singular.
        errors: length of the error bars to each side, in standard errors; 0 draws none.
        top: number of heads to name.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_ranking(PlottedNumbers("cost", [0.1, 0.3], [0.01, 0.02]), ["0.0", "0.1"])  # doctest: +SKIP
    """
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
        if top:
            _name_first(axes, names[:top], values)
    axes.set_ylabel(numbers.axis_label(errors), parse_math=False)
    axes.margins(x=0.02)
    missing = len(numbers.values) - len(order)
    left_out = f" ({missing} without a number)" if missing else ""
    set_title(axes, f"{numbers.statistic} of {counted(len(order), noun)}{left_out}", title)
    return axes


def _name_first(axes: "Axes", names: Sequence[str], values: Sequence[float]) -> None:
    """Draw the first points of a ranking in another colour, and list their names in order in the upper right corner,
    which a descending line leaves free.
    """
    axes.plot(range(1, len(names) + 1), values[: len(names)], "o", markersize=3.4, color=COLOUR_OF_NAMED, zorder=3)
    lines = [", ".join(names[start : start + NAMES_PER_LINE]) for start in range(0, len(names), NAMES_PER_LINE)]
    text: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8, "linespacing": 1.5, "parse_math": False}
    text["bbox"] = {"facecolor": "white", "alpha": 0.85, "linewidth": 0}
    listed = ",\n".join([f"largest: {lines[0]}", *lines[1:]])
    axes.text(0.99, 0.98, listed, transform=axes.transAxes, color=COLOUR_OF_NAMED, **text)
