"""The command `headwise distances`."""

from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, require_same_run, resumable
from headwise.cli.options import Data, Force, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import shares

EXAMPLES = """
headwise distances --model smollm2 --data corpus.jsonl --documents cut --context 2048 --out distances
headwise distances --data corpus.txt --documents cut --quantiles 0.5,0.9,0.99 --out distances
headwise distances --data corpus.txt --documents cut --first 0 --out distances --csv > distances.csv
"""


def distances(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    texts: TextFlags,
    quantiles: Annotated[
        str, typer.Option(metavar="P,P,...", help="Shares of the attention, above 0 and below 1.")
    ] = "0.5,0.9",
    first: Annotated[
        int, typer.Option(min=0, metavar="N", help="First tokens that also count as near, in columns of their own.")
    ] = 4,
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, longest distance first.")] = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure how far every head reaches: the smallest distance within which it puts 50 % and 90 % of its attention.
    Prints the heads with the longest distances, and saves these distances and the share of attention within each
    distance in --out. Processes started by torchrun share the work.
    """
    from headwise.runs.distributed import process_group
    from headwise.show.curves import print_distances

    chosen = shares(quantiles)
    with process_group() as process, resumable(out):
        shown = process.is_first and not output.quiet
        source, dataset = find_inputs(model, data, texts, out, shown=shown)
        settings: dict[str, Any] = {"quantiles": sorted({*chosen}), "first": first}
        require_same_run(hw.AttentionDistances, out, source, dataset, model, force=force, **settings)
        loaded = source.model(dtype=model.torch_dtype).to(process.device(model.device))
        result = hw.attention_distances(
            loaded, dataset, quantiles=chosen, first=first, out=out, force=force, progress=shown, title=source.title
        )
        if process.is_first:
            output.show(result, lambda console: print_distances(result, console, top), written=out)
