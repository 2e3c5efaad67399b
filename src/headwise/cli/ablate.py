"""The command `headwise ablate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from headwise.analysis.ablate import ablate as measure
from headwise.analysis.profile import load_profile
from headwise.analysis.replacements import Replacement, mean, uniform, zero
from headwise.cli.loading import load_with_loss
from headwise.cli.options import Data, Device, Force, LossName, ModelName, Out, TextFlags, Top
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.runs.distributed import LocalProcess
from headwise.show.scores import print_ablation
from headwise.show.terminal import make_console


def ablate(
    *,
    data: Data,
    out: Out,
    model: ModelName = "minilm",
    loss: LossName = None,
    replacement: Annotated[
        str, typer.Option(help="What replaces a head's output: zero, uniform (attention), or mean (over the data).")
    ] = "zero",
    units: Annotated[str, typer.Option(help="What is removed at a time: heads, layers, groups or roles.")] = "heads",
    roles: Annotated[Path | None, typer.Option(help="Folder of a profile, required by --units roles.")] = None,
    texts: TextFlags,
    device: Device = None,
    top: Top = 20,
    force: Force = False,
) -> None:
    """Measure the loss of a model without each head. Heads (with --units: layers, groups of heads that share keys and
    values, or all heads of a role such as previous token) are removed one at a time, by replacing their output. Prints
    the largest increases of the loss, and saves the effect of each removal in --out.
    """
    if (units == "roles") != (roles is not None):
        expected = "the folder of a profile if, and only if, --units is roles"
        raise InputError("roles", expected=expected, got="none" if roles is None else repr(str(roles)))
    sets = units if roles is None else load_profile(roles).roles()
    loaded, loss_function = load_with_loss(model, loss)
    dataset = texts.texts(data, loaded.tokenizer)
    result = measure(
        loaded.model.to(LocalProcess(True, 0).device(device)),
        dataset,
        loss_function,
        replacement=_replacement(replacement, dataset),
        units=sets,
        out=out,
        force=force,
        progress=True,
        title=loaded.title,
    )
    print_ablation(result, make_console(), top)
    typer.echo(f"\nwrote {out}")


def _replacement(name: str, texts: Texts) -> Replacement:
    """Return the `Replacement` called `name`, which takes the place of a removed head's output: "zero" for zeros,
    "uniform" for the head's output under uniform attention, "mean" for its mean output over the data in `texts`. Any
    other name raises `InputError`.
    """
    replacements: dict[str, Callable[[], Replacement]] = {
        "zero": zero,
        "uniform": uniform,
        "mean": lambda: mean(texts),
    }
    if name not in replacements:
        raise InputError("replacement", expected=f"one of {', '.join(replacements)}", got=repr(name))
    return replacements[name]()
