"""Forward and backward pass of blockwise attention, tile by tile, as a differentiable function of torch.

With s the scores of row i in units of ln 2, c a shift of each row near its largest score, and P the tile,

    P_ij = 2^(s_ij - c_i)     l_i = sum_j P_ij     O_i = (P V)_i / l_i

Output, c and l are saved. The backward pass computes P again, and divides by l where that is cheap: in dO, the gradient
of the output. With g the gradient of the log-sum-exp and dO' = dO / l,

    dV += P^T dO'     dS = P (dO' V^T - delta)     delta_i = (dO_i . O_i - g_i) / l_i
    dQ  = dS K        dK += dS^T Q

A sink logit adds its power to l, and nothing to the output.

(Dao et al. 2022, FlashAttention, appendix B, with the division deferred as in Rabe and Staats 2021.)
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer, RowBlock
from headwise.attention.backends.blockwise.scores import BFloat16Scores, Float32Scores
from headwise.attention.backends.blockwise.tiles import LOG2_E, BlockwisePlan, Pool, Tile, iterate_tiles
from headwise.attention.backends.sinks_gradient import OnlyFirstDerivative, SinksGradient
from headwise.attention.masks.grid import Grid
from headwise.attention.tensors import Bias, Keys, Outputs, PerRow, Queries, RowColumn, Stacked, StackedColumn, Values
from headwise.shapes import Float

PARTIAL_SUMS = 64
"""Number of bfloat16 sums into which a row is added before these are added in float32."""


class Observation(NamedTuple):
    """Function that receives the attention weights of one call, and the other data that it receives: the call's tokens,
    padding, sizes, positions and value vectors. The function is called once for each tile (rectangle of the score
    matrix), while the weights of the tile are in the CPU cache.
    """

    observer: Observer
    call_context: CallContext
    grid: Grid
    values: Values


class CallOptions(NamedTuple):
    """Options of one blockwise attention call, which the forward and the backward pass both read. They include the
    blocks of the score matrix to compute, scale, softcap, dropout with its seed, and the function that receives the
    attention weights.

    Attributes:
        bfloat16_scores: True for scores in bfloat16, False for scores in the dtype of q.
        bias_hides: True if the bias is -inf somewhere.
        threads: number of threads that tiles are made for.
        observation: function that receives the weights of each tile, and facts about the call; None without.
    """

    plan: BlockwisePlan
    bfloat16_scores: bool
    scale: float
    softcap: float | None
    bias_hides: bool
    dropout: float
    threads: int
    seed: int
    observation: Observation | None

    def prepare_scores(
        self, q: Tensor, k: Tensor, bias: Tensor | None, pool: Pool, shifts: RowColumn
    ) -> BFloat16Scores | Float32Scores:
        """Return the object that computes the scores of each tile (rectangle of the score matrix) and their gradient.
        From all scores of a query row, one number is subtracted, the shift of the row. The forward pass writes the
        shifts to `shifts`; the backward pass reads them there.
        """
        if self.bfloat16_scores:
            return BFloat16Scores(q, k, self.scale, self.plan, pool, shifts)
        options = (self.scale, self.softcap, self.bias_hides)
        return Float32Scores(q, k, bias, *options, pool, shifts, finds_uncapped=self.observation is not None)

    def tiles(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Iterator[Tile]:
        """Yield the tiles, the rectangles of the score matrix that are computed one after another. Their order is
        always the same.
        """
        return iterate_tiles(self.plan, q, k, bias if self.bias_hides else None, self.threads)

    def dropout_factors(self, number: int, tile: Tile, weights: Stacked, pool: Pool) -> Stacked | None:
        """Return one dropout factor for each weight of a tile: 0 with probability `dropout`, otherwise 1 / (1 -
        dropout). Return None without dropout. The factors depend only on the call's seed and the tile's `number`, so
        the forward and the backward pass use the same ones.
        """
        if self.dropout == 0:
            return None
        generator = torch.Generator(weights.device).manual_seed(self.seed + number)
        factors = pool.buffer("dropout", tile, weights)
        return factors.bernoulli_(1 - self.dropout, generator=generator).div_(1 - self.dropout)


class BlockwiseAttention(torch.autograd.Function):
    """Differentiable attention that computes only those blocks of the score matrix that contain a visible key. A block
    is computed in tiles. A tile has only some of the sequences and heads, so that its scores fit the CPU cache.
    """

    @staticmethod
    def forward(
        q: Queries, k: Keys, v: Values, bias: Bias | None, sinks: Float[Tensor, "heads 1"] | None, options: CallOptions
    ) -> tuple[Tensor | None, ...]:
        """Return the output, the log-sum-exp of each query row (None with bfloat16 scores), and two numbers of each row
        for the backward pass. The shift is subtracted from the row's scores (before the scale is applied, if scores are
        bfloat16). The sum is the divisor of the row's softmax: the sum of 2^(score / ln 2 - shift) over the keys and
        the head's sink logit.
        """
        out = _empty_rows(q, v.shape[-1], options.plan)
        shifts = q.new_zeros(*q.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32))
        sums = torch.full_like(shifts, torch.inf)
        pool, observation = Pool(options.plan, q, k, options.threads), options.observation
        value_dim, visibility, features = v.shape[-1], None, None
        scores = options.prepare_scores(q, k, bias, pool, shifts)
        for number, tile in enumerate(options.tiles(q, k, bias)):
            shifted = scores.shifted_scores(tile)
            powers = torch.exp2(shifted, out=shifted if observation is None else pool.buffer("powers", tile, shifted))
            power_sum = _row_sums(powers)
            if tile.has_key is not None:
                tile.by_head(power_sum).masked_fill_(~tile.has_key, torch.inf)
            normalizer = power_sum
            if sinks is not None:
                # A log-sum-exp of the keys is not used: its rounding error would be one of every weight.
                shift = tile.stack_rows(shifts)
                logits = sinks[tile.heads, :, None].double() * LOG2_E - tile.by_head(shift).double()
                normalizer = power_sum + logits.exp2_().to(shift.dtype).view_as(shift)
            factors = options.dropout_factors(number, tile, powers, pool)
            if observation is not None:
                visibility = observation.call_context.visibility(tile, observation.grid)
                features = visibility.stacked_key_features if factors is None else None
            product = _times(tile, powers if factors is None else factors.mul_(powers), v, features)
            if observation is not None and visibility is not None:
                uncapped = scores.largest_uncapped
                observation.observer(
                    RowBlock(
                        tile=tile,
                        grid=observation.grid,
                        call_context=observation.call_context,
                        visibility=visibility,
                        powers=powers,
                        power_score_sum=shifted.mul_(powers).sum(-1, keepdim=True),
                        power_sum=power_sum,
                        normalizer=normalizer,
                        largest_power=1.0,
                        largest_score=tile.stack_rows(shifts) / LOG2_E,
                        largest_uncapped_score=None if uncapped is None else uncapped / LOG2_E,
                        out=product[..., :value_dim] / normalizer,
                        feature_products=product[..., value_dim:] if product.shape[-1] > value_dim else None,
                        values=observation.values,
                    )
                )
            tile.write(out, product[..., :value_dim].div_(normalizer))
            tile.write(sums, normalizer)
        if options.bfloat16_scores:
            return out, None, shifts, sums
        # An infinite sum marks a row without a visible key, or one whose scores are all far below the sink.
        lse = ((sums.double().log2() + shifts.double()) / LOG2_E).to(shifts.dtype)[..., 0]
        lse = torch.where(sums[..., 0] == torch.inf, -torch.inf if sinks is None else sinks.to(lse.dtype), lse)
        return out, lse, shifts, sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save the tensors and options that the backward pass needs: the inputs, the output, the log-sum-exp, and two
        numbers of each row. These are the shift, which is subtracted from the row's scores, and the divisor of the
        row's softmax.
        """
        *tensors, ctx.options = inputs
        out, lse, shifts, sums = output
        ctx.save_for_backward(*tensors, out, lse, shifts, sums)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(shifts, sums)

    @staticmethod
    def backward(ctx: Any, grad_out: Outputs | None, grad_lse: PerRow | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, the bias and the sinks, given the gradients of the output and the
        log-sum-exp.
        """
        q, k, v, bias, sinks, out, lse, shifts, sums = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        inputs = (grad_out, grad_lse, q, k, v, bias, out, shifts, sums, ctx.options, ctx.needs_input_grad[3])
        gradients = BlockwiseBackward.apply(*inputs)  # type: ignore[no-untyped-call]
        of_sinks = None
        if ctx.needs_input_grad[4]:
            deltas = (grad_out * out.to(sums.dtype)).sum(-1)
            of_rows = (deltas, grad_lse, lse, shifts[..., 0], 1 / sums[..., 0])
            of_sinks = SinksGradient.apply(*of_rows, sinks[:, 0])[:, None]  # type: ignore[no-untyped-call]
        *of_qkv, of_bias = gradients
        return *of_qkv, None if of_bias is None else of_bias.to(bias.dtype), of_sinks, None


class BlockwiseBackward(OnlyFirstDerivative):
    """Backward pass of `BlockwiseAttention`, one tile (rectangle of the score matrix) at a time. It cannot be
    differentiated again.
    """

    attention = "blockwise attention"

    @staticmethod
    def forward(
        grad_out: Outputs,
        grad_lse: PerRow | None,
        q: Queries,
        k: Keys,
        v: Values,
        bias: Bias | None,
        out: Outputs,
        shifts: RowColumn,
        sums: RowColumn,
        options: CallOptions,
        bias_needs_grad: bool,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the bias (None if the bias needs no gradient). The weights of each tile
        (rectangle of the score matrix) are computed again, since the forward pass does not store them.
        """
        delta = (grad_out * out.to(sums.dtype)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[..., None]
        upstream, delta = torch.div(grad_out, sums, out=torch.empty_like(out)), delta / sums
        grad_q = _empty_rows(q, q.shape[-1], options.plan)
        # Keys last: the products that give these run a quarter faster so.
        grad_k, grad_v = (
            torch.zeros(x.mT.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (k, v)
        )
        grad_bias = torch.zeros_like(bias, dtype=sums.dtype) if bias_needs_grad and bias is not None else None
        pool = Pool(options.plan, q, k, options.threads)
        scores = options.prepare_scores(q, k, bias, pool, shifts)
        scores.start_backward(v, upstream, delta, grad_bias)
        for number, tile in enumerate(options.tiles(q, k, bias)):
            powers = scores.recompute(tile).exp2_()
            factors = options.dropout_factors(number, tile, powers, pool)
            used_powers = powers if factors is None else powers * factors
            _add_products(tile, grad_v, tile.stack_rows(upstream), used_powers)
            grad = scores.score_gradient(tile, powers, factors)
            tile.write(grad_q, _times(tile, grad, k))
            _add_products(tile, grad_k, tile.stack_rows(q), grad)
        if options.scale != 1.0:
            grad_q.mul_(options.scale)
            grad_k.mul_(options.scale)
        return grad_q, _keys_first(grad_k, k), _keys_first(grad_v, v), grad_bias


def _empty_rows(
    like: Float[Tensor, "batch heads length _"], width: int, plan: BlockwisePlan
) -> Float[Tensor, "batch heads length {width}"]:
    """Return a tensor for results, with the batch, heads and length of `like` and `width` features. In memory, the
    heads of one position are adjacent, as output projections read them. If the blocks of `plan` do not cover all query
    rows, the tensor is filled with 0, otherwise it is uninitialised.
    """
    batch, heads, length, _ = like.shape
    covers_all = all(sum(len(block.rows) for block in group.blocks) == length for group in plan)
    allocate = like.new_empty if covers_all else like.new_zeros
    return allocate(batch, length, heads, width).transpose(1, 2)


def _row_sums(powers: Stacked) -> StackedColumn:
    """Return the sum of each row of unnormalized weights, in float32 at least. To be faster than a conversion of all
    columns to float32, a bfloat16 row is first reduced to `PARTIAL_SUMS` partial sums in bfloat16.
    """
    if powers.dtype in (torch.float32, torch.float64):
        return powers.sum(-1, keepdim=True)
    foldable = powers.shape[-1] // PARTIAL_SUMS * PARTIAL_SUMS
    folded = powers[..., :foldable].view(*powers.shape[:-1], -1, PARTIAL_SUMS).sum(-2)
    return torch.cat([folded, powers[..., foldable:]], -1).sum(-1, keepdim=True, dtype=torch.float32)


def _times(
    tile: Tile,
    left: Stacked,
    right: Float[Tensor, "batch kv_heads keys width"],
    features: Float[Tensor, "#batch columns features"] | None = None,
) -> Float[Tensor, "kv stacked width_and_features"]:
    """Return the matrix product of `left` (such as weights) and `right` (such as values) over the keys of a tile
    (rectangle of the score matrix). `features`, some numbers for each key, are appended to `right` as additional
    columns.
    """
    product, offset = None, 0
    for keys, span in tile.spans(left):
        columns = tile.select_keys(right, keys)
        if features is not None:
            part = features[:, None, offset : offset + len(keys)].to(columns.dtype)
            kv_heads = len(columns) // tile.shape[0]
            columns = torch.cat([columns, part.expand(tile.shape[0], kv_heads, -1, -1).flatten(0, 1)], -1)
            offset += len(keys)
        product = torch.bmm(span, columns) if product is None else product.baddbmm_(span, columns)
    assert product is not None
    return product


def _add_products(
    tile: Tile,
    total: Float[Tensor, "batch kv_heads width keys"],
    rows: Float[Tensor, "kv stacked width"],
    scores: Stacked,
) -> None:
    """Add the matrix product `rows^T scores` over a tile's query rows to `total`, at the tile's keys. A tile is a
    rectangle of the score matrix. For the gradient of v, `scores` are unnormalized weights, and `rows` is the output's
    gradient divided by the sum of each row's unnormalized weights.
    """
    for keys, span in tile.spans(scores):
        columns = total[tile.sequences, tile.kv_heads, :, keys.start : keys.stop]
        if columns.dtype == rows.dtype and (columns.shape[0] == 1 or columns.shape[1] == total.shape[1]):
            columns.flatten(0, 1).baddbmm_(rows.mT, span)  # these axes are one in memory, so nothing is copied
        else:
            columns.add_(torch.bmm(rows.mT, span).view(columns.shape))


def _keys_first(
    grad: Float[Tensor, "batch kv_heads width keys"], like: Float[Tensor, "batch kv_heads keys width"]
) -> Float[Tensor, "batch kv_heads keys width"]:
    """Return the gradient `grad`, whose last axis is the keys, with its last two axes exchanged. The result has the
    axes and the dtype of `like`.
    """
    batch, heads, keys, width = like.shape
    return like.new_empty(batch, keys, heads, width).transpose(1, 2).copy_(grad.mT)
