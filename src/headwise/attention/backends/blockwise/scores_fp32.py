"""The scores of blocks in float32 or float64, as a softcap, a bias, sinks or the log-sum-exp need them."""

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.tiles import LOG2_E, Pool, Tile, pick, products
from headwise.shapes import Float

BLOCK_OVERHEAD = 2**17
"""What the operations of one block cost beside their work, in scores that could be computed meanwhile."""


class Float32Scores:
    """The scores of each tile, in powers of two, less the largest of each row; and their gradient."""

    def __init__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
        scale: float,
        softcap: float | None,
        holes: bool,
        pool: Pool,
        shifts: Float[Tensor, "batch heads queries 1"],
    ) -> None:
        """`scores` fills the shifts, and `again` reads them. The bias has holes where it is -inf somewhere."""
        self.q, self.k, self.bias, self.shifts = q, k, bias, shifts
        self.scale, self.softcap, self.holes, self.pool = scale, softcap, holes, pool

    def scores(self, tile: Tile) -> Float[Tensor, "kv stacked columns"]:
        """The scores less the largest of their row."""
        scores, _ = self._scores(tile)
        shift = scores.amax(-1, keepdim=True)
        tile.put(self.shifts, shift)
        return scores.sub_(shift)

    def again(self, tile: Tile) -> Float[Tensor, "kv stacked columns"]:
        """The same from shifts that are known; `gradient` of this tile is to follow."""
        scores, self._capped = self._scores(tile)
        return scores.sub_(tile.rows_of(self.shifts))

    def differentiate(
        self,
        v: Float[Tensor, "batch kv_heads keys value_dim"],
        upstream: Float[Tensor, "batch heads queries value_dim"],
        delta: Float[Tensor, "batch heads queries 1"],
        grad_bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
    ) -> None:
        """What `gradient` needs, and the room for that of the bias."""
        self._v, self._upstream, self._delta, self._grad_bias = v, upstream, delta, grad_bias

    def gradient(
        self,
        tile: Tile,
        weights: Float[Tensor, "kv stacked columns"],
        kept: Float[Tensor, "kv stacked columns"] | None,
    ) -> Float[Tensor, "kv stacked columns"]:
        """The gradient of the products of queries and keys, given what dropout multiplied the weights by."""
        grad = products("grad", tile, tile.rows_of(self._upstream), self._v.mT, 1.0, self.pool)
        if kept is not None:
            grad.mul_(kept)
        grad.sub_(tile.rows_of(self._delta)).mul_(weights)
        if self._grad_bias is not None:
            for keys, span in tile.spans(tile.by_head(grad)):
                here = pick(self._grad_bias, *tile.where, slice(keys.start, keys.stop))
                here.add_(span.sum_to_size(here.shape))  # the bias repeats these axes
        if self._capped is not None:
            grad.mul_(self._capped.square_().neg_().add_(1.0))
        return grad

    def _scores(
        self, tile: Tile
    ) -> tuple[Float[Tensor, "kv stacked columns"], Float[Tensor, "kv stacked columns"] | None]:
        """The scores, and tanh(score / c) where there is a softcap c, for the gradient."""
        rows, capped = tile.rows_of(self.q), None
        if self.softcap is None:
            scores = products("scores", tile, rows, self.k.mT, self.scale * LOG2_E, self.pool)
        else:
            scores = products("scores", tile, rows, self.k.mT, self.scale / self.softcap, self.pool)
            capped = torch.tanh(scores, out=self.pool.take("capped", tile, rows))
            torch.mul(capped, self.softcap * LOG2_E, out=scores)
        if self.bias is not None:
            for keys, span in tile.spans(tile.by_head(scores)):
                here = pick(self.bias, *tile.where, slice(keys.start, keys.stop))
                if self.holes:
                    here = here.clamp(min=torch.finfo(here.dtype).min / 2)  # finite: `lower` hides it
                span.add_(here, alpha=LOG2_E)
        tile.lower(scores)
        return scores, capped
