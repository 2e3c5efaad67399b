"""The command `headwise localize`."""

from pathlib import Path
from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_causal, find_inputs
from headwise.cli.options import Data, DecoderFlags, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import path
from headwise.errors import InputError

EXAMPLES = """
headwise localize --model smollm2 --data corpus.txt --documents cut --budget 0.01 --out streaming.json
headwise localize --model smollm2 --data corpus.txt --documents cut --window 128 --first 1 --out streaming.json
headwise localize --model smaller --data corpus.txt --documents cut --out streaming.json --json
"""


def localize(
    *,
    data: Data,
    out: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="JSON file for the result.")],
    model: DecoderFlags,
    budget: Annotated[
        float, typer.Option(min=0.0, help="Largest relative rise of the loss, such as 0.01 for one percent.")
    ] = 0.01,
    window: Annotated[int, typer.Option(min=1, help="Tokens of the window.")] = 512,
    first: Annotated[int, typer.Option(min=0, help="First tokens that all heads attend to.")] = 4,
    texts: TextFlags,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    output: OutputFlags,
) -> None:
    """Find the heads of a decoder that need only the first tokens and a window of recent ones, so that its cache can be
    shorter. Prints them, and saves them in --out.
    """
    from headwise.show.smaller_models import localization_records

    if out.exists() and not (force and out.is_file()):
        remedy = "--force replaces it" if out.is_file() else None
        raise InputError("out", expected="a new file", got=repr(str(out)), remedy=remedy)
    device = model.torch_device
    find_causal(model)
    source, dataset = find_inputs(model, data, texts, out.parent, shown=not output.quiet)
    loaded = source.model("causal", model.torch_dtype).to(device)
    result = hw.localize(loaded, dataset.within(loaded), budget, window=window, first=first)
    result.save(out)
    metadata = {"model": {"name": source.title}, "data": {"source": dataset.name}}
    output.show(lambda: localization_records(result, metadata), lambda console: console.print(str(result)), written=out)
