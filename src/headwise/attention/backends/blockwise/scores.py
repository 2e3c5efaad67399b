"""Scores of blockwise attention, one tile at a time: in float32 or float64, or in bfloat16.

bfloat16 keeps eight bits, so a score s is rounded by up to |s| 2^-9. An error in a score matters in proportion to the
weight of its key. So each row is shifted such that its heavy scores are near zero: then scores with large errors have
small weights. The product subtracts the shift itself, before it rounds: queries get two additional features that hold
the shift, keys get ones there. Two bfloat16 features hold 16 bits of the shift. If the shifts of a tile are so large
that 16 bits are too few, its products are computed in float32.

The shift is predicted from the mean and the variance of each feature of the keys. If features were independent, the
scores of a row would be normally distributed with some mean and variance s^2. Of n such scores x, those that dominate
the sum of exp(x)^2, and thus the error, lie 2 s^2 above the mean, or at the maximum if that is lower (Derrida 1981,
Random-energy model, at the inverse temperature 2). If the largest score of a row is not near the predicted shift, the
product is computed again with a corrected shift.
"""

from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.tiles import (
    LOG2_E,
    BlockwisePlan,
    Pool,
    Tile,
    products,
    reads_most_keys,
    select,
)
from headwise.attention.tensors import Bias, Keys, Outputs, Queries, RowColumn, Stacked, StackedColumn, Values
from headwise.shapes import Float

FLOAT32_BLOCK_OVERHEAD, BFLOAT16_BLOCK_OVERHEAD = 2**17, 2**18
"""Fixed cost of one block, in scores that could be computed in the same time."""


class Float32Scores:
    """Computes the scores of blockwise attention in float32 or float64, one tile (rectangle of the score matrix) at a
    time, and in the backward pass the gradients of the scores. Scores are divided by ln 2, so the unnormalized weight
    of a key is 2^score. The largest score of each row in the tile is subtracted from all scores of this row.

    Attributes:
        largest_uncapped: largest score of each row of the latest tile before the softcap and without the bias; None
            without a softcap, or if it is not asked for.
    """

    def __init__(
        self,
        q: Queries,
        k: Keys,
        bias: Bias | None,
        scale: float,
        softcap: float | None,
        bias_hides: bool,
        pool: Pool,
        shifts: RowColumn,
        *,
        finds_uncapped: bool = False,
    ) -> None:
        """Store the tensors and options of a call. With `finds_uncapped`, the largest scores before the softcap are
        computed too.
        """
        self.q, self.k, self.bias, self.shifts = q, k, bias, shifts
        self.scale, self.softcap, self.bias_hides, self.pool = scale, softcap, bias_hides, pool
        self.largest_uncapped: StackedColumn | None = None
        self._finds_uncapped = finds_uncapped and softcap is not None

    def shifted_scores(self, tile: Tile) -> Stacked:
        """Return the scores of a tile (rectangle of the score matrix) minus the largest score of each row. Write these
        largest scores to `self.shifts`.
        """
        scores, _ = self._scores(tile)
        shift = scores.amax(-1, keepdim=True)
        tile.write(self.shifts, shift)
        return scores.sub_(shift)

    def recompute(self, tile: Tile) -> Stacked:
        """Return the scores of a tile, computed again in the backward pass, minus the numbers that the forward pass
        wrote to `self.shifts`.
        """
        scores, self._tanh = self._scores(tile)
        return scores.sub_(tile.stack_rows(self.shifts))

    def start_backward(self, v: Values, upstream: Outputs, delta: RowColumn, grad_bias: Bias | None) -> None:
        """Store the tensors that `score_gradient` reads. `v` are the values, and `upstream` is the output's gradient
        divided by each row's sum of unnormalized weights. `delta` is the number that the softmax's gradient subtracts
        in each row. The gradient of the bias is added to `grad_bias`, unless it is None.
        """
        self._v, self._upstream, self._delta, self._grad_bias = v, upstream, delta, grad_bias

    def score_gradient(self, tile: Tile, weights: Stacked, dropout_factors: Stacked | None) -> Stacked:
        """Return the gradient with respect to a tile's scaled products `scale * q k^T`, before any softcap. If the bias
        needs a gradient, add the gradient of the tile's scores to the gradient of the bias. `weights` are the tile's
        unnormalized weights 2^(score - shift).
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

    def _scores(self, tile: Tile) -> tuple[Stacked, Stacked | None]:
        """Return the scores of a tile with softcap and bias, divided by ln 2. Also return tanh(scaled product /
        softcap), which the backward pass needs, or None without a softcap.
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


# -- scores in bfloat16 ------------------------------------------------------------------------------------------------

FARTHEST = 8.0
"""Largest accepted distance in nats between the largest score of a row and the row's shift."""

