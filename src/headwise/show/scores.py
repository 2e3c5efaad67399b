"""What heads are worth, on a terminal: an ablation, or scores of importance."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.analysis.ablation_result import Ablation, SetAblation
from headwise.analysis.losses import EmbeddingDistance
from headwise.runs.rows import MeanEstimate
from headwise.runs.table import Table

SURE = 2.0
"""From how many standard errors on a number is told apart from zero here."""


def print_ablation(ablation: Ablation | SetAblation, console: Console, top: int) -> None:
    """Print what costs most, and how many heads or sets can go one by one."""
    metadata: Any = ablation.metadata
    console.print(Text(_title(ablation), style="bold"), soft_wrap=True)
    loss, replacement = metadata["settings"]["loss"], metadata["settings"]["replacement"]
    console.print(f"loss: {loss}, {_with_error(ablation.baseline)} of the whole model; removed: {replacement}")
    print_scores(ablation, console, "cost", top)
    if loss == EmbeddingDistance.__name__:
        console.print("\na distance is never below 0: its error tells rows from each other, not from nothing")
        return
    costs = [errors(row.statistics["cost"]) for row in ablation.rows]
    dear, gain = (sum(sign * cost >= SURE for cost in costs) for sign in (1, -1))
    console.print(
        f"\nof {len(costs)}, removed one at a time, {dear} cost at least {SURE:g} standard errors, "
        f"{gain} gain as much, {len(costs) - dear - gain} neither"
    )


def print_scores(table: Table[Any], console: Console, statistic: str, top: int) -> None:
    """Print the rows with the largest numbers, NaN last."""
    rows = sorted(table.rows, key=lambda row: _or_least(row.statistics[statistic].value), reverse=True)
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("", *table.statistics, "standard errors"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows[:top]:
        numbers = (_with_error(row.statistics[name]) for name in table.statistics)
        shown.add_row(row.name, *numbers, f"{errors(row.statistics[statistic]):+.1f}")
    console.print()
    console.print(shown)
    if len(rows) > top:
        console.print(Text(f"and {len(rows) - top} more", style="dim"))


def errors(measured: MeanEstimate) -> float:
    """How many standard errors a mean is from zero; NaN of nothing."""
    if measured.sem == 0.0:
        return math.copysign(math.inf, measured.value) if measured.value else 0.0
    return measured.value / measured.sem


def print_importance(importance: Table[Any], console: Console, top: int) -> None:
    """Print the most important heads."""
    settings: Any = importance.metadata["settings"]
    console.print(Text(_title(importance), style="bold"), soft_wrap=True)
    over = "normalised in each layer" if settings["normalise"] else "not normalised"
    console.print(f"importance by {settings['method']['name']} of {settings['loss']}, {over}")
    print_scores(importance, console, importance.statistics[0], top)


def _title(table: Table[Any]) -> str:
    metadata: Any = table.metadata
    measured, source = metadata["measured"], (metadata["data"] or {}).get("source", "batches")
    sequences = "1 sequence" if measured["sequences"] == 1 else f"{measured['sequences']:,} sequences"
    return f"{metadata['model']['name']} on {source}: {sequences}, {measured['tokens']:,} tokens"


def _with_error(measured: MeanEstimate) -> str:
    error = "" if math.isnan(measured.sem) else f" ± {measured.sem:.2g}"
    return f"{measured.value:.4f}{error}"


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value
