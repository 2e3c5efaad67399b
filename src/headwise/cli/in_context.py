"""The command `headwise in-context`."""

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_causal, find_inputs, require_same_run, resumable
from headwise.cli.options import Data, DecoderFlags, Force, Out, TextFlags, Top
from headwise.cli.output import OutputFlags, require_new_tables
from headwise.cli.quantities import choice
from headwise.settings import IN_CONTEXT_REPLACEMENTS

EXAMPLES = """
headwise in-context --model smollm2 --data corpus.jsonl --documents truncate --out in-context
headwise in-context --model smollm2 --data corpus.jsonl --documents truncate --replacement mean --out in-context
headwise in-context --model smollm2 --data corpus.jsonl --early 20 --late 200 --window 1 --out early
"""


def in_context(
    *,
    data: Data,
    out: Out,
    model: DecoderFlags,
    texts: TextFlags,
    early: Annotated[int, typer.Option(min=2, metavar="N", help="Number of the early token, from 1.")] = 50,
    late: Annotated[int, typer.Option(min=3, metavar="N", help="Number of the late token.")] = 500,
    window: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens over which each loss is averaged.")] = 32,
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Number of sequences to measure on.")] = 3,
    replacement: Annotated[
        str,
        typer.Option(help="What replaces a head's output: zero, mean (over the data), or both.",
                     **choice((*IN_CONTEXT_REPLACEMENTS, "both"))),
    ] = "zero",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the choice of sequences.")] = 0,
    repeats: Annotated[bool, typer.Option(help="Also measure induction on repeated random tokens.")] = True,
    top: Top = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:  # fmt: skip
    """Measure the in-context learning score of a language model, its loss late in the context minus its loss early in
    it, and how the score changes without each head. Prints the heads without which the score rises most, and saves the
    changes in --out. Processor time grows with --sequences: on 2 cores, 3 sequences of smollm2 take about 9 minutes.
    """
    from headwise.analysis.in_context.loss import InContextLoss
    from headwise.show.scores import print_in_context

    require_new_tables(out, hw.InContextScores.NAME, force=force)
    find_causal(model)
    with resumable(out):
        source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
        replacements = IN_CONTEXT_REPLACEMENTS if replacement == "both" else (replacement,)
        score = InContextLoss(early, late, window).__name__
        for name in replacements:
            settings = {"loss": score, "units": "heads", "replacement": name}
            require_same_run(hw.Ablation, out / name, source, None, model, force=force, **settings)
        loaded = source.model("causal", model.torch_dtype).to(model.torch_device)
        result = hw.in_context_score(
            loaded, dataset, early=early, late=late, window=window, sequences=sequences, seed=seed, repeats=repeats,
            out=out, force=force,
            replacements=replacements,
            progress=not output.quiet, title=source.title,
        )  # fmt: skip
        result.save(out, force=True)
    output.show(result, lambda console: print_in_context(result, console, top), written=out)
