"""Objective of a trial: train and evaluate one model, or stop early if Optuna's pruner decides so."""

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
"""Number of held-out batches on which a learning-rate trial is evaluated before its end."""

PRUNING_POINTS = (0.5, 0.75)
"""Shares of the steps after which a learning-rate trial may be stopped."""


@dataclass
class TrialObjective:
    """Callable that trains the model of one trial at a learning rate, and returns its held-out loss and other
    measurements. The trial is either a learning-rate trial, which Optuna's pruner may stop early, or a final training
    of a head setting with its best learning rate.

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
        """Train the model of the trial with the peak learning rate `rate`. Return its held-out loss (infinite if
        training diverged) and further measurements by name: the trial's seconds and, for a final training, training
        loss, milliseconds per step and the measures of the study.

        Raises:
            optuna.TrialPruned: the trial is stopped early.
        """
        start = time.perf_counter()
        definition, key = self.definition, self.key
        seed = definition.seed + (key.number if key.final else 0)
        model = definition.build(key.setting, seed)
        pruning_steps = {math.ceil(share * self.steps) for share in PRUNING_POINTS} - {self.steps}

        def after_step(step: int) -> None:
            """Run after each training step: call the function in the attribute `after_step` of the objective. At half
            and three quarters of the steps of a learning-rate trial, also report the loss on some held-out batches to
            Optuna, whose pruner may stop the trial.
            """
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
        """Return measurements of a model after its final training, by name: loss on training batches (as many as are
        held out), milliseconds per step, and the additional measures of the study. Also pass the model to the study's
        callback `on_trained`, if there is one.
        """
        definition, key = self.definition, self.key
        train_loss = evaluate(model, definition.training[: len(definition.held_out)], definition.loss)
        measured: dict[str, Any] = {"train_loss": train_loss, "step_ms": 1000 * step_seconds}
        measured |= {name: float(measure(model)) for name, measure in definition.measures.items()}
        if definition.on_trained is not None:
            definition.on_trained(model, key.setting, key.number)
        return measured

    def _report(self, trial: Any, model: nn.Module, step: int) -> None:
        """Evaluate a model during training on up to 8 held-out batches, and report its mean loss to Optuna. Raise
        `TrialPruned` if the loss is not finite or if Optuna's pruner stops the trial.
        """
        loss = evaluate(model, self.definition.held_out[:PRUNING_BATCHES], self.definition.loss)
        if math.isfinite(loss):
            trial.report(loss, step)
        if not math.isfinite(loss) or trial.should_prune():
            raise require_optuna().TrialPruned
