"""Training and evaluation of one model of a study: the same batches for every setting, in an order set by the seed."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.analysis.losses import Loss, loss_per_example
from headwise.checks import finite_number, pair_of, probability, whole_number
from headwise.data.batches import device_of, evaluation_mode, to_device
from headwise.errors import InputError

Batches = Sequence[dict[str, Any]]
"""Batches of a data set, each a dictionary of the model's arguments by name."""

UNTIMED_STEPS = 2
"""First steps whose time is ignored: they allocate memory and warm up the code."""


@dataclass(frozen=True)
class Recipe:
    """Optimizer and learning-rate schedule of each training: AdamW (Loshchilov and Hutter 2019) with gradient clipping,
    linear warmup and cosine decay. It also sets the range in which a study searches the peak learning rate.

    Attributes:
        rates: smallest and largest peak learning rate among which a study searches.
        warmup: share of the steps over which the learning rate rises linearly towards its peak.
        floor: learning rate towards which the decay goes, as a share of the peak.
        betas: decay rates of AdamW's running means of gradients and squared gradients.
        weight_decay: weight decay of parameters with two axes or more; others are not decayed.
        clip: largest norm of all gradients together; larger gradients are scaled down.

    Raises:
        InputError: a number is out of range.
    """

    rates: tuple[float, float] = (3e-4, 3e-2)
    warmup: float = 0.1
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        rates = pair_of("rates", self.rates, of="two learning rates")
        low, high = (finite_number("rates", rate, above=0.0) for rate in rates)
        if not low < high:
            raise InputError("rates", expected="the smallest learning rate, then the largest", got=self.rates)
        for name in ("warmup", "floor"):
            probability(name, getattr(self, name))
        for beta in pair_of("betas", self.betas, of="two decay rates"):
            probability("betas", beta)
        finite_number("weight_decay", self.weight_decay, above=-1e-12)
        finite_number("clip", self.clip, above=0.0)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an AdamW optimizer for all parameters of a model. Parameters with one axis, such as norms and biases,
        have no weight decay.
        """
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], betas=self.betas)

    def rate_factor(self, step: int, steps: int) -> float:
        """Return the factor by which the peak learning rate is multiplied at `step`, counted from 0, of a training of
        `steps` steps. The factor rises linearly towards 1 during warmup, and then decays along a cosine from 1 towards
        `floor`.
        """
        warmup_steps = self.warmup * steps
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1.0, steps - warmup_steps)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


DEFAULT_RECIPE = Recipe()
"""Recipe that is used by default."""


@dataclass
class TrainingResult:
    """Result of a training: the mean loss over the last tenth of its steps, and the duration of each step in seconds.

    Attributes:
        loss: mean training loss over the last tenth of the steps.
        seconds: duration of each step, without what happens between steps.
    """

    loss: float
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Median duration of a training step in seconds, without the first two steps, which are slower. If there are at
        most two steps, it is the median of all steps.
        """
        return statistics.median(self.seconds[UNTIMED_STEPS:] or self.seconds)


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the model that `build` creates after torch is seeded with `seed`; torch's random state is restored
    afterwards.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def train(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    steps: int,
    rate: float,
    seed: int,
    recipe: Recipe = DEFAULT_RECIPE,
    after_step: Callable[[int], None] = lambda _step: None,
) -> TrainingResult:
    """Train a model in place, on its device, for `steps` optimizer steps of one batch each. The order of the batches is
    random and depends on `seed` alone. Return the mean loss over the last tenth of the steps and the duration of each
    step.

    Args:
        model: model to train.
        batches: training batches; each is used once before any is used again.
        loss: `(model, batch) -> (batch,)`, whose mean is minimized. If it has a method `reseeded(seed)`, each step
            uses `loss.reseeded(step)`, so that a masked-token loss masks other tokens each time.
        steps: number of optimizer steps.
        rate: peak learning rate.
        seed: seed of the batch order, and of random numbers in the model, such as dropout.
        recipe: optimizer and schedule.
        after_step: called after each step with the number of steps so far.
    """
    whole_number("steps", steps, least=1)
    optimizer, device, order = recipe.optimizer(model), device_of(model), batch_order(len(batches), seed)
    result, averaged_steps = TrainingResult(math.nan), max(1, steps // 10)
    total = 0.0
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for step in range(steps):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate * recipe.rate_factor(step, steps)
            batch = to_device(batches[next(order)], device)
            step_loss: Loss = loss.reseeded(step) if hasattr(loss, "reseeded") else loss
            optimizer.zero_grad(set_to_none=True)
            mean = loss_per_example(step_loss, model, batch).mean()
            mean.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            if step >= steps - averaged_steps:
                total += mean.item() / averaged_steps
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            result.seconds.append(time.perf_counter() - start)
            after_step(step + 1)
    result.loss = total
    return result


def evaluate(model: nn.Module, batches: Batches, loss: Loss) -> float:
    """Return the mean loss of a model over all examples of all batches, with the model in evaluation mode; NaN if any
    loss is NaN.
    """
    total, examples, device = 0.0, 0, device_of(model)
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            losses = loss_per_example(loss, model, to_device(batch, device)).double()
            total, examples = total + losses.sum().item(), examples + len(losses)
    return total / examples


def batch_order(number: int, seed: int) -> Iterator[int]:
    """Yield indices from 0 to `number` - 1 without end: each pass over all of them is in a new random order drawn from
    the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(number, generator=generator).tolist()
