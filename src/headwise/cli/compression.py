"""The commands that make models smaller: `headwise prune`, `merge`, `localize` and `compress`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

import headwise as hw
from headwise.cli.loading import find_inputs, find_loss
from headwise.cli.options import (
    CausalFlags,
    Data,
    DecoderFlags,
    Force,
    ModelFlags,
    ModelFolder,
    Out,
    TextFlags,
    choice,
    option,
    path,
    path_option,
)
from headwise.cli.output import OutputFlags, quiet_libraries
from headwise.errors import InputError
from headwise.settings import CONSTRAINTS, PRUNING_SCORES, MergeGrouping, MergeMethod

PLAN_FILE = "plan.json"
"""File in the folder of the pruned model with the plan."""


@dataclass(frozen=True)
class PlanFlags:
    """Command-line options of `headwise prune` that determine which heads remain: a saved pruning plan, or the settings
    of a new one.
    """

    keep: Annotated[
        float | None, option("Share of the heads that remain, above 0 and at most 1. A new plan needs it.")
    ] = None
    constraint: Annotated[
        str, choice(CONSTRAINTS, "Equally many heads in each layer (uniform), equally many groups, or any heads.")
    ] = "uniform"
    scores: Annotated[str, choice(PRUNING_SCORES, "What decides which heads remain.")] = "least-squares"
    rounds: Annotated[int | None, option("Number of times that the remaining heads are scored.", least=1)] = None
    plan: Annotated[Path | None, path_option("FILE", "Apply this plan instead of making one.")] = None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.plan is None):
            got = "neither" if self.plan is None else "both"
            raise InputError("keep", expected="one of --keep and --plan", got=got)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InputError("keep", expected="a share above 0 and at most 1", got=self.keep)


def prune(
    *,
    data: Data,
    out: ModelFolder,
    model: ModelFlags,
    heads: PlanFlags,
    fit: Annotated[bool, option("Fit the output projections to what the dense model returns.")] = True,
    texts: TextFlags,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Remove the least important heads of a model. Chooses them by scores on the data, and fits the output projections
    of the remaining heads. Saves the smaller model in --out, with the plan, which lists the remaining heads.

    Examples:
    headwise prune --model smollm2 --data corpus.txt --documents cut --context 128 --keep 0.67 --out smaller
    headwise prune --data sentences.jsonl --keep 0.5 --constraint free --scores ablation --out half
    headwise prune --data sentences.jsonl --plan half/plan.json --no-fit --out unfitted --json
    """
    from headwise.compression.parameter_counts import parameters_before_and_after
    from headwise.compression.recipe.inputs import load_whole_model
    from headwise.compression.saving import write_model
    from headwise.compression.scores.named_scores import plan_by_name, require_scores
    from headwise.runs.files import new_folder, require_new_folder, require_outside_data
    from headwise.show.smaller_models import plan_records, print_smaller

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
    if saved is None:
        assert heads.keep is not None  # required without a saved plan
        options: Any = {"keep": heads.keep, "constraint": heads.constraint, "rounds": heads.rounds}
        options |= {"fitted": fit, "progress": not output.quiet}
        plan = plan_by_name(heads.scores, dense, dataset, loss, **options)
    else:
        plan = saved
    smaller = hw.prune(dense, plan, calibration=dataset if fit else None)
    with new_folder(out, force=force) as part:
        write_model(smaller, dataset.tokenizer, part)
        plan.save(part / PLAN_FILE)
    sizes = parameters_before_and_after(dense, smaller)
    metadata = {"model": {"name": source.title}, "data": {"source": dataset.name}, **sizes}
    output.show(
        lambda: plan_records(plan, metadata), lambda console: print_smaller(f"{plan}\n", sizes, console), written=out
    )


