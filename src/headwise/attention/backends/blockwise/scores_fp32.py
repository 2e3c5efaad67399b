"""Scores in float32 or float64, for a softcap, a bias, sinks, dropout, the log-sum-exp or inputs in these dtypes."""

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.tiles import LOG2_E, Pool, Tile, products, select
from headwise.shapes import Float

BLOCK_OVERHEAD = 2**17
"""Fixed cost of one block, in scores that could be computed in the same time."""


class Float32Scores:
    """Scores of blockwise attention in float32 or float64, one tile (rectangle of the score matrix) at a time, and
    their gradients in the backward pass. Scores are divided by ln 2, so the unnormalized weight of a key is 2^score.
    The largest score of each row is subtracted from the row.

    Attributes:
        largest_uncapped: largest score of each row of the latest tile before the softcap and without the bias; None
            without a softcap, or if it is not asked for.
    """

    def __init__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
        scale: float,
        softcap: float | None,
        bias_hides: bool,
        pool: Pool,
        shifts: Float[Tensor, "batch heads queries 1"],
        *,
        finds_uncapped: bool = False,
    ) -> None:
        """Store the tensors and options of a call. `shifted_scores` writes each row's largest score to `shifts`.

        `recompute` reads it. `bias_hides` is True if the bias is -inf somewhere, and `finds_uncapped` if the largest
        scores before the softcap are asked for.
        """
        self.q, self.k, self.bias, self.shifts = q, k, bias, shifts
        self.scale, self.softcap, self.bias_hides, self.pool = scale, softcap, bias_hides, pool
        self.largest_uncapped: Float[Tensor, "kv stacked 1"] | None = None
        self._finds_uncapped = finds_uncapped and softcap is not None

    def shifted_scores(self, tile: Tile) -> Float[Tensor, "kv stacked columns"]:
        """Return the scores of a tile after subtracting from each row its largest score, and write these largest scores
        to `self.shifts`.
        """
        scores, _ = self._scores(tile)
        shift = scores.amax(-1, keepdim=True)
        tile.write(self.shifts, shift)
        return scores.sub_(shift)

    def recompute(self, tile: Tile) -> Float[Tensor, "kv stacked columns"]:
        """Return the scores of a tile, after subtracting from each row the number that `shifted_scores` wrote in the
        forward pass. With a softcap, also store the tanh of the scaled products divided by the softcap, for the call of
        `score_gradient` for this tile.
        """
        scores, self._tanh = self._scores(tile)
        return scores.sub_(tile.stack_rows(self.shifts))

    def start_backward(
        self,
        v: Float[Tensor, "batch kv_heads keys value_dim"],
        upstream: Float[Tensor, "batch heads queries value_dim"],
        delta: Float[Tensor, "batch heads queries 1"],
        grad_bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
    ) -> None:
        """Store tensors for `score_gradient`. `upstream` is the output's gradient divided by each row's sum of
        unnormalized weights. `delta` is the number that the softmax's gradient subtracts in each row. `score_gradient`
        adds the gradient of the bias to `grad_bias`, unless that is None.
        """
        self._v, self._upstream, self._delta, self._grad_bias = v, upstream, delta, grad_bias

    def score_gradient(
        self,
        tile: Tile,
        weights: Float[Tensor, "kv stacked columns"],
        dropout_factors: Float[Tensor, "kv stacked columns"] | None,
    ) -> Float[Tensor, "kv stacked columns"]:
        """Return the gradient with respect to a tile's scaled products `scale * q k^T`, before any softcap. `weights`
        are the tile's unnormalized weights 2^(score - shift). If a bias needs a gradient, its gradient is added to the
        tensor passed to `start_backward`.
        """
        grad = products("gradient", tile, tile.stack_rows(self._upstream), self._v.mT, 1.0, self.pool)
        if dropout_factors is not None:
            grad.mul_(dropout_factors)
        grad.sub_(tile.stack_rows(self._delta)).mul_(weights)
        if self._grad_bias is not None:
            for keys, span in tile.spans(tile.by_head(grad)):
                grad_span = select(self._grad_bias, *tile.row_slices, slice(keys.start, keys.stop))
                grad_span.add_(span.sum_to_size(grad_span.shape))  # the sum over axes along which the bias broadcasts
        if self._tanh is not None:
            grad.mul_(self._tanh.square_().neg_().add_(1.0))
        return grad

    def _scores(
        self, tile: Tile
    ) -> tuple[Float[Tensor, "kv stacked columns"], Float[Tensor, "kv stacked columns"] | None]:
        """Return the scores of a tile with softcap and bias, divided by ln 2, and tanh(scaled product / softcap), which
        the gradient needs; without a softcap the second is None. The method `tile.hide` lowers the scores of hidden
        keys, so that these keys get no weight.
        """
        rows, tanh = tile.stack_rows(self.q), None
        if self.softcap is None:
            scores = products("scores", tile, rows, self.k.mT, self.scale * LOG2_E, self.pool)
        else:
            scores = products("scores", tile, rows, self.k.mT, self.scale / self.softcap, self.pool)
            if self._finds_uncapped:
                visible = scores.clone()
                tile.hide(visible)
                self.largest_uncapped = visible.amax(-1, keepdim=True) * (self.softcap * LOG2_E)
            tanh = torch.tanh(scores, out=self.pool.buffer("tanh", tile, rows))
            torch.mul(tanh, self.softcap * LOG2_E, out=scores)
        if self.bias is not None:
            for keys, span in tile.spans(tile.by_head(scores)):
                bias = select(self.bias, *tile.row_slices, slice(keys.start, keys.stop)).to(span.dtype)
                if self.bias_hides:
                    bias = bias.clamp(min=torch.finfo(bias.dtype).min / 2)  # finite; `hide` hides these keys
                span.add_(bias, alpha=LOG2_E)
        tile.hide(scores)
        return scores, tanh
