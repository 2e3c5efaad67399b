"""The command `headwise in-context`."""

from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import DecoderRunFlags, find_causal, require_same_run
from headwise.cli.options import Top
from headwise.cli.output import require_new_tables
from headwise.cli.quantities import choice
from headwise.settings import IN_CONTEXT_REPLACEMENTS

EXAMPLES = """
headwise in-context --model smollm2 --data corpus.jsonl --documents truncate --out in-context
headwise in-context --model smollm2 --data corpus.jsonl --documents truncate --replacement mean --out in-context
headwise in-context --model smollm2 --data corpus.jsonl --early 20 --late 200 --window 1 --out early
"""


def in_context(
    *,
    run: DecoderRunFlags,
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
) -> None:  # fmt: skip
    """Measure the in-context learning score of a language model, its loss late in the context minus its loss early in
    it, and how the score changes without each head. Prints the heads without which the score rises most, and saves the
    changes in --out. Processor time grows with --sequences: on 2 cores, 3 sequences of smollm2 take about 9 minutes.
    Processes started by torchrun share the work.
    """
    from headwise.analysis.in_context_score import InContextLoss
    from headwise.show.results import print_in_context

    require_new_tables(run.out, hw.InContextScores.NAME, force=run.force)
    find_causal(run.model)
    with run.open(shared=True) as opened:
        replacements = IN_CONTEXT_REPLACEMENTS if replacement == "both" else (replacement,)
        score = InContextLoss(early, late, window).__name__
        for name in replacements:
            settings = {"loss": score, "units": "heads", "replacement": name}
            require_same_run(hw.Ablation, run.out / name, opened.source, None, run.model, force=run.force, **settings)
        loaded = opened.source.model("causal", run.model.torch_dtype).to(opened.device)
        options: dict[str, Any] = {"early": early, "late": late, "window": window, **opened.options}
        result = hw.in_context_score(
            loaded,
            opened.dataset,
            sequences=sequences,
            seed=seed,
            repeats=repeats,
            replacements=replacements,
            **options,
        )
        if opened.is_first:
            result.save(run.out, force=True)
        opened.show(result, print_in_context, top)
