"""Lines of numbers: against a count, with error bars and a band, and the attention that each key receives, by head."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.plots.canvas import (
    LINE_COLOURS,
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
    """A line with a name.

    Attributes:
        name: its name.
        x: positions of its points.
        values: values there.
        sems: their standard errors; NaN where unknown.
    """

    name: str
    x: Sequence[float]
    values: Sequence[float]
    sems: Sequence[float]


class Band(NamedTuple):
    """A range of values with a name.

    Attributes:
        name: its name.
        x: positions.
        low, middle, high: smallest, mean and largest value there.
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
    """Draw lines with error bars, and a band behind them, and return the axes.

    Args:
        curves: the lines.
        band: the band; None for none.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        title: end of the title, such as the model.
        errors: length of the error bars to each side, in standard errors; 0 draws none.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there is no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_curves([Curve("gradient", [0, 1], [2.0, 2.5], [0.1, 0.1])])  # doctest: +SKIP
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
    """Draw the attention that the key at each position receives, as a line for each head, and return the axes. Up to 8
    heads have a colour and a name each; more are coloured by layer. The y-axis is logarithmic, since an attention sink
    receives many times what other keys receive; positions with a number of 0 or NaN are gaps.

    Args:
        received: for each head, by `(layer, head)`, the mean weight of the key at each position, from 0 to 1.
        words: word at each position, for labels; positions are numbered by default.
        title: end of the title, such as the model.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_received({(0, 0): [0.7, 0.2, 0.1]}, words=["[CLS]", "hello", "[SEP]"])  # doctest: +SKIP
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
    """Return the lines of the heads in `heads`, in their order, or of all heads if it is None.

    Raises:
        InputError: a head is not among the keys of `received`.
    """
    if heads is None:
        return dict(received)
    return {head: received[head] for head in require_heads(heads, received, "with received attention")}
