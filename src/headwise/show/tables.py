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
    """Return an empty table without lines, whose cells are aligned on the right, except in the columns `left`, and
    have `gap` blanks around them.
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
    """Print rows of cells below an empty line, all of them or the first `top` ones and the number of the others."""
    table, rows = plain_table(*columns, left=left), list(rows)
    for cells in rows[:top]:
        table.add_row(*cells)
    console.print()
    console.print(table)
    if top is not None and len(rows) > top:
        console.print(Text(f"and {len(rows) - top} more", style="dim"))


def print_title(console: Console, title: str) -> None:
    """Print the first line of a result."""
    console.print(Text(title, style="bold"), soft_wrap=True)


def run_title(table: Table[Any], **counts: int) -> str:
    """Return one line with the name of a table's model, how its weights were quantised, the data source, and numbers:
    sequences, tokens, and further things by the noun for one of them.
    """
    metadata: Any = table.metadata
    measured, source = metadata["measured"], (metadata["data"] or {}).get("source", "batches")
    numbers = {"sequence": measured["sequences"], "token": measured["tokens"], **counts}
    sizes = ", ".join(counted(number, noun) for noun, number in numbers.items())
    quantisation = metadata["model"].get("quantisation")
    weights = "" if quantisation is None else f" ({quantisation})"
    return f"{metadata['model']['name']}{weights} on {source}: {sizes}"


def descending(items: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """Return items in descending order of a number, NaN last."""

    def key(item: T) -> float:
        number = value(item)
        return math.inf if math.isnan(number) else -number

    return sorted(items, key=key)


def means(row: Row, names: Iterable[str], form: str = "z.4f") -> list[str]:
    """Return the means of statistics of a row with their standard errors, as cells."""
    return [row.statistics[name].text(form) for name in names]


def significant(table: Table[Any], statistic: str) -> list[float]:
    """Return the means of a statistic in the rows in which a test found an effect, at a false discovery rate of 5 %."""
    q = table.tests()[f"{statistic}_q"]
    return [
        row.statistics[statistic].value for row, rate in zip(table.rows, q, strict=True) if rate <= FALSE_DISCOVERY_RATE
    ]


def signs(values: Iterable[float]) -> tuple[int, int]:
    """Return how many numbers are above 0, and how many below."""
    values = list(values)
    return sum(value > 0 for value in values), sum(value < 0 for value in values)
