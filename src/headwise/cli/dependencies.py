"""The command `headwise dependencies`."""

from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.head_tests import HeadTestFlags
from headwise.cli.options import Top
from headwise.cli.quantities import path
from headwise.settings import FEWEST_PAIRS

EXAMPLES = """
headwise dependencies --treebank en_ewt-ud-test.conllu --out minilm-dependencies
headwise dependencies --model smollm2 --treebank treebank --limit 300 --start-token 1
headwise dependencies --treebank en_ewt-ud-test.conllu --subtypes --json > dependencies.json
"""


def dependencies(
    *,
    treebank: Annotated[
        Path, typer.Option(parser=path, metavar="PATH", help="File in CoNLL-U format, or folder with such files.")
    ],
    test: HeadTestFlags,
    limit: Annotated[int | None, typer.Option(min=2, metavar="N", help="Use only this many sentences.")] = None,
    fewest: Annotated[
        int, typer.Option(min=2, metavar="N", help="Leave out relations with fewer pairs in a half.")
    ] = FEWEST_PAIRS,
    subtypes: Annotated[bool, typer.Option("--subtypes", help="Keep subtypes of relations.")] = False,
    start_token: Annotated[
        int | None, typer.Option(min=0, metavar="ID", help="Token to put before each sentence.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the division into halves.")] = 0,
    top: Top = 20,
) -> None:
    """Measure how often the word that a head attends to most is the governor or the dependent of a word. Compares each
    head with the best fixed offset, and prints the heads with the largest gain.
    """
    from headwise.show.results import print_dependencies

    settings: dict[str, Any] = {"limit": limit, "fewest": fewest, "subtypes": subtypes, "seed": seed}
    settings["start_token"] = start_token
    test.run(hw.dependency_accuracy, hw.DependencyAccuracy, settings, print_dependencies, top, treebank, **settings)
