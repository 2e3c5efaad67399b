"""The command `headwise sinks`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_inputs
from headwise.cli.options import Data, Force, ModelFlags, TableOut, TextFlags, Top
from headwise.cli.output import OutputFlags, require_new_tables
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
    out: TableOut,
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
    Prints the heads with the largest rates, and the rate of the model.
    """
    from headwise.show.head_tests import print_sinks

    require_new_tables(out, "sinks", force=force)
    places = numbers(positions)
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    loaded = source.model(dtype=model.torch_dtype).to(model.torch_device)
    table = hw.sink_rate(
        loaded, dataset, epsilon=epsilon, positions=places, progress=not output.quiet, title=source.title
    )
    table.save(out, force=force)
    output.show(table, lambda console: print_sinks(table, console, top), written=out)
