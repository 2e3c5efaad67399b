"""Output projections that lack columns, fitted again with the damping that cross-validation chooses.

For each damping, the projection is fitted to all folds but one and judged on that one, for each fold (Stone 1974). The
damping with the least error on the folds left out is taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.compression.calibration.folds import FoldedMoments
from headwise.compression.calibration.output_moments import OutputMoments
from headwise.shapes import Float, Int

DAMPINGS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""Dampings among which cross-validation chooses. The largest one leaves weights nearly as they are."""


def reconstructed(
    moments: FoldedMoments,
    weight: Float[Tensor, "out width"],
    kept: Int[Tensor, " kept"],
    has_bias: bool,
) -> tuple[Float[Tensor, "out kept"], Float[Tensor, " out"]]:
    """Return the weight and bias of an output projection whose input columns `kept` remain, fitted to the targets by
    least squares.

    Args:
        moments: of all columns, with the targets.
        weight: weight of the dense projection.
        kept: remaining columns.
        has_bias: True if the projection has a bias, which is fitted too; otherwise the bias is 0.
    """
    errors = torch.zeros(len(DAMPINGS), dtype=torch.float64)
    for fold, own in moments.folds.items():
        others = moments.without(fold)
        for tried, damping in enumerate(DAMPINGS):
            errors[tried] += own.error(*others.fit(weight, kept, has_bias, damping), kept)
    return moments.total.fit(weight, kept, has_bias, DAMPINGS[int(errors.argmin())])


class WeightChange(NamedTuple):
    """Change of an output projection if a block of columns is removed.

    Attributes:
        left: first factor of the change of the weight, which is `-left @ right`.
        right: second factor.
        centre: input whose output the change of the bias keeps the same.
    """

    left: Float[Tensor, "out block"]
    right: Float[Tensor, "block width"]
    centre: Float[Tensor, " width"]

    def added_error(self, residual: Float[Tensor, "out width"], moments: OutputMoments) -> float:
        """Return by how much the sum over tokens of the squared error rises.

        Args:
            residual: sum over tokens of `r (x - centre)^T`, where r is the error before the change.
            moments: of the tokens.
        """
        outer = torch.outer(self.centre, moments.x)
        xx = moments.xx - outer - outer.mT + moments.mass * torch.outer(self.centre, self.centre)
        square = ((self.right @ xx @ self.right.mT) * (self.left.mT @ self.left)).sum()
        return float(square + 2 * ((residual @ self.right.mT) * self.left).sum())


class BlockRemoval(NamedTuple):
    """Removal of a block of columns of an output projection.

    Attributes:
        error: the mean squared error of the targets that it adds, in units of the mean of `|y|^2`.
        changes: change of the projection by fold whose tokens it was not fitted to.
    """

    error: float
    changes: dict[int, WeightChange]


def fitted_removals(
    moments: FoldedMoments,
    weight: Float[Tensor, "out width"],
    blocks: Sequence[Int[Tensor, " block"]],
    removed: Int[Tensor, " removed"],
    has_bias: bool,
) -> list[BlockRemoval]:
    """Return for each block of columns what happens if it is removed in addition to the columns `removed`, and the
    other columns are fitted again to the targets by least squares. Errors are those on folds left out of the fit. The
    damping is the one with which their sum over all blocks, after the removal, is least. With the fitted weight W and
    the damped `C = E[x x^T]` of the remaining columns, the change of the weight is `-W_h [(C^-1)_hh]^-1 (C^-1)_h`.

    Source: Hassibi and Stork 1992, equation 5, for blocks of weights.

    Args:
        moments: of all columns, with the targets.
        weight: weight of the dense projection.
        blocks: columns of each block, none of them removed.
        removed: columns that were removed before.
        has_bias: True if the projection has a bias, which is fitted too.
    """
    is_kept = torch.ones(weight.shape[1], dtype=torch.bool)
    is_kept[removed] = False
    kept = is_kept.nonzero()[:, 0]
    before = torch.zeros(len(DAMPINGS), dtype=torch.float64)
    added = torch.zeros(len(DAMPINGS), len(blocks), dtype=torch.float64)
    changes: list[list[dict[int, WeightChange]]] = [[{} for _ in blocks] for _ in DAMPINGS]
    for fold, own in moments.folds.items():
        others = moments.without(fold)
        for tried, damping in enumerate(DAMPINGS):
            fitted, bias = others.fit(weight, kept, has_bias, damping)
            before[tried] += own.error(fitted, bias, kept)
            residual = own.yx - fitted @ own.xx[kept] - torch.outer(bias, own.x)
            lost = own.y - fitted @ own.x[kept] - own.mass * bias
            for index, change in enumerate(_changes(others, fitted, blocks, kept, has_bias, damping)):
                changes[tried][index][fold] = change
                added[tried, index] += change.added_error(residual - torch.outer(lost, change.centre), own)
    best = int((before[:, None] + added).sum(1).argmin())
    relative = _relative(added[best].tolist(), moments, has_bias)
    return [BlockRemoval(*each) for each in zip(relative, changes[best], strict=True)]


def _changes(
    moments: OutputMoments,
    fitted: Float[Tensor, "out kept"],
    blocks: Sequence[Int[Tensor, " block"]],
    kept: Int[Tensor, " kept"],
    has_bias: bool,
    damping: float,
) -> list[WeightChange]:
    """Return the change of a fitted projection by each block if the other columns are fitted again to the same data."""
    width = len(moments.x)
    centred = moments.about_mean() if has_bias else moments
    centre = moments.x / moments.mass if has_bias else torch.zeros_like(moments.x)
    inverse = torch.linalg.inv(centred.damped(damping)[kept][:, kept])
    place = torch.full((width,), -1)
    place[kept] = torch.arange(len(kept))
    changes = []
    for block in blocks:
        own = place[block]
        left = fitted[:, own] @ torch.linalg.inv(inverse[own][:, own])
        right = inverse.new_zeros(len(own), width)
        right[:, kept] = inverse[own]
        changes.append(WeightChange(left, right, centre))
    return changes


def unfitted_removals(
    moments: FoldedMoments,
    weight: Float[Tensor, "out width"],
    blocks: Sequence[Int[Tensor, " block"]],
    removed: Int[Tensor, " removed"],
    has_bias: bool,
) -> list[BlockRemoval]:
    """Return for each block of columns what happens if it is removed in addition to the columns `removed`, and nothing
    is fitted.

    Args:
        moments: of all columns, with the targets.
        weight: weight of the dense projection.
        blocks: columns of each block, none of them removed.
        removed: columns that were removed before.
        has_bias: True if the projection has a bias; errors are then in units of the targets' variance.
    """
    weight, total = weight.double(), moments.total
    residual = weight[:, removed] @ total.xx[removed]
    changes = []
    for block in blocks:
        right = total.xx.new_zeros(len(block), len(total.x))
        right[torch.arange(len(block)), block] = 1.0
        changes.append(WeightChange(weight[:, block], right, torch.zeros_like(total.x)))
    errors = _relative([change.added_error(residual, total) for change in changes], moments, has_bias)
    removals = zip(errors, changes, strict=True)
    return [BlockRemoval(error, dict.fromkeys(moments.folds, change)) for error, change in removals]


def _relative(errors: Sequence[float], moments: FoldedMoments, has_bias: bool) -> list[float]:
    """Return errors in units of the sum of squares of the targets, about their mean if there is a bias; 0 if the inputs
    or the targets do not vary.
    """
    total = moments.total.about_mean() if has_bias else moments.total
    varies = total.yy > 0 and bool(total.xx.any())
    return [error / total.yy if varies else 0.0 for error in errors]
