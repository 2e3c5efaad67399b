"""Definition of a study, and training and evaluation of one model: the same batches for every setting, in an order set
by the seed.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.analysis.losses import Loss, loss_per_example, name_of_loss, options_of_loss
from headwise.checks import finite_number, pair_of, probability, whole_number
from headwise.data.batches import device_of, digest_of, evaluation_mode, to_device
from headwise.errors import InputError
from headwise.studies.space import Setting, StudyBudget
from headwise.studies.trials import TrialKey, require_optuna

Batches = Sequence[dict[str, Any]]
"""Batches of a data set, each a dictionary of the model's arguments by name."""

UNTIMED_STEPS = 2
"""First steps whose time is ignored: they allocate memory and warm up the code."""


@dataclass(frozen=True)
class Recipe:
    """Optimizer and learning-rate schedule of each training in a study: AdamW (Loshchilov and Hutter 2019) with
    gradient clipping, linear warmup and cosine decay. The recipe also states the range of peak learning rates to
    search.

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


class TrainingResult(NamedTuple):
    """Result of one training: the mean training loss over the last tenth of the steps, and the time of each step in
    seconds.

    Attributes:
        loss: mean training loss over the last tenth of the steps.
        seconds: duration of each step, without what happens between steps.
    """

    loss: float
    seconds: list[float]

    @property
    def step_seconds(self) -> float:
        """Median seconds of a training step. The first two steps, which are slower, are ignored if there are others."""
        return statistics.median(self.seconds[UNTIMED_STEPS:] or self.seconds)


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the model that `build` creates while torch's random numbers are seeded by `seed`. Afterwards, torch's
    random state is restored.
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
    """Train a model in place for `steps` optimizer steps, with one batch per step in an order that depends on `seed`
    alone. Return the mean loss over the last tenth of the steps and the duration of each step. If the loss has a method
    `reseeded`, as a masked-token loss has, the loss is reseeded in each step with the number of the step.
    """
    whole_number("steps", steps, least=1)
    optimizer, device, order = recipe.optimizer(model), device_of(model), batch_order(len(batches), seed)
    seconds, total, averaged_steps = [], 0.0, max(1, steps // 10)
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
            seconds.append(time.perf_counter() - start)
            after_step(step + 1)
    return TrainingResult(total, seconds)


def evaluate(model: nn.Module, batches: Batches, loss: Loss) -> float:
    """Return the mean loss of a model in evaluation mode over all examples of all batches; NaN if any loss is NaN."""
    total, examples, device = 0.0, 0, device_of(model)
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            losses = loss_per_example(loss, model, to_device(batch, device)).double()
            total, examples = total + losses.sum().item(), examples + len(losses)
    return total / examples


def batch_order(number: int, seed: int) -> Iterator[int]:
    """Yield indices from 0 to `number` - 1 without end. Each pass over all indices is in a new random order, drawn from
    the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(number, generator=generator).tolist()


PRUNING_BATCHES = 8
"""Number of held-out batches on which a learning-rate trial is evaluated before its end."""

PRUNING_POINTS = (0.5, 0.75)
"""Shares of the steps after which a learning-rate trial may be stopped."""

Measure = Callable[[nn.Module], float]
"""Function that returns a number for a trained model."""

TrainedCallback = Callable[[nn.Module, Setting, int], None]
"""`(model, setting, seed)`, called with each trained model that is compared."""


