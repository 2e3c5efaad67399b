"""Norm-weighted attention and rollout in a terminal."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.analysis.flow.norm_table import CHANGE_SUFFIX, NORM_PREFIX, NormWeighted
from headwise.analysis.flow.rollout_table import ROLLED_PREFIX, Rollout
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.runs.significance import FALSE_DISCOVERY_RATE
from headwise.show.titles import run_title
from headwise.statistics.by_norm import MOVED, PREFERENCE


def print_norm_weighted(table: NormWeighted, statistic: str, console: Console, top: int) -> None:
    """Print the `top` heads in which the largest share of attention is on other keys by norm than by weight, with one
    statistic of norms, and the numbers of heads whose preference and change differ from zero.
    """
    console.print(Text(run_title(table, head=len(table.rows)), style="bold"), soft_wrap=True)
    change = statistic + CHANGE_SUFFIX
    columns = [name for name in (MOVED, PREFERENCE, NORM_PREFIX + statistic, change) if name in table.statistics]
    _print_heads(table, console, columns, MOVED, top)
    for name in (PREFERENCE, change):
        _print_found(table, console, name)


def print_rollout(table: Rollout, statistic: str, console: Console, top: int) -> None:
    """Print the rollout of each layer, the `top` heads in which a statistic differs most from that of their own
    attention, and the numbers of heads in which it differs from zero.
    """
    console.print(Text(run_title(table, head=len(table.rows)), style="bold"), soft_wrap=True)
    shown = _columns("layer", *table.layers.statistics)
    for row in table.layers.rows:
        shown.add_row(str(row.layer), *(row.statistics[name].text() for name in table.layers.statistics))
    console.print()
    console.print(shown)
    change = statistic + CHANGE_SUFFIX
    columns = [name for name in (ROLLED_PREFIX + statistic, change) if name in table.statistics]
    if not columns:
        console.print(f"\n{statistic} was not measured")
        return
    _print_heads(table, console, columns, change, top)
    _print_found(table, console, change)


def _print_heads(table: HeadTable[HeadRow], console: Console, columns: Sequence[str], order: str, top: int) -> None:
    """Print some columns of the `top` heads with the largest absolute values of one."""
    shown = _columns("", *columns)

    def key(row: HeadRow) -> float:
        value = row.statistics[order].value
        return math.inf if math.isnan(value) else -abs(value)

    for row in sorted(table.rows, key=key)[:top]:
        shown.add_row(row.name, *(row.statistics[name].text() for name in columns))
    console.print()
    console.print(shown)
    if len(table.rows) > top:
        console.print(Text(f"and {len(table.rows) - top} more", style="dim"))


def _print_found(table: HeadTable[Any], console: Console, name: str) -> None:
    """Print how many heads differ from zero in a column, by sign, at a false discovery rate of 5 %."""
    if name not in table.statistics:
        return
    q = table.tests()[f"{name}_q"]
    found = [
        row.statistics[name].value for row, rate in zip(table.rows, q, strict=True) if rate <= FALSE_DISCOVERY_RATE
    ]
    above, below = (sum(sign * value > 0 for value in found) for sign in (1, -1))
    console.print(
        f"\n{name}: {above} of {len(table.rows)} heads above 0, {below} below, at a false discovery rate of "
        f"{FALSE_DISCOVERY_RATE:.0%}"
    )


def _columns(*names: str) -> RichTable:
    """Return an empty table with these columns."""
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown
