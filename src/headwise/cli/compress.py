"""The command `headwise compress`."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.loading import quiet_libraries
from headwise.cli.options import Force, Out
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import path
from headwise.compression.recipe.compress import compress as run_recipe
from headwise.show.recipes import print_recipe, recipe_records

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
    on held-out text after each step, and saves the smaller model in the folder model in --out.
    """
    quiet_libraries()
    try:
        report = run_recipe(recipe, out, force=force, progress=not output.quiet)
    except KeyboardInterrupt:
        typer.echo("headwise: interrupted; run the same command again to resume", err=True)
        raise
    output.show(lambda: recipe_records(report), lambda console: print_recipe(report, console), written=out)
