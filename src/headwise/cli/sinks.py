"""The command `headwise sinks`."""

from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.options import Top
from headwise.cli.quantities import numbers
from headwise.settings import SINK_EPSILON

EXAMPLES = """
headwise sinks --model smollm2 --data corpus.jsonl --documents truncate --context 64 --out smollm2-sinks
headwise sinks --data sentences.jsonl --positions 0,1,2 --out sinks
headwise sinks --data sentences.jsonl --epsilon 0.2 --out sinks --json > sinks.json
"""


def sinks(
    *,
    run: RunFlags,
    epsilon: Annotated[
        float, typer.Option(metavar="X", help="Threshold of the mean attention, above 0 and below 1.")
    ] = SINK_EPSILON,
    positions: Annotated[str, typer.Option(metavar="N,N", help="Numbers of the tokens, from 0.")] = "0",
    top: Top = 20,
) -> None:
    """Measure in which share of sequences the mean attention of each head on the first token exceeds a threshold.
    Prints the heads with the largest rates, and the rate of the model. Processes started by torchrun share the work.
    """
    from headwise.analysis.head_tests.sinks import sink_threshold
    from headwise.show.results import print_sinks

    epsilon = sink_threshold(epsilon)
    settings: dict[str, Any] = {"epsilon": epsilon, "positions": numbers(positions)}
    with run.open(shared=True) as opened:
        model = opened.load(hw.SinkRate, **settings)
        table = hw.sink_rate(model, opened.dataset, **settings, **opened.options)
        opened.show(table, print_sinks, top)
