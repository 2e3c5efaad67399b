"""The command `headwise profile`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, require_same_run, resumable
from headwise.cli.options import Data, Force, Html, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.pages import require_writable_page, write_example_page
from headwise.cli.quantities import choice
from headwise.errors import InputError
from headwise.settings import ROW_STATISTICS

EXAMPLES = """
headwise profile --data corpus.txt --documents cut --out profile --html profile.html
headwise profile --model smollm2 --data corpus.jsonl --documents pack --context 1024 --out smollm2-profile
headwise profile --data corpus.jsonl --out profile --csv > heads.csv
"""


def profile(
    *,
    data: Data,
    out: Out,
    model: ModelFlags,
    texts: TextFlags,
    repeats: Annotated[bool, typer.Option(help="Also measure induction on repeated random tokens.")] = True,
    html: Html = None,
    statistic: Annotated[
        str | None,
        typer.Option(help="Statistic by which the page of --html colours and sorts heads.", **choice(ROW_STATISTICS)),
    ] = None,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Measure the attention statistics of every head on a data set. Assigns a role to each head (such as previous
    token, induction or broad), prints the heads of each role, and saves roles and statistics in --out as a profile.
    Processes started by torchrun share the work.
    """
    from headwise.runs.distributed import process_group
    from headwise.show.profiles import print_profile

    require_writable_page(html)
    if statistic is not None and html is None:
        raise InputError("statistic", expected="--html, whose page opens on it", got="no --html")
    with process_group() as process, resumable(out):
        device = process.device(model.device)
        shown = process.is_first and not output.quiet
        source, dataset = find_inputs(model, data, texts, out, shown=shown)
        require_same_run(hw.Profile, out, source, dataset, model, force=force, repeats={} if repeats else None)
        loaded = source.model(dtype=model.torch_dtype).to(device)
        result = hw.profile(
            loaded,
            dataset,
            repeats=repeats,
            out=out,
            force=force,
            progress=shown,
            title=source.title,
        )
        if process.is_first:
            write_example_page(html, result, loaded, dataset, source.title, statistic)
            output.show(result, lambda console: print_profile(result, console), written=out, page=html)
