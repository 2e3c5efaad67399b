"""Attention over blocks of query rows, in plain torch operations. What a mask hides costs nothing.

The mask is asked about every block first. A block that it calls empty is never touched, and one that it calls full is
never masked. The plan of this, in `blocks.py`, is made once for the forward and the backward pass, which computes each
block of weights again from q and k. With A the weights of a block, dO the gradient of its output O and g that of its
log-sum-exp,

    dV += A^T dO       dS = A (dO V^T - delta + g)       delta_i = dO_i . O_i
    dQ  = dS K         dK += dS^T Q

(Dao et al. 2022, FlashAttention, appendix B). A block of rows goes over all its keys at once, so that the softmax is
torch's own, of one reading and one writing, and no sum is ever mended.

In bfloat16 the products are those of bfloat16, with sums in float32. Their results are rounded, so a score is not asked
for but its distance from the largest of its row, which the product subtracts before it rounds: what is rounded most is
what weighs least. Where the scores themselves are needed (a softcap, a bias, sinks, the log-sum-exp), and in float16,
for which CPUs have no fast product, everything is computed in float32.
"""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention import reference
from headwise.attention.blocks import Block, Piece, Plan, parts_of, plan_of
from headwise.attention.masks import can_be_read
from headwise.attention.problem import Answer, Problem
from headwise.shapes import Bool, Float

name = "blockwise"

BLOCK_BYTES = 2**22
"""Size of a block of scores that is computed at once: it stays in the cache from one operation to the next."""

LEAST_ROWS, MOST_ROWS = 64, 256
"""Between these lies the number of rows of a block."""


def why_not(problem: Problem) -> str | None:
    """The reason blocks of rows cannot do this problem, in one sentence, or None."""
    if problem.talking is not None:
        return "blocks hold some heads at a time, and talking_heads mixes all"
    if not can_be_read(problem.q):
        return "its blocks are planned from sizes and masks, which are not known while compiling or under vmap"
    return None


def run(problem: Problem, rows: int | None = None) -> Answer:
    """The answer, in blocks of `rows` query rows; of `rows_of(problem)` unless given."""
    if problem.return_weights:
        return reference.run(problem)  # the matrix that blocks avoid is asked for
    if 0 in (*problem.q.shape, *problem.k.shape):
        return reference.run(problem)  # nothing is held
    q, k, v = problem.q, problem.k, problem.v
    narrow = is_narrow(problem)
    if not narrow:
        q, k, v = (tensor.to(problem.score_dtype) for tensor in (q, k, v))
    # The scale goes with q, which is small, unless that would round and the scores are multiplied anyway.
    later = narrow or problem.softcap is not None
    factor = 1.0
    if isinstance(problem.scale, Tensor) or not later or _is_power_of_two(problem.scale):
        q = q * problem.scale
    else:
        factor = problem.scale
    seed = int(torch.randint(2**62, ())) if problem.dropout > 0 else 0
    plan = plan_of(problem.mask, problem.grid, rows_of(problem) if rows is None else rows)
    holes = problem.bias is not None and bool(problem.bias.amin() == -torch.inf)
    lse_wanted = problem.return_lse or problem.sinks is not None
    how = _How(plan, narrow, factor, problem.softcap, lse_wanted, holes, problem.dropout, seed)
    out, lse = _Blockwise.apply(q, k.contiguous(), v.contiguous(), problem.bias, how)  # type: ignore[no-untyped-call]
    if problem.sinks is not None:
        out, lse = reference.with_sinks(out, lse, problem.sinks)
    return Answer(out.to(problem.q.dtype), lse if problem.return_lse else None, None)


def is_narrow(problem: Problem) -> bool:
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


