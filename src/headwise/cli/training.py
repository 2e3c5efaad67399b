"""The commands about trainings: `headwise study`, which makes them, and `monitor`, which shows the state of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import resumable
from headwise.cli.options import Column, Data, Force, amount, choice, numbers, path, path_option, seconds
from headwise.cli.output import OutputFlags, quiet_libraries
from headwise.errors import InputError
from headwise.monitoring.alarms import AlarmLimits
from headwise.studies.text_options import TASKS, TextOptions

DEFAULT_SECONDS = 30 * 60.0
"""Time limit of a study if neither --budget nor --tokens is given."""


@dataclass(frozen=True)
class TextStudyFlags:
    """Command-line options of `headwise study` that describe the training data, and what the models learn."""

    task: Annotated[
        str, choice(TASKS, "What the models learn: the next token, masked tokens, or the label of a text.")
    ] = TextOptions.task
    context: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = TextOptions.context
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = TextOptions.batch
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens of the tokenizer that is trained on the data.")] = (
        TextOptions.vocabulary
    )
    tokenizer: Annotated[str | None, typer.Option(help="Use the tokenizer of this model instead.")] = None
    column: Column = TextOptions.column
    label: Annotated[str, typer.Option(help="Column with the label, for --task classify.")] = TextOptions.label


@dataclass(frozen=True)
class SpaceFlags:
    """Command-line options of `headwise study` that describe the models: the head settings to compare, the setting that
    the user has now (the baseline), and the size of the models.
    """

    heads: Annotated[Any, typer.Option(parser=numbers, metavar="N,N,...", help="Numbers of heads to compare.")] = (
        "1,2,4,8,16"
    )
    head_dim: Annotated[
        Any, typer.Option(parser=numbers, metavar="N,N,...", help="Head dimensions. Default: embed_dim / heads.")
    ] = None
    kv_heads: Annotated[
        Any, typer.Option(parser=numbers, metavar="N,N,...", help="Key/value heads. Default: as many as heads.")
    ] = None
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Number of ranks that must be able to share the heads equally.")
    ] = 1
    baseline: Annotated[
        str | None, typer.Option(metavar="HEADS[xDIM][/KV]", help="The setting in use, such as 8, 8x64 or 8x64/2.")
    ] = None
    params: Annotated[Any, typer.Option(parser=amount, metavar="N", help="Parameters of each model.")] = "1.5M"
    embed_dim: Annotated[
        int | None, typer.Option(min=2, help="Width of the models. Default: derived from --params.")
    ] = None
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers. Default: derived from --params.")] = None


@dataclass(frozen=True)
class BudgetFlags:
    """Command-line options of `headwise study` that limit its work."""

    budget: Annotated[
        Any,
        typer.Option(
            parser=seconds, metavar="TIME", help="Time limit, such as 30m or 2h. Default: 30m, or none with --tokens."
        ),
    ] = None
    tokens: Annotated[
        Any, typer.Option(parser=amount, metavar="N", help="Tokens of each training. Default: as the budget allows.")
    ] = None
    trials: Annotated[
        int | None, typer.Option(min=1, help="Learning rates per setting. Default: as the budget allows.")
    ] = None
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each setting with its best learning rate.")] = 3


def study(
    *,
    data: Data,
    out: Annotated[
        Path, path_option("FOLDER", "Folder for table, plot, database and models. An interrupted study resumes there.")
    ],
    text: TextStudyFlags,
    space: SpaceFlags,
    budget: BudgetFlags,
    seed: Annotated[int, typer.Option(min=0, help="Base seed of weights, batch order and search.")] = 0,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database that several processes share. Default: an SQLite file in --out."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the study in the database.")] = "study",
    device: Annotated[str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1. Default: cpu.")] = None,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Find out how many heads suit your data. Trains small models of equal size that differ in the number, dimension
    and sharing of their heads. Prints a table that compares the models' losses, and saves the table and the models in
    --out.

    Examples:
    headwise study --data corpus.txt --out how-many --budget 2h
    headwise study --data corpus.txt --heads 4,8,16 --kv-heads 1,2,4 --baseline 8 --out shared-heads
    headwise study --data labels.jsonl --task classify --tokens 1M --trials 4 --out classifier --json > study.json
    """
    from headwise.data.models import find_model
    from headwise.show.records import study_records
    from headwise.show.trainings import print_study

    quiet_libraries()
    limit = DEFAULT_SECONDS if budget.budget is None and budget.tokens is None else budget.budget
    limits = hw.StudyBudget(limit, tokens=budget.tokens, trials=budget.trials, seeds=budget.seeds)
    tokenizer = None if text.tokenizer is None else find_model(text.tokenizer, argument="tokenizer").tokenizer()
    sizes = (text.context, text.batch)
    options = TextOptions(text.task, *sizes, tokenizer, text.vocabulary, text.column, text.label)
    compared = hw.Space(space.embed_dim, space.heads, space.head_dim, space.kv_heads, space.tensor_parallel)
    with resumable(out):
        result = hw.study_texts(
            data,
            out,
            budget=limits,
            text=options,
            space=compared,
            baseline=space.baseline,
            params=space.params,
            layers=space.layers,
            seed=seed,
            device=device,
            optuna=hw.OptunaOptions(storage, name),
            progress=not output.quiet,
            force=force,
        )
    output.show(lambda: study_records(result), lambda console: print_study(result, console), written=out)


def monitor(
    *,
    folder: Annotated[Path, typer.Argument(parser=path, metavar="FOLDER", help="Run folder of a monitored training.")],
    out: Annotated[Path | None, path_option("FOLDER", "Folder for the pictures. Default: the run folder.")] = None,
    pictures: Annotated[bool, typer.Option(help="Write a picture of each statistic.")] = True,
    changed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of heads to name for each statistic that changed most.")
    ] = 5,
    max_logit: Annotated[
        float | None, typer.Option(metavar="X", help="Alarm above this attention logit.", show_default=True)
    ] = AlarmLimits.max_logit,
    entropy: Annotated[
        float | None, typer.Option(metavar="X", help="Alarm below this mean entropy, in nats.")
    ] = AlarmLimits.entropy,
    output_share: Annotated[
        float | None, typer.Option(metavar="X", help="Alarm below this share of the layer's median output norm.")
    ] = AlarmLimits.output_share,
    output: OutputFlags,
) -> None:
    """Show the state of a training that `hw.monitor` observes, also while it runs. Prints the last observed step; for
    each statistic the heads with the smallest, the median and the largest value, and those that changed most since the
    first step; and the alarms of the last step. Writes a picture of each statistic over all steps.

    Examples:
    headwise monitor run
    headwise monitor run --changed 10 --max-logit 50 --out pictures
    headwise monitor run --no-pictures --json > state.json
    """
    from headwise.show.trainings import history_records, print_history

    limits = AlarmLimits(max_logit, entropy, output_share)
    history = hw.History.load(folder)
    if not history.steps:
        raise InputError("folder", expected="a run folder with observed steps", got=f"{str(folder)!r} without steps")
    if pictures:
        history.save_pictures(folder if out is None else out)
    written = (folder if out is None else out) if pictures else None
    output.show(
        lambda: history_records(history, limits),
        lambda console: print_history(history, limits, console, changed),
        written=written,
    )
