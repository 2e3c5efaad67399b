"""The command `headwise name-movers`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.head_tests import DecoderTestFlags
from headwise.cli.options import Top
from headwise.settings import COPIED_PROMPTS, NAME_PROMPTS

EXAMPLES = """
headwise name-movers --model smollm2 --out smollm2-name-movers
headwise name-movers --model smollm2 --prompts 320 --copied 0
headwise name-movers --model smollm2 --seed 1 --json > name-movers.json
"""


def name_movers(
    *,
    test: DecoderTestFlags,
    prompts: Annotated[int, typer.Option(min=2, metavar="N", help="Number of prompts.")] = NAME_PROMPTS,
    copied: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of prompts whose names test the weights of heads.")
    ] = COPIED_PROMPTS,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the names.")] = 0,
    top: Top = 20,
) -> None:
    """Find heads that move a name to the end of a prompt, and heads that do the opposite, on prompts with two names.
    Prints the heads with the largest effects on the logits, and those that pass the tests.
    """
    from headwise.show.results import print_name_movers

    settings = {"prompts": prompts, "copied": copied, "seed": seed}
    test.run(hw.name_movers, hw.NameMovers, settings, print_name_movers, top, **settings)
