"""A training of the decoder in which every head is measured: by `hw.monitor` in the training's own forward passes, and
by `hw.watch` on random tokens that repeat.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.data.batches import evaluation_mode
from headwise.shapes import Bool, Float, Int
from headwise.studies.training import build_seeded
from research.formation.decoder import Decoder, Shape
from research.formation.text import COPIED, Copies, Text, held_out_rows

MONITORED = ("previous", "max_logit", "entropy", "output_norm")
"""Statistics of the monitor."""

GRADIENT_NORM = 1.0
"""Largest norm of all gradients together."""


@dataclass(frozen=True)
class Plan:
    """Numbers of a training.

    Attributes:
        steps: number of optimizer steps.
        every: steps from one measurement to the next.
        batch: rows of a batch.
        rate: learning rate of AdamW, constant after the warmup.
        warmup: first steps over which the learning rate rises linearly.
    """

    steps: int = 800
    every: int = 20
    batch: int = 32
    rate: float = 1e-2
    warmup: int = 50


def measured_training(text: Text, shape: Shape, plan: Plan, seed: int, kind: str) -> dict[str, Any]:
    """Train a decoder and return the measurements as JSON-compatible values.

    Args:
        text: rows of tokens.
        shape: sizes of the decoder.
        plan: numbers of the training.
        seed: seed of the weights, of the order of the rows and of the copies.
        kind: "repeats", "quotes", or "plain" for unchanged training rows.
    """
    start, processor = time.monotonic(), time.process_time()
    model = build_seeded(lambda: Decoder(shape), seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    measurements = Measurements(held_out_rows(text, kind), shape.vocabulary)
    batches = training_batches(text, plan, seed, kind)
    with hw.monitor(model, every=plan.every, statistics=MONITORED) as monitor:
        for step in range(plan.steps + 1):
            if step % plan.every == 0:
                measurements.measure(model, step)
            next_token_losses(model, next(batches)).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * min(1.0, (step + 1) / plan.warmup)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return {
        "seed": seed,
        "kind": kind,
        "shape": asdict(shape),
        "plan": asdict(plan),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **measurements.curves,
        "monitor": {name: _by_head(monitor.history, name) for name in MONITORED},
        "alarms": [alarm._asdict() for alarm in monitor.alarms],
        "costs": measurements.costs(model),
        "seconds": time.monotonic() - start,
        "processor_seconds": time.process_time() - processor,
    }


def training_batches(text: Text, plan: Plan, seed: int, kind: str) -> Iterator[Int[torch.Tensor, "batch length"]]:
    """Yield batches of training rows without end, each row once before any is used again. Copies are drawn anew
    each time.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        for indices in torch.randperm(len(text.training), generator=generator).split(plan.batch):
            ids = text.training[indices]
            yield COPIED[kind](ids, generator)[0] if kind in COPIED else ids


class Measurements:
    """Measurements of a model in evaluation mode, at several steps of its training.

    Attributes:
        curves: `steps`; `loss`, the mean loss on the copied tokens of held-out rows ("copied") and on all other
            tokens ("new"), in nats; and `induction`, the score of every head by its name.
    """

    def __init__(self, held_out: Copies, vocabulary: int) -> None:
        self._ids, self._is_copied = held_out
        self._repeats = hw.random_repeats(vocabulary)
        self.curves: dict[str, Any] = {"steps": [], "loss": {"copied": [], "new": []}, "induction": {}}

    def measure(self, model: nn.Module, step: int) -> None:
        """Add the measurements at a step to the curves."""
        with torch.no_grad(), evaluation_mode(model):
            losses = next_token_losses(model, self._ids)
            with hw.watch(model) as heads:
                model(self._repeats)
        copied = self._is_copied[:, 1:]
        self.curves["steps"].append(step)
        for name, mask in {"copied": copied, "new": ~copied}.items():
            self.curves["loss"][name].append(losses[mask].mean().item())
        for row in heads.rows():
            self.curves["induction"].setdefault(f"{row['layer']}.{row['head']}", []).append(row["induction"])

    def costs(self, model: nn.Module) -> dict[str, float]:
        """Return how much the loss on copied tokens rises without each head, in nats, by its name."""
        batch = {"input_ids": self._ids, "is_copied": self._is_copied}
        ablation = hw.ablate(model, [batch], copied_loss)
        return {row.name: row.statistics["cost"].value for row in ablation.rows}


def copied_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Float[torch.Tensor, " batch"]:
    """Return the mean loss on the copied tokens of each row."""
    mask: Bool[torch.Tensor, "batch length"] = batch["is_copied"][:, 1:]
    losses = next_token_losses(model, batch["input_ids"])
    return losses.where(mask, 0.0).sum(1) / mask.sum(1)


def next_token_losses(
    model: nn.Module, ids: Int[torch.Tensor, "batch length"]
) -> Float[torch.Tensor, "batch length-1"]:
    """Return the loss of the prediction of every token but the first of its row, in nats."""
    logits = model(input_ids=ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def _by_head(history: hw.History, statistic: str) -> dict[str, list[float]]:
    """Return a statistic at the observed steps, for each head by its name."""
    values: dict[str, list[float]] = {}
    for row in history.rows():
        values.setdefault(f"{row['layer']}.{row['head']}", []).append(row[statistic])
    return values
