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


Fit = tuple[Float[Tensor, "_ _"], Float[Tensor, "_"], Float[Tensor, "_ _"]]
"""Output projection that is fitted by least squares: its weight `(out, kept)` for the columns that remain, its bias
`(out,)`, which is 0 if it has none, and the inverse of the damped mean of x x^T over these columns."""


@dataclass
class OutputMoments:
    """Weighted sums over tokens, in float64, of the inputs x of an output projection, of the target outputs y, and of
    their products. A least-squares fit needs no other data.

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
        """Return the sums, over tokens, of the inputs `x`, the target outputs `y` and their products. Each token has
        the weight 1 by default.
        """
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
        """Return the moments of x and y about their means, for the fit of a projection with a bias. In the products xx,
        yx and yy, the mean of x is subtracted from x, and the mean of y from y.
        """
        x, y = self.x / self.mass, self.y / self.mass
        xx = self.xx - self.mass * torch.outer(x, x)
        yx = self.yx - self.mass * torch.outer(y, x)
        yy = self.yy - self.mass * float(y.square().sum())
        if float(xx.trace()) <= ROUNDING * float(self.xx.trace()):
            xx, yx = torch.zeros_like(xx), torch.zeros_like(yx)
        return OutputMoments(self.tokens, self.mass, self.x, self.y, xx, yx, yy if yy > ROUNDING * self.yy else 0.0)

    def damped(self, damping: float) -> Float[Tensor, "width width"]:
        """Return the mean of `x x^T` with a ridge term: the mean of its diagonal, times `damping`, is added to the
        diagonal. Return the identity if x is 0 everywhere.
        """
        mean = self.xx / self.mass
        added = damping * mean.diagonal().mean() if bool(mean.any()) else 1.0
        return mean + added * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)

    def fits(
        self, weight: Float[Tensor, "out width"], kept: Int[Tensor, " kept"], has_bias: bool, dampings: Sequence[float]
    ) -> Iterator[Fit]:
        """Yield, for each of the `dampings`, the least-squares fit of an output projection that reads the input columns
        `kept` alone. The damping is a ridge term that draws the fitted weight towards the original `weight`. Columns
        whose inputs are all 0 therefore keep their weights.
        """
        centred = self.about_mean() if has_bias else self
        dense = weight.double()[:, kept]
        missing = (centred.yx[:, kept] - dense @ centred.xx[kept][:, kept]) / self.mass
        for damping in dampings:
            inverse = torch.linalg.inv(centred.damped(damping)[kept][:, kept])
            fitted = dense + missing @ inverse
            bias = (self.y - fitted @ self.x[kept]) / self.mass
            yield fitted, bias if has_bias else torch.zeros_like(bias), inverse

    def error(
        self, weight: Float[Tensor, "out kept"], bias: Float[Tensor, " out"], kept: Int[Tensor, " kept"]
    ) -> float:
        """Return the sum over tokens of the squared error `|y - W x - b|^2` of a projection with weight W and bias b. y
        is the target output of a token. The input x consists of the columns `kept`.
        """
        x, xx = self.x[kept], self.xx[kept][:, kept]
        about_bias = self.yy - 2 * bias @ self.y + self.mass * bias @ bias
        of_weight = (weight @ xx - 2 * (self.yx[:, kept] - torch.outer(bias, x))) * weight
        return float(about_bias + of_weight.sum())


class WeightChange(NamedTuple):
    """Change of an output projection when a block of its input columns, such as those of one head, is removed, and the
    weights of the other columns are fitted again.

    Attributes:
        left: first factor of the change of the weight, which is `-left @ right`.
        right: second factor of the change of the weight.
        centre: input for which the changed projection has the same output as before, since the bias changes, too.
    """

    left: Float[Tensor, "out block"]
    right: Float[Tensor, "block width"]
    centre: Float[Tensor, " width"]

    def added_error(self, residual: Float[Tensor, "out width"], moments: OutputMoments) -> float:
        """Return how much this change of a projection's weight and bias increases the squared error of its outputs,
        summed over tokens. `residual` is the sum over tokens of `r (x - centre)^T`. Here, x is the input of the
        projection, and r is the target minus the output before the change.
        """
        mapped, centre, x = self.right @ moments.xx, self.right @ self.centre, self.right @ moments.x
        outer = torch.outer(centre, x)
        xx = mapped @ self.right.mT - outer - outer.mT + moments.mass * torch.outer(centre, centre)
        square = (xx * (self.left.mT @ self.left)).sum()
        return float(square + 2 * ((residual @ self.right.mT) * self.left).sum())


BlockRemoval = tuple[float, dict[int, WeightChange]]
"""Effect of the removal of a block of input columns on an output projection. The first part is the increase of the mean
squared difference between outputs and targets, in units of the mean square of the targets. The second is the change of
the projection for each fold, fitted without the tokens of this fold."""


def _changes(
    fit: Fit, blocks: Sequence[Int[Tensor, " block"]], kept: Int[Tensor, " kept"], centre: Float[Tensor, " width"]
) -> Iterator[WeightChange]:
    """Yield, for each block of input columns, the change of a fitted projection if the block is removed and the weights
    of the other columns are fitted again.
    """
    weight, _, inverse = fit
    place = torch.full((len(centre),), -1)
    place[kept] = torch.arange(len(kept))
    for block in blocks:
        own = place[block]
        right = inverse.new_zeros(len(own), len(centre))
        right[:, kept] = inverse[own]
        left = weight[:, own] @ torch.linalg.inv(inverse[own][:, own])
        yield WeightChange(left, right, centre)


class FoldedMoments:
    """Data for fitting one output projection again without some of its input columns, such as those of removed heads:
    one `OutputMoments` for each cross-validation fold. An `OutputMoments` has sums over tokens of the inputs of the
    projection, of the outputs that it should have (the targets), and of the products of both.

    Attributes:
        folds: sums over the tokens of a fold, by the number of the fold.
    """

    def __init__(self, path: str, weight: Float[Tensor, "out width"], has_bias: bool) -> None:
        self.folds: dict[int, OutputMoments] = {}
        self._path, self._weight, self._has_bias = path, weight, has_bias

    def add(self, fold: int, moments: OutputMoments) -> None:
        """Add sums over more tokens to the sums of a cross-validation fold. If all of these tokens have the weight 0,
        as padding has, their sums are ignored.
        """
        if moments.mass:
            self.folds[fold] = self.folds[fold] + moments if fold in self.folds else moments

    def checked(self) -> "FoldedMoments":
        """Check the sums in this object, and return the object. Raise `InputError` if a sum is not finite, or if there
        are fewer than two cross-validation folds.
        """
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
        """Sums of the inputs, the targets and their products over the tokens of all folds."""
        return reduce(add, self.folds.values())

    def without(self, fold: int) -> OutputMoments:
        """Return the sums of the inputs, the targets and their products over the tokens of all folds except `fold`."""
        return reduce(add, (moments for number, moments in self.folds.items() if number != fold))

    def fit(
        self, kept: Int[Tensor, " kept"], left_out: int | None = None
    ) -> tuple[Float[Tensor, "out kept"], Float[Tensor, " out"]]:
        """Return the weight and bias, fitted by least squares to the targets, of a projection with the input columns
        `kept` alone. The ridge damping is chosen by cross-validation over all folds. The final fit does not use the
        fold `left_out`, if one is stated.
        """
        errors = torch.zeros(len(DAMPINGS), dtype=torch.float64)
        for fold, own in self.folds.items():
            fits = self.without(fold).fits(self._weight, kept, self._has_bias, DAMPINGS)
            errors += torch.tensor([own.error(weight, bias, kept) for weight, bias, _ in fits], dtype=torch.float64)
        data = self.total if left_out is None else self.without(left_out)
        ((weight, bias, _),) = data.fits(self._weight, kept, self._has_bias, [DAMPINGS[int(errors.argmin())]])
        return weight, bias

    def fitted_removals(
        self, blocks: Sequence[Int[Tensor, " block"]], removed: Int[Tensor, " removed"]
    ) -> list[BlockRemoval]:
        """Return, for each block of input columns, the effect of its removal in addition to the columns `removed`.
        After the removal, the weights of the remaining columns are fitted again to the targets. Each fit leaves out one
        cross-validation fold, on which its error is measured. All blocks use the ridge damping with the lowest sum of
        errors. If the block h is removed, the weight W changes by `-W_h [(C^-1)_hh]^-1 (C^-1)_h`, where C is the damped
        `E[x x^T]` of the columns before the removal.

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
                weight, bias, _ = fit
                residual = own.yx - weight @ own.xx[kept] - torch.outer(bias, own.x)
                lost = own.y - weight @ own.x[kept] - own.mass * bias
                # |e|^2 = e y - e W x - e b for e = y - W x - b; `residual` and `lost` are the sums of e x^T and e
                of_weight = float((weight * (own.yx + residual)[:, kept]).sum())
                before[tried] += own.yy - of_weight - float(bias @ (own.y + lost))
                for index, change in enumerate(_changes(fit, blocks, kept, centre)):
                    changes[tried][index][fold] = change
                    added[tried, index] += change.added_error(residual - torch.outer(lost, change.centre), own)
        best = int((before[:, None] + added).sum(1).argmin())
        return list(zip(self._relative(added[best].tolist()), changes[best], strict=True))

    def unfitted_removals(
        self, blocks: Sequence[Int[Tensor, " block"]], removed: Int[Tensor, " removed"]
    ) -> list[BlockRemoval]:
        """Return, for each block of input columns, the effect of its removal in addition to the columns `removed`. The
        remaining columns keep their weights.
        """
        weight, total = self._weight.double(), self.total
        residual = weight[:, removed] @ total.xx[removed]
        changes = []
        for block in blocks:
            right = total.xx.new_zeros(len(block), len(total.x))
            right[torch.arange(len(block)), block] = 1.0
            changes.append(WeightChange(weight[:, block], right, torch.zeros_like(total.x)))
        errors = self._relative([change.added_error(residual, total) for change in changes])
        return [(error, dict.fromkeys(self.folds, change)) for error, change in zip(errors, changes, strict=True)]

    def _relative(self, errors: Sequence[float]) -> list[float]:
        """Return squared errors divided by the sum of squares of the targets. If the projection has a bias, the mean of
        the targets is first subtracted from the targets. Return 0 for each error if the inputs are all 0 or the targets
        do not vary.
        """
        total = self.total.about_mean() if self._has_bias else self.total
        varies = total.yy > 0 and bool(total.xx.any())
        return [error / total.yy if varies else 0.0 for error in errors]
