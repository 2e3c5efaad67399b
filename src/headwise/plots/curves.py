"""Lines of numbers: against a count, against the steps of a training, and the attention that each key receives."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.errors import InputError
from headwise.plots.canvas import (
    INK,
    LINE_COLOURS,
    SOFT,
    add_colour_bar,
    axes_for,
    label_ticks,
    layer_scale,
    put_legend_right,
    require_finite,
    set_title,
    without_upper_frame,
)
from headwise.plots.kinds import require_heads
from headwise.plots.points import standard_errors
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND_COLOUR = "#999999"

LINE_STYLES = ("-", "--")
"""Styles of named lines of received attention, in turn: they repeat what colours show."""


class Curve(NamedTuple):
    """Named line to draw: the positions of its points along x, the value at each, and the standard error of each value
    (NaN where it is unknown).
    """

    name: str
    x: Sequence[float]
    values: Sequence[float]
    sems: Sequence[float]

    @staticmethod
    def of(name: str, points: Sequence[tuple[float, Sequence[float]]]) -> "Curve":
        """Return the curve through `points`. Each point has a position along x, and a sequence that starts with the
        mean and its standard error.
        """
        return Curve(name, [x for x, _ in points], [each[0] for _, each in points], [each[1] for _, each in points])


class Band(NamedTuple):
    """Named range of values to draw as a band: at each position along x the smallest, the mean and the largest
    value.
    """

    name: str
    x: Sequence[float]
    low: Sequence[float]
    middle: Sequence[float]
    high: Sequence[float]


def draw_curves(
    curves: Sequence[Curve],
    band: Band | None = None,
    *,
    x: str = "",
    y: str = "",
    title: str = "",
    errors: float = 1.96,
    ax: Any = None,
) -> "Axes":
    """Draw curves as lines with error bars of `errors` standard errors to each side. A band (range of values), if there
    is one, is drawn behind them.
    """
    length = standard_errors(errors)
    require_finite(y, [value for curve in curves for value in curve.values] + list(band.middle if band else ()))
    axes = axes_for(ax, 6.4, 3.8)
    if band is not None:
        axes.fill_between(band.x, band.low, band.high, color=BAND_COLOUR, alpha=0.3, linewidth=0)
        axes.plot(band.x, band.middle, color=BAND_COLOUR, linewidth=1.2, label=f"{band.name} (range, mean)")
    for index, curve in enumerate(curves):
        bars = [0.0 if math.isnan(sem) else length * sem for sem in curve.sems] if length else None
        style: dict[str, Any] = {"fmt": ".-", "color": LINE_COLOURS[index % len(LINE_COLOURS)], "linewidth": 1.4}
        axes.errorbar(curve.x, curve.values, bars, label=curve.name, **style)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    without_upper_frame(axes)
    put_legend_right(axes)
    set_title(axes, f"{y} against {x}", title)
    return axes


def draw_received(
    received: Mapping[tuple[int, int], Sequence[float]],
    *,
    words: Sequence[str] = (),
    title: str = "",
    ax: Any = None,
) -> "Axes":
    """Draw the attention that the key at each position receives (the mean weight over queries), as one line per head.
    `received` maps heads `(layer, head)` to these numbers. Up to 8 heads have a colour and a name each; more are
    coloured by layer. The y-axis is logarithmic, and has gaps where a number is 0 or NaN. `words` label the positions,
    which are numbered by default.
    """
    require_finite("received", [value for line in received.values() for value in line])
    positions = max(len(line) for line in received.values())
    axes = axes_for(ax, min(max(4.8, 2.2 + 0.22 * positions), 7.6), 3.6)
    layers = {layer for layer, _ in received}
    scale, has_names = layer_scale(layers), len(received) <= len(LINE_COLOURS)
    for index, ((layer, head), line) in enumerate(received.items()):
        shown = [value if value > 0 else math.nan for value in line]  # a logarithmic axis has no 0
        if has_names:
            style: dict[str, Any] = {"color": LINE_COLOURS[index], "linestyle": LINE_STYLES[index % 2]}
            style |= {"linewidth": 1.4, "marker": ".", "markersize": 4, "label": f"{layer}.{head}"}
        else:
            style = {"color": scale.to_rgba(layer), "linewidth": 0.7, "alpha": 0.7}
        axes.plot(range(len(line)), shown, **style)
    if has_names:
        put_legend_right(axes)
    elif len(layers) > 1:
        add_colour_bar(axes, scale, "layer")
    axes.set_yscale("log")
    axes.set_ylabel("received attention (mean weight)")
    without_upper_frame(axes)
    if words:
        label_ticks(axes, "x", list(words), rotation=90)
    else:
        axes.set_xlabel("position of the key")
        axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.02)
    set_title(axes, f"received attention of {counted(len(received), 'head')}", title)
    return axes


def chosen_heads(received: Mapping[tuple[int, int], Sequence[float]], heads: Any) -> dict[Any, Sequence[float]]:
    """Return the entries of `received` for the chosen heads `(layer, head)`, in the order of `heads`; all entries if
    `heads` is None.
    """
    if heads is None:
        return dict(received)
    return {head: received[head] for head in require_heads(heads, received, "with received attention")}


# -- a statistic against the step of a training ------------------------------------------------------------------------

HeadSeries = tuple[tuple[int, int], list[int], list[float]]
"""Layer and number of a head, the steps in which a statistic has a value, and the values."""


MOST_NAMED = 5
"""Largest number of lines with a name."""

MOST_THICK = 50
"""Largest number of lines that are not thin and pale."""

LINE_SPACE = 0.05
"""Smallest distance of two names, as a share of the height of the axes."""

NON_FINITE_COLOUR = "#b34700"


class Line(NamedTuple):
    """Values of a statistic of one head `(layer, head)` in the observed steps of a training. NaN stands for infinite
    values.
    """

    head: tuple[int, int]
    steps: list[int]
    values: list[float]

    @property
    def points(self) -> list[tuple[int, float]]:
        """Pairs of a step and its value, for the steps in which the value is finite."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]

    @property
    def change(self) -> float:
        """Absolute difference between the last and the first finite value; 0 if there are fewer than two."""
        points = self.points
        return abs(points[-1][1] - points[0][1]) if points else 0.0


