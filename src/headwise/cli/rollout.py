"""The command `headwise rollout`."""

from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, require_same_run, resumable
from headwise.cli.options import Data, Force, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
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
    out: Out,
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
    Processes started by torchrun share the work.
    """
    from headwise.runs.distributed import process_group
    from headwise.show.flow import print_rollout

    with process_group() as process, resumable(out):
        shown = process.is_first and not output.quiet
        source, dataset = find_inputs(model, data, texts, out, shown=shown)
        require_same_run(hw.Rollout, out, source, dataset, model, force=force, residual=residual)
        loaded = source.model(dtype=model.torch_dtype).to(process.device(model.device))
        options: dict[str, Any] = {"out": out, "force": force, "progress": shown, "title": source.title}
        result = hw.rollout(loaded, dataset, residual=residual, **options)
        if process.is_first:
            output.show(result, lambda console: print_rollout(result, by, console, top), written=out)
