"""Scores from products that are rounded to bfloat16, whose eight bits a large score would lose.

Where |q| |k| says that scores are small, they are taken as they come. Elsewhere a score is not asked for but its
distance from about the largest of its row, which the product subtracts before it is rounded: what is rounded most is
what weighs least. That number comes from a sample of the keys, and from all of them where the sample was not near.
"""

from functools import cached_property

import torch
from torch import Tensor

from headwise.attention.tiles import Pool, Tile, products
from headwise.shapes import Bool, Float

SMALL = 16.0
"""Scores that cannot be larger, in nats, are rounded as they are: by 1/32 at most."""

FARTHEST = 8.0
"""How far beyond a sample's largest score that of a row may lie, in nats, for the rounding to be left at that."""

SAMPLE_STEP = 16
"""Of how many keys one is in the sample."""


class Narrow:
    """The scores of each tile, in powers of two, with a shift for each row that was subtracted from its products."""

    def __init__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        scale: float,
        factor: float,
        pool: Pool,
    ) -> None:
        """`scale` makes products scores in nats, `factor` in powers of two."""
        self.k, self.scale, self.factor, self.pool = k, scale, factor, pool
        of_queries = _longest(q).view(k.shape[0], k.shape[1], -1).amax(2)
        self.small: Bool[Tensor, "batch kv_heads"] = of_queries * _longest(k) * scale <= SMALL
        self.missed: set[tuple[int, int]] = set()

    def scores(
        self, tile: Tile, q: Float[Tensor, "kv stacked head_dim"]
    ) -> tuple[Float[Tensor, "kv stacked columns"], Float[Tensor, "kv stacked 1"] | None]:
        """The scores less the shift, and the shift; None where it is 0."""
        if self._are_small(tile):
            return self.again(tile, q, None), None
        where = (tile.sequences.start, tile.kv_heads.start)
        if where not in self.missed:
            shift = self._from_sample(tile, q)
            scores = self.again(tile, q, shift)
            if _are_near(scores, self.factor / self.scale):
                return scores, shift
            self.missed.add(where)  # heads that look where no sample does will do so again
        shift = self._from_all(tile, q)
        return self.again(tile, q, shift), shift

    def again(
        self, tile: Tile, q: Float[Tensor, "kv stacked head_dim"], shift: Float[Tensor, "kv stacked 1"] | None
    ) -> Float[Tensor, "kv stacked columns"]:
        """The scores less a shift that is known."""
        if shift is None or self._are_small(tile):
            scores = products("scores", tile, q, self.k.mT, self.factor, self.pool)
        else:
            scores = products("scores", tile, and_less(q, shift), self._keys, self.factor, self.pool)
        tile.lower(scores)
        return scores

    def _are_small(self, tile: Tile) -> bool:
        return bool(self.small[tile.sequences, tile.kv_heads].all())

    def _from_sample(self, tile: Tile, q: Float[Tensor, "kv stacked head_dim"]) -> Float[Tensor, "kv stacked 1"]:
        """The largest product of each row with some of its keys, less one nat; -inf in a row that sees none of them.

        The first of a row's keys is often among them, which in decoders has the largest scores.
        """
        step = SAMPLE_STEP  # parts begin at its multiples
        sampled = [range(keys.start // step, -(-keys.stop // step)) for keys in tile.block.spans]
        found = torch.cat([torch.bmm(q, tile.keys_of(self._sample, keys).mT) for keys in sampled], -1)
        tile.lower(found, step)
        return found.amax(-1, keepdim=True) - 1.0 / self.scale

    def _from_all(self, tile: Tile, q: Float[Tensor, "kv stacked head_dim"]) -> Float[Tensor, "kv stacked 1"]:
        """About the largest product of each row, within 1/128 of its bound |q| max |k|.

        No product is below minus that bound. Raised by it they are positive, and positive floats are in the order of
        their bits, above all negative ones, which torch compares eight times as fast as bfloat16.
        """
        longest = _longest(self.k)[tile.sequences, tile.kv_heads].flatten()[:, None, None]
        raised = (q.float().norm(dim=-1, keepdim=True) * longest * 1.02).to(q.dtype)
        found = products("scores", tile, and_less(q, -raised), self._keys, 1.0, self.pool)
        tile.lower(found)
        return torch.sub(_largest(found), raised)

    @cached_property
    def _keys(self) -> Float[Tensor, "batch kv_heads head_dim_and_2 keys"]:
        return and_ones(self.k)

    @cached_property
    def _sample(self) -> Float[Tensor, "batch kv_heads some head_dim"]:
        return self.k[:, :, ::SAMPLE_STEP].contiguous()


def and_ones(tensor: Float[Tensor, "*axes keys width"]) -> Float[Tensor, "*axes width_and_2 keys"]:
    """Keys last, one more feature that is 1 everywhere, and one that is 0, since bfloat16 takes them in pairs."""
    *axes, keys, width = tensor.shape
    result = tensor.new_empty(*axes, width + 2, keys)
    result[..., :width, :] = tensor.mT
    result[..., width, :] = 1.0
    result[..., width + 1, :] = 0.0
    return result


def and_less(rows: Float[Tensor, "*axes width"], less: Float[Tensor, "*axes 1"]) -> Float[Tensor, "*axes width_and_2"]:
    """Rows whose products with what `and_ones` made are smaller by `less`, subtracted before they are rounded."""
    return torch.cat([rows, -less.to(rows.dtype), rows.new_zeros(less.shape)], -1)


def _longest(tensor: Float[Tensor, "batch heads length width"]) -> Float[Tensor, "batch heads"]:
    """The norm of the longest row."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)
    return norms.amax(-1)


def _largest(scores: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "kv stacked 1"]:
    """The largest of each row that has one of 0 or more; in another row some negative number."""
    return scores.view(torch.int16).amax(-1, keepdim=True).view(scores.dtype)


def _are_near(scores: Float[Tensor, "kv stacked columns"], nat: float) -> bool:
    """Whether the largest score of every row is 0 or more, and not too far from it, where `nat` is one nat."""
    least, most = torch.aminmax(_largest(scores))
    return bool(least >= 0.0) and bool(most <= FARTHEST * nat)
