"""The command `headwise distances`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.quantities import shares

EXAMPLES = """
headwise distances --model smollm2 --data corpus.jsonl --documents cut --context 2048 --out distances
headwise distances --data corpus.txt --documents cut --quantiles 0.5,0.9,0.99 --out distances
headwise distances --data corpus.txt --documents cut --first 0 --out distances --csv > distances.csv
"""


def distances(
    *,
    run: RunFlags,
    quantiles: Annotated[
        str, typer.Option(metavar="P,P,...", help="Shares of the attention, above 0 and below 1.")
    ] = "0.5,0.9",
    first: Annotated[
        int, typer.Option(min=0, metavar="N", help="First tokens that also count as near, in columns of their own.")
    ] = 4,
    top: Annotated[int, typer.Option(min=1, help="Number of heads to print, longest distance first.")] = 20,
) -> None:
    """Measure how far every head reaches: the smallest distance within which it puts 50 % and 90 % of its attention.
    Prints the heads with the longest distances, and saves these distances and the share of attention within each
    distance in --out. Processes started by torchrun share the work.
    """
    from headwise.show.results import print_distances

    chosen = shares(quantiles)
    with run.open(shared=True) as opened:
        model = opened.load(hw.AttentionDistances, quantiles=sorted({*chosen}), first=first)
        result = hw.attention_distances(model, opened.dataset, quantiles=chosen, first=first, **opened.options)
        opened.show(result, print_distances, top)
