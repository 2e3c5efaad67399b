"""The command `headwise monitor`."""

from pathlib import Path
from typing import Annotated

import typer

import headwise as hw
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import path
from headwise.errors import InputError
from headwise.monitoring.alarms import AlarmLimits

EXAMPLES = """
headwise monitor run
headwise monitor run --changed 10 --max-logit 50 --out pictures
headwise monitor run --no-pictures --json > state.json
"""


def monitor(
    *,
    folder: Annotated[Path, typer.Argument(parser=path, metavar="FOLDER", help="Run folder of a monitored training.")],
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FOLDER", help="Folder for the pictures. Default: the run folder."),
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Write a picture of each statistic.")] = True,
    changed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of heads to name for each statistic that changed most.")
    ] = 5,
    max_logit: Annotated[
        float | None, typer.Option(metavar="X", help="Alarm above this attention logit.", show_default=True)
    ] = AlarmLimits.max_logit,
    entropy: Annotated[
        float | None, typer.Option(metavar="X", help="Alarm below this mean entropy, in nats.")
    ] = AlarmLimits.entropy,
    output_share: Annotated[
        float | None, typer.Option(metavar="X", help="Alarm below this share of the layer's median output norm.")
    ] = AlarmLimits.output_share,
    output: OutputFlags,
) -> None:
    """Show the state of a training that `hw.monitor` observes, also while it runs. Prints the last observed step; for
    each statistic the heads with the smallest, the median and the largest value, and those that changed most since the
    first step; and the alarms of the last step. Writes a picture of each statistic over all steps.
    """
    from headwise.show.monitoring import history_records, print_history

    limits = AlarmLimits(max_logit, entropy, output_share)
    history = hw.History.load(folder)
    if not history.steps:
        raise InputError("folder", expected="a run folder with observed steps", got=f"{str(folder)!r} without steps")
    if pictures:
        history.save_pictures(folder if out is None else out)
    written = (folder if out is None else out) if pictures else None
    output.show(
        lambda: history_records(history, limits),
        lambda console: print_history(history, limits, console, changed),
        written=written,
    )
