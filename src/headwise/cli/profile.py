"""The command `headwise profile`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.options import Html
from headwise.cli.pages import require_writable_page, write_example_page
from headwise.cli.quantities import added_statistics, choice
from headwise.errors import InputError
from headwise.settings import ROW_STATISTICS

EXAMPLES = """
headwise profile --data corpus.txt --documents cut --out profile --html profile.html
headwise profile --model smollm2 --data corpus.jsonl --documents pack --context 1024 --out smollm2-profile
headwise profile --data corpus.jsonl --out profile --csv > heads.csv
"""


def profile(
    *,
    run: RunFlags,
    repeats: Annotated[bool, typer.Option(help="Also measure induction on repeated random tokens.")] = True,
    html: Html = None,
    statistic: Annotated[
        str | None,
        typer.Option(
            help="Statistic by which the page of --html colours and sorts heads.",
            **choice(ROW_STATISTICS, added_statistics),
        ),
    ] = None,
) -> None:
    """Measure the attention statistics of every head on a data set. Assigns a role to each head (such as previous
    token, induction or broad), prints the heads of each role, and saves roles and statistics in --out as a profile.
    Processes started by torchrun share the work.
    """
    from headwise.show.profiles import print_profile

    require_writable_page(html)
    if statistic is not None and html is None:
        raise InputError("statistic", expected="--html, whose page opens on it", got="no --html")
    with run.open(shared=True) as opened:
        model = opened.load(hw.Profile, repeats={} if repeats else None)
        result = hw.profile(model, opened.dataset, repeats=repeats, **opened.options)
        if opened.is_first:
            write_example_page(html, result, model, opened.dataset, opened.source.title, statistic)
        opened.show(result, print_profile, page=html)
