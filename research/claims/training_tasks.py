"""Trainings: models with different numbers of heads and equal parameters, trained on the same batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.losses import Loss
from headwise.studies.budget import StudyBudget
from headwise.studies.model import Transformer
from headwise.studies.model_shape import ModelShape
from headwise.studies.optuna_storage import OptunaOptions
from headwise.studies.space import Setting, Space
from headwise.studies.study import study
from headwise.studies.training import Recipe, build_seeded
from research.claims import corpora
from research.claims.corpora import Batches
from research.claims.environment import available_cores, describe_environment
from research.claims.head_measures import compare_with_untrained, ranks, removals
from research.claims.relations_task import KINDS, WIDTH, Relations, accuracy, relations_loss, weights
from research.claims.result_files import read_json, work_folder, write_json
from research.claims.sizes import Size

RATES = (1.4e-3, 2.24e-2)
"""Range of the search for a learning rate; three trials try 5.6e-3, 2.8e-3 and 1.1e-2."""

LOW_RATES = (3.5e-4, 5.6e-3)
"""The same range for little data; three trials try 1.4e-3, 7e-4 and 2.8e-3."""

COMPARED_ON = 4
"""Number of held-out batches on which heads are compared."""

REMOVED_ON = 8
"""Number of training batches for importance, and of held-out batches for the loss without heads."""

Measure = Callable[[nn.Module, Setting, int], dict[str, Any]]
"""Function of a trained model, its setting and its seed that measures more than the losses."""


@dataclass(frozen=True)
class Task:
    """One training task, for which numbers of heads are compared.

    Attributes:
        name: of the study and its file.
        data: short description for the report.
        task: short description for the report.
        width: of the model.
        depth: number of layers.
        loss: loss of each sequence, for training and for held-out data.
        make: returns the model of a setting.
        batches: returns training and held-out batches.
        measure: measures more of each trained model; None if losses are enough.
        is_setting: whether the study compares numbers of heads for their own sake.
        more_seeds: number of trainings in addition to those of the size.
        rates: range of the search for a learning rate.
    """

    name: str
    data: str
    task: str
    width: int
    depth: int
    loss: Loss
    make: Callable[[Setting], nn.Module]
    batches: Callable[[], tuple[Batches, Batches]]
    measure: Measure | None = None
    is_setting: bool = True
    more_seeds: int = 0
    rates: tuple[float, float] = RATES


def tasks(size: Size) -> dict[str, Task]:
    """Return all tasks of a size, by name.

    Long and short tasks alternate, so that processes that start at different tasks finish at about the same time.
    """
    text = partial(corpora.next_bytes, size.held_out)
    small = partial(corpora.next_bytes, size.held_out, corpora.SMALL)
    few = f"{corpora.SMALL * corpora.ROWS * corpora.LENGTH / 1000:.0f} KB of the text"
    listed = [_text("text-64x2", 64, 2, text, size, measure_all=True)]
    listed += [_text("text-32x1", 32, 1, text, size), *(_relations(kind, size) for kind in KINDS)]
    listed += [_text("small-64x2", 64, 2, small, size, data=few, more_seeds=1, rates=LOW_RATES)]
    listed += [_masked(text, size), _text("text-64x1", 64, 1, text, size), _text("text-32x2", 32, 2, text, size)]
    listed += [_lookup(size)]
    if size.large:
        listed += [_text("text-64x4", 64, 4, text, size), _text("text-128x2", 128, 2, text, size)]
    return {task.name: task for task in listed}


def run(task: Task, size: Size, out: Path) -> None:
    """Train the models of a task and write the results. Several processes may run the same task and share the work."""
    folder = work_folder(out) / task.name
    settings = Space(task.width, size.heads).settings()
    training, held_out = task.batches()

    def keep(model: nn.Module, setting: Setting, seed: int) -> None:
        print(f"{task.name}: {setting.num_heads} heads, seed {seed}", flush=True)
        if task.measure is not None:
            write_json(folder / "measures" / f"{setting.name}-{seed}.json", task.measure(model, setting, seed))

    result = study(
        task.make,
        training,
        settings,
        held_out=held_out,
        loss=task.loss,
        budget=StudyBudget(steps=size.steps, trials=size.trials, seeds=size.seeds + task.more_seeds),
        recipe=Recipe(rates=task.rates),
        on_trained=keep,
        out=folder,
        optuna=OptunaOptions(name=task.name),
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for trained in sorted(result.metadata["runs"], key=lambda trained: trained["seed"]):
        setting = Setting(*trained["setting"])
        measures = folder / "measures" / f"{setting.name}-{trained['seed']}.json"
        run = {name: trained[name] for name in ("seed", "rate", "loss", "train_loss")}
        runs.setdefault(str(setting.num_heads), []).append(run | (read_json(measures) if task.measure else {}))
    write_json(
        out / f"{task.name}.json",
        {
            "about": describe_environment(size.name, processes=available_cores()),
            "data": task.data,
            "task": task.task,
            "width": task.width,
            "depth": task.depth,
            "is_setting": task.is_setting,
            "parameters": {str(row.num_heads): row.statistics["parameters"].value for row in result.rows},
            "training": {"batches": len(training), "tokens a batch": training[0]["input_ids"].numel()},
            "held out": sum(batch["input_ids"].numel() for batch in held_out),
            "steps": size.steps,
            "trials": size.trials,
            "rates": task.rates,
            "margin": result.margin,
            "runs": runs,
            "search": result.metadata["search"],
        },
    )


# -- the tasks --------------------------------------------------------------------------------------------------------


def _shape(vocabulary: int, width: int, depth: int, *, causal: bool = True) -> ModelShape:
    """Return a shape with about 12 width^2 parameters a block; the MLP is then 2.7 times as wide as the model."""
    parameters = vocabulary * width + 12 * depth * width**2 + width * (2 * depth + 1)
    return ModelShape(vocabulary, width, depth, parameters, causal=causal)


def _text(
    name: str,
    width: int,
    depth: int,
    batches: Any,
    size: Size,
    *,
    data: str = "text",
    measure_all: bool = False,
    **more: Any,
) -> Task:
    make = partial(Transformer, _shape(corpora.VOCABULARY, width, depth))
    measure = _measure(make, batches, hw.next_token_loss, size, width, measure_all=measure_all)
    about = (data, "next byte", width, depth, hw.next_token_loss, make, batches)
    return Task(name, *about, measure=measure, **more)


def _masked(batches: Any, size: Size) -> Task:
    make = partial(Transformer, _shape(corpora.VOCABULARY, 64, 2, causal=False))
    loss = hw.MaskedTokenLoss(corpora.MASK)
    return Task(
        "masked-64x2", "text", "masked bytes", 64, 2, loss, make, batches, _measure(make, batches, loss, size, 64)
    )


def _lookup(size: Size) -> Task:
    make = partial(Transformer, _shape(2 * corpora.KEYS, 64, 2))

    def batches() -> tuple[Batches, Batches]:
        return corpora.lookups(size.steps, 1), corpora.lookups(size.held_out, 2)

    measure = _measure(make, batches, lookup_loss, size, 64)
    return Task("lookup-64x2", "generated", "lookup of pairs", 64, 2, lookup_loss, make, batches, measure)


def lookup_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of the values in the second half of each sequence, in nats: `(batch,)`."""
    ids = batch["input_ids"]
    half = ids.shape[1] // 2
    losses = F.cross_entropy(model(ids)[:, half::2].flatten(0, 1), ids[:, half + 1 :: 2].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def _relations(kind: str, size: Size) -> Task:
    """Return the task of several relations. With weights by position alone it only illustrates the argument."""

    def batches() -> tuple[Batches, Batches]:
        return corpora.symbols(size.steps, 1), corpora.symbols(size.held_out, 2)

    def measure(model: Any, setting: Setting, seed: int) -> dict[str, Any]:
        held_out = batches()[1]
        return {"accuracy": accuracy(model, held_out), "weights": weights(model, held_out[0]["input_ids"])}

    words = {"places": "weights by place alone", "tokens": "ordinary attention", "mlp": "with an MLP"}[kind]
    make = partial(Relations, kind=kind)
    about = ("generated", f"several relations, {words}", WIDTH, 1, relations_loss, make, batches, measure)
    return Task(f"relations-{kind}", *about, is_setting=kind != "places")


def _measure(make: Any, batches: Any, loss: Loss, size: Size, width: int, *, measure_all: bool = False) -> Measure:
    """Return the function that measures ranks and, for some numbers of heads, distances between heads.

    Args:
        make: returns the model of a setting.
        batches: returns training and held-out batches.
        loss: loss of each sequence.
        size: how much is measured.
        width: of the model.
        measure_all: measure distances for more numbers of heads, and the loss without heads.
    """

    def measured(model: nn.Module, setting: Setting, seed: int) -> dict[str, Any]:
        training, held_out = batches()
        compared_on = held_out[:COMPARED_ON]
        measures: dict[str, Any] = {"ranks": ranks(model.eval(), compared_on[0]["input_ids"])}
        if setting.num_heads in ((2, 4, 8, 16) if measure_all else (8,)):
            untrained = build_seeded(lambda: make(setting), seed)
            measures |= compare_with_untrained(model, untrained.eval(), compared_on)
        if measure_all:
            measures["removed"] = removals(model, training[:REMOVED_ON], held_out[:REMOVED_ON], loss, size.drawn)
        return measures

    return measured
