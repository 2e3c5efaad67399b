"""How far a long run is: a bar with its rate and the time left, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headwise.errors import require

if TYPE_CHECKING:
    from rich.progress import Task

RATE_MINUTES = 10
"""Over how many the rate is taken: a batch may take one."""


@contextmanager
def progress_bar(title: str, total: int | None, unit: str, *, shown: bool) -> Iterator[Callable[[int, bool], None]]:
    """A function that is told how many units are done, and whether they were done before this run.

    Raises:
        MissingExtra: it is to be shown and rich is not installed.
    """
    if not shown:
        yield lambda _units, _before: None
        return
    require("rich", purpose="a progress bar", extra="cli")
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    before_this = 0

    class Rate(ProgressColumn):
        """Units a second."""

        def render(self, task: "Task") -> Text:
            seconds = task.finished_time or task.elapsed
            rate = (task.completed - before_this) / seconds if seconds else 0.0
            return Text(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s" if rate else "")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=60 * RATE_MINUTES) as progress:
        task = progress.add_task(title, total=total)

        def advance(units: int, before: bool) -> None:
            nonlocal before_this
            if before:  # the clock starts again: what was done before says nothing of the rate
                before_this += units
                progress.reset(task, completed=before_this)
            else:
                progress.advance(task, units)

        yield advance
