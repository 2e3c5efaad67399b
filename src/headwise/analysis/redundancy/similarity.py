"""Similarity of two heads from running sums: of their outputs over tokens, and of their attention weights over rows."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.errors import require
from headwise.runs.checkpoint import storable
from headwise.shapes import Bool, Float


@storable
class OutputProducts:
    """Running sums over tokens that compare each head of one attention module with each head of a second module. Two
    measures follow from these sums for each pair of heads. The first is the dependence of their outputs
    (Hilbert-Schmidt independence criterion). The second is the mean cosine of the vectors that they write into the
    residual stream.

    The outputs are shifted by their mean over the first tokens, `outs`, which changes no result: sums of large numbers
    would lose digits.
    """

    def __init__(self, outs: Sequence[Float[Tensor, "tokens _ _"]]) -> None:
        self._heads = heads = outs[0].shape[1], outs[1].shape[1]
        zeros = partial(torch.zeros, dtype=torch.float64, device=outs[0].device)
        self._shifts = [out.double().mean(0) for out in outs]
        widths = [shift.numel() for shift in self._shifts]
        self.tokens = 0
        self._products, self._sums = zeros(*widths), [zeros(width) for width in widths]
        self._norm_products, self._norm_sums = zeros(heads), [zeros(number) for number in heads]
        self._weighted_sums = zeros(widths[0], heads[1]), zeros(widths[1], heads[0])
        self._cosine_sums, self._cosine_counts = zeros(2, *heads)

    def add(
        self, outs: Sequence[Float[Tensor, "tokens _ _"]], directions: Sequence[Float[Tensor, "_ tokens _"]]
    ) -> None:
        """Add tokens to the sums. `outs` are the head outputs of the two modules, each `(tokens, heads, value_dim)`.
        `directions` are the vectors that their heads write into the residual stream, as unit vectors, each `(heads,
        tokens, width)`. They are 0 where a head writes nothing.
        """
        shifted = [out - shift for out, shift in zip(outs, self._shifts, strict=True)]
        norms = [out.square().sum(-1) for out in shifted]
        flat = [out.flatten(1) for out in shifted]
        self.tokens += len(flat[0])
        self._products += flat[0].mT @ flat[1]
        self._norm_products += norms[0].mT @ norms[1]
        for index in range(2):
            self._sums[index] += flat[index].sum(0)
            self._norm_sums[index] += norms[index].sum(0)
            self._weighted_sums[index].addmm_(flat[index].mT, norms[1 - index])
        if directions[0].shape[-1] == directions[1].shape[-1]:
            self._cosine_sums += directions[0].flatten(1) @ directions[1].flatten(1).mT
            writes = [(each != 0).any(-1).to(out.dtype) for each, out in zip(directions, outs, strict=True)]
            self._cosine_counts += writes[0] @ writes[1].mT

    def merge(self, other: "OutputProducts") -> None:
        """Add the sums of `other`, which are over different tokens for the same two modules. Each object subtracts its
        own mean vector from the head outputs before it sums. The sums of `other` are therefore first converted to the
        mean vector of this object.
        """
        device = self._products.device
        of_first, of_second = (
            _translation(theirs.to(device) - own) for own, theirs in zip(self._shifts, other._shifts, strict=True)
        )
        moved = of_first @ other._with_norms().to(device) @ of_second.mT
        features = [slice(shift.numel()) for shift in self._shifts]
        norms = [slice(shift.numel(), -1) for shift in self._shifts]
        self._products += moved[features[0], features[1]]
        self._norm_products += moved[norms[0], norms[1]]
        self._weighted_sums[0].add_(moved[features[0], norms[1]])
        self._weighted_sums[1].add_(moved[norms[0], features[1]].mT)
        for index, sums in enumerate((moved[:, -1], moved[-1])):
            self._sums[index] += sums[features[index]]
            self._norm_sums[index] += sums[norms[index]]
        self.tokens += other.tokens
        self._cosine_sums += other._cosine_sums.to(device)
        self._cosine_counts += other._cosine_counts.to(device)

    def _with_norms(self) -> Float[Tensor, "first second"]:
        """Return the sums over tokens as one matrix. A row stands for a number that the first module has at each token:
        an output feature, the squared norm of a head's output, or the constant 1. A column stands for such a number of
        the second module. Each entry is the sum over tokens of the product of the two numbers.
        """
        tokens = self._norm_products.new_full((1,), self.tokens)
        of_features = torch.cat([self._products, self._weighted_sums[0], self._sums[0][:, None]], 1)
        of_norms = torch.cat([self._weighted_sums[1].mT, self._norm_products, self._norm_sums[0][:, None]], 1)
        of_one = torch.cat([self._sums[1], self._norm_sums[1], tokens])[None]
        return torch.cat([of_features, of_norms, of_one])

    def varies(self, rounding: float) -> Bool[Tensor, " first_heads"]:
        """Return True for the heads of the first module whose outputs vary between tokens by more than rounding. For
        such a head, the variance of the outputs over tokens is more than `rounding` times their mean square.
        """
        mean_shifted = self._sums[0].view_as(self._shifts[0]) / self.tokens
        variance = self._norm_sums[0] / self.tokens - mean_shifted.square().sum(-1)
        mean_square = variance + (self._shifts[0] + mean_shifted).square().sum(-1)
        return variance > rounding * mean_square

    @property
    def mean_cosine(self) -> Float[Tensor, "first_heads second_heads"]:
        """Mean cosine between the vectors that two heads write into the residual stream. Rows are heads of the first
        module, and columns are heads of the second module. The mean is over the tokens at which both heads write a
        vector other than 0.

        NaN if there is no such token, or if the modules write vectors of different widths.
        """
        cosines: Tensor = self._cosine_sums / self._cosine_counts
        return cosines

    @property
    def dependence(self) -> Float[Tensor, "first_heads second_heads"]:
        """Dependence between the outputs x and y of two heads. Rows are heads of the first module, and columns are
        heads of the second module. It is the unbiased estimate of the Hilbert-Schmidt independence criterion with
        linear kernels; NaN for fewer than 4 tokens.

        With n tokens, K_ij = x_i . x_j and L_ij = y_i . y_j, both without their diagonals, it is (Song et al. 2012,
        equation 5)

            (tr KL + (1'K1)(1'L1) / ((n - 1)(n - 2)) - 2 (1'KL1) / (n - 2)) / (n (n - 3))

        All terms follow from sums over tokens of products of x, y and their squared norms.
        """
        n = self.tokens
        if n < 4:
            return torch.full(self._heads, torch.nan, dtype=torch.float64)
        x, y = (total.view(shift.shape) for total, shift in zip(self._sums, self._shifts, strict=True))
        products = self._products.view(*x.shape, *y.shape)
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


def _translation(difference: Float[Tensor, "heads value_dim"]) -> Float[Tensor, "features features"]:
    """Return a matrix that expresses the addition of a vector a (a row of `difference`) to the output x of each head.
    It is applied to a vector of three parts: the output features of all heads, the squared norm of each head's output,
    and the number 1. The product is the same vector for the outputs x + a.

    The squared norm of a head becomes `|x|^2 + 2 a.x + |a|^2`.
    """
    heads, features = len(difference), difference.numel()
    matrix = torch.eye(features + heads + 1, dtype=difference.dtype, device=difference.device)
    matrix[:features, -1] = difference.flatten()
    for head, of_head in enumerate(difference):
        matrix[features + head, head * len(of_head) : (head + 1) * len(of_head)] = 2 * of_head
    matrix[features:-1, -1] = difference.square().sum(-1)
    return matrix


def chance_of(threshold: float, tokens: int) -> float:
    """Return the approximate probability that two unrelated heads have a similarity `cka` (debiased centred kernel
    alignment) of at least `threshold` by chance, over `tokens` independent tokens. It is computed for outputs of one
    feature and of many features, and the larger of the two probabilities is returned.

    The standard deviation of the `cka` of unrelated heads is sqrt(2 / (n (n - 3))) for n tokens.

    With m = n (n - 3) / 2, the alignment r of outputs of many features has sqrt(m - 1) r / sqrt(1 - r^2) distributed as
    Student's t with m - 1 degrees of freedom (Szekely and Rizzo 2013). Outputs of one feature have about the square of
    the correlation coefficient, with a beta distribution.
    """
    if threshold >= 1.0:
        return 0.0
    stats: Any = require("scipy.stats", purpose="a test of similarity", extra="tables")
    degrees = tokens * (tokens - 3) / 2 - 1
    of_many = stats.t.sf(threshold * math.sqrt(degrees / (1 - threshold**2)), degrees)
    of_one = stats.beta.sf(threshold, 1 / 2, (tokens - 2) / 2)
    return float(max(of_many, of_one))


@storable
class WeightDistances:
    """Running mean, over query rows, of the Jensen-Shannon distance between the attention weights of every two heads of
    one attention module. The rows are added in blocks, so that the whole attention matrix is never in memory.

    A tile (part of the score matrix computed at once) may hold the weights of some heads only. Tiles of the same rows
    are kept until tiles of other rows arrive.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self._sums, self._counts = torch.zeros(2, heads, heads, dtype=torch.float64, device=device)
        self.finish_call()

    def finish_call(self) -> None:
        """Delete the stored attention weights of an attention call at its end. They are stored for comparison with
        heads that the call computes later.
        """
        self._current_rows: Any = None
        self._tiles: list[tuple[slice, Tensor, Tensor]] = []

    def add(self, rows: RowBlock) -> None:
        """Add the distances between every two heads for a block of attention weights, which contains some query rows of
        some heads. The heads of the block are compared with each other, and with the heads of earlier blocks that
        contain the same query rows. Rows of padding and rows without a visible key are left out.
        """
        tile = rows.tile
        current_rows = (tile.block.rows, tuple(tile.block.spans), tile.sequences.start, tile.sequences.stop)
        if current_rows != self._current_rows:
            self._current_rows, self._tiles = current_rows, []
        weights, counted = rows.weights, rows.visibility.counted_rows.expand(tile.shape)
        for index in range(weights.shape[1]):
            head, after = tile.heads.start + index, index + 1
            further = slice(head + 1, tile.heads.stop), weights[:, after:], counted[:, after:]
            for others, other_weights, other_counted in (*self._tiles, further):
                both_count = counted[:, index, None] & other_counted
                distances = _distances(weights[:, index, None], other_weights).masked_fill_(~both_count, 0.0)
                self._sums[head, others] += distances.double().sum((0, 2))
                self._counts[head, others] += both_count.sum((0, 2))
        self._tiles.append((tile.heads, weights, counted))

    def merge(self, other: "WeightDistances") -> None:
        """Add the sums of `other`, which are over other query rows of the same attention module."""
        self._sums += other._sums.to(self._sums.device)
        self._counts += other._counts.to(self._counts.device)

    @property
    def mean(self) -> Float[Tensor, "heads heads"]:
        """Mean Jensen-Shannon distance between the attention weights of every two heads, in the square root of nats.
        NaN for heads that were not compared.
        """
        distances: Tensor = (self._sums + self._sums.mT) / (self._counts + self._counts.mT)
        return distances.fill_diagonal_(0.0)


def _distances(
    p: Float[Tensor, "batch 1 rows columns"], q: Float[Tensor, "batch heads rows columns"]
) -> Float[Tensor, "batch heads rows"]:
    """Return the Jensen-Shannon distance between the attention weights `p` of one head and the attention weights `q` of
    each of some other heads, for each query row.
    """
    # With p = m (1 + t) and q = m (1 - t), numbers that are nearly equal are not subtracted.
    total = p + q
    limit = 1.0 - torch.finfo(total.dtype).eps
    t = ((p - q) / total).nan_to_num_(0.0).clamp_(-limit, limit)
    divergence = ((1 + t) * t.log1p() + (1 - t) * t.neg().log1p()).mul_(total).sum(-1) / 4
    return divergence.clamp_(min=0.0).sqrt_()