def rows_of(problem: Problem) -> int:
    """How many query rows a block has: an eighth of the columns that the last rows hold (a quarter in bfloat16).

    At least 64 and at most 256. More rows are faster products, and more columns that only some of the rows need; what
    is gained and lost evens out about there, in bfloat16 later.
    """
    grid = problem.grid
    last = range(max(grid.queries - MOST_ROWS, 0), grid.queries)
    width = sum(len(part.columns) for part in parts_of(problem.mask, grid, last, range(grid.keys)))
    rows = width // (4 if is_narrow(problem) else 8)
    return min(max(1 << max(rows - 1, 0).bit_length(), LEAST_ROWS), MOST_ROWS)


def _is_power_of_two(scale: Any) -> bool:
    """Whether multiplying by it rounds nothing."""
    return math.frexp(scale)[0] == 0.5


# -- tiles: what is computed at once ------------------------------------------------------------------------------


class _How(NamedTuple):
    """What decides the weights beside the tensors. The bias has holes where it is -inf somewhere."""

    plan: Plan
    narrow: bool
    factor: float
    softcap: float | None
    lse: bool
    holes: bool
    dropout: float
    seed: int


class _Hidden(NamedTuple):
    """What is hidden in a block: from column `offset` on, the largest value that a score may have.

    Infinite where a key is allowed, -infinite where it is hidden, and 0 in a row without any key: such a row is given
    weights, which are then taken away, since a softmax over nothing is NaN. Torch vectorises the smaller of two
    tensors; filling by a boolean mask takes forty times as long.
    """

    offset: int
    ceiling: Float[Tensor, "#batch #heads rows columns"]


