"""One model trained on so many batches, the same for every setting that is compared; and what it cost."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.analysis.losses import Loss, loss_per_example
from headwise.checks import finite_number, probability, whole_number
from headwise.data.batches import device_of, evaluation_mode, to_device

Batches = Sequence[dict[str, Any]]
"""Batches of a data set, each as the model's arguments by name."""

FIRST = 2
"""Steps whose time says nothing: memory is taken, code is warmed."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW (Loshchilov and Hutter 2019), a rate that rises, then falls as a cosine.

    Attributes:
        warmup: share of the steps over which the rate rises from 0.
        floor: what is left of it at the end.
        betas: of the running means of gradients and their squares.
        weight_decay: of parameters with two axes or more.
        clip: the largest norm of all gradients together; a larger one is scaled down.

    Raises:
        InputError: numbers out of range.
    """

    warmup: float = 0.1
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("warmup", "floor"):
            probability(name, getattr(self, name))
        for beta in self.betas:
            probability("betas", beta)
        finite_number("weight_decay", self.weight_decay, above=-1e-12)
        finite_number("clip", self.clip, above=0.0)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, without decay of what has one axis: norms and biases."""
        matrices = [each for each in model.parameters() if each.ndim > 1]
        vectors = [each for each in model.parameters() if each.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW([each for each in groups if each["params"]], betas=self.betas)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, as a share of the highest."""
        rising = self.warmup * steps
        if step < rising:
            return (step + 1) / (rising + 1)
        way = (step - rising) / max(1.0, steps - rising)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * way))


RECIPE = Recipe()
"""The usual one."""


@dataclass
class Trained:
    """What a training came to.

    Attributes:
        loss: of the last batches, in training.
        seconds: of each step, without what is measured between them.
    """

    loss: float
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The median of the steps, the first ones apart."""
        return statistics.median(self.seconds[FIRST:] or self.seconds)


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model whose weights are drawn from a seed; the random state outside is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def train(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    steps: int,
    rate: float,
    seed: int,
    recipe: Recipe = RECIPE,
    after: Callable[[int], None] = lambda _step: None,
) -> Trained:
    """Train a model on `steps` batches, drawn without putting back until all were seen, and again.

    Args:
        model: trained in place, on its device.
        batches: what there is.
        loss: `(model, batch) -> (batch,)`; their mean is descended. One with `reseeded(seed)` is another at each step.
        steps: batches.
        rate: the highest learning rate.
        seed: of the order of batches and of what is drawn in the model.
        recipe: all else.
        after: told after each step how many have been taken.
    """
    whole_number("steps", steps, least=1)
    optimizer, device, order = recipe.optimizer(model), device_of(model), shuffled(len(batches), seed)
    trained, last = Trained(math.nan), max(1, steps // 10)
    total = 0.0
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for step in range(steps):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate * recipe.rate(step, steps)
            batch = to_device(batches[next(order)], device)
            optimizer.zero_grad(set_to_none=True)
            mean = loss_per_example(_of_step(loss, step), model, batch).mean()
            mean.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            if step >= steps - last:
                total += mean.item() / last
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            trained.seconds.append(time.perf_counter() - start)
            after(step + 1)
    trained.loss = total
    return trained


def evaluate(model: nn.Module, batches: Batches, loss: Loss) -> float:
    """The mean loss over examples; NaN where one is."""
    total, number, device = 0.0, 0, device_of(model)
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            losses = loss_per_example(loss, model, to_device(batch, device)).double()
            total, number = total + losses.sum().item(), number + len(losses)
    return total / number


def shuffled(number: int, seed: int) -> Iterator[int]:
    """Numbers below `number` for ever, each once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(number, generator=generator).tolist()


def _of_step(loss: Any, step: int) -> Loss:
    found: Loss = loss.reseeded(step) if hasattr(loss, "reseeded") else loss
    return found
