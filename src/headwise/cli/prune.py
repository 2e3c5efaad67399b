"""The command `headwise prune`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, find_loss
from headwise.cli.options import Data, Force, ModelFlags, ModelFolder, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import choice, path
from headwise.errors import InputError
from headwise.settings import CONSTRAINTS, PRUNING_SCORES

if TYPE_CHECKING:
    from torch import nn

    from headwise.analysis.losses import Loss

EXAMPLES = """
headwise prune --model smollm2 --data corpus.txt --documents cut --context 128 --keep 0.67 --out smaller
headwise prune --data sentences.jsonl --keep 0.5 --constraint free --scores ablation --out half
headwise prune --data sentences.jsonl --plan half/plan.json --no-fit --out unfitted --json
"""

PLAN_FILE = "plan.json"
"""File in the folder of the pruned model with the plan."""


@dataclass(frozen=True)
class PlanFlags:
    """Command-line options of `headwise prune` that say which heads remain: those of a saved plan, or of a new one with
    a share of the heads, a constraint on their numbers, and scores.

    Attributes:
        keep: share of the heads that remain; None with a saved plan.
        constraint: constraint on the numbers of heads.
        scores: name of the scores.
        rounds: number of times that the remaining heads are scored; None for the default of the scores.
        plan: file with a saved plan; None for a new one.
    """

    keep: Annotated[
        float | None, typer.Option(help="Share of the heads that remain, above 0 and at most 1. A new plan needs it.")
    ] = None
    constraint: Annotated[
        str,
        typer.Option(
            help="Equally many heads in each layer (uniform), equally many groups, or any heads.", **choice(CONSTRAINTS)
        ),
    ] = "uniform"
    scores: Annotated[str, typer.Option(help="What decides which heads remain.", **choice(PRUNING_SCORES))] = (
        "least-squares"
    )
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of times that the remaining heads are scored.")] = (
        None
    )
    plan: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Apply this plan instead of making one.")
    ] = None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.plan is None):
            got = "neither" if self.plan is None else "both"
            raise InputError("keep", expected="one of --keep and --plan", got=got)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InputError("keep", expected="a share above 0 and at most 1", got=self.keep)

    def make(
        self, model: "nn.Module", texts: "hw.Texts", loss: "Loss", *, fitted: bool, shown: bool
    ) -> "hw.PruningPlan":
        """Return a new plan for a model, whose output projections will be `fitted`; if `shown`, show progress bars."""
        from headwise.compression.scores.named_scores import plan_by_name

        assert self.keep is not None  # checked above, without a saved plan
        return plan_by_name(
            self.scores,
            model,
            texts,
            loss,
            keep=self.keep,
            constraint=self.constraint,
            fitted=fitted,
            rounds=self.rounds,
            progress=shown,
        )


def prune(
    *,
    data: Data,
    out: ModelFolder,
    model: ModelFlags,
    heads: PlanFlags,
    fit: Annotated[bool, typer.Option(help="Fit the output projections to what the dense model returns.")] = True,
    texts: TextFlags,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Remove the least important heads of a model. Chooses them by scores on the data, fits the output projections of
    the remaining ones, and saves the smaller model with its plan in --out.
    """
    from headwise.compression.parameter_counts import parameters_before_and_after
    from headwise.compression.recipe.inputs import load_whole_model
    from headwise.compression.saving import write_model
    from headwise.compression.scores.named_scores import require_scores
    from headwise.runs.files import new_folder, require_new_folder, require_outside_data
    from headwise.show.smaller_models import plan_records, print_plan

    require_outside_data(out, data)
    require_new_folder(out, force=force)
    saved = None if heads.plan is None else hw.PruningPlan.load(heads.plan)
    device = model.torch_device
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    _, loss = find_loss(source, dataset.tokenizer, None)
    if saved is None:
        require_scores(heads.scores, heads.constraint, loss)
    dense = load_whole_model(source, model.torch_dtype).to(device)
    dataset = dataset.within(dense)
    plan = saved or heads.make(dense, dataset, loss, fitted=fit, shown=not output.quiet)
    smaller = hw.prune(dense, plan, calibration=dataset if fit else None)
    with new_folder(out, force=force) as part:
        write_model(smaller, dataset.tokenizer, part)
        plan.save(part / PLAN_FILE)
    sizes = parameters_before_and_after(dense, smaller)
    metadata = {"model": {"name": source.title}, "data": {"source": dataset.name}, **sizes}
    output.show(lambda: plan_records(plan, metadata), lambda console: print_plan(plan, console, sizes), written=out)
