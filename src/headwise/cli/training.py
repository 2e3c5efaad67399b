"""The commands about trainings: `headwise study`, which makes them, and `monitor`, which shows the state of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import resumable
from headwise.cli.options import Column, Data, Force, amount, choice, numbers, option, path, path_option, seconds
from headwise.cli.output import OutputFlags, quiet_libraries
from headwise.errors import InputError
from headwise.monitoring.alarms import AlarmLimits
from headwise.studies.text_options import TASKS, TextOptions

DEFAULT_SECONDS = 30 * 60.0
"""Time limit of a study if neither --budget nor --tokens is given."""


@dataclass(frozen=True)
class TextStudyFlags:
    """Command-line options of `headwise study` that describe the training data and the task that the models learn."""

    task: Annotated[
        str, choice(TASKS, "What the models learn: the next token, masked tokens, or the label of a text.")
    ] = TextOptions.task
    context: Annotated[int, option("Tokens per sequence.", least=2)] = TextOptions.context
    batch: Annotated[int, option("Sequences per batch.", least=1)] = TextOptions.batch
    vocabulary: Annotated[int, option("Tokens of the tokenizer that is trained on the data.", least=1)] = (
        TextOptions.vocabulary
    )
    tokenizer: Annotated[str | None, option("Use the tokenizer of this model instead.")] = None
    column: Column = TextOptions.column
    label: Annotated[str, option("Column with the label, for --task classify.")] = TextOptions.label


@dataclass(frozen=True)
class SpaceFlags:
    """Command-line options of `headwise study` that describe the models: the head settings (numbers of heads and head
    dimensions) to compare, the setting that the user has now (the baseline), and the size of the models.
    """

    heads: Annotated[Any, option("Numbers of heads to compare.", "N,N,...", parser=numbers)] = "1,2,4,8,16"
    head_dim: Annotated[Any, option("Head dimensions. Default: embed_dim / heads.", "N,N,...", parser=numbers)] = None
    kv_heads: Annotated[Any, option("Key/value heads. Default: as many as heads.", "N,N,...", parser=numbers)] = None
    tensor_parallel: Annotated[
        int, option("Number of ranks that must be able to share the heads equally.", least=1)
    ] = 1
    baseline: Annotated[str | None, option("The setting in use, such as 8, 8x64 or 8x64/2.", "HEADS[xDIM][/KV]")] = None
    params: Annotated[Any, option("Parameters of each model.", "N", parser=amount)] = "1.5M"
    embed_dim: Annotated[int | None, option("Width of the models. Default: derived from --params.", least=2)] = None
    layers: Annotated[int | None, option("Number of layers. Default: derived from --params.", least=1)] = None


@dataclass(frozen=True)
class BudgetFlags:
    """Command-line options of `headwise study` that limit its work: time, tokens of each training, learning rates
    (trials) and seeds.
    """

    budget: Annotated[
        Any,
        option("Time limit, such as 30m or 2h. Default: 30m, or none with --tokens.", "TIME", parser=seconds),
    ] = None
    tokens: Annotated[Any, option("Tokens of each training. Default: as the budget allows.", "N", parser=amount)] = None
    trials: Annotated[int | None, option("Learning rates per setting. Default: as the budget allows.", least=1)] = None
    seeds: Annotated[int, option("Trainings of each setting with its best learning rate.", least=1)] = 3


def study(
    *,
    data: Data,
    out: Annotated[
        Path, path_option("FOLDER", "Folder for table, plot, database and models. An interrupted study resumes there.")
    ],
    text: TextStudyFlags,
    space: SpaceFlags,
    budget: BudgetFlags,
    seed: Annotated[int, option("Base seed of weights, batch order and search.", least=0)] = 0,
    storage: Annotated[
        str | None,
        option("Database that several processes share. Default: an SQLite file in --out.", "URL"),
    ] = None,
    name: Annotated[str, option("Name of the study in the database.")] = "study",
    device: Annotated[str | None, option("Device, such as cpu, cuda or cuda:1. Default: cpu.")] = None,
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
    pictures: Annotated[bool, option("Write a picture of each statistic.")] = True,
    changed: Annotated[int, option("Number of heads to name for each statistic that changed most.", "N", least=0)] = 5,
    max_logit: Annotated[
        float | None, option("Alarm above this attention logit.", "X", show_default=True)
    ] = AlarmLimits.max_logit,
    entropy: Annotated[float | None, option("Alarm below this mean entropy, in nats.", "X")] = AlarmLimits.entropy,
    output_share: Annotated[
        float | None, option("Alarm below this share of the layer's median output norm.", "X")
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
