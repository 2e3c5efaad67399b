"""Scores by measurements on data: the loss of the model without some heads, and derivatives of the loss by gates.

Both are measured in the model without the heads that were removed before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.analysis.ablate import ablate
from headwise.analysis.gate import gate
from headwise.analysis.importance.importance import importance
from headwise.analysis.losses import Loss, prepare_loss, require_loss
from headwise.checks import flag
from headwise.compression.calibration.calibration_survey import heads_of_each_batch
from headwise.compression.calibration.scored_heads import ScoredHead, calibration_batches
from headwise.compression.calibration.weight_gradients import require_slope
from headwise.compression.pruning.pruning_plan import Head
from headwise.data.batches import evaluation_mode
from headwise.page.columns import ModelIdentity
from headwise.progress import shown_progress
from headwise.runs.fingerprint import identity_of
from headwise.runs.rows import MeanEstimate

DEFAULT_ROUNDS = 8
"""Number of times that the heads are scored by default."""


class _MeasuredScores:
    """Scores of sets of heads by measurements on data.

    Args:
        model: the model.
        dataset: `Texts`, or batches.
        loss: function of model and batch, such as `hw.next_token_loss`.
        progress: show a progress bar on standard error.

    Attributes:
        rows: the heads.
        identity: identity of the model.
        batches: the data.
    """

    rounds = DEFAULT_ROUNDS
    is_comparable = True

    def __init__(self, model: nn.Module, dataset: Any, loss: Loss, *, progress: bool = False) -> None:
        require_loss(loss)
        self._model = model
        with evaluation_mode(model), torch.no_grad(), shown_progress(flag("progress", progress)):
            self.batches = batches = calibration_batches(model, dataset)
            self._parts = [(batch, _prepared(loss, model, batch)) for batch in batches]
            self.rows: Sequence[ScoredHead] = heads_of_each_batch(model, batches)
            self.identity: ModelIdentity | None = identity_of(model)

    @contextmanager
    def _without(self, removed: frozenset[Head]) -> Iterator[None]:
        """Set the outputs of these heads to zero while the context is open."""
        if not removed:
            yield
            return
        with gate(self._model, dict.fromkeys(sorted(removed), 0.0)):
            yield


class AblationScores(_MeasuredScores):
    """Scores of sets of heads: the rise of the mean loss if the outputs of all heads of a set are multiplied by 0, in
    the model without the heads that were removed before, in units of the loss (Michel, Levy and Neubig 2019, section
    3.2).

    Args:
        model: the model.
        dataset: `Texts`, or batches.
        loss: function of model and batch, such as `hw.next_token_loss`.
        progress: show a progress bar on standard error.

    Attributes:
        rows: the heads.
        identity: identity of the model.
        batches: the data.

    Example:
        >>> scores = headwise.AblationScores(model, texts, headwise.next_token_loss)  # doctest: +SKIP
        >>> plan = headwise.plan_pruning(scores, keep=0.5)  # doctest: +SKIP
    """

    name = "ablation"

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, given that some heads were removed before."""
        names = {str(number): unit for number, unit in enumerate(units)}
        costs = _WeightedMeans()
        with self._without(removed):
            for batch, loss in self._parts:
                effects: Any = ablate(self._model, [batch], loss, units=names)
                costs.add({row.name: row.statistics["cost"] for row in effects.rows})
        return [costs.of(name) for name in names]


class ImportanceScores(_MeasuredScores):
    """Scores of sets of heads: the sum over heads of the mean absolute derivative of the loss with respect to the
    head's gate (Michel, Levy and Neubig 2019, equation 5), in the model without the heads that were removed before, in
    units of the loss.

    Args:
        model: the model.
        dataset: `Texts`, or batches.
        loss: function of model and batch, such as `hw.next_token_loss`.
        progress: show a progress bar on standard error.

    Attributes:
        rows: the heads.
        identity: identity of the model.
        batches: the data.

    Example:
        >>> scores = headwise.ImportanceScores(model, texts, headwise.next_token_loss)  # doctest: +SKIP
        >>> plan = headwise.plan_pruning(scores, keep=0.5)  # doctest: +SKIP
    """

    name = "gradient importance"

    def __init__(self, model: nn.Module, dataset: Any, loss: Loss, *, progress: bool = False) -> None:
        require_slope(loss)
        super().__init__(model, dataset, loss, progress=progress)

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, given that some heads were removed before."""
        gradients = _WeightedMeans()
        with self._without(removed):
            for batch, loss in self._parts:
                table = importance(self._model, [batch], loss)
                gradients.add({(row.layer, row.head): row.statistics["gradient"] for row in table.heads})
        return [sum(gradients.of(head) for head in unit) for unit in units]


class _WeightedMeans:
    """Means over the examples of several batches."""

    def __init__(self) -> None:
        self._sums: dict[Any, float] = {}
        self._examples: dict[Any, int] = {}

    def add(self, means: Mapping[Any, MeanEstimate]) -> None:
        """Add the means over one batch; those over no example do not count."""
        for key, mean in means.items():
            if mean.n:
                self._sums[key] = self._sums.get(key, 0.0) + mean.n * mean.value
                self._examples[key] = self._examples.get(key, 0) + mean.n

    def of(self, key: Any) -> float:
        """Return the mean of `key` over the examples of all batches; NaN without examples."""
        return self._sums[key] / self._examples[key] if key in self._sums else math.nan


def _prepared(loss: Loss, model: nn.Module, batch: dict[str, Any]) -> Loss:
    """Return a loss for one batch, whose reference, if it has one, is the unchanged model."""
    own = copy(loss)
    prepare_loss(own, model, batch)
    return partial(own)
