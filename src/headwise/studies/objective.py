"""Objective of a trial: train one model, evaluate it, and stop early when the pruner says so."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.studies.definition import StudyDefinition
from headwise.studies.optuna_storage import require_optuna
from headwise.studies.training import evaluate, train
from headwise.studies.trial_store import TrialKey

PRUNING_BATCHES = 8
"""Held-out batches on which a learning-rate trial is judged before its end."""

PRUNING_POINTS = (0.5, 0.75)
"""Shares of the steps after which a learning-rate trial may be stopped."""


@dataclass
class TrialObjective:
    """Function that trains and evaluates the model of one trial, as Optuna calls it.

    Attributes:
        definition: models and data of the study.
        steps: number of training steps.
        key: the trial.
        after_step: called after each training step.
    """

    definition: StudyDefinition
    steps: int
    key: TrialKey
    after_step: Callable[[], None]

    def __call__(self, trial: Any, rate: float) -> tuple[float, dict[str, Any]]:
        """Train a model with a learning rate; return its held-out loss and further measurements.

        Raises:
            optuna.TrialPruned: the trial is stopped early.
        """
        start = time.perf_counter()
        definition, key = self.definition, self.key
        seed = definition.seed + (key.number if key.final else 0)
        model = definition.build(key.setting, seed)
        pruning_steps = {math.ceil(share * self.steps) for share in PRUNING_POINTS} - {self.steps}

        def after_step(step: int) -> None:
            self.after_step()
            if step in pruning_steps and not key.final:
                self._report(trial, model, step)

        result = train(
            model,
            definition.training,
            definition.loss,
            steps=self.steps,
            rate=rate,
            seed=seed,
            recipe=definition.recipe,
            after_step=after_step,
        )
        loss = evaluate(model.eval(), definition.held_out, definition.loss)
        measured = self._measure(model, result.step_seconds) if key.final else {}
        measured["seconds"] = time.perf_counter() - start
        return loss if math.isfinite(loss) else math.inf, measured

    def _measure(self, model: nn.Module, step_seconds: float) -> dict[str, Any]:
        """Return the additional measurements of a compared model, and pass it to `on_trained`."""
        definition, key = self.definition, self.key
        train_loss = evaluate(model, definition.training[: len(definition.held_out)], definition.loss)
        measured: dict[str, Any] = {"train_loss": train_loss, "step_ms": 1000 * step_seconds}
        measured |= {name: float(measure(model)) for name, measure in definition.measures.items()}
        if definition.on_trained is not None:
            definition.on_trained(model, key.setting, key.number)
        return measured

    def _report(self, trial: Any, model: nn.Module, step: int) -> None:
        """Report an intermediate loss to Optuna; raise `TrialPruned` if it is not finite or the pruner stops it."""
        loss = evaluate(model, self.definition.held_out[:PRUNING_BATCHES], self.definition.loss)
        if math.isfinite(loss):
            trial.report(loss, step)
        if not math.isfinite(loss) or trial.should_prune():
            raise require_optuna().TrialPruned
