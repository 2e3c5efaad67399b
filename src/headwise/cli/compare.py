"""The command `headwise compare`."""

from pathlib import Path
from typing import Annotated

import typer

import headwise as hw
from headwise.cli.options import Html, Top
from headwise.cli.output import OutputFlags
from headwise.cli.pages import require_writable_page
from headwise.cli.quantities import path

EXAMPLES = """
headwise compare text-profile code-profile
headwise compare before after --statistic entropy --statistic first --top 50 --html differences.html
headwise compare before after --json > differences.json
"""


def compare(
    *,
    a: Annotated[Path, typer.Argument(parser=path, metavar="A", help="Folder of the first profile.")],
    b: Annotated[
        Path,
        typer.Argument(parser=path, metavar="B", help="Folder of the second profile, of a model with the same heads."),
    ],
    statistic: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare only this statistic. Can be repeated.")
    ] = None,
    top: Top = 20,
    html: Html = None,
    output: OutputFlags,
) -> None:
    """Show the heads that differ most between two profiles. Each profile is a folder that `headwise profile` wrote,
    with the attention statistics of every head. Prints a table with one row per head and statistic; the largest
    differences, measured in standard errors, are first. Lists the heads whose role differs.
    """
    from headwise.show.profiles import print_comparison
    from headwise.show.records import comparison_records

    require_writable_page(html)
    comparison = hw.compare(hw.load_profile(a), hw.load_profile(b))
    statistics = statistic or []
    if html is not None:
        hw.write_page(html, comparison.a, against=[comparison.b], statistic=next(iter(statistics), None))
    output.show(
        lambda: comparison_records(comparison, statistics),
        lambda console: print_comparison(comparison, console, statistics, top),
        page=html,
    )
