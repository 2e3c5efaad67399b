"""The command `headwise norm-weighted`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.quantities import added_statistics, choice
from headwise.settings import NORMED_STATISTICS

EXAMPLES = """
headwise norm-weighted --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out norms
headwise norm-weighted --data sentences.jsonl --by special --out norms
headwise norm-weighted --data sentences.jsonl --out norms --csv > norms.csv
"""


def norm_weighted(
    *,
    run: RunFlags,
    by: Annotated[
        str, typer.Option(help="Statistic that is printed.", **choice(NORMED_STATISTICS, added_statistics))
    ] = "first",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, those that differ most first.")] = 20,
) -> None:
    """Measure where every head reads from by the norms of the vectors that it adds up, instead of by attention weights
    alone. Prints the heads in which both differ most, and saves all statistics in --out. Processes started by torchrun
    share the work.
    """
    from headwise.show.results import print_norm_weighted

    with run.open(shared=True) as opened:
        model = opened.load(hw.NormWeighted)
        result = hw.norm_weighted(model, opened.dataset, **opened.options)
        opened.show(result, print_norm_weighted, top, statistic=by)
