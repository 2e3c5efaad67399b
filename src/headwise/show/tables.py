"""Tables of numbers in a terminal: their cells, their order, and the lines around them."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.runs.rows import Row
from headwise.runs.significance import FALSE_DISCOVERY_RATE
from headwise.runs.table import Table
from headwise.wording import counted

AT_RATE = f"at a false discovery rate of {FALSE_DISCOVERY_RATE:.0%}"

T = TypeVar("T")


def plain_table(*columns: str, left: Collection[str] = (), gap: int = 1) -> RichTable:
    """Return an empty rich table without lines. Cells are aligned on the right, except in the columns named in `left`.
    `gap` is the number of blanks on each side of a cell.
    """
    table = RichTable(box=None, pad_edge=False, padding=(0, gap), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    top: int | None = None,
    left: Collection[str] = (),
) -> None:
    """Print a table below an empty line: all `rows`, or only the first `top` ones followed by the number of the
    others.
    """
    table, rows = plain_table(*columns, left=left), list(rows)
    for cells in rows[:top]:
        table.add_row(*cells)
    console.print()
    console.print(table)
    if top is not None and len(rows) > top:
        console.print(Text(f"and {len(rows) - top} more", style="dim"))


def print_title(console: Console, title: str) -> None:
    """Print the title of a result, its first line, in bold."""
    console.print(Text(title, style="bold"), soft_wrap=True)


def run_title(table: Table[Any], **counts: int) -> str:
    """Return a title in one line: model, quantisation, data source and numbers, for example "144 heads" for `head=144`
    in `counts`.
    """
    metadata: Any = table.metadata
    measured, source = metadata["measured"], (metadata["data"] or {}).get("source", "batches")
    numbers = {"sequence": measured["sequences"], "token": measured["tokens"], **counts}
    sizes = ", ".join(counted(number, noun) for noun, number in numbers.items())
    quantisation = metadata["model"].get("quantisation")
    weights = "" if quantisation is None else f" ({quantisation})"
    return f"{metadata['model']['name']}{weights} on {source}: {sizes}"


def descending(items: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """Return `items` in descending order of the number that `value` returns for each. Items with NaN come last."""

    def key(item: T) -> float:
        number = value(item)
        return math.inf if math.isnan(number) else -number

    return sorted(items, key=key)


def means(row: Row, names: Iterable[str], form: str = "z.4f") -> list[str]:
    """Return cells of a printed table: the means of the statistics `names` in one row, each with its standard error."""
    return [row.statistics[name].text(form) for name in names]


def significant(table: Table[Any], statistic: str) -> list[float]:
    """Return the means of a statistic in those rows of a table in which it differs significantly from no effect."""
    q = table.tests()[f"{statistic}_q"]
    return [
        row.statistics[statistic].value for row, rate in zip(table.rows, q, strict=True) if rate <= FALSE_DISCOVERY_RATE
    ]


def signs(values: Iterable[float]) -> tuple[int, int]:
    """Return how many of the numbers are above 0, and how many are below 0."""
    values = list(values)
    return sum(value > 0 for value in values), sum(value < 0 for value in values)
