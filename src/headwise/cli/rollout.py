"""The command `headwise rollout`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.quantities import choice
from headwise.settings import ROLLOUT_RESIDUAL, ROLLOUT_STATISTICS

EXAMPLES = """
headwise rollout --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out rollout
headwise rollout --data sentences.jsonl --by special --out rollout
headwise rollout --data sentences.jsonl --residual 0.3 --out rollout --json > rollout.json
"""


def rollout(
    *,
    run: RunFlags,
    residual: Annotated[
        float, typer.Option(metavar="X", help="Share of the residual connection in each layer, below 1.")
    ] = ROLLOUT_RESIDUAL,
    by: Annotated[
        str, typer.Option(help="Statistic of heads that is printed.", **choice(ROLLOUT_STATISTICS))
    ] = "first",
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, those that differ most first.")] = 20,
) -> None:
    """Measure where the attention of every layer and head goes in the input, if attention is multiplied over layers.
    Prints the layers, and the heads in which this differs most from their own attention. Saves both tables in --out.
    Processes started by torchrun share the work.
    """
    from headwise.show.results import print_rollout

    with run.open(shared=True) as opened:
        model = opened.load(hw.Rollout, residual=residual)
        result = hw.rollout(model, opened.dataset, residual=residual, **opened.options)
        opened.show(result, print_rollout, top, statistic=by)
