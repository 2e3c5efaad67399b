"""The commands that measure what heads do for the loss: `headwise ablate`, `importance`, `curve` and `in-context`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import CausalRunFlags, RunFlags, find_loss, require_same_run
from headwise.cli.options import Html, LossName, Top, choice, option, path_option
from headwise.cli.output import require_new_tables, require_writable_page
from headwise.errors import InputError
from headwise.settings import IMPORTANCE_METHODS, IN_CONTEXT_REPLACEMENTS, UNIT_KINDS

REPLACEMENTS = ("zero", "uniform", "mean")
"""Functions of `hw.replacements` whose results take the place of a removed head's output."""


def ablate(
    *,
    run: RunFlags,
    loss: LossName = None,
    replacement: Annotated[
        str, choice(REPLACEMENTS, "What replaces a head's output: zero, uniform (attention), or mean (over the data).")
    ] = "zero",
    units: Annotated[str, choice((*UNIT_KINDS, "roles"), "What is removed at a time.")] = "heads",
    roles: Annotated[
        Path | None, path_option("FOLDER", "Profile of the same model, required by --units roles.")
    ] = None,
    top: Top = 20,
    html: Html = None,
) -> None:
    """Measure the loss of a model without each head. Heads (with --units: layers, groups of heads that share keys and
    values, or all heads of a role such as previous token) are removed one at a time, by replacing their output. Prints
    the largest increases of the loss, and saves the effect of each removal in --out. Processes started by torchrun
    share the work.

    Examples:
    headwise ablate --data sentences.jsonl --out ablation
    headwise ablate --model smollm2 --data corpus.jsonl --documents truncate --context 256 --out smollm2-ablation
    headwise ablate --data sentences.jsonl --units roles --roles profile --replacement mean --out roles
    """
    from headwise.analysis.losses import name_of_loss
    from headwise.analysis.profile import require_profile_of

    if (units == "roles") != (roles is not None):
        expected = "the folder of a profile if, and only if, --units is roles"
        raise InputError("roles", expected=expected, got="none" if roles is None else repr(str(roles)))
    if html is not None and units != "heads":
        raise InputError("html", expected="--units heads, whose effects a page shows", got=f"--units {units}")
    require_writable_page(html)
    profile = None if roles is None else hw.load_profile(roles)
    with run.open(shared=True) as opened:
        lm_head, loss_function = find_loss(opened.source, opened.dataset.tokenizer, loss)
        settings = {"replacement": replacement} if units == "roles" else {"replacement": replacement, "units": units}
        settings["loss"] = name_of_loss(loss_function)
        model = opened.load(hw.Ablation if units == "heads" else hw.SetAblation, lm_head, **settings)
        if profile is not None:
            require_profile_of(profile, model, opened.source.title)
        replace = getattr(hw.replacements, replacement)
        result = hw.ablate(
            model,
            opened.dataset,
            loss_function,
            replacement=replace(opened.dataset) if replacement == "mean" else replace(),
            units=units if profile is None else profile.roles(),
            **opened.options,
        )
        if isinstance(result, hw.Ablation):
            opened.write_page(html, result, model)
        opened.show(result, page=html, top=top)


@dataclass(frozen=True)
class MethodFlags:
    """Command-line options of `headwise importance` that only one importance method (a value of --method) accepts. A
    field is None if its option is not used on the command line; the method then uses its own default value.
    """

    steps: Annotated[int | None, option("integrated: number of points between 0 and 1 for all gates.", least=1)] = None
    sparsity: Annotated[
        float | None, option("hard_concrete: penalty of an open gate, in units of the loss.", least=0.0)
    ] = None
    epochs: Annotated[int | None, option("hard_concrete: passes over the data.", least=1)] = None


def importance(
    *,
    run: RunFlags,
    loss: LossName = None,
    method: Annotated[
        str | None, choice(IMPORTANCE_METHODS, "Default: gradient, or ablation with the embedding loss.")
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Divide the scores of a layer by their l2 norm.")
    ] = False,
    method_options: MethodFlags,
    top: Top = 20,
    html: Html = None,
) -> None:
    """Score how important each head is for the loss. Methods: gradients of the loss with respect to head gates (factors
    on head outputs), these gradients integrated while all gates rise from 0 to 1, removal of each head, or learned
    gates. Prints the heads with the largest scores, and saves all scores in --out. Processes started by torchrun share
    the work.

    Examples:
    headwise importance --data sentences.jsonl --method integrated --steps 8 --out importance
    headwise importance --model smollm2 --data corpus.jsonl --documents truncate --context 256 --out smollm2-importance
    headwise importance --data sentences.jsonl --out importance --json > importance.json
    """
    from headwise.analysis.importance.importance import create_method
    from headwise.analysis.losses import name_of_loss

    require_writable_page(html)
    of_method: dict[str, Any] = {name: value for name, value in asdict(method_options).items() if value is not None}
    with run.open(shared=True) as opened:
        lm_head, loss_function = find_loss(opened.source, opened.dataset.tokenizer, loss)
        if method is None:  # the gradient of a distance is 0 at the unchanged model
            method = "ablation" if isinstance(loss_function, hw.EmbeddingDistance) else "gradient"
        chosen = create_method(method, of_method, loss_function, normalise=normalise)
        settings = {"method": {"name": method, **asdict(chosen)}, "normalise": normalise}
        model = opened.load(hw.Importance, lm_head, **settings, loss=name_of_loss(loss_function))
        options = {**of_method, **opened.options}
        result = hw.importance(model, opened.dataset, loss_function, method, normalise=normalise, **options)
        opened.write_page(html, result, model)
        opened.show(result, page=html, top=top)


