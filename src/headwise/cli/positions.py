"""The command `headwise positions`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.quantities import added_statistics, choice, numbers
from headwise.settings import ROW_STATISTICS

EXAMPLES = """
headwise positions --model smollm2 --data corpus.jsonl --documents cut --context 2048 --out positions
headwise positions --data corpus.txt --documents cut --by distance --out positions
headwise positions --data corpus.txt --documents cut --edges 0,8,64,512 --out positions --csv > curves.csv
"""


def positions(
    *,
    run: RunFlags,
    edges: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="First position of each bin, and the end. Default: powers of two."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="Statistic that is printed.", **choice(ROW_STATISTICS, added_statistics))
    ] = "entropy",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, steepest slope first.")] = 20,
) -> None:
    """Measure the attention statistics of every head against the position of the query: in bins of positions, and their
    slope on the logarithm of the position. Prints one statistic of the heads with the steepest slopes, and saves curves
    and slopes of all statistics in --out. Processes started by torchrun share the work.
    """
    from headwise.show.results import print_positions

    bins = None if edges is None else numbers(edges)
    with run.open(shared=True) as opened:
        model = opened.load(hw.PositionCurves, edges=bins)
        result = hw.position_curves(model, opened.dataset, edges=bins, **opened.options)
        opened.show(result, print_positions, top, statistic=by)
