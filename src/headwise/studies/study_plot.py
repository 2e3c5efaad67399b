"""Plot of a study: loss against number of heads and against training time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import require
from headwise.runs.rows import MeanEstimate
from headwise.studies.space import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class PlottedSetting:
    """Values of one head setting for the figure of a study: mean loss, loss of each seed, time per step, and whether
    the setting is on the Pareto frontier.

    Attributes:
        setting: heads of the models.
        loss: mean held-out loss.
        step_ms: milliseconds per training step.
        seed_losses: held-out loss of each seed.
        on_frontier: True if no other setting is better in every respect.
    """

    setting: Setting
    loss: MeanEstimate
    step_ms: MeanEstimate
    seed_losses: tuple[float, ...]
    on_frontier: bool


def draw_study(points: Sequence[PlottedSetting], title: str, *, one_width: bool) -> "Figure":
    """Return a matplotlib figure with two panels: the held-out loss of each head setting against the number of heads
    (left, with one dot per seed) and against the time per training step (right, with standard errors). `one_width` is
    True if heads x head_dim is the same for all settings; otherwise each head_dim has its own line on the left.

    Args:
        points: settings that were trained.
        title: name of the data.
        one_width: True if heads x head_dim is the same for all settings; otherwise each head_dim has its own line.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure: Figure = require_matplotlib()(figsize=(9.0, 3.8), layout="constrained")
    by_heads, by_time = figure.subplots(1, 2, sharey=True)
    _draw_by_heads(by_heads, points, one_width=one_width)
    by_heads.set(xlabel="heads", ylabel="held-out loss", title=f"{title}: one point per seed")
    for point in points:
        x_error, y_error = (
            0.0 if math.isnan(measured.sem) else measured.sem for measured in (point.step_ms, point.loss)
        )
        x, y, colour = point.step_ms.value, point.loss.value, "C0" if point.on_frontier else "0.6"
        by_time.errorbar(x, y, xerr=x_error, yerr=y_error, fmt="o", color=colour, capsize=2)
        by_time.annotate(point.setting.name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    by_time.set(xlabel="time per step, ms", title="blue: Pareto frontier; bars: standard errors")
    return figure


def _draw_by_heads(axes: Any, points: Sequence[PlottedSetting], *, one_width: bool) -> None:
    """Draw held-out loss against number of heads on `axes`: a dot for each seed, and lines through the mean losses.
    With `one_width`, one line joins the settings with the same heads x head_dim, otherwise those with the same
    head_dim. Settings in which query heads share key/value heads have a line of their own for each number of key/value
    heads.
    """
    families: dict[str, list[PlottedSetting]] = {}
    for point in points:
        families.setdefault(_line_label(point.setting, one_width=one_width), []).append(point)
    for family, members in families.items():
        heads, means = [point.setting.num_heads for point in members], [point.loss.value for point in members]
        (line,) = axes.plot(heads, means, marker="_", markersize=12, label=family)
        for point in members:
            losses = [loss for loss in point.seed_losses if math.isfinite(loss)]
            axes.plot([point.setting.num_heads] * len(losses), losses, ".", color=line.get_color(), alpha=0.6)
    counts = sorted({point.setting.num_heads for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    if len(families) > 1:
        axes.legend(fontsize=8)


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