class _Tile(NamedTuple):
    """Some sequences and heads of a block, and what is hidden there."""

    block: Block
    sequences: slice
    heads: slice
    kv_heads: slice
    hidden: list[_Hidden]
    alive: Bool[Tensor, "#batch #heads rows 1"] | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences, heads, rows)."""
        sequences, heads = (some.stop - some.start for some in (self.sequences, self.heads))
        return sequences, heads, len(self.block.rows)

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """Its place in a tensor `(batch, heads, queries, ...)`."""
        return self.sequences, self.heads, slice(self.block.rows.start, self.block.rows.stop)

    def rows_of(self, tensor: Float[Tensor, "batch heads queries width"]) -> Float[Tensor, "kv stacked width"]:
        """Its rows of q or what is shaped like it, those of a group one under the other."""
        part = tensor[self.where]
        return part.reshape(self._groups, -1, part.shape[-1])

    def put(self, into: Float[Tensor, "batch heads queries width"], rows: Float[Tensor, "kv stacked width"]) -> None:
        """What `rows_of` took, put back."""
        into[self.where] = self.by_head(rows)

    def keys_of(self, tensor: Float[Tensor, "batch kv_heads all width"], keys: range) -> Float[Tensor, "kv keys width"]:
        """Some keys of k or v, in its heads."""
        return tensor[self.sequences, self.kv_heads, keys.start : keys.stop].flatten(0, 1)

    def spans(self, scores: Float[Tensor, "*heads rows columns"]) -> Iterator[tuple[range, Tensor]]:
        """The keys of each span, and their columns of the scores."""
        offset = 0
        for keys in self.block.spans:
            yield keys, scores[..., offset : offset + len(keys)]
            offset += len(keys)

    def by_head(self, stacked: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "batch heads rows columns"]:
        """The same rows with each head apart."""
        return stacked.view(*self.shape, stacked.shape[-1])

    @property
    def _groups(self) -> int:
        return self.shape[0] * int(self.kv_heads.stop - self.kv_heads.start)


class _Pool:
    """Memory that every tile uses again, each name as much as the largest needs: fresh memory is the slowest."""

    def __init__(self, how: _How, q: Tensor, k: Tensor) -> None:
        self._like = q
        self._size = max((_size(*where, q, k) for where in _blocks_of(how)), default=0)
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, tile: _Tile, rows: Float[Tensor, "kv stacked _"]) -> Float[Tensor, "kv stacked columns"]:
        """Room for the scores of these rows, with whatever was left in it."""
        if name not in self._held:
            self._held[name] = self._like.new_empty(self._size)
        shape = (*rows.shape[:2], tile.block.width)
        return self._held[name][: math.prod(shape)].view(shape)


def _blocks_of(how: _How) -> Iterator[tuple[Piece, Block]]:
    """Every block of the plan, with its piece."""
    return ((piece, block) for piece in how.plan for block in piece.blocks)


def _size(piece: Piece, block: Block, q: Tensor, k: Tensor) -> int:
    """The number of scores in the largest tile of a block, which is its first."""
    sequences, heads, _ = next(_shares(piece, block, q, k))
    return int((sequences.stop - sequences.start) * (heads.stop - heads.start)) * len(block.rows) * block.width


def _tiles(how: _How, q: Tensor, k: Tensor, bias: Tensor | None) -> Iterator[_Tile]:
    """Every tile of a plan."""
    for piece, block in _blocks_of(how):
        hidden, alive = _hidden(piece, block, bias if how.holes else None, q)
        for sequences, heads, kv_heads in _shares(piece, block, q, k):
            own = (_shifted(sequences, piece.sequences), _shifted(heads, piece.heads))
            ceilings = [_Hidden(offset, _pick(ceiling, *own)) for offset, ceiling in hidden]
            here = None if alive is None else _pick(alive, *own)
            yield _Tile(block, sequences, heads, kv_heads, ceilings, here)


def _shares(piece: Piece, block: Block, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Sequences, heads and key/value heads that a block is computed in: as many at once as `BLOCK_BYTES` holds."""
    group = q.shape[1] // k.shape[1]
    first, last = piece.heads.start, piece.heads.stop
    kv_heads = range(first // group, -(-last // group))
    room = BLOCK_BYTES // (len(block.rows) * block.width * group * q.element_size())
    threads = torch.get_num_threads()
    room = max(room // threads * threads, threads)  # so that no thread waits for another's last head
    # A piece that ends inside a group goes head by head of k, as do all sequences but whole ones.
    step = 1 if first % group or last % group else min(room, len(kv_heads))
    together = max(room // step, 1) if step == k.shape[1] else 1
    for start in range(piece.sequences.start, piece.sequences.stop, together):
        sequences = slice(start, min(start + together, piece.sequences.stop))
        for at in range(kv_heads.start, kv_heads.stop, step):
            end = min(at + step, kv_heads.stop)
            yield sequences, slice(max(at * group, first), min(end * group, last)), slice(at, end)


def _hidden(
    piece: Piece, block: Block, holes: Float[Tensor, "#batch #heads #queries #keys"] | None, like: Tensor
) -> tuple[list[_Hidden], Bool[Tensor, "#batch #heads rows 1"] | None]:
    """The ceilings of a block's parts, and which rows have a key at all; None where all have one."""
    allowed, offset = [], 0
    for columns, masked in block.parts:
        if piece.mask is not None and masked:
            allowed.append((offset, piece.mask.block(piece.grid, block.rows, columns)))
        if holes is not None:
            there = _bias_at(holes, piece.sequences, piece.heads, block.rows, columns) > -torch.inf
            there = there.expand(-1, -1, len(block.rows), len(columns))
            allowed.append((offset, there & allowed.pop()[1] if masked else there))
        offset += len(columns)
    alive = None
    if len(allowed) == len(block.parts):
        alive = reduce(torch.logical_or, (part.any(-1, keepdim=True) for _, part in allowed))
    if alive is not None and bool(alive.all()):
        alive = None
    inf = torch.full((), torch.inf, dtype=like.dtype, device=like.device)
    ceilings = [(offset, torch.where(part, inf, -inf)) for offset, part in allowed]
    if alive is not None:
        ceilings = [(offset, torch.where(alive, ceiling, inf.new_zeros(()))) for offset, ceiling in ceilings]
    return [_Hidden(*ceiling) for ceiling in ceilings], alive


def _bias_at(
    bias: Float[Tensor, "#batch #heads #queries #keys"], sequences: range, heads: range, rows: range, columns: range
) -> Float[Tensor, "..."]:
    """A block of the bias; axes of length 1 stay."""
    return _pick(bias, *(slice(some.start, some.stop) for some in (sequences, heads, rows, columns)))


def _pick(tensor: Tensor, *slices: slice) -> Tensor:
    """These slices of the first axes, where they are not of length 1 and stand for all."""
    return tensor[tuple(slice(None) if size == 1 else some for size, some in zip(tensor.shape, slices, strict=False))]


def _shifted(part: slice, whole: range) -> slice:
    """The part, counted from where the whole starts."""
    return slice(part.start - whole.start, part.stop - whole.start)


# -- the weights of a tile --------------------------------------------------------------------------------------------


def _wide_scores(
    tile: _Tile, q: Tensor, k: Tensor, bias: Tensor | None, how: _How, pool: _Pool
) -> tuple[Float[Tensor, "kv stacked columns"], Float[Tensor, "kv stacked columns"] | None]:
    """The scores, and tanh(score / c) where there is a softcap c, for the backward pass."""
    scores = pool.take("scores", tile, q)
    for keys, span in tile.spans(scores):
        torch.bmm(q, tile.keys_of(k, keys).mT, out=span)
    capped = None
    if how.softcap is not None:
        capped = pool.take("capped", tile, q)
        torch.tanh(scores.mul_(how.factor / how.softcap), out=capped)
        torch.mul(capped, how.softcap, out=scores)
    if bias is not None:
        for keys, span in tile.spans(tile.by_head(scores)):
            here = _pick(bias, *tile.where, slice(keys.start, keys.stop))
            span.add_(here.clamp(min=torch.finfo(here.dtype).min) if how.holes else here)  # finite: `_lower` hides it
    _lower(tile, scores)
    return scores, capped


def _narrow_scores(
    tile: _Tile, q: Tensor, k: Tensor, factor: float, shift: Float[Tensor, "kv stacked 1"], pool: _Pool
) -> Float[Tensor, "kv stacked columns"]:
    """The scores less the shift of their row, which is taken off before anything is rounded."""
    scores = pool.take("scores", tile, q)
    for keys, span in tile.spans(scores):
        torch.baddbmm(shift.expand(span.shape), q, tile.keys_of(k, keys).mT, beta=-1, out=span)
    if factor != 1.0:
        scores.mul_(factor)
    _lower(tile, scores)
    return scores


def _narrow_shift(
    tile: _Tile, q: Tensor, k: Tensor, longest: Float[Tensor, "batch kv_heads 1 1"], pool: _Pool
) -> Float[Tensor, "kv stacked 1"]:
    """About the largest score of each row, before the factor: within 1/128 of its bound |q| max |k|.

    No score is below minus that bound. Raised by it they are positive, and positive floats are in the order of their
    bits, above all negative ones, which torch compares eight times as fast as bfloat16.
    """
    bound = q.float().norm(dim=-1, keepdim=True) * longest[tile.sequences, tile.kv_heads].flatten(0, 1) * 1.02
    raised = bound.to(q.dtype)
    scores = pool.take("scores", tile, q)
    for keys, span in tile.spans(scores):
        torch.baddbmm(raised.expand(span.shape), q, tile.keys_of(k, keys).mT, out=span)
    _lower(tile, scores)
    return torch.sub(scores.view(torch.int16).amax(-1, keepdim=True).view(q.dtype), raised)


def _lower(tile: _Tile, scores: Float[Tensor, "kv stacked columns"]) -> None:
    """The scores of what is hidden put where no weight is."""
    for offset, ceiling in tile.hidden:
        part = tile.by_head(scores)[..., offset : offset + ceiling.shape[-1]]
        torch.minimum(part, ceiling, out=part)


def _softmax(tile: _Tile, scores: Float[Tensor, "kv stacked columns"]) -> None:
    """The weights, in place of the scores; 0 in a row without a key."""
    torch.softmax(scores, -1, out=scores)
    if tile.alive is not None:
        tile.by_head(scores).mul_(tile.alive)


def _softmax_with_lse(tile: _Tile, scores: Float[Tensor, "kv stacked columns"]) -> Float[Tensor, "kv stacked 1"]:
    """The weights, in place of the scores, and the log-sum-exp of each row.

    It is not in what softmax returns: the largest weight is off by half an ulp of its own, too much for a log-sum-exp
    near 0.
    """
    lse = scores.amax(-1, keepdim=True)
    total = scores.sub_(lse).exp_().sum(-1, keepdim=True)
    scores.div_(total)
    lse += total.log_()
    if tile.alive is not None:
        tile.by_head(scores).mul_(tile.alive)
        tile.by_head(lse).masked_fill_(~tile.alive, -torch.inf)
    return lse


def _kept(
    how: _How, number: int, tile: _Tile, weights: Float[Tensor, "kv stacked columns"], pool: _Pool
) -> Tensor | None:
    """What dropout multiplies the weights of tile `number` by: the same whenever it is asked."""
    if how.dropout == 0:
        return None
    generator = torch.Generator(weights.device).manual_seed(how.seed + number)
    kept = pool.take("kept", tile, weights)
    return kept.bernoulli_(1 - how.dropout, generator=generator).div_(1 - how.dropout)


# -- forward and backward ---------------------------------------------------------------------------------------------


class _Blockwise(torch.autograd.Function):
    """The output, and of each row the log-sum-exp if asked for; where products are narrow its shift in that place."""

    @staticmethod
    def forward(
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        v: Float[Tensor, "batch kv_heads keys value_dim"],
        bias: Float[Tensor, "#batch #heads #queries #keys"] | None,
        how: _How,
    ) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"] | None]:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        of_rows = q.new_full((*q.shape[:-1], 1), -torch.inf) if how.narrow or how.lse else None
        pool = _Pool(how, q, k)
        longest = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1) if how.narrow else None
        for number, tile in enumerate(_tiles(how, q, k, bias)):
            rows = tile.rows_of(q)
            if longest is not None:
                value = _narrow_shift(tile, rows, k, longest[..., None, None], pool)
                weights = _narrow_scores(tile, rows, k, how.factor, value, pool)
            else:
                weights, _ = _wide_scores(tile, rows, k, bias, how, pool)
            if how.lse:
                value = _softmax_with_lse(tile, weights)
            else:
                _softmax(tile, weights)
            if of_rows is not None:
                tile.put(of_rows, value)
            kept = _kept(how, number, tile, weights, pool)
            tile.put(out, _times(tile, weights if kept is None else kept.mul_(weights), v))
        return out, None if of_rows is None else of_rows[..., 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        q, k, v, bias, ctx.how = inputs
        out, of_rows = output
        ctx.save_for_backward(q, k, v, bias, out, of_rows if ctx.how.narrow else None)
        ctx.set_materialize_grads(False)
        if ctx.how.narrow and of_rows is not None:
            ctx.mark_non_differentiable(of_rows)

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Float[Tensor, "batch heads queries value_dim"] | None,
        grad_lse: Float[Tensor, "batch heads queries"] | None,
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
        shift: Float[Tensor, "batch heads queries"] | None,
        how: _How,
        learns_bias: bool,
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
        # Keys last: the products that give these run a quarter faster so.
        grad_k, grad_v = (
            torch.zeros(x.mT.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (k, v)
        )
        grad_bias = torch.zeros_like(bias) if learns_bias and bias is not None else None
        pool = _Pool(how, q, k)
        for number, tile in enumerate(_tiles(how, q, k, bias)):
            rows, upstream = tile.rows_of(q), tile.rows_of(grad_out)
            capped = None
            if shift is not None:
                weights = _narrow_scores(tile, rows, k, how.factor, tile.rows_of(shift[..., None]), pool)
            else:
                weights, capped = _wide_scores(tile, rows, k, bias, how, pool)
            _softmax(tile, weights)
            kept = _kept(how, number, tile, weights, pool)
            _add_products(tile, grad_v, upstream, weights if kept is None else weights * kept)
            delta = _delta(upstream, tile.rows_of(out), None if grad_lse is None else tile.rows_of(grad_lse[..., None]))
            grad = _grad_of_scores(tile, upstream, v, delta, weights, kept, pool)
            if grad_bias is not None:
                _add_to_bias(tile, grad_bias, grad)
            if capped is not None:
                grad.mul_(capped.square_().neg_().add_(1.0))
            tile.put(grad_q, _times(tile, grad, k))
            _add_products(tile, grad_k, rows, grad)
        if how.factor != 1.0:
            grad_q.mul_(how.factor)
            grad_k.mul_(how.factor)
        return grad_q, grad_k.mT.to(k.dtype), grad_v.mT.to(v.dtype), grad_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        pass  # nothing is needed to refuse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "the derivative for the gradient of blockwise attention is not implemented; backend='reference' has one"
        )


def _times(
    tile: _Tile, left: Float[Tensor, "kv stacked columns"], right: Float[Tensor, "batch kv_heads keys width"]
) -> Float[Tensor, "kv stacked width"]:
    """`left @ right`, over the keys of the tile."""
    product = None
    for keys, span in tile.spans(left):
        here = tile.keys_of(right, keys)
        product = torch.bmm(span, here) if product is None else product.baddbmm_(span, here)
    assert product is not None
    return product


def _add_products(
    tile: _Tile,
    total: Float[Tensor, "batch kv_heads width keys"],
    rows: Float[Tensor, "kv stacked width"],
    scores: Float[Tensor, "kv stacked columns"],
) -> None:
    """`rows^T scores` added to the columns that the tile holds."""
    for keys, span in tile.spans(scores):
        into = total[tile.sequences, tile.kv_heads, :, keys.start : keys.stop].flatten(0, 1)
        if into.dtype == rows.dtype:
            into.baddbmm_(rows.mT, span)
        else:
            into.add_(torch.bmm(rows.mT, span))


def _delta(
    upstream: Float[Tensor, "kv stacked width"],
    out: Float[Tensor, "kv stacked width"],
    grad_lse: Float[Tensor, "kv stacked 1"] | None,
) -> Float[Tensor, "kv stacked 1"]:
    """dO_i . O_i less the gradient of the log-sum-exp, summed in float32 at least."""
    wide = torch.promote_types(out.dtype, torch.float32)
    delta = (upstream.to(wide) * out.to(wide)).sum(-1, keepdim=True).to(out.dtype)
    return delta if grad_lse is None else delta - grad_lse


def _grad_of_scores(
    tile: _Tile,
    upstream: Float[Tensor, "kv stacked width"],
    v: Float[Tensor, "batch kv_heads keys width"],
    delta: Float[Tensor, "kv stacked 1"],
    weights: Float[Tensor, "kv stacked columns"],
    kept: Float[Tensor, "kv stacked columns"] | None,
    pool: _Pool,
) -> Float[Tensor, "kv stacked columns"]:
    """`A (dO V^T - delta)`, dropout's factors on the product."""
    grad = pool.take("grad", tile, weights)
    for keys, span in tile.spans(grad):
        values = tile.keys_of(v, keys).mT
        if kept is None:
            torch.baddbmm(delta.expand(span.shape), upstream, values, beta=-1, out=span)
        else:
            torch.bmm(upstream, values, out=span)
    if kept is not None:
        grad.mul_(kept).sub_(delta)
    return grad.mul_(weights)


def _add_to_bias(
    tile: _Tile, total: Float[Tensor, "#batch #heads #queries #keys"], grad: Float[Tensor, "kv stacked columns"]
) -> None:
    """The gradient of a block of scores, summed over the axes that the bias repeats."""
    for keys, span in tile.spans(tile.by_head(grad)):
        here = _pick(total, *tile.where, slice(keys.start, keys.stop))
        here.add_(span.sum_to_size(here.shape))
