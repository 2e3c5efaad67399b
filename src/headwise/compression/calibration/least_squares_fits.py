"""Output projections that are fitted by least squares, from second moments of their inputs and targets.

    x   input of the output projection: the outputs of all heads side by side, `(tokens, width)`
    y   output that the projection shall have, `(tokens, out)`

The weight of some columns S of x that minimises the mean of `|y - W x_S - b|^2` is `W = E[y x_S^T] E[x_S x_S^T]^-1`,
with moments about the means if there is a bias. With a damping d, the minimised number has one more term,
`d m |W - W_dense|^2`, where m is the mean square of the columns of x (ridge regression, Hoerl and Kennard 1970).

All means are weighted means over tokens, see `derivatives`.

The damping is chosen by cross-validation: for each damping, the projection is fitted to all folds but one and judged on
that one, for each fold (Stone 1974). The damping with the least error on the folds left out is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Float, Int

DAMPINGS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""Dampings among which cross-validation chooses. The largest one leaves weights nearly as they are."""

ROUNDING = 1e-12
"""Part of a sum of squares below which the sum about the mean is rounding of float64."""


class Fit(NamedTuple):
    """Output projection that is fitted to targets.

    Attributes:
        weight: weight of the columns that remain.
        bias: the bias; 0 if the projection has none.
        inverse: inverse of the damped mean of x x^T over these columns.
    """

    weight: Float[Tensor, "out kept"]
    bias: Float[Tensor, " out"]
    inverse: Float[Tensor, "kept kept"]


@dataclass
class OutputMoments:
    """Weighted sums over tokens of x, y and their products, in float64.

    Attributes:
        tokens: number of tokens.
        mass: sum of the weights of the tokens.
        x: sum of x.
        y: sum of y.
        xx: sum of x x^T.
        yx: sum of y x^T.
        yy: sum of |y|^2.
    """

    tokens: int
    mass: float
    x: Float[Tensor, " width"]
    y: Float[Tensor, " out"]
    xx: Float[Tensor, "width width"]
    yx: Float[Tensor, "out width"]
    yy: float

    @staticmethod
    def of(
        x: Float[Tensor, "tokens width"],
        y: Float[Tensor, "tokens out"],
        weights: Float[Tensor, " tokens"] | None = None,
    ) -> "OutputMoments":
        """Return the sums over some tokens. Each token has the weight 1 by default."""
        x, y = x.double(), y.double()
        weights = x.new_ones(len(x)) if weights is None else weights.double()
        weighted = weights[:, None] * x
        squares = float(weights @ y.square().sum(1))
        mass = float(weights.sum())
        return OutputMoments(len(x), mass, weighted.sum(0), weights @ y, weighted.mT @ x, y.mT @ weighted, squares)

    def __add__(self, other: "OutputMoments") -> "OutputMoments":
        sums = (getattr(self, name) + getattr(other, name) for name in ("tokens", "mass", "x", "y", "xx", "yx", "yy"))
        return OutputMoments(*sums)

    def about_mean(self) -> "OutputMoments":
        """Return the moments about the means of x and y, for a projection with a bias."""
        x, y = self.x / self.mass, self.y / self.mass
        xx = self.xx - self.mass * torch.outer(x, x)
        yx = self.yx - self.mass * torch.outer(y, x)
        yy = self.yy - self.mass * float(y.square().sum())
        if float(xx.trace()) <= ROUNDING * float(self.xx.trace()):
            xx, yx = torch.zeros_like(xx), torch.zeros_like(yx)
        return OutputMoments(self.tokens, self.mass, self.x, self.y, xx, yx, yy if yy > ROUNDING * self.yy else 0.0)

    def damped(self, damping: float) -> Float[Tensor, "width width"]:
        """Return the mean of x x^T, with a part of its mean diagonal added to the diagonal; the identity if x is 0."""
        mean = self.xx / self.mass
        added = damping * mean.diagonal().mean() if bool(mean.any()) else 1.0
        return mean + added * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)

    def fits(
        self, weight: Float[Tensor, "out width"], kept: Int[Tensor, " kept"], has_bias: bool, dampings: Sequence[float]
    ) -> Iterator["Fit"]:
        """Yield the fit of the targets by an output projection whose input columns `kept` remain, for each damping. The
        damping draws the weight to the dense one, so that columns without data keep theirs.
        """
        centred = self.about_mean() if has_bias else self
        dense = weight.double()[:, kept]
        missing = (centred.yx[:, kept] - dense @ centred.xx[kept][:, kept]) / self.mass
        for damping in dampings:
            inverse = torch.linalg.inv(centred.damped(damping)[kept][:, kept])
            fitted = dense + missing @ inverse
            bias = (self.y - fitted @ self.x[kept]) / self.mass
            yield Fit(fitted, bias if has_bias else torch.zeros_like(bias), inverse)

    def error(
        self, weight: Float[Tensor, "out kept"], bias: Float[Tensor, " out"], kept: Int[Tensor, " kept"]
    ) -> float:
        """Return the sum over tokens of `|y - W x - b|^2`, for some columns of x."""
        x, xx = self.x[kept], self.xx[kept][:, kept]
        about_bias = self.yy - 2 * bias @ self.y + self.mass * bias @ bias
        of_weight = (weight @ xx - 2 * (self.yx[:, kept] - torch.outer(bias, x))) * weight
        return float(about_bias + of_weight.sum())


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
        """Return by how much the sum over tokens of the squared error rises. The sum over tokens of `r (x - centre)^T`
        is `residual`, where r is the error before the change.
        """
        mapped, centre, x = self.right @ moments.xx, self.right @ self.centre, self.right @ moments.x
        outer = torch.outer(centre, x)
        xx = mapped @ self.right.mT - outer - outer.mT + moments.mass * torch.outer(centre, centre)
        square = (xx * (self.left.mT @ self.left)).sum()
        return float(square + 2 * ((residual @ self.right.mT) * self.left).sum())


