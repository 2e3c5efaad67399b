"""The command `headwise positions`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, require_same_run, resumable
from headwise.cli.options import Data, Force, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import choice, numbers
from headwise.settings import ROW_STATISTICS

EXAMPLES = """
headwise positions --model smollm2 --data corpus.jsonl --documents cut --context 2048 --out positions
headwise positions --data corpus.txt --documents cut --by distance --out positions
headwise positions --data corpus.txt --documents cut --edges 0,8,64,512 --out positions --csv > curves.csv
"""


def positions(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    texts: TextFlags,
    edges: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="First position of each bin, and the end. Default: powers of two."),
    ] = None,
    by: Annotated[str, typer.Option(help="Statistic that is printed.", **choice(ROW_STATISTICS))] = "entropy",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, steepest slope first.")] = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure the attention statistics of every head against the position of the query: in bins of positions, and their
    slope on the logarithm of the position. Prints one statistic of the heads with the steepest slopes, and saves curves
    and slopes of all statistics in --out. Processes started by torchrun share the work.
    """
    from headwise.runs.distributed import process_group
    from headwise.show.curves import print_positions

    bins = None if edges is None else numbers(edges)
    with process_group() as process, resumable(out):
        shown = process.is_first and not output.quiet
        source, dataset = find_inputs(model, data, texts, out, shown=shown)
        require_same_run(hw.PositionCurves, out, source, dataset, model, force=force, edges=bins)
        loaded = source.model(dtype=model.torch_dtype).to(process.device(model.device))
        result = hw.position_curves(
            loaded, dataset, edges=bins, out=out, force=force, progress=shown, title=source.title
        )
        if process.is_first:
            output.show(result, lambda console: print_positions(result, by, console, top), written=out)
