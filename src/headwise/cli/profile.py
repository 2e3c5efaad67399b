"""The command `headwise profile`."""

from typing import Annotated

import typer

from headwise.analysis.profile import profile as measure
from headwise.cli.loading import quiet_libraries
from headwise.cli.options import Data, Device, Force, ModelName, Out, TextFlags
from headwise.data.models import load
from headwise.runs.distributed import process_group
from headwise.show.profiles import print_profile
from headwise.show.terminal import make_console


def profile(
    *,
    data: Data,
    out: Out,
    model: ModelName = "minilm",
    texts: TextFlags,
    repeats: Annotated[bool, typer.Option(help="Also measure induction on repeated random tokens.")] = True,
    device: Device = None,
    force: Force = False,
) -> None:
    """Measure the attention statistics of every head on a data set. Assigns a role to each head (such as previous
    token, induction or broad), prints the heads of each role, and saves roles and statistics in --out as a profile.
    Processes started by torchrun share the work.
    """
    with process_group() as process:
        quiet_libraries()
        loaded = load(model)
        dataset = texts.texts(data, loaded.tokenizer)
        result = measure(
            loaded.model.to(process.device(device)),
            dataset,
            repeats=repeats,
            out=out,
            force=force,
            progress=process.is_first,
            title=loaded.title,
        )
        if process.is_first:
            print_profile(result, make_console())
            typer.echo(f"\nwrote {out}")
