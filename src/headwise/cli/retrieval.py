"""The command `headwise retrieval`."""

from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.head_tests import DecoderTestFlags
from headwise.cli.options import Top
from headwise.cli.quantities import choice, numbers, path
from headwise.settings import CONTINUATIONS, NEEDLE_LENGTHS, NEEDLES

EXAMPLES = """
headwise retrieval --model smollm2 --out smollm2-retrieval
headwise retrieval --model smollm2 --haystack book.txt --lengths 512,1024 --needles 20
headwise retrieval --model smollm2 --continuation forced --json > retrieval.json
"""


def retrieval(
    *,
    test: DecoderTestFlags,
    haystack: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="PATH", help="Text that hides needles. Default: the help topics of Python."),
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="N,N", help="Numbers of tokens of the texts, about.")] = ",".join(
        map(str, NEEDLE_LENGTHS)
    ),
    needles: Annotated[int, typer.Option(min=1, metavar="N", help="Number of needles.")] = NEEDLES,
    continuation: Annotated[
        str,
        typer.Option(help="Whether the model generates its answers, or reads the right ones.", **choice(CONTINUATIONS)),
    ] = "generated",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of needles and texts.")] = 0,
    top: Top = 20,
) -> None:
    """Measure how often each head attends most to the token that the model repeats from a sentence in a long text.
    Prints the heads with the largest retrieval scores, and tests which scores are above 0.1.
    """
    from headwise.show.results import print_retrieval

    settings: dict[str, Any] = {"continuation": continuation, "seed": seed, "lengths": sorted(set(numbers(lengths)))}
    options = {**settings, "haystack": haystack, "needles": needles}
    test.run(hw.retrieval_score, hw.Retrieval, settings, print_retrieval, top, **options)
