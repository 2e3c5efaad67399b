"""Scores of heads by the size of their weights, or by measurements on data: the loss of the model without some heads,
and derivatives of the loss by gates. Both are measured in the model without the heads that were removed before.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
from headwise.compression.calibration.calibration_data import (
    ScoredHead,
    calibration_batches,
    heads_of_each_batch,
    scored_heads,
)
from headwise.compression.calibration.derivatives import require_slope
from headwise.compression.pruning.pruning_plan import DEFAULT_ROUNDS, Head
from headwise.data.batches import evaluation_mode
from headwise.families.registry import head_module
from headwise.page.columns import ModelIdentity
from headwise.progress import shown_progress
from headwise.runs.fingerprint import identity_of
from headwise.runs.rows import MeanEstimate


class MagnitudeScores:
    """Pruning scores of sets of heads by the size of their weights: the Euclidean norm of all weights of the heads. The
    squared weights of a key/value head are divided equally among its query heads.

    Args:
        model: the model.
        batch: one batch, on which the model shows where it attends.

    Attributes:
        rows: the heads.
        identity: identity of the model.
        batches: the data.
    """

    name = "magnitude"
    rounds: int | None = 1
    is_comparable = True

    def __init__(self, model: nn.Module, batch: Any) -> None:
        with evaluation_mode(model), torch.no_grad():
            self.batches = calibration_batches(model, [batch])
            self.rows: Sequence[ScoredHead] = scored_heads(model, self.batches[0])
            self.identity: ModelIdentity | None = identity_of(model)
            squares = {row.module: torch.zeros(0) for row in self.rows}
            for path in squares:
                module = head_module(model, path)
                squares[path] = torch.zeros(module.num_heads, dtype=torch.float64)
                for blocks in module.blocks:
                    numbers = blocks.view(model.get_parameter(blocks.parameter).detach()).double().flatten(1)
                    group = module.num_heads // blocks.heads
                    squares[path] += numbers.square().sum(1).repeat_interleave(group).cpu() / group
            self._square_of = {(row.layer, row.head): float(squares[row.module][row.head]) for row in self.rows}

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the weight norm of each unit (set of heads that are removed together). Heads that are already
        `removed` do not affect the norms of others.
        """
        return [sum(self._square_of[head] for head in unit) ** 0.5 for unit in units]


class _MeasuredScores:
    """Base class of pruning scores that are measured on data, in a model from which the heads pruned so far are
    removed.
    """

    rounds: int | None = DEFAULT_ROUNDS
    is_comparable = True

    def __init__(self, model: nn.Module, dataset: Any, loss: Loss, *, progress: bool = False) -> None:
        require_loss(loss)
        self._model = model
        with evaluation_mode(model), torch.no_grad(), shown_progress(flag("progress", progress)):
            self.batches = calibration_batches(model, dataset)
            self._losses: list[Loss] = []  # for each batch, with the unchanged model as its reference
            for batch in self.batches:
                own = copy(loss)
                prepare_loss(own, model, batch)
                self._losses.append(partial(own))  # no further call prepares it again
            self.rows: Sequence[ScoredHead] = heads_of_each_batch(model, self.batches)
            self.identity: ModelIdentity | None = identity_of(model)

    def _means(
        self, removed: frozenset[Head], measure: Callable[[list[dict[str, Any]], Loss], Mapping[Any, MeanEstimate]]
    ) -> dict[Any, float]:
        """Call `measure` on each batch while the outputs of the heads `removed` are multiplied by 0. For each quantity
        that `measure` returns, by key, return the mean over the examples of all batches. A quantity without a value on
        any example is left out.
        """
        sums: dict[Any, float] = {}
        examples: dict[Any, int] = {}
        with gate(self._model, dict.fromkeys(sorted(removed), 0.0)) if removed else nullcontext():
            for batch, loss in zip(self.batches, self._losses, strict=True):
                for key, mean in measure([batch], loss).items():
                    if mean.n:
                        sums[key] = sums.get(key, 0.0) + mean.n * mean.value
                        examples[key] = examples.get(key, 0) + mean.n
        return {key: total / examples[key] for key, total in sums.items()}


class AblationScores(_MeasuredScores):
    """Pruning scores of sets of heads by ablation: the rise of the mean loss when the outputs of all heads in the set
    are multiplied by 0 (Michel, Levy and Neubig 2019, section 3.2). The rise is measured in the model without the heads
    that are removed already.

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
        """Return the rise of the mean loss when each unit (set of heads) is ablated, in the model without the heads
        `removed`.
        """
        names = {str(number): unit for number, unit in enumerate(units)}

        def costs(batches: list[dict[str, Any]], loss: Loss) -> dict[str, MeanEstimate]:
            effects: Any = ablate(self._model, batches, loss, units=names)
            return {row.name: row.statistics["cost"] for row in effects.rows}

        means = self._means(removed, costs)
        return [means.get(name, math.nan) for name in names]


class ImportanceScores(_MeasuredScores):
    """Pruning scores of sets of heads by gradients. The importance of a head is the mean absolute derivative of the
    loss with respect to a gate that multiplies its output (Michel, Levy and Neubig 2019, equation 5). The score of a
    set is the sum over its heads. It is measured in the model without the heads that are removed already.

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
        """Return the summed gradient importance of the heads of each unit (set of heads), in the model without the
        heads `removed`.
        """

        def gradients(batches: list[dict[str, Any]], loss: Loss) -> dict[Head, MeanEstimate]:
            rows = importance(self._model, batches, loss).heads
            return {(row.layer, row.head): row.statistics["gradient"] for row in rows}

        means = self._means(removed, gradients)
        return [sum(means.get(head, math.nan) for head in unit) for unit in units]
