"""Plots of a study: a measurement of each head setting against number of heads, and against training time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import require
from headwise.plots.canvas import LINE_COLOURS, axes_for, set_title, without_upper_frame
from headwise.runs.rows import MeanEstimate
from headwise.studies.space import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRONTIER, OTHERS = "#0072b2", "0.6"
"""Colours of settings on the Pareto frontier and of other settings."""


@dataclass(frozen=True, kw_only=True)
class PlottedSetting:
    """Values of one head setting for the plots of a study: the mean of a statistic, its value of each seed, time per
    step, and whether the setting is on the Pareto frontier.

    Attributes:
        setting: heads of the models.
        value: mean of the statistic over seeds, such as the held-out loss.
        step_ms: milliseconds per training step.
        seed_values: value of the statistic for each seed.
        on_frontier: True if no other setting is better in every respect.
    """

    setting: Setting
    value: MeanEstimate
    step_ms: MeanEstimate
    seed_values: tuple[float, ...]
    on_frontier: bool


def draw_by_heads(
    points: Sequence[PlottedSetting], label: str, *, title: str = "", one_width: bool = False, ax: Any = None
) -> "Axes":
    """Draw a statistic of each head setting against the number of heads, and return the axes: a dot for each seed, and
    lines through the means. With `one_width`, one line joins the settings with the same heads x head_dim, otherwise
    those with the same head_dim. Settings in which query heads share key/value heads have a line of their own for each
    number of key/value heads.

    Args:
        points: settings that were trained.
        label: label of the statistic.
        title: start of the title, such as the name of the data.
        one_width: True if heads x head_dim is the same for all settings.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: `ax` is not axes.
        MissingExtra: matplotlib is not installed.
    """
    axes = axes_for(ax, 5.0, 3.8)
    families: dict[str, list[PlottedSetting]] = {}
    for point in points:
        families.setdefault(_line_label(point.setting, one_width=one_width), []).append(point)
    for index, (family, members) in enumerate(families.items()):
        heads, means = [point.setting.num_heads for point in members], [point.value.value for point in members]
        colour = LINE_COLOURS[index % len(LINE_COLOURS)]
        axes.plot(heads, means, marker="_", markersize=12, label=family, color=colour)
        for point in members:
            of_seeds = [value for value in point.seed_values if math.isfinite(value)]
            axes.plot([point.setting.num_heads] * len(of_seeds), of_seeds, ".", color=colour, alpha=0.6)
    counts = sorted({point.setting.num_heads for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set(xlabel="heads", ylabel=label)
    without_upper_frame(axes)
    if len(families) > 1:
        axes.legend(fontsize=8, frameon=False)
    set_title(axes, title, "one point per seed")
    return axes


def draw_by_time(points: Sequence[PlottedSetting], label: str, *, title: str = "", ax: Any = None) -> "Axes":
    """Draw a statistic of each head setting against the time per training step, and return the axes. Each point has its
    standard errors and the name of its setting; settings on the Pareto frontier are blue.

    Args:
        points: settings that were trained.
        label: label of the statistic.
        title: start of the title, such as the name of the data.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: `ax` is not axes.
        MissingExtra: matplotlib is not installed.
    """
    axes = axes_for(ax, 5.0, 3.8)
    for point in points:
        errors = [0.0 if math.isnan(measured.sem) else measured.sem for measured in (point.step_ms, point.value)]
        x, y, colour = point.step_ms.value, point.value.value, FRONTIER if point.on_frontier else OTHERS
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], fmt="o", color=colour, capsize=2)
        axes.annotate(point.setting.name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(xlabel="time per step, ms", ylabel=label)
    without_upper_frame(axes)
    set_title(axes, title, "Pareto frontier blue, bars: ±1 standard error")
    return axes


def new_panels() -> "tuple[Figure, list[Axes]]":
    """Return a new figure with two axes next to each other, which share their y-axis.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure = require_matplotlib()(figsize=(9.4, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, 2, sharey=True))


def _line_label(setting: Setting, *, one_width: bool) -> str:
    """Return the label of the line on which a setting is drawn, such as `heads x head_dim = 512` with `one_width`,
    otherwise `head_dim 64`. If key/value heads are shared by query heads, their number is appended.
    """
    width = (
        f"heads x head_dim = {setting.num_heads * setting.head_dim}" if one_width else f"head_dim {setting.head_dim}"
    )
    shared = "" if setting.num_kv_heads == setting.num_heads else f", {setting.num_kv_heads} key/value heads"
    return width + shared


def require_matplotlib() -> Any:
    """Import matplotlib and return its class `Figure`, or raise `MissingExtra` if it is not installed."""
    return require("matplotlib.figure", purpose="drawing a study", extra="plot").Figure
