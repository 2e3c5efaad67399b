"""Attention over blocks of query rows, in plain torch operations. What a mask hides costs nothing.

The mask is asked about every block first. A block that it calls empty is never touched, and one that it calls full is
never masked. The plan of this, in `blocks.py`, is made once for the forward and the backward pass. A block of rows goes
over all its keys at once. With s the scores of row i in powers of two, c about the largest of them, and P the block

    P_ij = 2^(s_ij - c_i)     l_i = sum_j P_ij     O_i = (P V)_i / l_i

Output, c and l are kept. The backward pass computes P again, and divides by l where that is short: in dO, the gradient
of the output. With g the gradient of the log-sum-exp and dO' = dO / l,

    dV += P^T dO'     dS = P (dO' V^T - delta)     delta_i = (dO_i . O_i - g_i) / l_i
    dQ  = dS K        dK += dS^T Q

(Dao et al. 2022, FlashAttention, appendix B, with the division put off as in Rabe and Staats 2021.)

In bfloat16 the products are those of bfloat16 (`scores_bf16.py`), with sums in float32. Where the scores themselves are
needed (a softcap, a bias, sinks, the log-sum-exp), and in float16, for which CPUs have no fast product, everything is
computed in float32.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends import reference
from headwise.attention.backends.blockwise import scores_bf16, scores_fp32
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.plan import MOST_ROWS, BlockwisePlan, plan_of, reads_most
from headwise.attention.backends.blockwise.row_block import Observer, RowBlock
from headwise.attention.backends.blockwise.scores_bf16 import BFloat16Scores
from headwise.attention.backends.blockwise.scores_fp32 import Float32Scores
from headwise.attention.backends.blockwise.tiles import LOG2_E, Pool, Tile, tiles
from headwise.attention.backends.blockwise.visibility import TileVisibility
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem
from headwise.checks import has_readable_values, whole_number
from headwise.shapes import Float

name = "blockwise"

WATCHED_ROWS = 256
"""The most rows of a block that is watched: it keeps scores beside powers, and fewer of both stay in the cache."""

FOLD = 64
"""In how many sums a row of bfloat16 is added before these are, in float32."""


def why_not(problem: Problem) -> str | None:
    """The reason blocks of rows cannot do this problem, in one sentence, or None."""
    if problem.talking is not None:
        return "blocks hold some heads at a time, and talking_heads mixes all"
    if not has_readable_values(problem.q):
        return "its blocks are planned from sizes and masks, which are not known while compiling or under vmap"
    return None


def run(
    problem: Problem,
    rows: int | None = None,
    plan: BlockwisePlan | None = None,
    observer: Observer | None = None,
    call_context: CallContext | None = None,
) -> Answer:
    """The answer, by a plan, or by one in blocks of `rows` query rows; of `blocks.rows_of` unless given.

    An observer is shown all rows, some at a time; what they hold is overwritten after it returns.
    """
    if problem.return_weights:
        return reference.run(problem)  # the matrix that blocks avoid is asked for
    if 0 in (*problem.q.shape, *problem.k.shape):
        return reference.run(problem)  # nothing is held
    q, k, v = problem.q, problem.k, problem.v
    is_wide = observer is not None or not uses_bfloat16_scores(problem)
    if is_wide:
        q, k, v = (tensor.to(problem.score_dtype) for tensor in (q, k, v))
    scale = problem.scale
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    if plan is None:
        plan = plan_blocks(problem, rows, MOST_ROWS if observer is None else WATCHED_ROWS)
    holes = problem.bias is not None and bool(problem.bias.amin() == -torch.inf)
    seed = int(torch.randint(2**62, ())) if problem.dropout > 0 else 0
    watched = (
        None if observer is None else _Watched(observer, call_context or CallContext(), problem.grid, problem.sinks)
    )
    how = _How(plan, not is_wide, scale, problem.softcap, holes, problem.dropout, seed, watched)
    if not is_wide:
        v = v.contiguous()
    elif len(k) > 1 or reads_most(plan):  # where few keys of one sequence are read, it is from where they lie
        k, v = k.contiguous(), v.contiguous()
    out, lse, *_ = _Blockwise.apply(q, k, v, problem.bias, how)  # type: ignore[no-untyped-call]
    if problem.sinks is not None:
        out, lse = reference.with_sinks(out, lse, problem.sinks)
    return Answer(out.to(problem.q.dtype), lse if problem.return_lse else None, None)


@dataclass(frozen=True)
class Blockwise:
    """The backend in blocks of `rows` query rows: a whole number above 0, or None for as many as `rows_of` finds.

    Raises:
        InputError: any other number of rows.
    """

    rows: int | None = None
    name: str = field(default=name, init=False)

    def __post_init__(self) -> None:
        if self.rows is not None:
            whole_number("rows", self.rows, least=1)

    def why_not(self, problem: Problem) -> str | None:
        """See `Backend`."""
        return why_not(problem)

    def run(self, problem: Problem) -> Answer:
        """See `Backend`."""
        return run(problem, rows=self.rows)


def plan_blocks(problem: Problem, rows: int | None = None, most: int = MOST_ROWS) -> BlockwisePlan:
    """The blocks that a problem is computed in."""
    return plan_of(
        problem.mask,
        problem.grid,
        scores_bf16.BLOCK_OVERHEAD if uses_bfloat16_scores(problem) else scores_fp32.BLOCK_OVERHEAD,
        rows,
        most,
    )


def uses_bfloat16_scores(problem: Problem) -> bool:
    """Whether the products run in bfloat16: where nothing but weights is wanted of the scores."""
    needs_scores = (
        problem.softcap is not None
        or problem.bias is not None
        or problem.sinks is not None
        or problem.return_lse
        or problem.dropout > 0
        or isinstance(problem.scale, Tensor)
        or problem.scale <= 0.0
    )
    return problem.q.dtype == torch.bfloat16 and not needs_scores


class _How(NamedTuple):
    """What decides the weights beside the tensors. The bias has holes where it is -inf somewhere."""

    plan: BlockwisePlan
    narrow: bool
    scale: float
    softcap: float | None
    holes: bool
    dropout: float
    seed: int
    watched: "_Watched | None"


class _Watched(NamedTuple):
    """Who is shown the rows, and what they hold beside what is in a tile."""

    observer: Observer
    call_context: CallContext
    grid: Grid
    sinks: Float[Tensor, "heads 1"] | None

    def show(
        self,
        tile: Tile,
        visibility: TileVisibility,
        powers: Float[Tensor, "kv stacked columns"],
        power_score_sum: Float[Tensor, "kv stacked 1"],
        power_sum: Float[Tensor, "kv stacked 1"],
        shift: Float[Tensor, "kv stacked 1"],
        product: Float[Tensor, "kv stacked value_dim_and_features"],
        value_dim: int,
    ) -> None:
        """Call the observer with the row block of a tile, whose largest power is 1 after the shift."""
        normalizer = power_sum
        if self.sinks is not None:
            sinks = torch.exp2(self.sinks[tile.heads, :, None] * LOG2_E - tile.by_head(shift))
            normalizer = power_sum + sinks.view_as(power_sum)
        self.observer(
            RowBlock(
                tile=tile,
                grid=self.grid,
                call_context=self.call_context,
                visibility=visibility,
                powers=powers,
                power_score_sum=power_score_sum,
                power_sum=power_sum,
                normalizer=normalizer,
                largest_power=1.0,
                out=product[..., :value_dim] / normalizer,
                feature_products=product[..., value_dim:] if product.shape[-1] > value_dim else None,
            )
        )


# -- the weights of a tile, before they are divided by their sum -----------------------------------------------------


def _scores_of(
    how: "_How", q: Tensor, k: Tensor, bias: Tensor | None, pool: Pool, shifts: Float[Tensor, "batch heads queries 1"]
) -> BFloat16Scores | Float32Scores:
    """What gives the scores of a tile less a shift for each row, and their gradient."""
    if how.narrow:
        return BFloat16Scores(q, k, how.scale, how.plan, pool, shifts)
    return Float32Scores(q, k, bias, how.scale, how.softcap, how.holes, pool, shifts)


def _sums(weights: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "kv stacked 1"]:
    """The sum of each row. In bfloat16 of `FOLD` sums, rounded, since torch would make a wider copy of all."""
    if weights.dtype in (torch.float32, torch.float64):
        return weights.sum(-1, keepdim=True)
    whole = weights.shape[-1] // FOLD * FOLD
    folded = weights[..., :whole].view(*weights.shape[:-1], -1, FOLD).sum(-2)
    rest = weights[..., whole:]
    return torch.cat([folded, rest], -1).sum(-1, keepdim=True, dtype=torch.float32)


def _kept(
    how: _How, number: int, tile: Tile, weights: Float[Tensor, "kv stacked columns"], pool: Pool
) -> Tensor | None:
    """What dropout multiplies the weights of tile `number` by: the same whenever it is asked."""
    if how.dropout == 0:
        return None
    generator = torch.Generator(weights.device).manual_seed(how.seed + number)
    kept = pool.take("kept", tile, weights)
    return kept.bernoulli_(1 - how.dropout, generator=generator).div_(1 - how.dropout)


# -- forward and backward ---------------------------------------------------------------------------------------------


class _Blockwise(torch.autograd.Function):
    """The output, and the log-sum-exp of each row where products are not narrow."""

    @staticmethod
    def forward(
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        v: Float[Tensor, "batch kv_heads keys value_dim"],
        bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
        how: _How,
    ) -> tuple[Tensor | None, ...]:
        out = _heads_inside(q, v.shape[-1], how.plan)
        shifts = q.new_zeros(*q.shape[:-1], 1)
        totals = torch.full_like(shifts, torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        pool = Pool(how.plan, q, k)
        scores, watched = _scores_of(how, q, k, bias, pool, shifts), how.watched
        for number, tile in enumerate(tiles(how.plan, q, k, bias if how.holes else None)):
            exponents = scores.scores(tile)
            weights = torch.exp2(exponents, out=exponents if watched is None else pool.take("powers", tile, exponents))
            total = _sums(weights)
            if tile.alive is not None:
                tile.by_head(total).masked_fill_(~tile.alive, torch.inf)
            kept = _kept(how, number, tile, weights, pool)
            visibility = None if watched is None else watched.call_context.visibility(tile, watched.grid)
            beside = None if visibility is None or kept is not None else visibility.stacked_key_features
            product = _times(tile, weights if kept is None else kept.mul_(weights), v, beside)
            if watched is not None and visibility is not None:
                power_score_sum = exponents.mul_(weights).sum(-1, keepdim=True)
                shift = tile.rows_of(shifts)
                watched.show(tile, visibility, weights, power_score_sum, total, shift, product, v.shape[-1])
            tile.put(out, product[..., : v.shape[-1]].div_(total))
            tile.put(totals, total)
        lse = None if how.narrow else _log_sum_exp(shifts, totals)
        return out, lse, shifts, totals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        q, k, v, bias, ctx.how = inputs
        out, _, shifts, totals = output
        ctx.save_for_backward(q, k, v, bias, out, shifts, totals)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(shifts, totals)

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Float[Tensor, "batch heads queries value_dim"] | None,
        grad_lse: Float[Tensor, "batch heads queries"] | None,
        *_: None,
    ) -> tuple[Tensor | None, ...]:
        inputs = (grad_out, grad_lse, *ctx.saved_tensors, ctx.how, ctx.needs_input_grad[3])
        return *_BlockwiseBackward.apply(*inputs), None  # type: ignore[no-untyped-call]


class _BlockwiseBackward(torch.autograd.Function):
    """The gradient, as a function of its own, so that a second derivative meets a refusal and never a zero."""

    @staticmethod
    def forward(
        grad_out: Float[Tensor, "batch heads queries value_dim"] | None,
        grad_lse: Float[Tensor, "batch heads queries"] | None,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        v: Float[Tensor, "batch kv_heads keys value_dim"],
        bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
        out: Float[Tensor, "batch heads queries value_dim"],
        shifts: Float[Tensor, "batch heads queries 1"],
        totals: Float[Tensor, "batch heads queries 1"],
        how: _How,
        learns_bias: bool,
    ) -> tuple[Tensor | None, ...]:
        upstream, delta = _per_total(grad_out, grad_lse, out, totals)
        grad_q = _heads_inside(q, q.shape[-1], how.plan)
        # Keys last: the products that give these run a quarter faster so.
        grad_k, grad_v = (
            torch.zeros(x.mT.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (k, v)
        )
        grad_bias = torch.zeros_like(bias) if learns_bias and bias is not None else None
        pool = Pool(how.plan, q, k)
        scores = _scores_of(how, q, k, bias, pool, shifts)
        scores.differentiate(v, upstream, delta, grad_bias)
        for number, tile in enumerate(tiles(how.plan, q, k, bias if how.holes else None)):
            weights = scores.again(tile).exp2_()
            kept = _kept(how, number, tile, weights, pool)
            _add_products(tile, grad_v, tile.rows_of(upstream), weights if kept is None else weights * kept)
            grad = scores.gradient(tile, weights, kept)
            tile.put(grad_q, _times(tile, grad, k))
            _add_products(tile, grad_k, tile.rows_of(q), grad)
        if how.scale != 1.0:
            grad_q.mul_(how.scale)
            grad_k.mul_(how.scale)
        return grad_q, _keys_first(grad_k, k), _keys_first(grad_v, v), grad_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        pass  # nothing is needed to refuse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "the derivative for the gradient of blockwise attention is not implemented; backend='reference' has one"
        )


def _heads_inside(
    like: Float[Tensor, "batch heads length _"], width: int, plan: BlockwisePlan
) -> Float[Tensor, "batch heads length {width}"]:
    """Room whose heads lie side by side in memory, where the projections have them; zeros where no block is."""
    batch, heads, length, _ = like.shape
    whole = all(sum(len(block.rows) for block in piece.blocks) == length for piece in plan)
    room = like.new_empty(batch, length, heads, width) if whole else like.new_zeros(batch, length, heads, width)
    return room.transpose(1, 2)


def _log_sum_exp(
    shifts: Float[Tensor, "batch heads queries 1"], totals: Float[Tensor, "batch heads queries 1"]
) -> Float[Tensor, "batch heads queries"]:
    """The log-sum-exp in nats; -inf in a row without a key."""
    lse = (totals.log2() + shifts) / LOG2_E
    return lse.masked_fill_(totals == torch.inf, -torch.inf)[..., 0]


def _per_total(
    grad_out: Float[Tensor, "batch heads queries value_dim"] | None,
    grad_lse: Float[Tensor, "batch heads queries"] | None,
    out: Float[Tensor, "batch heads queries value_dim"],
    totals: Float[Tensor, "batch heads queries 1"],
) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries 1"]]:
    """`dO / l`, and delta, summed in float32 at least."""
    delta = torch.zeros_like(totals)
    if grad_out is not None:
        delta = (grad_out * out.to(totals.dtype)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse[..., None]
    upstream = torch.zeros_like(out) if grad_out is None else torch.div(grad_out, totals, out=torch.empty_like(out))
    return upstream, (delta / totals).to(out.dtype)


def _times(
    tile: Tile,
    left: Float[Tensor, "kv stacked columns"],
    right: Float[Tensor, "batch kv_heads keys width"],
    beside: Float[Tensor, "#batch columns more"] | None = None,
) -> Float[Tensor, "kv stacked width_and_more"]:
    """`left @ right`, over the keys of the tile, with more columns beside those of `right` in all its heads."""
    product, offset = None, 0
    for keys, span in tile.spans(left):
        here = tile.keys_of(right, keys)
        if beside is not None:
            more = beside[:, None, offset : offset + len(keys)].to(here.dtype)
            kv_heads = len(here) // tile.shape[0]
            here = torch.cat([here, more.expand(tile.shape[0], kv_heads, -1, -1).flatten(0, 1)], -1)
            offset += len(keys)
        product = torch.bmm(span, here) if product is None else product.baddbmm_(span, here)
    assert product is not None
    return product


def _add_products(
    tile: Tile,
    total: Float[Tensor, "batch kv_heads width keys"],
    rows: Float[Tensor, "kv stacked width"],
    scores: Float[Tensor, "kv stacked columns"],
) -> None:
    """`rows^T scores` added to the columns that the tile holds."""
    for keys, span in tile.spans(scores):
        into = total[tile.sequences, tile.kv_heads, :, keys.start : keys.stop]
        if into.dtype == rows.dtype and (into.shape[0] == 1 or into.shape[1] == total.shape[1]):
            into.flatten(0, 1).baddbmm_(rows.mT, span)  # these axes are one in memory, so nothing is copied
        else:
            into.add_(torch.bmm(rows.mT, span).view(into.shape))


def _keys_first(
    grad: Float[Tensor, "batch kv_heads width keys"], like: Float[Tensor, "batch kv_heads keys width"]
) -> Float[Tensor, "batch kv_heads keys width"]:
    """The gradient as its tensor is, in one copy."""
    batch, heads, keys, width = like.shape
    return like.new_empty(batch, keys, heads, width).transpose(1, 2).copy_(grad.mT)
