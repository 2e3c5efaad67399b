"""Pictures of docs/reports/claims.md."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from research.claims.estimates import Estimate
from research.claims.study_results import Layer, Study, gaps, time_ratios

DPI = 110
COLUMNS = 3


def panels(number: int, width: float = 3.4, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """Return a figure with a number of axes, three in a row, and these axes."""
    rows, columns = -(-number // COLUMNS), min(number, COLUMNS)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for blank in axes[number:]:
        blank.axis("off")
    return figure, axes[:number]


def by_heads(axes: Axes, numbers: Sequence[int], **labels: str) -> None:
    """Label the x-axis with numbers of heads on a logarithmic scale."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set(xlabel="heads", **labels)


def line(axes: Axes, values: Mapping[int, Sequence[float]], label: str | None = None) -> None:
    """Plot means over seeds with standard errors, and each seed as a point.

    Args:
        axes: where to plot.
        values: one value for each seed, by number of heads.
        label: for the legend.
    """
    estimates = {number: Estimate.of(of_seeds) for number, of_seeds in values.items()}
    means, errors = [each.mean for each in estimates.values()], [each.error for each in estimates.values()]
    shown = axes.errorbar(list(estimates), means, yerr=errors, marker="o", markersize=3, capsize=2, label=label)
    for number, each in values.items():
        axes.plot([number] * len(each), each, ".", color=shown.lines[0].get_color(), alpha=0.4, markersize=4)


def of_seeds(values: Mapping[int, Mapping[int, float]]) -> dict[int, list[float]]:
    """Return the values of all seeds as a list, by number of heads."""
    return {number: list(each.values()) for number, each in values.items()}


def losses(studies: Sequence[Study], path: Path) -> None:
    """Plot the held-out loss against the number of heads, one panel for each setting."""
    figure, axes = panels(len(studies))
    for each, study in zip(axes, studies, strict=True):
        line(each, of_seeds(study.values()))
        by_heads(each, study.heads, ylabel="held-out loss, nats")
        each.set_title(textwrap.fill(study.title, 44), fontsize=8)
    figure.savefig(path, dpi=DPI)


def heads_apart(small: Sequence[Layer], real: Mapping[str, Sequence[Layer]], path: Path) -> None:
    """Plot the distances between heads by layer: trained, untrained, and untrained but equally sharp."""
    figure, axes = panels(1 + len(real), 3.6, 3.0)
    groups = {"trained here, 8 heads": [each for each in small if each.heads == 8], **real}
    for each, (title, layers) in zip(axes, groups.items(), strict=True):
        for name in ("trained", "untrained", "as_sharp"):
            found = [getattr(layer, name) for layer in layers]
            y, errors = [estimate.mean for estimate in found], [estimate.error for estimate in found]
            label = name.replace("as_sharp", "untrained, as sharp")
            each.errorbar(range(len(layers)), y, yerr=errors, marker="o", markersize=3, linestyle="none", label=label)
        each.set(xlabel="layer", ylabel="Jensen-Shannon distance", title=title, ylim=(0, 0.85))
        each.title.set_fontsize(9)
    axes[0].set(xlabel="layers of all studies, in the order of the table")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def times(regimes: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the time relative to the fused layer with one head, for the fused layer and for a list of heads."""
    figure, axes = panels(2, 4.2, 3.2)
    for each, what in zip(axes, ("forward", "training"), strict=True):
        for name, style in (("fused", "-"), ("list", "--")):
            found = [ratio for ratio in time_ratios(regimes, f"{name} {{n}}", "fused 1") if ratio.what == what]
            for place, regime in enumerate(dict.fromkeys(cost.regime for cost in found)):
                some = [cost for cost in found if cost.regime == regime]
                heads, medians = [cost.heads for cost in some], [cost.median for cost in some]
                label = f"{name}: {regime}"
                each.plot(heads, medians, style, color=f"C{place}", marker="o", markersize=3, label=label)
        by_heads(each, heads, ylabel="times the fused layer with one head", title=what)
        each.set_yscale("log", base=2)
        each.yaxis.set_major_locator(LogLocator(2, subs=(1.0, 1.5)))
        each.yaxis.set_major_formatter("{x:g}")
        each.axhline(1.0, color="0.7", linewidth=0.8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def slots(studies: Sequence[Study], path: Path) -> None:
    """Plot the share of right answers in each slot of the task of several relations."""
    figure, axes = panels(len(studies))
    for each, study in zip(axes, studies, strict=True):
        for slot in range(len(study.runs[study.heads[0]][0]["accuracy"])):
            values = {heads: [run["accuracy"][slot] for run in runs] for heads, runs in study.runs.items()}
            line(each, values, f"{slot + 1} before")
        by_heads(each, study.heads, ylabel="share of right answers")
        each.set_ylim(0, 1.05)
        each.set_title(study.saved["task"], fontsize=8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def gap(study: Study, path: Path) -> None:
    """Plot the generalisation gap of the study on little data, and the two losses it is the difference of."""
    figure, axes = panels(2, 4.2, 3.0)
    line(axes[0], of_seeds(gaps(study)))
    by_heads(axes[0], study.heads, ylabel="held-out less training loss, nats")
    for name, label in (("loss", "held out"), ("train_loss", "training")):
        line(axes[1], of_seeds(study.values(name)), label)
    by_heads(axes[1], study.heads, ylabel="loss, nats")
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def removed(study: Study, path: Path) -> None:
    """Plot the loss against the share of heads that are removed."""
    figure, axes = panels(2, 4.2, 3.0)
    for heads, runs in study.runs.items():
        total = runs[0]["removed"]["heads"]
        for each, how in zip(axes, ("random", "least"), strict=True):
            points = {0.0: [run["removed"]["whole"] for run in runs]}
            for number in runs[0]["removed"]["least"]:
                kind = how if number in runs[0]["removed"][how] else "least"
                points[int(number) / total] = [mean_of(run["removed"][kind][number]) for run in runs]
            means = [mean_of(each) for each in points.values()]
            each.plot(list(points), means, marker="o", markersize=3, label=f"{heads} a layer")
    for each, title in zip(axes, ("drawn at random", "the least important first"), strict=True):
        each.set(xlabel="share of the heads that are removed", ylabel="held-out loss, nats", title=title)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def mean_of(given: float | Sequence[float]) -> float:
    """Return the mean of one number or of several."""
    return given if isinstance(given, float | int) else sum(given) / len(given)
