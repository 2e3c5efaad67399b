"""Pictures of docs/reports/claims.md."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from research.claims.estimates import mean_and_error, of_runs
from research.claims.report_text import SCHEMES
from research.claims.result_files import Results

DPI, COLUMNS = 110, 3
COLOURS = {scheme: f"C{number}" for number, scheme in enumerate(SCHEMES)}
"""Colour of the line of each position scheme, the same in every panel."""


def panels(number: int, width: float = 3.4, height: float = 2.6, most: int = COLUMNS) -> tuple[Figure, list[Axes]]:
    """Return a figure with a number of axes, at most `most` in a row, and these axes."""
    rows, columns = -(-number // most), min(number, most)
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


def line(axes: Axes, values: Mapping[int, Sequence[float]], label: str, colour: str | None = None) -> None:
    """Plot means over seeds with standard errors, by number of heads; infinite means are left out."""
    estimates = {heads: mean_and_error(each) for heads, each in values.items() if all(map(math.isfinite, each))}
    means, errors = zip(*estimates.values(), strict=True) if estimates else ((), ())
    axes.errorbar(list(estimates), means, yerr=errors, color=colour, marker="o", markersize=3, capsize=2, label=label)


def by_task(results: Results, name: str, tasks: Sequence[str], label: str, path: Path) -> None:
    """Plot a measured value against the number of heads: one panel for each task, one line for each position scheme."""
    present = [task for task in tasks if any(task == each for each, _ in results.settings)]
    if not present:
        return
    figure, axes = panels(len(present))
    for each, task in zip(axes, present, strict=True):
        for (_, scheme), cells in ((key, cells) for key, cells in results.settings.items() if key[0] == task):
            line(each, {heads: of_runs(cell, name) for heads, cell in cells.items()}, scheme, COLOURS[scheme])
            title = f"{cell_words(cells)}, width {next(iter(cells.values()))['width']}"
        by_heads(each, list(cells), ylabel=label)
        each.set_title(textwrap.fill(title, 44), fontsize=8)
    legend_below(figure, axes)
    figure.savefig(path, dpi=DPI)


def legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend for all panels below them, where it covers nothing."""
    entries = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=len(entries), fontsize=8)


def cell_words(cells: Mapping[int, Any]) -> str:
    """Return the short description of the task of cells."""
    return str(next(iter(cells.values()))["words"])


def heads_apart(results: Results, path: Path) -> None:
    """Plot the distance beyond equally sharp untrained heads, with its interval."""
    effects = results.verdicts["different"]["effects"]
    figure = Figure(figsize=(7, 1 + 0.28 * len(effects)), layout="constrained")
    axes = figure.subplots()
    means = np.array([row["mean"] for row in effects.values()])
    reach = np.abs(np.array([[row["low"], row["high"]] for row in effects.values()]).T - means)
    axes.errorbar(means, range(len(means)), xerr=reach, fmt="o", markersize=4, capsize=2)
    axes.set_yticks(range(len(means)), list(effects))
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set(xlabel="Jensen-Shannon distance, trained minus equally sharp untrained")
    axes.invert_yaxis()
    figure.savefig(path, dpi=DPI)


def times(regimes: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the time relative to the fused layer with one head, for the fused layer and for a list of heads."""
    figure, axes = panels(2, 4.2, 3.2)
    for each, what in zip(axes, ("forward", "training"), strict=True):
        for place, regime in enumerate(regimes):
            seconds = {name: np.array(of_case) for name, of_case in regime["seconds"].items()}
            heads = sorted({int(name.split()[-1]) for name in seconds})
            for name, style in (("fused", "-"), ("list", "--")):
                medians = [np.median(seconds[f"{what} {name} {n}"] / seconds[f"{what} fused 1"]) for n in heads]
                label = f"{name}: {regime['device']}, batch {regime['batch']}, length {regime['length']}"
                each.plot(heads, medians, style, color=f"C{place}", marker="o", markersize=3, label=label)
        by_heads(each, heads, ylabel="times the fused layer with one head", title=what)
        each.set_yscale("log", base=2)
        each.yaxis.set_major_locator(LogLocator(2, subs=(1.0, 1.5)))
        each.yaxis.set_major_formatter("{x:g}")
        each.axhline(1.0, color="0.7", linewidth=0.8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def slots(results: Results, path: Path) -> None:
    """Plot the share of right answers in each slot of the task of several relations."""
    shown = {key: cells for key, cells in results.settings.items() if key[0].startswith("relations")}
    if not shown:
        return
    figure, axes = panels(len(shown))
    for each, ((_, scheme), cells) in zip(axes, shown.items(), strict=True):
        for slot in range(len(next(iter(cells.values()))["runs"][0]["accuracy"])):
            values = {heads: [run["accuracy"][slot] for run in cell["runs"]] for heads, cell in cells.items()}
            line(each, values, f"{slot + 1} before")
        by_heads(each, list(cells), ylabel="share of right answers")
        each.set_ylim(0, 1.05)
        each.set_title(textwrap.fill(f"{cell_words(cells)}, {scheme}", 44), fontsize=8)
        each.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)


def shares(results: Results, path: Path) -> None:
    """Plot the share of half of the heads in the effect of all, against the number of heads."""
    rows = results.verdicts["robust"]["settings"]
    tasks = sorted({row["task"] for row in rows.values()})
    figure, axes = panels(2 * len(tasks), 4.2, 3.0, most=2)
    places = [(task, how) for task in tasks for how in ("half", "least")]
    for each, (task, how) in zip(axes, places, strict=True):
        for row in (row for row in rows.values() if row["task"] == task):
            means, errors = zip(*row[how].values(), strict=True)
            numbers = [int(heads) for heads in row[how]]
            scheme = row["scheme"]
            style = {"color": COLOURS[scheme], "marker": "o", "markersize": 3, "capsize": 2, "label": scheme}
            each.errorbar(numbers, means, yerr=errors, **style)
        by_heads(each, numbers, ylabel="share of the effect of all heads")
        each.set_title(f"{task}: {'half of the heads' if how == 'half' else 'the least important half'}", fontsize=9)
        each.legend(fontsize=7)
    figure.savefig(path, dpi=DPI)
