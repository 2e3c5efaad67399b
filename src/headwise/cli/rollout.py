"""The command `headwise rollout`."""

from typing import Annotated

import typer

from headwise.analysis.flow.rollout import RESIDUAL
from headwise.analysis.flow.rollout import rollout as measure_rollout
from headwise.analysis.flow.rollout_reader import HEAD_STATISTICS
from headwise.cli.loading import find_inputs
from headwise.cli.options import Data, Force, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags, require_new_tables
from headwise.cli.quantities import choice
from headwise.runs.distributed import LocalProcess
from headwise.show.flow import print_rollout
from headwise.show.records import table_records

EXAMPLES = """
headwise rollout --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out rollout
headwise rollout --data sentences.jsonl --by special --out rollout
headwise rollout --data sentences.jsonl --residual 0.3 --out rollout --json > rollout.json
"""


def rollout(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    residual: Annotated[
        float, typer.Option(metavar="X", help="Share of the residual connection in each layer, below 1.")
    ] = RESIDUAL,
    texts: TextFlags,
    by: Annotated[str, typer.Option(help="Statistic of heads that is printed.", **choice(HEAD_STATISTICS))] = "first",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, those that differ most first.")] = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure where the attention of every layer and head goes in the input, if attention is multiplied over layers.
    Prints the layers, and the heads in which this differs most from their own attention. Saves both tables in --out.
    """
    require_new_tables(out, "rollout", "rollout_layers", force=force)
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    loaded = source.model(dtype=model.torch_dtype).to(LocalProcess(True, 0).device(model.device))
    result = measure_rollout(loaded, dataset, residual=residual, progress=not output.quiet, title=source.title)
    result.save(out, force=force)
    output.show(lambda: table_records(result), lambda console: print_rollout(result, by, console, top), written=out)
