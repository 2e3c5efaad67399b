"""Circuits of heads in a terminal."""

import math

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.analysis.circuits.scores import CircuitScores, Composition
from headwise.wording import number, quotient


def print_circuits(
    scores: CircuitScores, composition: Composition | None, kind: str, console: Console, top: int
) -> None:
    """Print the `top` heads with the largest scores (copying scores if the table has them), and the `top` pairs of
    heads with the largest composition scores of a kind.
    """
    console.print(Text(f"{scores.model_name}: {len(scores.rows)} heads", style="bold"), soft_wrap=True)
    by = scores.statistics[0]
    console.print(f"scores from weights; heads by {by}")
    ranked = sorted(scores.rows, key=lambda row: -_number(row.statistics[by].value))
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("", *scores.statistics):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in ranked[:top]:
        shown.add_row(row.name, *(number(row.statistics[name].value) for name in scores.statistics))
    console.print()
    console.print(shown)
    if len(ranked) > top:
        console.print(Text(f"and {len(ranked) - top} more", style="dim"))
    if composition is not None:
        _print_pairs(composition, kind, console, top)


def _print_pairs(composition: Composition, kind: str, console: Console, top: int) -> None:
    """Print the `top` pairs of heads with the largest composition scores of a kind."""
    expected = composition.expected
    console.print(f"\n{kind.upper()}-composition, earlier head > later head; {number(expected)} for random matrices")
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("", kind, "times random"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in composition.largest(kind, top):
        value = row.statistics[kind].value
        shown.add_row(row.name, number(value), quotient(value / expected, ".1f"))
    console.print()
    console.print(shown)
    if len(composition.rows) > top:
        console.print(Text(f"and {len(composition.rows) - top} more", style="dim"))


def _number(value: float) -> float:
    """Return a sort key for descending order that puts NaN last."""
    return -math.inf if math.isnan(value) else value