def curve(
    *,
    run: RunFlags,
    loss: LossName = None,
    scores: Annotated[list[Path], path_option("FOLDER", "Result of importance or ablate; can be repeated.")],
    random: Annotated[int, option("Number of random orders.", "N", least=0)] = 10,
    seed: Annotated[int, option("Seed of the random orders.", "N", least=0)] = 0,
) -> None:
    """Measure the loss of a model while more and more heads are removed, the least important first, and while random
    heads are removed. The order is that of saved scores, measured on other data. Prints the loss after each further
    tenth of the heads is removed, and saves it in --out.

    Examples:
    headwise curve --model smollm2 --data test.jsonl --scores scores --out curve
    headwise curve --data sentences.jsonl --scores ablation --random 20 --out curve
    headwise curve --data sentences.jsonl --scores ablation --scores importance --out curve --json > curve.json
    """
    from headwise.analysis.losses import name_of_loss
    from headwise.runs.table import table_path

    orders, tables = {}, (hw.Importance, hw.Ablation)
    for folder in scores:
        table = next((table for table in tables if table_path(folder, table.NAME).exists()), None)
        if table is None:
            names = " or ".join(f"{table.NAME}.parquet" for table in tables)
            raise InputError("scores", expected=f"a folder with {names}", got=repr(str(folder)))
        orders[str(folder)] = table.load(folder)
    with run.open() as opened:
        lm_head, loss_function = find_loss(opened.source, opened.dataset.tokenizer, loss)
        model = opened.load(hw.SetAblation, lm_head, loss=name_of_loss(loss_function))
        options: dict[str, Any] = {"random": random, "seed": seed, **opened.options}
        result = hw.pruning_curve(model, opened.dataset, loss_function, orders, **options)
        result.save(run.out, force=True)
        opened.show(result)


def in_context(
    *,
    run: CausalRunFlags,
    early: Annotated[int, option("Number of the early token, from 1.", "N", least=2)] = 50,
    late: Annotated[int, option("Number of the late token.", "N", least=3)] = 500,
    window: Annotated[int, option("Tokens over which each loss is averaged.", "N", least=1)] = 32,
    sequences: Annotated[int, option("Number of sequences to measure on.", "N", least=1)] = 3,
    replacement: Annotated[
        str,
        choice(
            (*IN_CONTEXT_REPLACEMENTS, "both"), "What replaces a head's output: zero, mean (over the data), or both."
        ),
    ] = "zero",
    seed: Annotated[int, option("Seed of the choice of sequences.", "N", least=0)] = 0,
    repeats: Annotated[bool, option("Also measure induction on repeated random tokens.")] = True,
    top: Top = 20,
) -> None:
    """Measure the in-context learning score of a language model, its loss late in the context minus its loss early in
    it, and how the score changes without each head. Prints the heads without which the score rises most, and saves the
    changes in --out. Processor time grows with --sequences: on 2 cores, 3 sequences of smollm2 take about 9 minutes.
    Processes started by torchrun share the work.

    Examples:
    headwise in-context --model smollm2 --data corpus.jsonl --documents truncate --out in-context
    headwise in-context --model smollm2 --data corpus.jsonl --documents truncate --replacement mean --out in-context
    headwise in-context --model smollm2 --data corpus.jsonl --early 20 --late 200 --window 1 --out early
    """
    from headwise.analysis.in_context_score import InContextLoss

    require_new_tables(run.out, hw.InContextScores.NAME, force=run.force)
    with run.open(shared=True) as opened:
        replacements = IN_CONTEXT_REPLACEMENTS if replacement == "both" else (replacement,)
        score = InContextLoss(early, late, window).__name__
        for name in replacements:
            settings = {"loss": score, "units": "heads", "replacement": name}
            require_same_run(hw.Ablation, run.out / name, opened.source, None, run.model, force=run.force, **settings)
        loaded = opened.source.model("causal", run.model.torch_dtype).to(opened.device)
        options: dict[str, Any] = {"early": early, "late": late, "window": window, **opened.options}
        options |= {"sequences": sequences, "seed": seed, "repeats": repeats, "replacements": replacements}
        result = hw.in_context_score(loaded, opened.dataset, **options)
        if opened.is_first:
            result.save(run.out, force=True)
        opened.show(result, top=top)
