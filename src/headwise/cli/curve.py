"""The command `headwise curve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import RunFlags, find_loss
from headwise.cli.options import LossName
from headwise.cli.quantities import path
from headwise.errors import InputError

EXAMPLES = """
headwise curve --model smollm2 --data test.jsonl --scores scores --out curve
headwise curve --data sentences.jsonl --scores ablation --random 20 --out curve
headwise curve --data sentences.jsonl --scores ablation --scores importance --out curve --json > curve.json
"""


def curve(
    *,
    run: RunFlags,
    loss: LossName = None,
    scores: Annotated[
        list[Path],
        typer.Option(parser=path, metavar="FOLDER", help="Result of importance or ablate; can be repeated."),
    ],
    random: Annotated[int, typer.Option(min=0, metavar="N", help="Number of random orders.")] = 10,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the random orders.")] = 0,
) -> None:
    """Measure the loss of a model without more and more heads, the least important first, and without random heads. The
    order is that of saved scores, measured on other data. Prints the loss without each tenth of the heads, and saves it
    in --out.
    """
    from headwise.analysis.losses import name_of_loss
    from headwise.show.results import print_curve

    orders = {str(folder): _table(folder) for folder in scores}
    with run.open() as opened:
        lm_head, loss_function = find_loss(opened.source, opened.dataset.tokenizer, loss)
        model = opened.load(hw.SetAblation, lm_head, loss=name_of_loss(loss_function))
        options: dict[str, Any] = {"random": random, "seed": seed, **opened.options}
        result = hw.pruning_curve(model, opened.dataset, loss_function, orders, **options)
        result.save(run.out, force=True)
        opened.show(result, print_curve)


def _table(folder: Path) -> Any:
    """Return the table of importance or ablation effects in a folder."""
    from headwise.runs.table import table_path

    tables = (hw.Importance, hw.Ablation)
    for table in tables:
        if table_path(folder, table.NAME).exists():
            return table.load(folder)
    names = " or ".join(f"{table.NAME}.parquet" for table in tables)
    raise InputError("scores", expected=f"a folder with {names}", got=repr(str(folder)))
