"""Pictures of docs/formation.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.formation.changes import Changes, changes
from research.formation.report_growth import LARGEST_FLOAT16

LOSSES = {"new": ("new tokens", "0.35"), "copied": ("copied tokens", "tab:red")}
"""Label and colour of each loss."""

OF_LAYER = ("tab:gray", "tab:blue")
"""Colours of the heads of the first and the second layer."""


def formation(result: Mapping[str, Any], change: Changes) -> Figure:
    """Draw the losses, the induction score of every head, and the attention to the previous token of one training."""
    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    panels: Any = figure.subplots(3, 1, sharex=True)
    _losses(panels[0], result)
    _heads(panels[1], result["steps"], result["induction"])
    first_layer = {name: curve for name, curve in result["monitor"]["previous"].items() if name.startswith("0.")}
    _first_layer(panels[2], result["steps"], first_layer)
    panels[0].set(ylabel="loss, nats", title="loss on held-out rows")
    panels[1].set(ylabel="share of attention", title="induction score on random tokens that repeat (hw.watch)")
    title = "attention to the previous token in the training's own passes (hw.monitor)"
    panels[2].set(ylabel="share of attention", title=title, xlabel="step")
    for axes in panels:
        for step, style in ((change.score_half, "-"), (change.gain_half, ":")):
            if step is not None:
                axes.axvline(step, color="tab:green", linestyle=style, linewidth=1.2, zorder=0)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    panels[0].plot([], [], color="tab:green", linewidth=1.2, label="half of the final score")
    panels[0].plot([], [], color="tab:green", linewidth=1.2, linestyle=":", label="half of the final gain")
    panels[0].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return figure


def trainings(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the losses and the induction scores of several trainings, in a column for each.

    Args:
        results: the saved results by the title of the column.
    """
    figure = Figure(figsize=(2.1 * len(results) + 0.8, 4.6), layout="constrained")
    panels: Any = figure.subplots(2, len(results), sharex=True, sharey="row", squeeze=False)
    for column, (title, result) in enumerate(results.items()):
        above, below = panels[0][column], panels[1][column]
        _losses(above, result)
        _heads(below, result["steps"], result["induction"], is_named=False)
        above.set_title(title, fontsize=9)
        below.set_xlabel("step")
        change = changes(result)
        if change.is_formed:
            for axes in (above, below):
                for step, style in ((change.score_half, "-"), (change.gain_half, ":")):
                    if step is not None:
                        axes.axvline(step, color="tab:green", linestyle=style, linewidth=1.0, zorder=0)
    panels[0][0].set_ylabel("loss, nats")
    panels[1][0].set_ylabel("induction score,\nshare of attention")
    above, below = panels[0][-1], panels[1][-1]
    for layer, name in enumerate(("first", "second")):
        below.plot([], [], color=OF_LAYER[layer], label=f"heads of the\n{name} layer")
    above.plot([], [], color="tab:green", linewidth=1.0, label="half of the\nfinal score")
    above.plot([], [], color="tab:green", linewidth=1.0, linestyle=":", label="half of the\nfinal gain")
    for axes in (above, below):
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    return figure


def growth(growing: Mapping[str, Any], clipped: Mapping[str, Any]) -> Figure:
    """Draw the loss and the largest logit of a training without and with QK-clip."""
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for result, label, color in ((growing, "without QK-clip", "tab:red"), (clipped, "with QK-clip", "tab:blue")):
        for axes, name in ((above, "loss"), (below, "max_logit")):
            values = [math.nan if value is None else value for value in result[name]]
            axes.plot(range(len(values)), values, color=color, linewidth=1.0, label=label)
    plan = growing["plan"]
    limits = {
        LARGEST_FLOAT16 / math.sqrt(plan["width"] // plan["heads"]): ("largest product\nin float16", "--"),
        100.0: ("limit of the alarm,\nthreshold of QK-clip", ":"),
    }
    for height, (label, style) in limits.items():
        below.axhline(height, color="0.4", linestyle=style, linewidth=1.0, label=label)
    marks = [(growing["first_alarm"] and growing["first_alarm"]["step"], "tab:orange", "first alarm: high logit")]
    marks.append((growing["nonfinite_step"], "black", "loss is NaN"))
    for step, color, label in marks:
        if step is not None:
            above.axvline(step, color=color, linewidth=1.2, label=f"{label}\n(step {step})")
            below.axvline(step, color=color, linewidth=1.2)
    below.set_yscale("log")
    above.set(ylabel="loss, nats", title="loss of the training batches")
    below.set(ylabel="logit", xlabel="step", title="largest attention logit of all heads (hw.monitor)")
    for axes in (above, below):
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return figure


def _losses(axes: Axes, result: Mapping[str, Any]) -> None:
    """Draw the losses of a training."""
    for name, (label, color) in LOSSES.items():
        axes.plot(result["steps"], result["loss"][name], color=color, label=label)
    axes.set_ylim(bottom=0)


def _heads(axes: Axes, steps: Sequence[int], curves: Mapping[str, Sequence[float]], *, is_named: bool = True) -> None:
    """Draw a line for each head: heads of the first layer in grey, those of the second in other colours."""
    for name, curve in curves.items():
        layer, head = map(int, name.split("."))
        color = OF_LAYER[0] if layer == 0 else f"C{head}" if is_named else OF_LAYER[1]
        label = "heads of layer 0" if layer == 0 and head == 0 else None if layer == 0 else f"head {name}"
        axes.plot(steps, curve, color=color, label=label if is_named else None, linewidth=1.3, alpha=0.9)
    axes.set_ylim(0, 1)


def _first_layer(axes: Axes, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Draw a line for each head of the first layer."""
    for index, (name, curve) in enumerate(curves.items()):
        axes.plot(steps, curve, color=f"C{index}", label=f"head {name}", linewidth=1.3)
    axes.set_ylim(0, 1)