class BlockRemoval(NamedTuple):
    """Removal of a block of columns of an output projection.

    Attributes:
        error: the mean squared error of the targets that it adds, in units of the mean of `|y|^2`.
        changes: change of the projection by fold whose tokens it was not fitted to.
    """

    error: float
    changes: dict[int, WeightChange]


def _changes(
    fit: Fit, blocks: Sequence[Int[Tensor, " block"]], kept: Int[Tensor, " kept"], centre: Float[Tensor, " width"]
) -> Iterator[WeightChange]:
    """Yield the change of a fitted projection by each block if the other columns are fitted again to the same data."""
    place = torch.full((len(centre),), -1)
    place[kept] = torch.arange(len(kept))
    for block in blocks:
        own = place[block]
        left = fit.weight[:, own] @ torch.linalg.inv(fit.inverse[own][:, own])
        right = fit.inverse.new_zeros(len(own), len(centre))
        right[:, kept] = fit.inverse[own]
        yield WeightChange(left, right, centre)


class FoldedMoments:
    """Moments of an output projection in each fold, by which it is fitted again without some of its input columns.

    Attributes:
        folds: moments by fold.
    """

    def __init__(self, path: str, weight: Float[Tensor, "out width"], has_bias: bool) -> None:
        self.folds: dict[int, OutputMoments] = {}
        self._path, self._weight, self._has_bias = path, weight, has_bias

    def add(self, fold: int, moments: OutputMoments) -> None:
        """Add moments to those of a fold."""
        if moments.mass:
            self.folds[fold] = self.folds[fold] + moments if fold in self.folds else moments

    def checked(self) -> "FoldedMoments":
        """Return these moments."""
        expected = f"texts for which inputs and outputs of {self._path} are finite numbers"
        if not self.folds:
            raise InputError("calibration", expected=expected, got="padding alone")
        if any(not bool(each.xx.isfinite().all() and each.yx.isfinite().all()) for each in self.folds.values()):
            raise InputError("calibration", expected=expected, got="NaN or infinity")
        if len(self.folds) == 1:
            expected = f"at least 2 sequences or batches on which {self._path} runs"
            raise InputError("calibration", expected=expected, got="1", remedy="use more batches")
        return self

    @property
    def total(self) -> OutputMoments:
        """Moments of all folds."""
        return reduce(add, self.folds.values())

    def without(self, fold: int) -> OutputMoments:
        """Return the moments of all folds but one."""
        return reduce(add, (moments for number, moments in self.folds.items() if number != fold))

    def fit(
        self, kept: Int[Tensor, " kept"], left_out: int | None = None
    ) -> tuple[Float[Tensor, "out kept"], Float[Tensor, " out"]]:
        """Return the weight and bias of the projection whose input columns `kept` remain, fitted to the targets by
        least squares. Only the choice of the damping uses the fold `left_out`, if one is named.
        """
        errors = torch.zeros(len(DAMPINGS), dtype=torch.float64)
        for fold, own in self.folds.items():
            for tried, fit in enumerate(self.without(fold).fits(self._weight, kept, self._has_bias, DAMPINGS)):
                errors[tried] += own.error(fit.weight, fit.bias, kept)
        data = self.total if left_out is None else self.without(left_out)
        (best,) = data.fits(self._weight, kept, self._has_bias, [DAMPINGS[int(errors.argmin())]])
        return best.weight, best.bias

    def fitted_removals(
        self, blocks: Sequence[Int[Tensor, " block"]], removed: Int[Tensor, " removed"]
    ) -> list[BlockRemoval]:
        """Return for each block of columns what happens if it is removed in addition to the columns `removed`, and the
        other columns are fitted again to the targets by least squares. Errors are those on folds left out of the fit.
        The damping is the one with which their sum over all blocks, after the removal, is least. With the fitted weight
        W and the damped `C = E[x x^T]` of the remaining columns, the change of the weight is
        `-W_h [(C^-1)_hh]^-1 (C^-1)_h`.

        Source: Hassibi and Stork 1992, equation 5, for blocks of weights.
        """
        is_kept = torch.ones(self._weight.shape[1], dtype=torch.bool)
        is_kept[removed] = False
        kept = is_kept.nonzero()[:, 0]
        before = torch.zeros(len(DAMPINGS), dtype=torch.float64)
        added = torch.zeros(len(DAMPINGS), len(blocks), dtype=torch.float64)
        changes: list[list[dict[int, WeightChange]]] = [[{} for _ in blocks] for _ in DAMPINGS]
        for fold, own in self.folds.items():
            others = self.without(fold)
            centre = others.x / others.mass if self._has_bias else torch.zeros_like(others.x)
            for tried, fit in enumerate(others.fits(self._weight, kept, self._has_bias, DAMPINGS)):
                residual = own.yx - fit.weight @ own.xx[kept] - torch.outer(fit.bias, own.x)
                lost = own.y - fit.weight @ own.x[kept] - own.mass * fit.bias
                # |e|^2 = e y - e W x - e b for e = y - W x - b; `residual` and `lost` are the sums of e x^T and e
                of_weight = float((fit.weight * (own.yx + residual)[:, kept]).sum())
                before[tried] += own.yy - of_weight - float(fit.bias @ (own.y + lost))
                for index, change in enumerate(_changes(fit, blocks, kept, centre)):
                    changes[tried][index][fold] = change
                    added[tried, index] += change.added_error(residual - torch.outer(lost, change.centre), own)
        best = int((before[:, None] + added).sum(1).argmin())
        relative = self._relative(added[best].tolist())
        return [BlockRemoval(*each) for each in zip(relative, changes[best], strict=True)]

    def unfitted_removals(
        self, blocks: Sequence[Int[Tensor, " block"]], removed: Int[Tensor, " removed"]
    ) -> list[BlockRemoval]:
        """Return for each block of columns what happens if it is removed in addition to the columns `removed`, and
        nothing is fitted.
        """
        weight, total = self._weight.double(), self.total
        residual = weight[:, removed] @ total.xx[removed]
        changes = []
        for block in blocks:
            right = total.xx.new_zeros(len(block), len(total.x))
            right[torch.arange(len(block)), block] = 1.0
            changes.append(WeightChange(weight[:, block], right, torch.zeros_like(total.x)))
        errors = self._relative([change.added_error(residual, total) for change in changes])
        removals = zip(errors, changes, strict=True)
        return [BlockRemoval(error, dict.fromkeys(self.folds, change)) for error, change in removals]

    def _relative(self, errors: Sequence[float]) -> list[float]:
        """Return errors in units of the sum of squares of the targets, about their mean if there is a bias; 0 if the
        inputs or the targets do not vary.
        """
        total = self.total.about_mean() if self._has_bias else self.total
        varies = total.yy > 0 and bool(total.xx.any())
        return [error / total.yy if varies else 0.0 for error in errors]
