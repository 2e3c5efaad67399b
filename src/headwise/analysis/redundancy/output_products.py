"""Running sums over tokens from which the similarity of head outputs follows: dependence and mean cosine."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.shapes import Bool, Float


class TokenOutputs(NamedTuple):
    """Outputs of all heads of one attention module at a number of tokens, and the unit vectors in whose directions the
    heads write into the residual stream.

    Attributes:
        out: head outputs, before the output projection.
        directions: unit vectors of what each head writes into the residual stream; 0 where it writes nothing.
    """

    out: Float[Tensor, "tokens heads value_dim"]
    directions: Float[Tensor, "heads tokens width"]


class OutputProducts:
    """Running sums over tokens, which arrive in parts, for every head of a first and every head of a second attention
    module. They give, for each such pair of heads, the dependence of the two heads' outputs, and the mean cosine
    between the vectors that the two heads write into the residual stream. No token is kept.

    The outputs are shifted by their mean over the first part, which changes no result: sums of large numbers would lose
    digits.
    """

    def __init__(self, first: TokenOutputs, second: TokenOutputs) -> None:
        heads = self._heads = first.out.shape[1], second.out.shape[1]
        self._shape = (*first.out.shape[1:], *second.out.shape[1:])
        zeros = partial(torch.zeros, dtype=torch.float64, device=first.out.device)
        self._shifts = [outputs.out.double().mean(0) for outputs in (first, second)]
        widths = [shift.numel() for shift in self._shifts]
        self._tokens = 0
        self._products, self._sums = zeros(*widths), [zeros(width) for width in widths]
        self._norm_products, self._norm_sums = zeros(heads), [zeros(number) for number in heads]
        self._weighted_sums = zeros(widths[0], heads[1]), zeros(widths[1], heads[0])
        self._cosine_sums, self._cosine_counts = zeros(2, *heads)

    def add(self, first: TokenOutputs, second: TokenOutputs) -> None:
        """Add further tokens to the running sums for every pair of a head of the first and a head of the second module.
        `first` and `second` are the outputs of the two modules at these tokens.
        """
        outs = [outputs.out - shift for outputs, shift in zip((first, second), self._shifts, strict=True)]
        norms = [out.square().sum(-1) for out in outs]
        flat = [out.flatten(1) for out in outs]
        self._tokens += len(flat[0])
        self._products += flat[0].mT @ flat[1]
        self._norm_products += norms[0].mT @ norms[1]
        for index in range(2):
            self._sums[index] += flat[index].sum(0)
            self._norm_sums[index] += norms[index].sum(0)
            self._weighted_sums[index].addmm_(flat[index].mT, norms[1 - index])
        if first.directions.shape[-1] == second.directions.shape[-1]:
            self._cosine_sums += first.directions.flatten(1) @ second.directions.flatten(1).mT
            writes = [(outputs.directions != 0).any(-1).to(outputs.out.dtype) for outputs in (first, second)]
            self._cosine_counts += writes[0] @ writes[1].mT

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._tokens

    def varies(self, rounding: float) -> Bool[Tensor, " first_heads"]:
        """Return True for the heads of the first module whose outputs vary over tokens by more than rounding: their
        mean squared distance from their mean is more than `rounding` times their mean square.

        Args:
            rounding: largest square of a relative difference that counts as rounding.
        """
        mean_shifted = self._sums[0].view_as(self._shifts[0]) / self._tokens
        variance = self._norm_sums[0] / self._tokens - mean_shifted.square().sum(-1)
        mean_square = variance + (self._shifts[0] + mean_shifted).square().sum(-1)
        return variance > rounding * mean_square

    @property
    def mean_cosine(self) -> Float[Tensor, "first_heads second_heads"]:
        """Mean cosine between the vectors that a head of the first and a head of the second module write into the
        residual stream, for every such pair, over the tokens at which both heads write.

        NaN if there is no such token, or if the modules write vectors of different widths.
        """
        cosines: Tensor = self._cosine_sums / self._cosine_counts
        return cosines

    @property
    def dependence(self) -> Float[Tensor, "first_heads second_heads"]:
        """Unbiased estimate of the Hilbert-Schmidt independence criterion of the outputs x of a head of the first and y
        of a head of the second module, with linear kernels, for every such pair; NaN for fewer than 4 tokens.

        With n tokens, K_ij = x_i . x_j and L_ij = y_i . y_j, both without their diagonals, it is (Song et al. 2012,
        equation 5)

            (tr KL + (1'K1)(1'L1) / ((n - 1)(n - 2)) - 2 (1'KL1) / (n - 2)) / (n (n - 3))

        All terms follow from sums over tokens of products of x, y and their squared norms.
        """
        n = self._tokens
        if n < 4:
            return torch.full(self._heads, torch.nan, dtype=torch.float64)
        x, y = (total.view(shift.shape) for total, shift in zip(self._sums, self._shifts, strict=True))
        products = self._products.view(self._shape)
        trace = products.square().sum((1, 3)) - self._norm_products
        totals = [total.square().sum(-1) - norms for total, norms in zip((x, y), self._norm_sums, strict=True)]
        with_norms_of_y, with_norms_of_x = (
            torch.einsum("hd,hdk->hk", total, sums.view(*total.shape, -1))
            for total, sums in zip((x, y), self._weighted_sums, strict=True)
        )
        rows = torch.einsum("hd,hdke,ke->hk", x, products, y) - with_norms_of_y - with_norms_of_x.mT
        rows += self._norm_products
        total = trace + torch.outer(*totals) / ((n - 1) * (n - 2)) - 2.0 * rows / (n - 2)
        estimate: Tensor = total / (n * (n - 3))
        return estimate
