"""Definition of a study: the models and data it trains on, the loss and measurements it compares, and one training."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from headwise.analysis.losses import Loss
from headwise.data.batches import digest_of
from headwise.studies.budget import StudyBudget
from headwise.studies.space import Setting
from headwise.studies.training import Batches, Recipe, build_seeded, evaluate, train
from headwise.studies.trials import TrialKey, require_optuna

PRUNING_BATCHES = 8
"""Number of held-out batches on which a learning-rate trial is evaluated before its end."""

PRUNING_POINTS = (0.5, 0.75)
"""Shares of the steps after which a learning-rate trial may be stopped."""

Measure = Callable[[nn.Module], float]
"""Function that returns a number for a trained model."""

TrainedCallback = Callable[[nn.Module, Setting, int], None]
"""`(model, setting, seed)`, called with each trained model that is compared."""


@dataclass(frozen=True)
class StudyDefinition:
    """Everything that defines a study except its budget: the head settings to compare, the function that builds a model
    for a setting, the batches, loss, training recipe and base seed. It also contains functions that measure a trained
    model, and a callback that receives each model after its final training, with the best learning rate of its setting.

    Attributes:
        build_model: returns an untrained model with the heads of a setting.
        settings: settings to compare, in order.
        training: batches to train on.
        held_out: batches on which the losses of trained models are compared.
        loss: `(model, batch) -> (batch,)`.
        recipe: optimizer and learning-rate schedule.
        measures: additional numbers of each trained model, by name.
        on_trained: called with each trained model that is compared; None to call nothing.
        seed: base seed of weights, batch order and learning-rate search.
    """

    build_model: Callable[[Setting], nn.Module]
    settings: tuple[Setting, ...]
    training: Batches
    held_out: Batches
    loss: Loss
    recipe: Recipe
    measures: Mapping[str, Measure]
    on_trained: TrainedCallback | None
    seed: int

    def build(self, setting: Setting, seed: int) -> nn.Module:
        """Return an untrained model with the heads of `setting`, whose weights are drawn after torch is seeded with
        `seed`.
        """
        return build_seeded(lambda: self.build_model(setting), seed)

    def fingerprint(self, budget: StudyBudget) -> dict[str, Any]:
        """Return the values that identify a study as plain JSON values by name: the settings, the shapes of the
        parameters, the contents of the batches, the loss, the recipe, the seed, and the steps and trials of the budget.
        A stored study can be resumed only if all of them are equal.
        """
        parts = [
            part for batch in (*self.training, {"": None}, *self.held_out) for item in batch.items() for part in item
        ]
        models = [self.build(setting, self.seed).named_parameters() for setting in self.settings]
        shapes = ((name, tuple(parameter.shape)) for model in models for name, parameter in model)
        fingerprint: dict[str, Any] = {
            "space": [setting.name for setting in self.settings],
            "model": digest_of(shapes),
            "data": digest_of(parts),
            "loss": getattr(self.loss, "__name__", type(self.loss).__name__),
            "steps": budget.steps,
            "trials": budget.trials,
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "training batches": len(self.training),
            "held-out batches": len(self.held_out),
        }
        as_read_back: dict[str, Any] = json.loads(json.dumps(fingerprint))
        return as_read_back

    def run_trial(
        self, key: TrialKey, steps: int, after_step: Callable[[], None], trial: Any, rate: float
    ) -> tuple[float, dict[str, Any]]:
        """Train the model of a trial. Return its held-out loss (infinite if training diverged) and further measurements
        by name: the trial's seconds and, for a final training, training loss, milliseconds per step and the measures of
        the study. A model from a final training is also passed to `on_trained`.

        A learning-rate trial is evaluated on some held-out batches at half and at three quarters of its steps; Optuna's
        pruner may stop it there, and it is stopped if its loss is not finite.

        Args:
            key: the trial.
            steps: number of training steps.
            after_step: called after each training step.
            trial: the trial as Optuna's object.
            rate: peak learning rate.

        Raises:
            optuna.TrialPruned: the trial is stopped early.
        """
        start = time.perf_counter()
        seed = self.seed + (key.number if key.final else 0)
        model = self.build(key.setting, seed)
        pruning_steps = set() if key.final else {math.ceil(share * steps) for share in PRUNING_POINTS} - {steps}

        def after_each_step(step: int) -> None:
            """Call `after_step`; at some steps of a learning-rate trial, stop the trial if its loss is too high."""
            after_step()
            if step in pruning_steps:
                loss = evaluate(model, self.held_out[:PRUNING_BATCHES], self.loss)
                if math.isfinite(loss):
                    trial.report(loss, step)
                if not math.isfinite(loss) or trial.should_prune():
                    raise require_optuna().TrialPruned

        result = train(
            model,
            self.training,
            self.loss,
            steps=steps,
            rate=rate,
            seed=seed,
            recipe=self.recipe,
            after_step=after_each_step,
        )
        loss = evaluate(model.eval(), self.held_out, self.loss)
        measured: dict[str, Any] = {}
        if key.final:
            measured["train_loss"] = evaluate(model, self.training[: len(self.held_out)], self.loss)
            measured["step_ms"] = 1000 * result.step_seconds
            measured |= {name: float(measure(model)) for name, measure in self.measures.items()}
            if self.on_trained is not None:
                self.on_trained(model, key.setting, key.number)
        measured["seconds"] = time.perf_counter() - start
        return loss if math.isfinite(loss) else math.inf, measured
