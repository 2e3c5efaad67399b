"""The command `headwise name-movers`."""

from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.head_tests import decoder_and_tokenizer
from headwise.cli.loading import find_causal, require_same_run
from headwise.cli.options import DecoderFlags, Force, TableFolder, Top
from headwise.cli.output import OutputFlags
from headwise.settings import COPIED_PROMPTS, NAME_PROMPTS

EXAMPLES = """
headwise name-movers --model smollm2 --out smollm2-name-movers
headwise name-movers --model smollm2 --prompts 320 --copied 0
headwise name-movers --model smollm2 --seed 1 --json > name-movers.json
"""


def name_movers(
    *,
    model: DecoderFlags,
    prompts: Annotated[int, typer.Option(min=2, metavar="N", help="Number of prompts.")] = NAME_PROMPTS,
    copied: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of prompts whose names test the weights of heads.")
    ] = COPIED_PROMPTS,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the names.")] = 0,
    out: TableFolder = None,
    top: Top = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Find heads that move a name to the end of a prompt, and heads that do the opposite, on prompts with two names.
    Prints the heads with the largest effects on the logits, and those that pass the tests.
    """
    from headwise.runs.files import require_writable
    from headwise.show.results import print_name_movers

    settings: dict[str, Any] = {"prompts": prompts, "copied": copied, "seed": seed}
    if out is not None:
        require_writable(out)
        require_same_run(hw.NameMovers, out, find_causal(model), None, model, force=force, **settings)
    loaded, tokenizer, title = decoder_and_tokenizer(model)
    options: dict[str, Any] = {"out": out, "force": force, "progress": not output.quiet, "title": title}
    table = hw.name_movers(loaded, tokenizer, **settings, **options)
    output.show(table, lambda console: print_name_movers(table, console, top), written=out)