def draw_history(
    series: Iterable[HeadSeries],
    statistic: str,
    unit: str,
    model: str,
    heads: Sequence[tuple[int, int]] | None = None,
    ax: Any = None,
) -> "Axes":
    """Draw a statistic of heads against the training step, as one line per head, coloured by layer. `heads` selects
    heads `(layer, head)`; all are drawn by default. Up to five heads are named, those that changed most from their
    first to their last value. Steps in which a head has a NaN or infinite value are marked by a cross at the lower end,
    and leave gaps in the lines.
    """
    lines = [
        Line(head, steps, [value if math.isfinite(value) else math.nan for value in values])
        for head, steps, values in series
    ]
    if heads is not None:
        chosen = require_heads(heads, {line.head for line in lines}, "of the history")
        if not chosen:
            raise InputError("heads", expected="at least one head to plot", got="none")
        lines = [line for line in lines if line.head in chosen]
    axes = axes_for(ax, 7.2, 3.8)
    named = sorted(lines, key=lambda line: -line.change)[:MOST_NAMED]
    if len(lines) > MOST_NAMED:
        named = [line for line in named if line.change > 0]
    axes.margins(x=0.02)
    layers = sorted({line.head[0] for line in lines})
    scale, has_few_layers = layer_scale(layers), len(layers) <= len(LINE_COLOURS)
    for line in sorted(lines, key=lambda line: line.head[::-1]):  # so that no layer covers all others
        layer = line.head[0]
        colour = LINE_COLOURS[layers.index(layer)] if has_few_layers else scale.to_rgba(layer)
        _draw_line(axes, line, colour, is_named=line in named, is_thin=len(lines) > MOST_THICK)
    without_value = {step for line in lines for step in {*line.steps} - {step for step, _ in line.points}}
    if without_value:
        style: dict[str, Any] = {"linestyle": "", "marker": "x", "color": NON_FINITE_COLOUR, "markersize": 5}
        style |= {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
        axes.plot(sorted(without_value), [0.0] * len(without_value), label="NaN or infinite", **style)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{statistic} ({unit})" if unit else statistic, parse_math=False)
    without_upper_frame(axes)
    axes.locator_params(axis="x", integer=True)
    if len({step for line in lines for step in line.steps}) == 1:
        axes.set_xticks(lines[0].steps)
    if not any(line.points for line in lines):
        axes.set_yticks([])
    _write_names(axes, named)
    handles: list[Any] = [line for line in axes.lines if line.get_label() == "NaN or infinite"]
    if not has_few_layers:
        add_colour_bar(axes, scale, "layer")
        if handles:
            axes.legend(handles=handles, loc="best", frameon=False, fontsize=8)
    elif len(layers) > 1 or handles:
        from matplotlib.lines import Line2D

        handles += [
            Line2D([], [], color=colour, linewidth=1.6, label=f"layer {layer}")
            for layer, colour in zip(layers if len(layers) > 1 else (), LINE_COLOURS, strict=False)
        ]
        put_legend_right(axes, handles)
        legend = axes.get_legend()
        if legend is not None and any(line.points for line in named):  # whose names are to the right of the axes
            legend.set_bbox_to_anchor((1.12, 1.0))
    missing = sum(len(line.points) < len(line.values) for line in lines)
    left_out = f" ({missing} with NaN or infinite values)" if missing else ""
    set_title(axes, f"{statistic} of {counted(len(lines), 'head')}{left_out}", model)
    return axes


def _draw_line(axes: "Axes", line: Line, colour: Any, *, is_named: bool, is_thin: bool) -> None:
    """Draw the values of one head as a line. If a finite value has no finite neighbour, so that a line would not show
    it, all points are drawn, too.
    """
    style: dict[str, Any] = {"linewidth": 1.6 if is_named else 0.6 if is_thin else 1.0}
    style |= {"alpha": 1.0 if is_named or not is_thin else 0.5, "zorder": 3 if is_named else 2}
    finite = [False, *map(math.isfinite, line.values), False]
    is_lone = any(finite[index - 1 : index + 2] == [False, True, False] for index in range(1, len(finite) - 1))
    axes.plot(line.steps, line.values, color=colour, marker="." if is_lone else "", markersize=4, **style)


def _write_names(axes: "Axes", named: Sequence[Line]) -> None:
    """Write the names of heads to the right of the axes, without overlap, in the order of the lines' last finite
    values. A thin line connects each name with this value.
    """
    ends = sorted((line.points[-1][1], line.points[-1][0], line.head) for line in named if line.points)
    low, high = axes.get_ylim()
    heights: list[float] = []
    for value, _, _ in ends:
        wanted = (value - low) / (high - low)
        heights.append(max(wanted, heights[-1] + LINE_SPACE) if heights else wanted)
    excess = max(heights, default=0.0) - 1.0
    for index in reversed(range(len(heights))):  # names that were moved above the upper end go down again
        most = 1.0 if index == len(heights) - 1 else heights[index + 1] - LINE_SPACE
        heights[index] = min(heights[index], most) if excess > 0 else heights[index]
    for (value, step, (layer, head)), height in zip(ends, heights, strict=True):
        style: dict[str, Any] = {"xycoords": "data", "textcoords": "axes fraction", "fontsize": 8, "color": INK}
        style["arrowprops"] = {"arrowstyle": "-", "color": SOFT, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 0}
        axes.annotate(f"{layer}.{head}", (step, value), (1.025, height), va="center", **style)
