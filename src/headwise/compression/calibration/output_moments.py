"""Second moments of an output projection's inputs and targets, and the weights that fit them by least squares.

    x   input of the output projection: the outputs of all heads side by side, `(tokens, width)`
    y   output that the projection shall have, `(tokens, out)`

The weight of some columns S of x that minimises the mean of `|y - W x_S - b|^2` is `W = E[y x_S^T] E[x_S x_S^T]^-1`,
with moments about the means if there is a bias. With a damping d, the minimised number has one more term,
`d m |W - W_dense|^2`, where m is the mean square of the columns of x (ridge regression, Hoerl and Kennard 1970).

All means are weighted means over tokens, see `token_weights`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.shapes import Float, Int

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

        Args:
            weight: weight of the dense projection.
            kept: remaining columns.
            has_bias: True if the projection has a bias, which is fitted too; otherwise the bias is 0.
            dampings: strengths of the damping.
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