@dataclass(frozen=True)
class Corpus:
    """Data of a study: batches to train models on, held-out batches to compare models on, the loss function `(model,
    batch) -> (batch,)`, and the labels of a classifier in the order of its classes.

    Attributes:
        training: batches to train on.
        held_out: batches on which the losses of trained models are compared.
        loss: `(model, batch) -> (batch,)`.
        labels: labels of a classifier in the order of its classes; empty for other tasks.
    """

    training: Batches
    held_out: Batches
    loss: Loss
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyDefinition:
    """Everything that defines a study except its budget: models, head settings, data, loss and training recipe.

    Attributes:
        build_model: returns an untrained model with the heads of a setting.
        settings: settings to compare, in order.
        corpus: batches and loss.
        recipe: optimizer and learning-rate schedule.
        measures: additional numbers of each trained model, by name.
        on_trained: called with each trained model that is compared; None to call nothing.
        seed: base seed of weights, batch order and learning-rate search.
    """

    build_model: Callable[[Setting], nn.Module]
    settings: tuple[Setting, ...]
    corpus: Corpus
    recipe: Recipe
    measures: Mapping[str, Measure]
    on_trained: TrainedCallback | None
    seed: int

    def build(self, setting: Setting, seed: int) -> nn.Module:
        """Return an untrained model with the heads of `setting`, with weights drawn from `seed`."""
        return build_seeded(lambda: self.build_model(setting), seed)

    def train(
        self, model: nn.Module, steps: int, rate: float, seed: int, after_step: Callable[[int], None]
    ) -> TrainingResult:
        """Train a model on the study's training batches, with the study's loss and training recipe, by the function
        `train`.
        """
        options: Any = {"steps": steps, "rate": rate, "seed": seed, "recipe": self.recipe, "after_step": after_step}
        return train(model, self.corpus.training, self.corpus.loss, **options)

    def fingerprint(self, budget: StudyBudget) -> dict[str, Any]:
        """Return plain JSON values, by name, that identify a study, such as hashes of its data and models. A stored
        study is resumed only if these values are equal to its own.
        """
        batches = (*self.corpus.training, {"": None}, *self.corpus.held_out)
        models = [self.build(setting, self.seed).named_parameters() for setting in self.settings]
        shapes = ((name, tuple(parameter.shape)) for model in models for name, parameter in model)
        fingerprint: dict[str, Any] = {
            "space": [setting.name for setting in self.settings],
            "model": digest_of(shapes),
            "data": digest_of(part for batch in batches for item in batch.items() for part in item),
            "loss": name_of_loss(self.corpus.loss),
            "loss options": options_of_loss(self.corpus.loss),
            "steps": budget.steps,
            "trials": budget.trials,
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "training batches": len(self.corpus.training),
            "held-out batches": len(self.corpus.held_out),
        }
        as_read_back: dict[str, Any] = json.loads(json.dumps(fingerprint))
        return as_read_back

    def run_trial(
        self, key: TrialKey, steps: int, after_step: Callable[[], None], trial: Any, rate: float
    ) -> tuple[float, dict[str, Any]]:
        """Train a model for one trial of a study. Return its held-out loss (infinite if training diverged) and further
        measurements by name. In a learning-rate trial, the model is also evaluated after half and three quarters of the
        steps. At each of these points, the trial ends with `optuna.TrialPruned` if the loss is not finite or Optuna's
        pruner stops it.
        """
        start = time.perf_counter()
        seed = self.seed + (key.number if key.final else 0)
        model = self.build(key.setting, seed)
        pruning_steps = set() if key.final else {math.ceil(share * steps) for share in PRUNING_POINTS} - {steps}

        def after_each_step(step: int) -> None:
            after_step()
            if step in pruning_steps:
                loss = evaluate(model, self.corpus.held_out[:PRUNING_BATCHES], self.corpus.loss)
                if math.isfinite(loss):
                    trial.report(loss, step)
                if not math.isfinite(loss) or trial.should_prune():
                    raise require_optuna().TrialPruned

        result = self.train(model, steps, rate, seed, after_each_step)
        loss = evaluate(model.eval(), self.corpus.held_out, self.corpus.loss)
        measured: dict[str, Any] = {}
        if key.final:
            as_many = self.corpus.training[: len(self.corpus.held_out)]
            measured["train_loss"] = evaluate(model, as_many, self.corpus.loss)
            measured["step_ms"] = 1000 * result.step_seconds
            measured |= {name: float(measure(model)) for name, measure in self.measures.items()}
            if self.on_trained is not None:
                self.on_trained(model, key.setting, key.number)
        measured["seconds"] = time.perf_counter() - start
        return loss if math.isfinite(loss) else math.inf, measured
