"""The command `headwise sinks`."""

from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, require_same_run, resumable
from headwise.cli.options import Data, Force, ModelFlags, Out, TextFlags, Top
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import numbers
from headwise.settings import SINK_EPSILON

EXAMPLES = """
headwise sinks --model smollm2 --data corpus.jsonl --documents truncate --context 64 --out smollm2-sinks
headwise sinks --data sentences.jsonl --positions 0,1,2 --out sinks
headwise sinks --data sentences.jsonl --epsilon 0.2 --out sinks --json > sinks.json
"""


def sinks(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    epsilon: Annotated[
        float, typer.Option(metavar="X", help="Threshold of the mean attention, above 0 and below 1.")
    ] = SINK_EPSILON,
    positions: Annotated[str, typer.Option(metavar="N,N", help="Numbers of the tokens, from 0.")] = "0",
    texts: TextFlags,
    top: Top = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure in which share of sequences the mean attention of each head on the first token exceeds a threshold.
    Prints the heads with the largest rates, and the rate of the model. Processes started by torchrun share the work.
    """
    from headwise.runs.distributed import process_group
    from headwise.show.head_tests import print_sinks

    places = numbers(positions)
    with process_group() as process, resumable(out):
        shown = process.is_first and not output.quiet
        source, dataset = find_inputs(model, data, texts, out, shown=shown)
        require_same_run(hw.SinkRate, out, source, dataset, model, force=force, epsilon=epsilon, positions=places)
        loaded = source.model(dtype=model.torch_dtype).to(process.device(model.device))
        options: dict[str, Any] = {"out": out, "force": force, "progress": shown, "title": source.title}
        table = hw.sink_rate(loaded, dataset, epsilon=epsilon, positions=places, **options)
        if process.is_first:
            output.show(table, lambda console: print_sinks(table, console, top), written=out)
