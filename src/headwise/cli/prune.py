"""The command `headwise prune`."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.loading import find_inputs, find_loss
from headwise.cli.options import Data, Force, ModelFlags, ModelFolder, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import choice, path
from headwise.compression.named_scores import SCORES, plan_by_name, require_scores
from headwise.compression.plan_pruning import CONSTRAINTS
from headwise.compression.prune import prune as remove
from headwise.compression.pruning_plan import PruningPlan
from headwise.compression.saving import write_model
from headwise.compression.whole_model import load_whole_model
from headwise.errors import InputError
from headwise.runs.distributed import LocalProcess
from headwise.runs.folders import new_folder, require_new_folder
from headwise.show.plans import plan_records, print_plan

EXAMPLES = """
headwise prune --model smollm2 --data corpus.txt --documents cut --context 128 --keep 0.67 --out smaller
headwise prune --data sentences.jsonl --keep 0.5 --constraint free --scores ablation --out half
headwise prune --data sentences.jsonl --plan half/plan.json --no-fit --out unfitted --json
"""

PLAN_FILE = "plan.json"
"""File in the folder of the pruned model with the plan."""


def prune(
    *,
    data: Data,
    out: ModelFolder,
    model: ModelFlags,
    keep: Annotated[
        float | None,
        typer.Option(help="Share of the heads that remain, above 0 and at most 1. A new plan needs it."),
    ] = None,
    constraint: Annotated[
        str,
        typer.Option(
            help="Equally many heads in each layer (uniform), equally many groups, or any heads.", **choice(CONSTRAINTS)
        ),
    ] = "uniform",
    scores: Annotated[str, typer.Option(help="What decides which heads remain.", **choice(SCORES))] = "least-squares",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of times that the remaining heads are scored.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Apply this plan instead of making one.")
    ] = None,
    fit: Annotated[bool, typer.Option(help="Fit the output projections to what the dense model returns.")] = True,
    texts: TextFlags,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Remove the least important heads of a model. Chooses them by scores on the data, fits the output projections of
    the remaining ones, and saves the smaller model with its plan in --out.
    """
    if (keep is None) == (plan is None):
        raise InputError("keep", expected="one of --keep and --plan", got="neither" if plan is None else "both")
    if keep is not None and not 0 < keep <= 1:
        raise InputError("keep", expected="a share above 0 and at most 1", got=keep)
    require_new_folder(out, force=force)
    chosen = None if plan is None else PruningPlan.load(plan)
    device = LocalProcess(True, 0).device(model.device)
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    _, loss = find_loss(source, dataset.tokenizer, None)
    require_scores(scores, constraint, loss)
    dense = load_whole_model(source, model.torch_dtype).to(device)
    dataset = dataset.within(dense)
    if chosen is None:
        assert keep is not None  # checked above
        chosen = plan_by_name(
            scores,
            dense,
            dataset,
            loss,
            keep=keep,
            constraint=constraint,
            rounds=rounds,
            progress=not output.quiet,
        )
    smaller = remove(dense, chosen, calibration=dataset if fit else None)
    with new_folder(out, force=force) as part:
        write_model(smaller, dataset.tokenizer, part)
        chosen.save(part / PLAN_FILE)
    sizes = {
        f"parameters_{when}": sum(weight.numel() for weight in each.parameters())
        for when, each in (("before", dense), ("after", smaller))
    }
    metadata = {"model": {"name": source.title}, "data": {"source": dataset.name}, **sizes}
    output.show(lambda: plan_records(chosen, metadata), lambda console: print_plan(chosen, console, sizes), written=out)
