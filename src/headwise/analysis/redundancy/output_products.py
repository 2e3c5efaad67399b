"""Running sums over tokens from which the similarity of head outputs follows: cross-covariance and mean cosine."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.shapes import Float


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
    module. They give, for each such pair of heads, the covariance of the two heads' outputs, and the mean cosine
    between the vectors that the two heads write into the residual stream.

    The covariance is that of the head outputs. The cosine is between the vectors that the heads write into the residual
    stream. Both are updated part by part (Chan, Golub and LeVeque 1983), so that no token is kept.
    """

    def __init__(self, first: TokenOutputs, second: TokenOutputs) -> None:
        self._tokens, self._shape = 0, (*first.out.shape[1:], *second.out.shape[1:])
        zeros = partial(torch.zeros, dtype=torch.float64, device=first.out.device)
        self._means = [zeros(outputs.out.shape[1:].numel()) for outputs in (first, second)]
        self._covariance = zeros(len(self._means[0]), len(self._means[1]))
        self._cosine_sums, self._cosine_counts = zeros(2, first.out.shape[1], second.out.shape[1])

    def add(self, first: TokenOutputs, second: TokenOutputs) -> None:
        """Add further tokens to the running sums for every pair of a head of the first and a head of the second module:
        the covariance of the two heads' outputs, and the cosine between what they write into the residual stream.
        `first` and `second` are the outputs of the two modules at these tokens.
        """
        flat = [outputs.out.flatten(1) for outputs in (first, second)]
        means = [outputs.mean(0) for outputs in flat]
        tokens, total = len(flat[0]), self._tokens + len(flat[0])
        differences = [mean - before for mean, before in zip(means, self._means, strict=True)]
        self._covariance += (flat[0] - means[0]).mT @ (flat[1] - means[1])
        self._covariance += torch.outer(*differences) * (self._tokens * tokens / total)
        self._means = [
            before + difference * (tokens / total) for before, difference in zip(self._means, differences, strict=True)
        ]
        self._tokens = total
        if first.directions.shape[-1] == second.directions.shape[-1]:
            self._cosine_sums += first.directions.flatten(1) @ second.directions.flatten(1).mT
            writes = [(outputs.directions != 0).any(-1).to(outputs.out.dtype) for outputs in (first, second)]
            self._cosine_counts += writes[0] @ writes[1].mT

    @property
    def mean_cosine(self) -> Float[Tensor, "first_heads second_heads"]:
        """Mean cosine between the vectors that a head of the first and a head of the second module write into the
        residual stream, for every such pair, over the tokens at which both heads write.

        NaN if there is no such token, or if the modules write vectors of different widths.
        """
        cosines: Tensor = self._cosine_sums / self._cosine_counts
        return cosines

    @property
    def squared_covariance(self) -> Float[Tensor, "first_heads second_heads"]:
        """Squared Frobenius norm of the cross-covariance between the outputs of a head of the first and a head of the
        second module, for every such pair. It is multiplied by the squared number of tokens.
        """
        norms: Tensor = self._covariance.view(self._shape).square().sum((1, 3))
        return norms
