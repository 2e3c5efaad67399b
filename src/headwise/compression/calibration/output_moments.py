"""Second moments of an output projection's inputs and targets, and the weights that fit them best by least squares.

    x   input of the output projection: the outputs of all heads side by side, `(tokens, width)`
    y   output that the projection shall have, `(tokens, out)`

The weight of some columns S of x that minimises the mean of `|y - W x_S - b|^2` is `W = E[y x_S^T] E[x_S x_S^T]^-1`,
with moments about the means if there is a bias.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Float, Int

DAMPING = 0.01
"""Part of the mean diagonal of the moments of x that is added to the diagonal, so that few tokens suffice."""

ROUNDING = 1e-12
"""Part of a sum of squares below which the sum about the mean is rounding of float64."""


@dataclass
class OutputMoments:
    """Sums over tokens of x, y and their products, in float64.

    Attributes:
        tokens: number of tokens.
        x: sum of x.
        y: sum of y.
        xx: sum of x x^T.
        yx: sum of y x^T.
        yy: sum of |y|^2.
    """

    tokens: int
    x: Float[Tensor, " width"]
    y: Float[Tensor, " out"]
    xx: Float[Tensor, "width width"]
    yx: Float[Tensor, "out width"]
    yy: float

    @staticmethod
    def of(x: Float[Tensor, "tokens width"], y: Float[Tensor, "tokens out"]) -> "OutputMoments":
        """Return the sums over the tokens of one batch."""
        x, y = x.double(), y.double()
        return OutputMoments(len(x), x.sum(0), y.sum(0), x.mT @ x, y.mT @ x, float(y.square().sum()))

    def __add__(self, other: "OutputMoments") -> "OutputMoments":
        sums = (getattr(self, name) + getattr(other, name) for name in ("tokens", "x", "y", "xx", "yx", "yy"))
        return OutputMoments(*sums)

    def about_mean(self) -> "OutputMoments":
        """Return the moments about the means of x and y, for a projection with a bias."""
        x, y = self.x / self.tokens, self.y / self.tokens
        xx = self.xx - self.tokens * torch.outer(x, x)
        yx = self.yx - self.tokens * torch.outer(y, x)
        yy = self.yy - self.tokens * float(y.square().sum())
        if float(xx.trace()) <= ROUNDING * float(self.xx.trace()):
            xx, yx = torch.zeros_like(xx), torch.zeros_like(yx)
        return OutputMoments(self.tokens, self.x, self.y, xx, yx, yy if yy > ROUNDING * self.yy else 0.0)

    def damped(self) -> Float[Tensor, "width width"]:
        """Return the mean of x x^T, with a small number added to the diagonal; the identity if x is 0."""
        mean = self.xx / self.tokens
        added = DAMPING * mean.diagonal().mean() if bool(mean.any()) else 1.0
        return mean + added * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)


def require_usable(moments: OutputMoments | None, path: str) -> None:
    """Raise `InputError` if the projection at `path` ran on no data (None), on padding alone, or on numbers that are
    NaN or infinite.
    """
    if moments is None:
        raise InputError("calibration", expected=f"data on which {path} runs", got="none")
    if not moments.tokens or not bool(moments.xx.isfinite().all() and moments.yx.isfinite().all()):
        got = "NaN or infinity" if moments.tokens else "padding alone"
        expected = f"texts for which inputs and outputs of {path} are finite numbers"
        raise InputError("calibration", expected=expected, got=got)


def reconstructed(
    moments: OutputMoments,
    weight: Float[Tensor, "out width"],
    kept: Int[Tensor, " kept"],
    has_bias: bool,
) -> tuple[Float[Tensor, "out kept"], Float[Tensor, " out"] | None]:
    """Return the weight and bias of an output projection whose input columns `kept` remain, fitted to the targets by
    least squares. The damping draws the weight to the dense one, so that columns without data keep theirs.

    Args:
        moments: of all columns, with the targets.
        weight: weight of the dense projection.
        kept: remaining columns.
        has_bias: True if the projection has a bias, which is fitted too.
    """
    centred = moments.about_mean() if has_bias else moments
    dense = weight.double()[:, kept]
    second = centred.xx[kept][:, kept] / moments.tokens
    missing = centred.yx[:, kept] / moments.tokens - dense @ second
    damped = centred.damped()[kept][:, kept]
    fitted = dense + torch.linalg.solve(damped, missing.mT).mT
    if not has_bias:
        return fitted, None
    return fitted, (moments.y - fitted @ moments.x[kept]) / moments.tokens


class BlockRemoval(NamedTuple):
    """Removal of a block of columns of an output projection, after which the other columns are fitted again.

    Attributes:
        error: the mean squared error of the targets that it adds, in units of the mean of `|y|^2`.
        left: first factor of the change of the fitted weight.
        right: second factor; the change is `-left @ right`, in which the removed columns lose their weights.
    """

    error: float
    left: Float[Tensor, "out block"]
    right: Float[Tensor, "block width"]


def block_removals(
    moments: OutputMoments,
    weight: Float[Tensor, "out width"],
    blocks: Sequence[Int[Tensor, " block"]],
    removed: Int[Tensor, " removed"],
    has_bias: bool,
) -> Iterator[BlockRemoval]:
    """Yield for each block of columns what happens if it is removed in addition to the columns `removed`, and the other
    columns are fitted again to the targets by least squares, as by `reconstructed`. With the fitted weight W and
    `C = E[x x^T]` of the remaining columns, the added error is `tr(W_h [(C^-1)_hh]^-1 W_h^T)`, and the change of the
    weight is `-W_h [(C^-1)_hh]^-1 (C^-1)_h`.

    Source: Hassibi and Stork 1992, equation 5, for blocks of weights.

    Args:
        moments: of all columns, with the targets.
        weight: weight of the dense projection.
        blocks: columns of each block, none of them removed.
        removed: columns that were removed before.
        has_bias: True if the projection has a bias, which is fitted too.
    """
    centred = moments.about_mean() if has_bias else moments
    width = len(moments.x)
    is_kept = torch.ones(width, dtype=torch.bool)
    is_kept[removed] = False
    kept = is_kept.nonzero()[:, 0]
    place = is_kept.cumsum(0) - 1
    inverse = torch.linalg.inv(centred.damped()[kept][:, kept])
    fitted, _ = reconstructed(moments, weight, kept, has_bias)
    is_varied = centred.yy > 0 and bool(centred.xx.any())  # otherwise nothing is lost
    for block in blocks:
        own = place[block]
        left = fitted[:, own] @ torch.linalg.inv(inverse[own][:, own])
        right = inverse.new_zeros(len(own), width)
        right[:, kept] = inverse[own]
        error = float((left * fitted[:, own]).sum()) * moments.tokens
        yield BlockRemoval(error / centred.yy if is_varied else 0.0, left, right)
