"""The command `headwise compare`."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.analysis.compare import compare as compare_profiles
from headwise.analysis.profile import load_profile
from headwise.cli.options import Top
from headwise.show.profiles import print_comparison
from headwise.show.terminal import make_console


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the first profile.")],
    b: Annotated[Path, typer.Argument(help="Folder of the second profile, of a model with the same heads.")],
    statistic: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare only this statistic. Can be repeated.")
    ] = None,
    top: Top = 20,
) -> None:
    """Show the heads that differ most between two profiles. Each profile is a folder that `headwise profile` wrote,
    with the attention statistics of every head. Prints a table with one row per head and statistic; the largest
    differences, measured in standard errors, are first.
    """
    comparison = compare_profiles(load_profile(a), load_profile(b))
    print_comparison(comparison, make_console(), statistic or (), top)
