"""Curves in a terminal: pruning curves, and statistics of heads against position and distance."""

import math

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.analysis.curves.distance_table import AttentionDistances
from headwise.analysis.curves.position_table import SLOPE_SUFFIX, PositionCurves
from headwise.analysis.pruning_curve import RANDOM, PruningCurve
from headwise.show.titles import run_title
from headwise.wording import number


def print_curve(curve: PruningCurve, console: Console) -> None:
    """Print the loss without each number of heads, one column for each order, and the range of the random orders."""
    console.print(Text(run_title(curve), style="bold"), soft_wrap=True)
    baseline = curve.baseline
    console.print(f"loss of the unchanged model: {baseline.text()}")
    names = list(dict.fromkeys(row.order for row in curve.rows if row.order != RANDOM))
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("removed heads", "share", *names, "random (range)"):
        shown.add_column(column, justify="right", no_wrap=True)
    band = {count: f"{number(low)} to {number(high)}" for count, low, _, high in curve.band()}
    for points in zip(*(curve.curve(name) for name in names), strict=True):
        losses = [point.statistics["loss"] for point in points]
        numbers = (loss.text() for loss in losses)
        count = points[0].removed
        shown.add_row(str(count), f"{points[0].share:.0%}", *numbers, band.get(count, ""))
    console.print()
    console.print(shown)


def print_positions(curves: PositionCurves, statistic: str, console: Console, top: int) -> None:
    """Print the curves of a statistic, one column for each bin of positions, of the `top` heads with the largest slopes
    by absolute size; and the slopes with their standard errors and adjusted p-values.
    """
    name = statistic + SLOPE_SUFFIX
    slopes = {row.name: row.statistics[name] for row in curves.slopes.rows if name in row.statistics}
    console.print(Text(run_title(curves, head=len(curves.slopes.rows)), style="bold"), soft_wrap=True)
    if not slopes:
        console.print(f"{statistic} was not measured")
        return
    q = dict(zip(slopes, curves.slopes.tests()[f"{name}_q"], strict=True))
    console.print(f"{statistic} by position of the query; slope on ln(position), counted from 1")
    bins = list(dict.fromkeys((row.position_from, row.position_to) for row in curves.rows))
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("", "slope", "q", *(str(a) if a == b else f"{a}-{b}" for a, b in bins)):
        shown.add_column(column, justify="right", no_wrap=True)
    order = sorted(slopes, key=lambda head: _descending(abs(slopes[head].value)))
    rows = {(row.name, row.position_from): row.statistics[statistic].value for row in curves.rows}
    for head in order[:top]:
        values = (number(rows[head, first], "z.3g") for first, _ in bins)
        shown.add_row(head, slopes[head].text("z.3f"), number(q[head], ".2g"), *values)
    console.print()
    console.print(shown)
    _print_rest(console, len(order) - top)


def print_distances(distances: AttentionDistances, console: Console, top: int) -> None:
    """Print the `top` heads with the longest distances that hold the largest share of their attention."""
    names = distances.statistics
    last = [name for name in names if not name.endswith("_with_first")][-1]
    console.print(Text(run_title(distances, head=len(distances.rows)), style="bold"), soft_wrap=True)
    console.print(f"distance in tokens that holds a percentage of the attention; heads by {last}")
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("", *names):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in sorted(distances.rows, key=lambda row: _descending(row.statistics[last].value))[:top]:
        shown.add_row(row.name, *(row.statistics[name].text("z.1f") for name in names))
    console.print()
    console.print(shown)
    _print_rest(console, len(distances.rows) - top)


def _print_rest(console: Console, count: int) -> None:
    """Print the number of heads that are not printed, if there are some."""
    if count > 0:
        console.print(Text(f"and {count} more", style="dim"))


def _descending(value: float) -> float:
    """Return a sort key for descending order that puts NaN last."""
    return math.inf if math.isnan(value) else -value
