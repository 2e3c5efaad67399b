"""The command `headwise rollout`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_inputs
from headwise.cli.options import Data, Force, ModelFlags, TableOut, TextFlags
from headwise.cli.output import OutputFlags, require_new_tables
from headwise.cli.quantities import choice
from headwise.settings import ROLLOUT_RESIDUAL, ROLLOUT_STATISTICS

EXAMPLES = """
headwise rollout --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out rollout
headwise rollout --data sentences.jsonl --by special --out rollout
headwise rollout --data sentences.jsonl --residual 0.3 --out rollout --json > rollout.json
"""


def rollout(
    *,
    data: Data,
    out: TableOut,
    model: ModelFlags,
    residual: Annotated[
        float, typer.Option(metavar="X", help="Share of the residual connection in each layer, below 1.")
    ] = ROLLOUT_RESIDUAL,
    texts: TextFlags,
    by: Annotated[
        str, typer.Option(help="Statistic of heads that is printed.", **choice(ROLLOUT_STATISTICS))
    ] = "first",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, those that differ most first.")] = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure where the attention of every layer and head goes in the input, if attention is multiplied over layers.
    Prints the layers, and the heads in which this differs most from their own attention. Saves both tables in --out.
    """
    from headwise.show.flow import print_rollout

    require_new_tables(out, "rollout", "rollout_layers", force=force)
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    loaded = source.model(dtype=model.torch_dtype).to(model.torch_device)
    result = hw.rollout(loaded, dataset, residual=residual, progress=not output.quiet, title=source.title)
    result.save(out, force=force)
    output.show(result, lambda console: print_rollout(result, by, console, top), written=out)
