"""The command `headwise norm-weighted`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, require_same_run, resumable
from headwise.cli.options import Data, Force, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import choice
from headwise.settings import NORMED_STATISTICS

EXAMPLES = """
headwise norm-weighted --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out norms
headwise norm-weighted --data sentences.jsonl --by special --out norms
headwise norm-weighted --data sentences.jsonl --out norms --csv > norms.csv
"""


def norm_weighted(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    texts: TextFlags,
    by: Annotated[str, typer.Option(help="Statistic that is printed.", **choice(NORMED_STATISTICS))] = "first",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, those that differ most first.")] = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure where every head reads from by the norms of the vectors that it adds up, instead of by attention weights
    alone. Prints the heads in which both differ most, and saves all statistics in --out. Processes started by torchrun
    share the work.
    """
    from headwise.runs.distributed import process_group
    from headwise.show.flow import print_norm_weighted

    with process_group() as process, resumable(out):
        shown = process.is_first and not output.quiet
        source, dataset = find_inputs(model, data, texts, out, shown=shown)
        require_same_run(hw.NormWeighted, out, source, dataset, model, force=force)
        loaded = source.model(dtype=model.torch_dtype).to(process.device(model.device))
        result = hw.norm_weighted(loaded, dataset, out=out, force=force, progress=shown, title=source.title)
        if process.is_first:
            output.show(
                result,
                lambda console: print_norm_weighted(result, by, console, top),
                written=out,
            )