LARGE_SHIFT, FARTHEST_IF_LARGE = 64.0, 1.0
"""Size of a shift in nats above which the largest score must be within `FARTHEST_IF_LARGE` of it.

The prediction of a large shift is rounded to bfloat16 itself, so it can be off by much more than the scores vary.
"""

LARGEST_SPLIT_SHIFT = 2.0**16
"""Largest shift in nats that two bfloat16 features represent, to within half a nat."""

MOST_PRODUCTS = 6
"""Largest number of products for one tile. Each correction reduces the distance to the largest score by 2^8."""

SAMPLE_KEYS = 256
"""Approximate number of keys from which the mean and variance of the features are computed."""


class BFloat16Scores:
    """Computes the scores of blockwise attention in bfloat16, one tile (rectangle of the score matrix) at a time, and
    in the backward pass the gradients of the scores. Scores are divided by ln 2, so the unnormalized weight of a key is
    2^score. One number, the shift, is subtracted from all scores of a row. It is chosen so that the row's largest
    scores are near zero, where bfloat16 is precise.

    Attributes:
        largest_uncapped: None, since there is no softcap.
    """

    largest_uncapped = None

    def __init__(self, q: Queries, k: Keys, scale: float, plan: BlockwisePlan, pool: Pool, shifts: RowColumn) -> None:
        """Store the tensors of a call, and the keys with two more features that are 1, which subtract a row's shift."""
        self.q, self.scale, self.plan, self.pool, self.shifts = q, scale, plan, pool, shifts
        self._extended_keys = extend_with_ones(k, plan)
        self._k = k

    def shifted_scores(self, tile: Tile) -> Stacked:
        """Return the scores of a tile (rectangle of the score matrix) minus one shift for each row, and write the
        shifts to `self.shifts`. Shifts are subtracted before the scale is applied. They are predicted from the queries
        and from the mean and variance of the keys. Then they are corrected until the largest shifted score of every row
        is near zero.
        """
        mean, deviation = (tile.stack_rows(moment) for moment in self._moments)
        highest = NormalDist().inv_cdf(max(1 - 1 / tile.block.width, 0.5))
        shift = torch.addcmul(mean, deviation, (deviation * (2 * self.scale)).clamp_(max=highest))
        rows = tile.stack_rows(self.q)
        magnitude = self._predicted_magnitude
        for attempt in range(MOST_PRODUCTS):
            if attempt > 0 or not magnitude <= LARGE_SHIFT:
                magnitude = self._magnitude(shift)
            scores = self._product(tile, rows, shift, magnitude)
            largest, written = _row_maximum(scores), shift
            farthest = (FARTHEST_IF_LARGE if magnitude > LARGE_SHIFT else FARTHEST) * LOG2_E
            least, most = torch.aminmax(largest)
            if least >= -farthest and most <= farthest:
                break
            shift = _finite(shift.float()) + _finite(largest.float() / (self.scale * LOG2_E))
        tile.write(self.shifts, written)
        return scores

    def recompute(self, tile: Tile) -> Stacked:
        """Return the scores of a tile, computed again in the backward pass, minus the shifts that the forward pass
        wrote to `self.shifts`.
        """
        shift, magnitude = tile.stack_rows(self.shifts), self._written_magnitude
        if not magnitude <= LARGEST_SPLIT_SHIFT:
            magnitude = self._magnitude(shift)
        return self._product(tile, tile.stack_rows(self.q), shift, magnitude)

    def start_backward(self, v: Values, upstream: Outputs, delta: RowColumn, _: Tensor | None = None) -> None:
        """Store two factors whose product is `upstream v^T - delta`: the values `v` and the upstream gradient
        `upstream`, each with two additional features. The additional features of the values are 1; those of the
        upstream gradient add up to `-delta`. `delta` is the number that the softmax's gradient subtracts in each row.
        """
        self._extended_upstream = extend_with_shift(upstream, delta)
        self._extended_values = extend_with_ones(v, self.plan)

    def score_gradient(self, tile: Tile, weights: Stacked, _: Tensor | None = None) -> Stacked:
        """Return the gradient with respect to a tile's scaled products `scale * q k^T`. `weights` are the tile's
        unnormalized weights 2^(score - shift).
        """
        upstream = tile.stack_rows(self._extended_upstream)
        return products("gradient", tile, upstream, self._extended_values, 1.0, self.pool).mul_(weights)

    @cached_property
    def _moments(self) -> tuple[RowColumn, RowColumn]:
        """Predicted mean and standard deviation of each query's dot products with all keys, before the scale is
        applied. Both are computed from a sample of at most 511 keys, as if the features of keys were independent.
        """
        sample = self._k[:, :, :: max(self._k.shape[2] // SAMPLE_KEYS, 1)].float()
        mean = sample.mean(2, keepdim=True)
        variance = (sample - mean).square_().mean(2, keepdim=True)
        rows = self.q.reshape(*self._k.shape[:2], -1, self.q.shape[-1])
        moments = rows @ mean.mT.to(rows.dtype), (rows.square() @ variance.mT.to(rows.dtype)).sqrt_()
        return moments[0].view_as(self.shifts), moments[1].view_as(self.shifts)

    @cached_property
    def _predicted_magnitude(self) -> float:
        """Upper bound of the absolute values of all predicted shifts (numbers that are subtracted from the scores of a
        row), in nats; infinite or NaN if a prediction overflows.
        """
        mean, deviation = self._moments
        return float((mean.abs() + 6 * deviation).amax()) * self.scale  # no prediction is 6 deviations from the mean

    @cached_property
    def _written_magnitude(self) -> float:
        """Largest absolute value of the shifts (numbers that are subtracted from the scores of a row) that the forward
        pass wrote, in nats. This property is cached, so it must not be read before all shifts are written.
        """
        return self._magnitude(self.shifts)

    def _magnitude(self, shift: Float[Tensor, "*axes 1"]) -> float:
        """Return the largest absolute value of the given shifts (numbers that are subtracted from the scores of a row),
        in nats. Shifts are subtracted before the scale is applied, so their largest value is multiplied by the scale.
        """
        lowest, highest = torch.aminmax(shift)
        return max(-float(lowest), float(highest)) * self.scale

    def _product(
        self, tile: Tile, rows: Float[Tensor, "kv stacked head_dim"], shift: StackedColumn, magnitude: float
    ) -> Stacked:
        """Return a tile's scores `(rows k^T - shift) * scale`, divided by ln 2. Keys and `rows` have two additional
        bfloat16 features, so that the matrix product subtracts the shift. If `magnitude`, the largest absolute shift in
        nats, is above 2^16 or NaN, the scores are computed in float32 instead.
        """
        factor = self.scale * LOG2_E
        if magnitude <= LARGEST_SPLIT_SHIFT:
            scores = products("scores", tile, extend_with_shift(rows, shift), self._extended_keys, factor, self.pool)
        else:
            scores = self.pool.buffer("scores", tile, rows)
            for keys, span in tile.spans(scores):
                exact = torch.bmm(rows.float(), tile.select_keys(self._k, keys).float().mT)
                span.copy_(exact.sub_(shift.float()).mul_(factor))
        tile.hide(scores)
        return scores


def _finite(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return a tensor with zeros in place of NaN and infinities. These arise where the predicted shift of a row, the
    number to subtract from its scores, overflows.
    """
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def extend_with_ones(
    tensor: Float[Tensor, "*axes keys width"], plan: BlockwisePlan
) -> Float[Tensor, "*axes width_and_2 keys"]:
    """Return keys or values with keys as the last axis and with two additional features of 1. In the product with
    `rows` from `extend_with_shift`, these two features subtract a number from each row of the product.

    If the plan reads most keys, keys are adjacent in memory, which makes products faster; otherwise features are, since
    a part of the keys is then faster to copy.
    """
    *axes, keys, width = tensor.shape
    keys_adjacent = reads_most_keys(plan)
    extended = (
        tensor.new_empty(*axes, width + 2, keys) if keys_adjacent else tensor.new_empty(*axes, keys, width + 2).mT
    )
    extended[..., :width, :] = tensor.mT
    extended[..., width:, :] = 1.0
    return extended


def extend_with_shift(
    rows: Float[Tensor, "*axes width"], shift: Float[Tensor, "*axes 1"]
) -> Float[Tensor, "*axes width_and_2"]:
    """Return `rows` with two additional features: `-shift` rounded to the dtype of `rows`, and the remainder, so that
    their sum is `-shift`. In the product with keys from `extend_with_ones`, these features subtract `shift` before the
    product is rounded.
    """
    if shift.dtype == rows.dtype:
        return torch.cat([rows, -shift, torch.zeros_like(shift)], -1)
    rounded = shift.to(rows.dtype)
    return torch.cat([rows, -rounded, (rounded - shift).to(rows.dtype)], -1)


def _row_maximum(scores: Stacked) -> StackedColumn:
    """Return the largest score of each row of a bfloat16 tensor. The bits of the scores are compared as 16-bit
    integers, eight times as fast as floats. Positive floats have the order of these integers. Negative floats have the
    opposite order, and are negative as integers too.
    """
    bits = scores.view(torch.int16)
    largest = bits.amax(-1, keepdim=True)
    if largest.amin() < 0:
        largest = torch.where(largest < 0, bits.amin(-1, keepdim=True), largest)
    return largest.view(scores.dtype)
