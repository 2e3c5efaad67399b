"""The studies: models of every number of heads, trained on the same batches, at equal parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.losses import Loss
from headwise.studies.model import Shape, Transformer
from headwise.studies.space import Setting, Space
from headwise.studies.study import study
from headwise.studies.training import build
from research.claims import corpora, kept
from research.claims.corpora import Batches
from research.claims.looks import apart, ranks, removals
from research.claims.relations import KINDS, WIDTH, Relations, accuracy, relations_loss, weights
from research.claims.sizes import Size

RATES = (1.4e-3, 2.24e-2)
"""The learning rates that are searched; three trials try 5.6e-3, 2.8e-3 and 1.1e-2."""

LOW_RATES = (3.5e-4, 5.6e-3)
"""The same where data are few: 1.4e-3, 7e-4 and 2.8e-3."""

LOOKED_AT = 4
"""Held-out batches on which heads are compared."""

REMOVED_ON = 8
"""Batches on which heads are weighed, and as many on which they are removed."""

Look = Callable[[nn.Module, Setting, int], dict[str, Any]]
"""What is measured of a trained model, given its setting and seed, beside its losses."""


@dataclass(frozen=True)
class Task:
    """One study.

    Attributes:
        name: of the study and its file.
        data, task: what it is, in words.
        width, depth: of the model.
        loss: what is trained and judged by.
        make: gives the model of a setting.
        batches: to train on, and to judge by.
        look: what else is measured.
        is_setting: whether it is one of those in which numbers of heads are compared for their own sake.
        more_seeds: beyond those of the size.
        rates: among which is searched.
    """

    name: str
    data: str
    task: str
    width: int
    depth: int
    loss: Loss
    make: Callable[[Setting], nn.Module]
    batches: Callable[[], tuple[Batches, Batches]]
    look: Look | None = None
    is_setting: bool = True
    more_seeds: int = 0
    rates: tuple[float, float] = RATES


def tasks(size: Size) -> dict[str, Task]:
    """All of a size, by name; long and short ones in turn, so that processes that begin at several places end alike."""
    text = partial(corpora.next_bytes, size.held_out)
    small = partial(corpora.next_bytes, size.held_out, corpora.SMALL)
    few = f"{corpora.SMALL * corpora.ROWS * corpora.LENGTH / 1000:.0f} KB of the text"
    found = [_text("text-64x2", 64, 2, text, size, look=True)]
    found += [_text("text-32x1", 32, 1, text, size), *(_relations(kind, size) for kind in KINDS)]
    found += [_text("small-64x2", 64, 2, small, size, data=few, more_seeds=1, rates=LOW_RATES)]
    found += [_masked(text, size), _text("text-64x1", 64, 1, text, size), _text("text-32x2", 32, 2, text, size)]
    found += [_lookup(size)]
    if size.large:
        found += [_text("text-64x4", 64, 4, text, size), _text("text-128x2", 128, 2, text, size)]
    return {task.name: task for task in found}


def run(task: Task, size: Size, out: Path) -> None:
    """Train what is to be trained, with other processes that do the same."""
    folder = kept.scratch(out) / task.name
    settings = Space(task.width, size.heads).settings()
    training, held_out = task.batches()

    def keep(model: nn.Module, setting: Setting, seed: int) -> None:
        print(f"{task.name}: {setting.num_heads} heads, seed {seed}", flush=True)
        if task.look is not None:
            kept.write(folder / "looks" / f"{setting.name}-{seed}.json", task.look(model, setting, seed))

    found = study(
        task.make,
        training,
        settings,
        held_out=held_out,
        loss=task.loss,
        steps=size.steps,
        trials=size.trials,
        seeds=size.seeds + task.more_seeds,
        rates=task.rates,
        keep=keep,
        out=folder,
        name=task.name,
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for each in sorted(found.metadata["runs"], key=lambda each: each["seed"]):
        setting = Setting(*each["setting"])
        looks = folder / "looks" / f"{setting.name}-{each['seed']}.json"
        run = {name: each[name] for name in ("seed", "rate", "loss", "train_loss")}
        runs.setdefault(str(setting.num_heads), []).append(run | (kept.read(looks) if task.look else {}))
    kept.write(
        out / f"{task.name}.json",
        {
            "about": kept.about(size.name, threads=torch.get_num_threads(), processes=kept.cores()),
            "data": task.data,
            "task": task.task,
            "width": task.width,
            "depth": task.depth,
            "is_setting": task.is_setting,
            "parameters": {str(row.num_heads): row.statistics["parameters"].value for row in found.rows},
            "training": {"batches": len(training), "tokens a batch": training[0]["input_ids"].numel()},
            "held out": sum(batch["input_ids"].numel() for batch in held_out),
            "steps": size.steps,
            "trials": size.trials,
            "rates": task.rates,
            "margin": found.margin,
            "runs": runs,
            "search": found.metadata["search"],
        },
    )


# -- what they are ----------------------------------------------------------------------------------------------------


def _shape(vocabulary: int, width: int, depth: int, *, causal: bool = True) -> Shape:
    """Blocks of about 12 width^2 parameters: an MLP of 2.7 times the width with heads of width / heads."""
    parameters = vocabulary * width + 12 * depth * width**2 + width * (2 * depth + 1)
    return Shape(vocabulary, width, depth, parameters, causal=causal)


def _text(
    name: str,
    width: int,
    depth: int,
    batches: Any,
    size: Size,
    *,
    data: str = "text",
    look: bool = False,
    **more: Any,
) -> Task:
    make = partial(Transformer, _shape(corpora.VOCABULARY, width, depth))
    looks = _look(make, batches, hw.next_token_loss, size, width, look=look)
    about = (data, "next byte", width, depth, hw.next_token_loss, make, batches)
    return Task(name, *about, look=looks, **more)


def _masked(batches: Any, size: Size) -> Task:
    make = partial(Transformer, _shape(corpora.VOCABULARY, 64, 2, causal=False))
    loss = hw.MaskedTokenLoss(corpora.MASK)
    return Task("masked-64x2", "text", "masked bytes", 64, 2, loss, make, batches, _look(make, batches, loss, size, 64))


def _lookup(size: Size) -> Task:
    make = partial(Transformer, _shape(2 * corpora.KEYS, 64, 2))

    def batches() -> tuple[Batches, Batches]:
        return corpora.lookups(size.steps, 1), corpora.lookups(size.held_out, 2)

    look = _look(make, batches, lookup_loss, size, 64)
    return Task("lookup-64x2", "generated", "lookup of pairs", 64, 2, lookup_loss, make, batches, look)


def lookup_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """-ln p of the values in the second half of each sequence: `(batch,)`."""
    ids = batch["input_ids"]
    half = ids.shape[1] // 2
    losses = F.cross_entropy(model(ids)[:, half::2].flatten(0, 1), ids[:, half + 1 :: 2].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def _relations(kind: str, size: Size) -> Task:
    """The task of several relations; with weights that are decided by places alone it is for the argument only."""

    def batches() -> tuple[Batches, Batches]:
        return corpora.symbols(size.steps, 1), corpora.symbols(size.held_out, 2)

    def look(model: Any, setting: Setting, seed: int) -> dict[str, Any]:
        held_out = batches()[1]
        return {"accuracy": accuracy(model, held_out), "weights": weights(model, held_out[0]["input_ids"])}

    words = {"places": "weights by place alone", "tokens": "ordinary attention", "mlp": "with an MLP"}[kind]
    make = partial(Relations, kind=kind)
    about = ("generated", f"several relations, {words}", WIDTH, 1, relations_loss, make, batches, look)
    return Task(f"relations-{kind}", *about, is_setting=kind != "places")


def _look(make: Any, batches: Any, loss: Loss, size: Size, width: int, *, look: bool = False) -> Look:
    """Distances of heads for the numbers in the middle, ranks; and where `look`, what is lost without heads."""

    def measured(model: nn.Module, setting: Setting, seed: int) -> dict[str, Any]:
        training, held_out = batches()
        some = held_out[:LOOKED_AT]
        found: dict[str, Any] = {"ranks": ranks(model.eval(), some[0]["input_ids"])}
        if setting.num_heads in ((2, 4, 8, 16) if look else (8,)):
            untrained = build(lambda: make(setting), seed)
            found |= apart(model, untrained.eval(), some)
        if look:
            found["removed"] = removals(model, training[:REMOVED_ON], held_out[:REMOVED_ON], loss, size.drawn)
        return found

    return measured
