"""Definition of a study: the models and data it trains on, and the loss and measurements it compares."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from headwise.analysis.losses import Loss
from headwise.data.batches import digest_of
from headwise.studies.budget import StudyBudget
from headwise.studies.space import Setting
from headwise.studies.training import Batches, Recipe, build_seeded

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
        """Return the values that identify a study (such as settings, parameter shapes, data, loss, recipe and seed) as
        plain JSON values by name. A stored study can be resumed only if all of them are equal.

        They identify the settings, the shapes of the parameters, the contents of the batches, the loss, the recipe, the
        seed, and the steps and trials of the budget.
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
