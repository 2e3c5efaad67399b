"""The command `headwise compress`."""

from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import quiet_libraries
from headwise.cli.options import Force, Out
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import path

EXAMPLES = """
headwise compress recipe.toml --out smaller
headwise compress recipe.toml --out smaller --force
headwise compress recipe.toml --out smaller --json > report.json
"""


def compress(
    *,
    recipe: Annotated[Path, typer.Argument(parser=path, metavar="RECIPE", help="TOML file with model, data, steps.")],
    out: Out,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Make a model smaller by the steps of a recipe: score, plan, prune, merge, heal, verify and save. Prints the loss
    on held-out text after each step, and the report that the section [report] states. Saves the smaller model in the
    folder model in --out.
    """
    from headwise.compression.recipe.compress import BEFORE_AFTER
    from headwise.show.smaller_models import print_recipe, recipe_records

    quiet_libraries()
    try:
        report = hw.compress(recipe, out, force=force, progress=not output.quiet)
    except KeyboardInterrupt:
        typer.echo("headwise: interrupted; run the same command again to resume", err=True)
        raise

    def print_reports(console: Any) -> None:
        print_recipe(report, console)
        if (out / BEFORE_AFTER).exists():
            before_after = hw.CompressionReport.load(out / BEFORE_AFTER)
            console.print(f"\n{before_after}", markup=False, highlight=False, soft_wrap=True)

    output.show(lambda: recipe_records(report), print_reports, written=out)
