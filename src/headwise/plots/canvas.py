"""Axes that plots are drawn on, and what many plots need on them: tick labels that fit, colour bars, legends."""

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEQUENTIAL, DIVERGING, WEIGHTS = "cividis", "RdBu_r", "Blues"
"""Colour maps for amounts, for effects and differences around 0, and for attention weights. Readers with any colour
vision can read them.
"""

INK, SOFT, BLANK = "#1d2330", "#667085", "#e4e6ea"
"""Colours of main text, of other text, and of cells without a number."""

LINE_COLOURS = ("#0078f3", "#692700", "#00a972", "#492740", "#c87500", "#124c81", "#000000", "#bf7ea6")
"""Colours of named lines. A test measures that they differ for readers with any colour vision, and that their contrast
to white is at least 3.
"""

LONGEST_LINE = 44
"""Number of characters in a line of a label."""

INCHES_PER_LABEL = 0.21
"""Smallest distance of tick labels."""


def axes_for(ax: Any, width: float, height: float) -> "Axes":
    """Return the matplotlib axes to draw on: `ax`, or the axes of a new figure of `width` by `height` inches if `ax` is
    None. Raise an error if `ax` is another object, or if matplotlib is missing.
    """
    axes_class = require("matplotlib.axes", purpose="a plot", extra="plot").Axes
    if ax is None:
        from headwise.plots.notebook_figure import new_axes

        return new_axes(width, height)
    if not isinstance(ax, axes_class):
        remedy = "figure.subplots() returns axes"
        raise InputError("ax", expected="matplotlib axes", got=type(ax).__name__, remedy=remedy)
    axes: Axes = ax
    return axes


def layer_scale(layers: Collection[int]) -> Any:
    """Return the matplotlib colour scale for lines and points that are coloured by layer, from the first to the last of
    `layers`. Colours that would be pale on white are left out.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    return ScalarMappable(Normalize(min(layers), max(layers)), ListedColormap(colormaps["plasma"](range(160))))


def axis_label(name: str, unit: str = "", meaning: str = "") -> str:
    r"""Return the label of an axis: the name of a statistic with its unit in parentheses, and its meaning on further
    lines.

    >>> axis_label("first_order", "nats", "Effect of removing the head.")
    'first order (nats)\nEffect of removing the head'
    """
    label = name.replace("_", " ") + (f" ({unit})" if unit else "")
    return "\n".join([label, *textwrap.wrap(meaning.removesuffix("."), LONGEST_LINE)])


def explain_blank(axes: "Axes", values: Sequence[float], noun: str = "head") -> None:
    """Write a note below a heat map of the numbers `values`, if it needs one: that all numbers are equal, so that there
    is only one colour, or how many are NaN or infinite, so that their cells are grey.
    """
    shown, notes = finite(values), []
    if len(values) > 1 and len(set(shown)) == 1:
        notes.append(
            f"one colour: every {noun}{' with a number' if len(shown) < len(values) else ''} has {shown[0]:.3g}"
        )
    if len(shown) < len(values):
        missing = len(values) - len(shown)
        notes.append(f"grey: {missing} of {counted(len(values), noun)} without a number, such as a mean over no row")
    if notes:
        axes.set_xlabel("\n".join([axes.get_xlabel(), *notes]), parse_math=False)


def finite(values: Iterable[float]) -> list[float]:
    """Return the values that are neither NaN nor infinite."""
    return [value for value in values if math.isfinite(value)]


def require_finite(statistic: str, values: Sequence[float]) -> None:
    """Raise `InputError` if `values`, one number per head, is empty or has no finite number. `statistic` is the name of
    the numbers in the error.
    """
    if not values:
        raise InputError("heads", expected="at least one head to plot", got="none")
    if not finite(values):
        expected = "a statistic with a finite number for at least one head"
        got = f"{statistic!r}, NaN or infinite for all {len(values)}"
        remedy = "a mean over no row is NaN, such as one over repeated words of a text without any"
        raise InputError("statistic", expected=expected, got=got, remedy=remedy)


def label_ticks(axes: "Axes", which: str, labels: Sequence[str], **style: Any) -> None:
    """Label the ticks 0, 1, ... of an axis, "x" or "y", with `labels`. If they do not all fit, only every second,
    fifth, tenth, ... is drawn. `style` has properties of the text.
    """
    box = axes.get_window_extent()
    inches = (box.width if which == "x" else box.height) / axes.figure.dpi
    step = tick_step(len(labels), inches)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(range(0, len(labels), step), labels[::step], parse_math=False, **style)
    axis.set_tick_params(labelsize=8, length=2 if len(labels) > step else 0)


def tick_step(count: int, inches: float) -> int:
    """Return the smallest step (1, 2, 5, 10, 20, ...) at which tick labels do not overlap, if `count` ticks share
    `inches`.
    """
    least = max(1.0, count * INCHES_PER_LABEL / max(inches, INCHES_PER_LABEL))
    power = 10 ** math.floor(math.log10(least))
    return next(int(power * factor) for factor in (1, 2, 5, 10) if power * factor >= least - 1e-9)


def separate_cells(axes: "Axes", rows: int, columns: int) -> None:
    """Draw white lines between the cells of a matrix plot, unless it has many cells, and remove its frame."""
    axes.spines[:].set_visible(False)
    if rows * columns <= 1200 and max(rows, columns) <= 64:
        axes.set_xticks([column - 0.5 for column in range(1, columns)], minor=True)
        axes.set_yticks([row - 0.5 for row in range(1, rows)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)


def add_colour_bar(axes: "Axes", drawn: Any, label: str) -> None:
    """Draw a colour bar to the right of the axes, with a label. `drawn` is the matplotlib object whose colours it
    explains, such as an image.
    """
    bar = axes.figure.colorbar(drawn, ax=axes, pad=0.02, aspect=24)
    bar.set_label(label, parse_math=False, fontsize=10 if "\n" not in label else 8)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def set_title(axes: "Axes", *parts: str) -> None:
    """Set the title of the axes to the non-empty texts in `parts`, joined by commas."""
    axes.set_title(", ".join(part for part in parts if part), fontsize=10, color=INK, parse_math=False)


def put_legend_right(axes: "Axes", handles: Sequence[Any] | None = None, *, reverse: bool = False) -> None:
    """Draw the legend to the right of the axes. With `reverse`, its entries are in the reverse order, from bottom to
    top.
    """
    options: dict[str, Any] = {"reverse": reverse} if handles is None else {"handles": handles}
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False, fontsize=8, **options)


def without_upper_frame(axes: "Axes") -> None:
    """Remove the frame lines of the axes at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
