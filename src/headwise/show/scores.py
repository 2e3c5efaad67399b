"""Ablations and importance scores in a terminal."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.analysis.ablation_result import Ablation, SetAblation
from headwise.analysis.in_context.table import InContextScores
from headwise.analysis.patching.activation_patching import Patching
from headwise.runs.significance import FALSE_DISCOVERY_RATE, in_errors
from headwise.runs.table import Table
from headwise.show.titles import run_title
from headwise.wording import counted, number, quotient


def print_ablation(ablation: Ablation | SetAblation, console: Console, top: int) -> None:
    """Print the `top` heads, or sets of heads, whose removal increases the loss most. Then print how many removals
    increase, and how many decrease, the loss at a false discovery rate of 5 %, unless the loss is a distance, which
    cannot be negative.
    """
    metadata: Any = ablation.metadata
    console.print(Text(run_title(ablation), style="bold"), soft_wrap=True)
    loss, replacement = metadata["settings"]["loss"], metadata["settings"]["replacement"]
    unchanged = ablation.baseline.text()
    console.print(f"loss: {loss}, {unchanged} for the unchanged model; replacement of head outputs: {replacement}")
    if "note" in metadata["measured"]:
        console.print(metadata["measured"]["note"])
    print_scores(ablation, console, "cost", top)
    if ablation.is_distance:
        console.print("\na distance cannot be negative: compare its errors between rows, not with zero")
        return
    costs, q = [row.statistics["cost"].value for row in ablation.rows], ablation.tests()["cost_q"]
    found = [cost for cost, rate in zip(costs, q, strict=True) if rate <= FALSE_DISCOVERY_RATE]
    rises, falls = (sum(sign * cost > 0 for cost in found) for sign in (1, -1))
    console.print(
        f"\nof {len(costs)}, removed one at a time, {rises} raise the loss, {falls} lower it, "
        f"{len(costs) - rises - falls} neither, at a false discovery rate of {FALSE_DISCOVERY_RATE:.0%}"
    )


def print_scores(
    table: Table[Any], console: Console, statistic: str, top: int, *, no_effect: float | None = None
) -> None:
    """Print the `top` rows of a table that have the largest mean of the statistic `statistic` (NaN last), or with
    `no_effect` those whose mean is farthest from this number. Each printed row shows the mean and standard error of
    every statistic, the distance of the mean of `statistic` from zero or from `no_effect` in standard errors, and the
    further summaries and tests of the table, if it has some.

    Args:
        table: rows with statistics.
        console: where to print.
        statistic: statistic to sort by.
        top: number of rows.
        no_effect: mean of a row without effect; None if rows are sorted by the mean itself.
    """
    summaries, tests, values = table.summaries(), table.tests(), [row.statistics[statistic].value for row in table.rows]
    if no_effect is not None:
        values = [abs(value - no_effect) for value in values]
    order = sorted(range(len(values)), key=lambda index: _nan_last(values[index]), reverse=True)
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    further = (name.removeprefix(f"{statistic}_") for name in (*summaries, *tests))
    for column in ("", *table.statistics, "standard errors", *further):
        shown.add_column(column, justify="right", no_wrap=True)
    for index in order[:top]:
        row = table.rows[index]
        numbers = (row.statistics[name].text() for name in table.statistics)
        measured = row.statistics[statistic]
        ratio = in_errors(measured._replace(value=measured.value - (no_effect or 0.0)))
        of_summaries = (_summary(of_rows[index]) for of_rows in summaries.values())
        of_tests = (number(of_rows[index], ".2g") for of_rows in tests.values())
        shown.add_row(row.name, *numbers, quotient(ratio, "+z.1f"), *of_summaries, *of_tests)
    console.print()
    console.print(shown)
    if len(order) > top:
        console.print(Text(f"and {len(order) - top} more", style="dim"))


def print_patching(table: Patching, console: Console, top: int, *, title: str) -> None:
    """Print the `top` heads with the largest effect of patching, below the name of the model and the logit differences
    of the two runs without patches.
    """
    measured: Any = table.metadata["measured"]
    console.print(Text(f"{title}: {counted(measured['sequences'], 'prompt pair')}", style="bold"), soft_wrap=True)
    clean, corrupted = (number(measured[name]) for name in ("clean", "corrupted"))
    direction = table.metadata["settings"]["direction"]
    console.print(f"logit of the right answer minus that of the wrong one: {clean} clean, {corrupted} corrupted")
    effect = "recovered is 0 without effect" if direction == "denoise" else "recovered is 1 without effect"
    console.print(f"direction: {direction}; {effect}")
    print_scores(table, console, "recovered", top, no_effect=table.no_effect("recovered"))


def print_importance(importance: Table[Any], console: Console, top: int) -> None:
    """Print the `top` heads with the largest importance scores, below lines that state model, data, method, loss and
    normalisation.
    """
    settings: Any = importance.metadata["settings"]
    console.print(Text(run_title(importance), style="bold"), soft_wrap=True)
    over = "normalised in each layer" if settings["normalise"] else "not normalised"
    console.print(f"importance by {settings['method']['name']} of {settings['loss']}, {over}")
    print_scores(importance, console, importance.statistics[0], top)


def print_in_context(scores: InContextScores, console: Console, top: int) -> None:
    """Print the in-context learning score of a model, and the `top` heads without which it rises most."""
    metadata: Any = scores.metadata
    settings = metadata["settings"]
    console.print(Text(run_title(scores), style="bold"), soft_wrap=True)
    window = "" if settings["window"] == 1 else f", means over the {settings['window']} tokens up to each"
    console.print(
        f"in-context learning score {scores.score.text()}: "
        f"loss {scores.late_loss.text()} at token {settings['late']}, "
        f"minus {scores.early_loss.text()} at token {settings['early']}{window}"
    )
    print_scores(scores, console, scores.statistics[0], top)


def _summary(value: float | int) -> str:
    """Return a count as text, or another number with four decimals."""
    return str(value) if isinstance(value, int) else number(value)


def _nan_last(value: float) -> float:
    """Return a sort key, for descending order, that sorts NaN last: the value itself, or minus infinity for NaN."""
    return -math.inf if math.isnan(value) else value
