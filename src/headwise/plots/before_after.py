"""Picture of a model before and after a change: sizes and times relative to before, losses, and agreement."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require
from headwise.plots.canvas import INK, SOFT, without_upper_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"size": "#4d4d4d", "time": "#0072b2", "attention": "#d55e00", "agreement": "#009e73"}
"""Colours of sizes, of times of the whole model and of its attention modules, and of agreement (Okabe and Ito 2008)."""

LABELS = {"size": "size", "time": "time, whole model", "attention": "time, attention alone"}

BEFORE, AFTER = "#667085", "#0072b2"
"""Colours of the loss before and after."""

ROW_INCHES = 0.27


def draw_before_after(changes: Sequence[Any], *, title: str = "") -> "Figure":
    """Draw how a compression affects a model. The `changes` are the rows of a compression report. There are up to three
    panels: sizes and times in percent of those of the dense model, the losses of both models, and the agreement of
    their outputs. Error bars are 95 % confidence intervals.
    """
    ratios = [row for row in changes if row.kind in ("size", "time") and row.change is not None]
    losses, agreements = ([row for row in changes if row.kind == kind] for kind in ("loss", "agreement"))
    panels = [
        (drawn, draw) for drawn, draw in ((ratios, _ratios), (losses, _losses), (agreements, _agreements)) if drawn
    ]
    if not panels:
        raise InputError("changes", expected="at least one quantity", got="none")
    require("matplotlib.figure", purpose="a plot", extra="plot")
    from headwise.plots.notebook_figure import NotebookFigure

    heights = [1.1 + ROW_INCHES * len(drawn) for drawn, _ in panels]
    figure = NotebookFigure(figsize=(9.2, sum(heights) + 0.5), layout="constrained")
    all_axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (drawn, draw) in zip(all_axes, panels, strict=True):
        draw(axes, drawn)
    figure.suptitle(title, fontsize=11, color=INK, parse_math=False)
    return figure


def _ratios(axes: "Axes", rows: Sequence[Any]) -> None:
    """Draw the panel of sizes and times of the compressed model, each in percent of that of the dense model."""
    largest = 100.0
    for place, row in enumerate(rows):
        kind = "attention" if row.quantity.endswith(", attention") else row.kind
        low, high = (100.0 * (row.change if end is None else end) for end in (row.low, row.high))
        largest = max(largest, high)
        _draw_point(axes, place, 100.0 * row.change, (low, high), COLOURS[kind], LABELS[kind])
    axes.axvline(100.0, color=SOFT, linewidth=0.9, zorder=0)
    axes.set_xlim(0.0, 1.08 * largest)
    _write_rows(axes, [(row.quantity, " → ".join(row.texts[1:3])) for row in rows])
    axes.set_xlabel("compressed, percent of dense (line: dense); bars: 95 % interval of the median ratio", fontsize=9)


def _losses(axes: "Axes", rows: Sequence[Any]) -> None:
    """Draw the panel of losses: each loss of the dense and of the compressed model; bars are 1.96 standard errors."""
    for place, row in enumerate(rows):
        for offset, value, error, colour, label in (
            (-0.16, row.dense, row.dense_sem, BEFORE, "dense"),
            (0.16, row.compressed, row.compressed_sem, AFTER, "compressed"),
        ):
            length = 0.0 if error is None else 1.96 * error
            _draw_point(axes, place + offset, value, (value - length, value + length), colour, label)
    _write_rows(axes, [(row.quantity, "\n".join((*row.texts[1:3], f"change {row.change_text}"))) for row in rows])
    axes.margins(x=0.12)
    axes.set_xlabel("mean loss (lower is better); bars: 1.96 standard errors over documents, not paired", fontsize=9)


def _agreements(axes: "Axes", rows: Sequence[Any]) -> None:
    """Draw the panel of agreement between the outputs of both models, where 1 means equal."""
    for place, row in enumerate(rows):
        low, high = (row.compressed if end is None else end for end in (row.low, row.high))
        _draw_point(axes, place, row.compressed, (low, high), COLOURS["agreement"])
    axes.set_xlim(min(0.0, 1.1 * min(row.compressed for row in rows)), 1.03)
    axes.axvline(1.0, color=SOFT, linewidth=0.9, zorder=0)
    _write_rows(axes, [(row.quantity, row.texts[2]) for row in rows])
    axes.set_xlabel("agreement with the dense model (1: equal); bars: 95 % interval", fontsize=9)


def _draw_point(
    axes: "Axes", row: float, value: float, ends: tuple[float, float], colour: str, label: str | None = None
) -> None:
    """Draw a point at `value` with a horizontal bar from one of `ends` to the other. A label is in the legend once."""
    bar: Any = [[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]]
    style: dict[str, Any] = {"markersize": 5, "elinewidth": 1.6, "capsize": 2.5}
    is_labelled = label is None or label in axes.get_legend_handles_labels()[1]
    shown = "_nolegend_" if is_labelled else label
    axes.errorbar([value], [row], xerr=bar, fmt="o", color=colour, label=shown, **style)


def _write_rows(axes: "Axes", rows: Sequence[tuple[str, str]]) -> None:
    """Label the rows of a panel, the first at the top: a name on the left, and a text to the right of the axes. `rows`
    has both for each row. If points have labels, also draw the legend, in one line above the axes.
    """
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", color="0.93", linewidth=0.6)
    axes.set_axisbelow(True)
    without_upper_frame(axes)
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "center"}
    for row, (_, text) in enumerate(rows):
        axes.text(1.02, row, text, fontsize=8, color=INK, parse_math=False, **place)
    if axes.get_legend_handles_labels()[1]:
        place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.1, "ncols": 3}
        axes.legend(fontsize=8, frameon=False, **place)
