"""The command `headwise ablate`."""

from pathlib import Path
from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags, find_loss
from headwise.cli.options import Html, LossName, Top
from headwise.cli.pages import require_writable_page, write_example_page
from headwise.cli.quantities import choice, path
from headwise.errors import InputError
from headwise.settings import UNIT_KINDS

EXAMPLES = """
headwise ablate --data sentences.jsonl --out ablation
headwise ablate --model smollm2 --data corpus.jsonl --documents truncate --context 256 --out smollm2-ablation
headwise ablate --data sentences.jsonl --units roles --roles profile --replacement mean --out roles
"""

REPLACEMENTS = ("zero", "uniform", "mean")
"""Functions of `hw.replacements` whose results take the place of a removed head's output."""


def ablate(
    *,
    run: RunFlags,
    loss: LossName = None,
    replacement: Annotated[
        str,
        typer.Option(
            help="What replaces a head's output: zero, uniform (attention), or mean (over the data).",
            **choice(REPLACEMENTS),
        ),
    ] = "zero",
    units: Annotated[str, typer.Option(help="What is removed at a time.", **choice((*UNIT_KINDS, "roles")))] = "heads",
    roles: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FOLDER", help="Profile of the same model, required by --units roles."),
    ] = None,
    top: Top = 20,
    html: Html = None,
) -> None:
    """Measure the loss of a model without each head. Heads (with --units: layers, groups of heads that share keys and
    values, or all heads of a role such as previous token) are removed one at a time, by replacing their output. Prints
    the largest increases of the loss, and saves the effect of each removal in --out. Processes started by torchrun
    share the work.
    """
    from headwise.analysis.losses import name_of_loss
    from headwise.analysis.profile import require_profile_of
    from headwise.show.results import print_ablation

    if (units == "roles") != (roles is not None):
        expected = "the folder of a profile if, and only if, --units is roles"
        raise InputError("roles", expected=expected, got="none" if roles is None else repr(str(roles)))
    if html is not None and units != "heads":
        raise InputError("html", expected="--units heads, whose effects a page shows", got=f"--units {units}")
    require_writable_page(html)
    profile = None if roles is None else hw.load_profile(roles)
    with run.open(shared=True) as opened:
        lm_head, loss_function = find_loss(opened.source, opened.dataset.tokenizer, loss)
        settings = {"replacement": replacement} if units == "roles" else {"replacement": replacement, "units": units}
        settings["loss"] = name_of_loss(loss_function)
        model = opened.load(hw.Ablation if units == "heads" else hw.SetAblation, lm_head, **settings)
        if profile is not None:
            require_profile_of(profile, model, opened.source.title)
        replace = getattr(hw.replacements, replacement)
        result = hw.ablate(
            model,
            opened.dataset,
            loss_function,
            replacement=replace(opened.dataset) if replacement == "mean" else replace(),
            units=units if profile is None else profile.roles(),
            **opened.options,
        )
        if opened.is_first and isinstance(result, hw.Ablation):
            write_example_page(html, result, model, opened.dataset, opened.source.title)
        opened.show(result, print_ablation, top, page=html)
