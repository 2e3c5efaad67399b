"""Scores from products that are rounded to bfloat16, whose eight bits a large score would lose.

So a score is not asked for, but its distance from where the heavy scores of its row are: what is rounded most is what
weighs least. That number is subtracted by the product itself, before it rounds, as one more feature.

It is foretold from the mean and the variance of each feature of the keys. Were features independent, the scores of a
row would be normal, with some mean and variance s^2. Of n such scores x, those that carry the sum of exp(x)^2, and so
the error, lie 2 s^2 above the mean, or where there are none so high, at the largest (Derrida 1981, Random-energy model,
at the inverse temperature 2). Where the largest score of a row turns out not to be near, another product mends it.
"""

from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.plan import BlockwisePlan, reads_most
from headwise.attention.backends.blockwise.tiles import LOG2_E, Pool, Tile, products
from headwise.shapes import Float

BLOCK_OVERHEAD = 2**18
"""What the operations of one block cost beside their work, in scores that could be computed meanwhile."""

FARTHEST = 8.0
"""How far from what is subtracted the largest score of a row may lie, in nats, for the rounding to be left at that."""

SAMPLE = 256
"""Of about how many keys the mean and the variance are taken."""


class BFloat16Scores:
    """The scores of each tile, in powers of two, less a shift for each row; and their gradient."""

    def __init__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        scale: float,
        plan: BlockwisePlan,
        pool: Pool,
        shifts: Float[Tensor, "batch heads queries 1"],
    ) -> None:
        """`scores` fills the shifts, and `again` reads them."""
        self.q, self.scale, self.plan, self.pool, self.shifts = q, scale, plan, pool, shifts
        self._keys = and_ones(k, plan)
        self._k = k

    def scores(self, tile: Tile) -> Float[Tensor, "kv stacked columns"]:
        """The scores less the shifts, which are corrected where they were foretold wrong."""
        mean, deviation = (tile.rows_of(each) for each in self._moments)
        highest = NormalDist().inv_cdf(max(1 - 1 / tile.block.width, 0.5))
        shift = torch.addcmul(mean, deviation, (deviation * (2 * self.scale)).clamp_(max=highest))
        rows = tile.rows_of(self.q)
        scores = self._less(tile, rows, shift)
        largest = _largest(scores)
        least, most = torch.aminmax(largest)
        if not (least >= -FARTHEST * LOG2_E and most <= FARTHEST * LOG2_E):
            shift += largest / (self.scale * LOG2_E)
            scores = self._less(tile, rows, shift)
        tile.put(self.shifts, shift)
        return scores

    def again(self, tile: Tile) -> Float[Tensor, "kv stacked columns"]:
        """The scores less shifts that are known."""
        return self._less(tile, tile.rows_of(self.q), tile.rows_of(self.shifts))

    def differentiate(
        self,
        v: Float[Tensor, "batch kv_heads keys value_dim"],
        upstream: Float[Tensor, "batch heads queries value_dim"],
        delta: Float[Tensor, "batch heads queries 1"],
        _: Tensor | None = None,
    ) -> None:
        """What `gradient` needs."""
        self._upstream, self._values = and_less(upstream, delta), and_ones(v, self.plan)

    def gradient(
        self, tile: Tile, weights: Float[Tensor, "kv stacked columns"], _: Tensor | None = None
    ) -> Float[Tensor, "kv stacked columns"]:
        """The gradient of the products of queries and keys."""
        return products("grad", tile, tile.rows_of(self._upstream), self._values, 1.0, self.pool).mul_(weights)

    @cached_property
    def _moments(self) -> tuple[Float[Tensor, "batch heads queries 1"], Float[Tensor, "batch heads queries 1"]]:
        """Mean and standard deviation of each row's products, were the features of the keys independent."""
        sample = self._k[:, :, :: max(self._k.shape[2] // SAMPLE, 1)].float()
        mean = sample.mean(2, keepdim=True)
        variance = (sample - mean).square_().mean(2, keepdim=True)
        rows = self.q.reshape(*self._k.shape[:2], -1, self.q.shape[-1])
        moments = rows @ mean.mT.to(rows.dtype), (rows.square() @ variance.mT.to(rows.dtype)).sqrt_()
        return moments[0].view_as(self.shifts), moments[1].view_as(self.shifts)

    def _less(
        self, tile: Tile, rows: Float[Tensor, "kv stacked head_dim"], shift: Float[Tensor, "kv stacked 1"]
    ) -> Float[Tensor, "kv stacked columns"]:
        scores = products("scores", tile, and_less(rows, shift), self._keys, self.scale * LOG2_E, self.pool)
        tile.lower(scores)
        return scores


def and_ones(tensor: Float[Tensor, "*axes keys width"], plan: BlockwisePlan) -> Float[Tensor, "*axes width_and_2 keys"]:
    """One more feature that is 1 everywhere, and one that is 0, since bfloat16 takes them in pairs.

    Products are faster where keys lie side by side in memory, but part of the keys is copied out slowly from there.
    """
    *axes, keys, width = tensor.shape
    laid_out = reads_most(plan)
    result = tensor.new_empty(*axes, width + 2, keys) if laid_out else tensor.new_empty(*axes, keys, width + 2).mT
    result[..., :width, :] = tensor.mT
    result[..., width, :] = 1.0
    result[..., width + 1, :] = 0.0
    return result


def and_less(rows: Float[Tensor, "*axes width"], less: Float[Tensor, "*axes 1"]) -> Float[Tensor, "*axes width_and_2"]:
    """Rows whose products with what `and_ones` made are smaller by `less`, subtracted before they are rounded."""
    return torch.cat([rows, -less.to(rows.dtype), rows.new_zeros(less.shape)], -1)


def _largest(scores: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "kv stacked 1"]:
    """The largest of each row, from the bits as whole numbers, which torch compares eight times as fast as bfloat16.

    The bits of positive floats are in their order. Those of negative ones are in the opposite order, below these.
    """
    bits = scores.view(torch.int16)
    largest = bits.amax(-1, keepdim=True)
    if largest.amin() < 0:
        largest = torch.where(largest < 0, bits.amin(-1, keepdim=True), largest)
    return largest.view(scores.dtype)
