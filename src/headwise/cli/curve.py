"""The command `headwise curve`."""

from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, find_loss, require_same_run, resumable
from headwise.cli.options import Data, Force, LossName, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import path
from headwise.errors import InputError

EXAMPLES = """
headwise curve --model smollm2 --data test.jsonl --scores scores --out curve
headwise curve --data sentences.jsonl --scores ablation --random 20 --out curve
headwise curve --data sentences.jsonl --scores ablation --scores importance --out curve --json > curve.json
"""


def curve(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    loss: LossName = None,
    scores: Annotated[
        list[Path],
        typer.Option(parser=path, metavar="FOLDER", help="Result of importance or ablate; can be repeated."),
    ],
    random: Annotated[int, typer.Option(min=0, metavar="N", help="Number of random orders.")] = 10,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the random orders.")] = 0,
    texts: TextFlags,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure the loss of a model without more and more heads, the least important first, and without random heads. The
    order is that of saved scores, measured on other data. Prints the loss without each tenth of the heads, and saves it
    in --out.
    """
    from headwise.analysis.losses import name_of_loss
    from headwise.show.curves import print_curve

    orders = {str(folder): _table(folder) for folder in scores}
    device = model.torch_device
    with resumable(out):
        source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
        lm_head, loss_function = find_loss(source, dataset.tokenizer, loss)
        settings = {"loss": name_of_loss(loss_function)}
        require_same_run(hw.SetAblation, out, source, dataset, model, force=force, **settings)
        loaded = source.model(lm_head, model.torch_dtype).to(device)
        options: dict[str, Any] = {"out": out, "force": force, "progress": not output.quiet, "title": source.title}
        result = hw.pruning_curve(loaded, dataset, loss_function, orders, random=random, seed=seed, **options)
        result.save(out, force=True)
    output.show(result, lambda console: print_curve(result, console), written=out)


def _table(folder: Path) -> Any:
    """Return the table of importance or ablation effects in a folder."""
    from headwise.runs.table import table_path

    tables = (hw.Importance, hw.Ablation)
    for table in tables:
        if table_path(folder, table.NAME).exists():
            return table.load(folder)
    names = " or ".join(f"{table.NAME}.parquet" for table in tables)
    raise InputError("scores", expected=f"a folder with {names}", got=repr(str(folder)))
