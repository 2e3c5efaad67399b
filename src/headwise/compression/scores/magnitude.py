"""Scores by the size of weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.compression.calibration.scored_heads import ScoredHead, calibration_batches, scored_heads
from headwise.compression.pruning.pruning_plan import Head
from headwise.data.batches import evaluation_mode
from headwise.families.head_module import HeadModule
from headwise.families.registry import head_module
from headwise.page.columns import ModelIdentity
from headwise.runs.fingerprint import identity_of


class MagnitudeScores:
    """Scores of sets of heads: the Euclidean norm of all their weights. The weights of a key/value head count in equal
    parts for the query heads that attend with it.

    Args:
        model: the model.
        batch: one batch, on which the model shows where it attends.

    Attributes:
        rows: the heads.
        identity: identity of the model.
        batches: the data.
    """

    name = "magnitude"
    rounds = 1
    is_comparable = True

    def __init__(self, model: nn.Module, batch: Any) -> None:
        with evaluation_mode(model), torch.no_grad():
            self.batches = calibration_batches(model, [batch])
            self.rows: Sequence[ScoredHead] = scored_heads(model, self.batches[0])
            self.identity: ModelIdentity | None = identity_of(model)
            squares = {row.module: _squares(model, head_module(model, row.module)) for row in self.rows}
            self._square_of = {(row.layer, row.head): float(squares[row.module][row.head]) for row in self.rows}

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, which does not depend on heads that were removed before."""
        return [sum(self._square_of[head] for head in unit) ** 0.5 for unit in units]


def _squares(model: nn.Module, module: HeadModule) -> Tensor:
    """Return the sum of the squared weights of each query head."""
    squares = torch.zeros(module.num_heads, dtype=torch.float64)
    for blocks in module.blocks:
        own = blocks.view(model.get_parameter(blocks.parameter).detach()).double().flatten(1).square().sum(1)
        group = module.num_heads // blocks.heads
        squares += own.repeat_interleave(group).cpu() / group
    return squares
