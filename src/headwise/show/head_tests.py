"""Tests of single heads in a terminal: retrieval, sinks, name movers and dependencies."""

from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.analysis.head_tests.dependency_table import DependencyAccuracy
from headwise.analysis.head_tests.name_mover_table import NameMovers
from headwise.analysis.head_tests.retrieval import THRESHOLD, Retrieval
from headwise.analysis.head_tests.sinks import SinkRate
from headwise.runs.rows import MeanEstimate
from headwise.runs.significance import FALSE_DISCOVERY_RATE
from headwise.runs.table import Table
from headwise.show.scores import print_scores
from headwise.wording import counted, number

AT_RATE = f"at a false discovery rate of {FALSE_DISCOVERY_RATE:.0%}"


def print_retrieval(table: Retrieval, console: Console, top: int) -> None:
    """Print the `top` heads with the largest retrieval scores, and the number of heads whose score is above 0.1."""
    measured: Any = table.metadata["measured"]
    texts = (
        f"{measured['sequences']} of {counted(measured['texts'], 'text')} with {counted(measured['needles'], 'needle')}"
    )
    _print_title(table, console, f"{texts}; the model repeats {measured['recall']:.0%} of the answers")
    print_scores(table, console, "score", top)
    found = sum(q <= FALSE_DISCOVERY_RATE for q in table.tests()["score_q"])
    console.print(f"\n{counted(found, 'head')} of {len(table.rows)} with a score above {THRESHOLD}, {AT_RATE}")


def print_sinks(table: SinkRate, console: Console, top: int) -> None:
    """Print the `top` heads with the largest sink rates, and the rate of the model."""
    measured: Any = table.metadata["measured"]
    settings: Any = table.metadata["settings"]
    _print_title(table, console, f"{counted(measured['sequences'], 'sequence')}; threshold {settings['epsilon']:g}")
    print_scores(table, console, table.statistics[0], top)
    console.print()
    for name, estimate in measured["model"].items():
        console.print(f"{name} of the model: {MeanEstimate(**estimate).text()}")


def print_name_movers(table: NameMovers, console: Console, top: int) -> None:
    """Print the `top` heads with the largest direct effects on the logits, and the heads that pass the tests."""
    measured: Any = table.metadata["measured"]
    logit = measured["logit"]
    solved = f"logit difference {MeanEstimate(**logit).text('z.3f')}, positive in {measured['solved']:.0%}"
    _print_title(table, console, f"{counted(measured['sequences'], 'prompt')}; {solved}")
    if measured["no_copying"] is not None:
        console.print(Text(f"no copying scores: {measured['no_copying']}"), soft_wrap=True)
    print_scores(table, console, "logit", top)
    console.print()
    for kind, title in (("name_mover", "name movers"), ("negative", "negative name movers")):
        names = ", ".join(row.name for row in table.found(kind)) or "none"
        console.print(Text(f"{title} {AT_RATE}: {names}"), soft_wrap=True)


def print_dependencies(table: DependencyAccuracy, console: Console, top: int) -> None:
    """Print the `top` heads with the largest gain over the best fixed offset, each in the relation that was selected
    for it, and the number of heads with a gain.
    """
    measured, best = table.metadata["measured"], table.best()
    _print_title(table, console, f"{counted(measured['sequences'], 'sentence')}, {counted(measured['pairs'], 'pair')}")
    for reason, count in measured["left_out"].items():
        console.print(Text(f"left out: {count} {reason}"), soft_wrap=True)
    q = best.tests()["gain_q"]
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("", "relation", "direction", "accuracy", "best offset", "gain", "q"):
        shown.add_column(column, justify="right", no_wrap=True)
    order = sorted(range(len(best.rows)), key=lambda index: -best.rows[index].statistics["gain"].value)
    for index in order[:top]:
        row = best.rows[index]
        accuracy, by_offset, gain = (row.statistics[name] for name in ("accuracy", "offset_accuracy", "gain"))
        numbers = (
            number(accuracy.value, ".3f"),
            f"{number(by_offset.value, '.3f')} ({row.offset:+})",
            gain.text(),
            number(q[index], ".2g"),
        )
        shown.add_row(row.name, row.relation, row.direction, *numbers)
    console.print()
    console.print(shown)
    if len(order) > top:
        console.print(Text(f"and {len(order) - top} more", style="dim"))
    found = sum(
        rate <= FALSE_DISCOVERY_RATE and row.statistics["gain"].value > 0
        for row, rate in zip(best.rows, q, strict=True)
    )
    console.print(f"\n{counted(found, 'head')} of {len(best.rows)} better than the best fixed offset, {AT_RATE}")


def _print_title(table: Table[Any], console: Console, summary: str) -> None:
    """Print the model of a table and a summary of what was measured."""
    console.print(Text(f"{table.model_name}: {summary}", style="bold"), soft_wrap=True)