def merge(
    *,
    data: Data,
    out: ModelFolder,
    kv_heads: Annotated[int, option("Key/value heads of each layer that remain.", least=1)],
    model: DecoderFlags,
    method: Annotated[str, choice(get_args(MergeMethod), "How heads are merged; see hw.merge_kv.")] = "procrustes",
    grouping: Annotated[str, choice(get_args(MergeGrouping), "Which heads become one; see hw.merge_kv.")] = "adjacent",
    texts: TextFlags,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Merge the key/value heads of each layer into fewer, which makes the cache of keys and values smaller. Fits the
    merged heads to the data, and saves the smaller model in --out.

    Examples:
    headwise merge --model smollm2 --data corpus.txt --documents cut --context 128 --kv-heads 1 --out merged
    headwise merge --model smollm2 --data corpus.txt --documents cut --kv-heads 1 --out merged --force
    headwise merge --model smaller --data sentences.jsonl --kv-heads 2 --out merged --json
    """
    from headwise.compression.parameter_counts import parameters_before_and_after
    from headwise.compression.recipe.inputs import load_whole_model
    from headwise.runs.files import require_new_folder, require_outside_data
    from headwise.show.records import Records
    from headwise.show.smaller_models import print_smaller

    require_outside_data(out, data)
    require_new_folder(out, force=force)
    device = model.torch_device
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    dense = load_whole_model(source, model.torch_dtype).to(device)
    names: Any = {"method": method, "grouping": grouping}
    merged = hw.merge_kv(dense, num_kv_heads=kv_heads, calibration=dataset.within(dense), **names)
    hw.save_model(merged, dataset.tokenizer, out, force=force)
    sizes = parameters_before_and_after(dense, merged)
    metadata = {"model": {"name": source.title}, "data": {"source": dataset.name}}
    output.show(
        lambda: Records([{"kv_heads": kv_heads, **sizes}], metadata),
        lambda console: print_smaller(f"key/value heads in each layer: {kv_heads}", sizes, console),
        written=out,
    )


def localize(
    *,
    data: Data,
    out: Annotated[Path, path_option("FILE", "JSON file for the result.")],
    model: CausalFlags,
    budget: Annotated[
        float, option("Largest relative rise of the loss, such as 0.01 for one percent.", least=0.0)
    ] = 0.01,
    window: Annotated[int, option("Tokens of the window.", least=1)] = 512,
    first: Annotated[int, option("First tokens that all heads attend to.", least=0)] = 4,
    texts: TextFlags,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    output: OutputFlags,
) -> None:
    """Find the heads of a decoder that need only the first tokens and a window of recent ones. The decoder can then
    store fewer keys and values for these heads. Prints the heads, and saves them in --out.

    Examples:
    headwise localize --model smollm2 --data corpus.txt --documents cut --budget 0.01 --out streaming.json
    headwise localize --model smollm2 --data corpus.txt --documents cut --window 128 --first 1 --out streaming.json
    headwise localize --model smaller --data corpus.txt --documents cut --out streaming.json --json
    """
    from headwise.show.records import Records

    if out.exists() and not (force and out.is_file()):
        remedy = "--force replaces it" if out.is_file() else None
        raise InputError("out", expected="a new file", got=repr(str(out)), remedy=remedy)
    device = model.torch_device
    source, dataset = find_inputs(model, data, texts, out.parent, shown=not output.quiet)
    loaded = source.model("causal", model.torch_dtype).to(device)
    result = hw.localize(loaded, dataset.within(loaded), budget, window=window, first=first)
    result.save(out)
    metadata: dict[str, Any] = {"model": {"name": source.title}, "data": {"source": dataset.name}}
    metadata |= {name: value for name, value in asdict(result).items() if name != "modules"}
    rows = asdict(result)["modules"]
    output.show(lambda: Records(rows, metadata), lambda console: console.print(str(result)), written=out)


def compress(
    *,
    recipe: Annotated[Path, typer.Argument(parser=path, metavar="RECIPE", help="TOML file with model, data, steps.")],
    out: Out,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Make a model smaller by the steps of a recipe: score, plan, prune, merge, heal, verify and save. Prints the loss
    on held-out text after each step. If the recipe has a section [report], also prints a comparison of the model before
    and after. Saves the smaller model in the folder model in --out.

    Examples:
    headwise compress recipe.toml --out smaller
    headwise compress recipe.toml --out smaller --force
    headwise compress recipe.toml --out smaller --json > report.json
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
