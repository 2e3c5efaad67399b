"""Progress bar of a long run, with its rate and the remaining time, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headwise.errors import require

if TYPE_CHECKING:
    from rich.progress import Task

RATE_MINUTES = 10
"""Minutes over which the remaining time is estimated: a single batch may take one."""


@contextmanager
def progress_bar(
    title: str, total: int | None, unit: str, *, shown: bool, transient: bool = False
) -> Iterator[Callable[[int, bool], None]]:
    """Show a progress bar while the context is open, and yield a function `advance(units, resumed)` that moves the bar
    by `units`. `resumed` is True for units that an earlier, stopped run has done; they do not count towards the
    displayed rate. If `shown` is False, there is no bar, and `advance` does nothing.

    Args:
        title: label of the bar.
        total: number of units; None if it is not known.
        unit: name of a unit, in the plural.
        shown: show the bar; otherwise `advance` does nothing.
        transient: remove the bar at the end.

    Raises:
        MissingExtra: `shown`, and rich is not installed.
    """
    if not shown:
        yield lambda _units, _resumed: None
        return
    require("rich", purpose="a progress bar", extra="cli")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """Column of a progress bar with the mean number of units per second since the start of this run."""

        def render(self, task: "Task") -> Text:
            """Return the mean number of units per second in this run as text; empty before the first unit."""
            seconds = task.finished_time or task.elapsed
            rate = (task.completed - task.fields["resumed"]) / seconds if seconds else 0.0
            return Text(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s" if rate else "")

    counts = (MofNCompleteColumn(), TextColumn(unit), Rate(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *counts,
        console=console,
        speed_estimate_period=60 * RATE_MINUTES,
        transient=transient,
        disable=transient and not console.is_terminal,  # it would print an empty line
    ) as progress:
        task = progress.add_task(title, total=total, resumed=0)

        def advance(units: int, resumed: bool) -> None:
            if resumed:  # restart the clock, so that the rate is that of this run alone
                resumed_units = progress.tasks[task].fields["resumed"] + units
                progress.reset(task, completed=resumed_units, resumed=resumed_units)
            else:
                progress.advance(task, units)

        yield advance
