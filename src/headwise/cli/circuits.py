"""The command `headwise circuits`."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import quiet_libraries
from headwise.cli.options import Force, ModelFlags, TableFolder, Top
from headwise.cli.output import OutputFlags, require_new_tables
from headwise.cli.quantities import choice
from headwise.settings import COMPOSITION_KINDS

EXAMPLES = """
headwise circuits --model smollm2 --out smollm2-circuits
headwise circuits --model smollm2 --composition v --top 30
headwise circuits --model smollm2 --composition none --json > circuits.json
"""


def circuits(
    *,
    model: ModelFlags,
    composition: Annotated[
        str,
        typer.Option(
            help="Kind of composition of which pairs of heads are printed.", **choice((*COMPOSITION_KINDS, "none"))
        ),
    ] = "k",
    distance: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens from the key to the query, for rotary positions.")
    ] = 0,
    out: TableFolder = None,
    top: Top = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Read the circuits of every head from the weights of a model, without data: how much the head copies what it
    attends to, whether it attends to equal tokens, and how much it reads from heads of earlier layers. Prints the heads
    with the largest copying scores, and the pairs with the largest composition scores.
    """
    from headwise.analysis.circuits.circuits import SCORES
    from headwise.show.results import print_circuits

    require_new_tables(out, "circuits", "composition", force=force)
    quiet_libraries()
    source = model.find()
    loaded = source.model(source.lm_head(), model.torch_dtype).to(model.torch_device)
    found = hw.circuits(loaded, title=source.title)
    scores = found.scores(*_available(found, SCORES, "scores"), distance=distance)
    pairs = None
    if composition != "none" and (kinds := _available(found, COMPOSITION_KINDS, "composition scores")):
        if composition not in kinds:
            found.composition(composition)  # raises the reason
        pairs = found.composition(*kinds, distance=distance)
    if out is not None:
        scores.save(out, force=force)
        if pairs is not None:
            pairs.save(out, force=force)

    def print_text(console: Any) -> None:
        print_circuits(scores, pairs, composition, console, top)

    output.show(scores, print_text, written=out)


def _available(found: "hw.Circuits", names: Sequence[str], plural: str) -> list[str]:
    """Return the scores that a model has. Say on standard error which it lacks, and why."""
    reasons = {name: found.why_not(name) for name in names}
    for reason in dict.fromkeys(each for each in reasons.values() if each is not None):
        missing = ", ".join(name for name in names if reasons[name] == reason)
        typer.echo(f"headwise: warning: the {plural} {missing} are left out: the model has {reason}", err=True)
    return [name for name in names if reasons[name] is None]
