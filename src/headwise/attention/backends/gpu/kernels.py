"""Triton kernels for the statistics of attention weights: of each query row, and of each key.

The first part computes the scores of a tile: some query rows of one head with some keys, scaled, capped, biased and
masked. The second adds tiles to the sums of query rows, the third is the kernel of the rows, without the values and
without the weight matrix. With s the scores of a row over its visible keys, t their largest, and l the log-sum-exp,
sink included,

    A_j     = exp(s_j - l)
    entropy = sum_j A_j (l - s_j) = exp(t - l) (sum_j e_j (t - s_j) + (l - t) sum_j e_j)     e_j = exp(s_j - t)

A program has a block of query rows of one head, reads the blocks with a visible key, and carries t and the sums along
(Milakov and Gimelshein 2018). So it needs no log-sum-exp of an attention kernel, and returns its own. No term of the
entropy is negative, so nothing cancels. All sums are in float32.

The last part is the kernel of the keys: the sums of the attention weights on each key, and the number of rows that may
attend to it. A program has a block of keys of one head, and reads the blocks of query rows of which some row sees one
of its keys. The weights follow from the largest score and the largest weight of each row. The rows are added in one
order, without atomic additions, so the sums have the same bits in every run; those of blocks are added in float64.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from headwise.attention.backends.plain_statistics import ROWS

# -- scores of a tile --------------------------------------------------------------------------------------------------

SERIES_BELOW = tl.constexpr(0.5)
"""Absolute value below which tanh is computed as a series: there, the other formula would cancel."""


class Call(NamedTuple):
    """Tensors, sizes and strides of one attention call, as the GPU kernels read them. If a tensor is None, the compiled
    kernel has no code that reads it. The stride is 0 for an axis along which a tensor repeats.

    Attributes:
        q, k: queries and keys.
        q_strides, k_strides: strides of sequences, heads, tokens and features.
        head_dim, heads, group, queries, keys: numbers of features of a head, of query heads, of query heads for each
            key/value head, of rows and of keys.
        head_scale: further factor for each head.
        ranges: start and stop of each range of keys of each query.
        ranges_strides: strides of sequences, heads and queries.
        dense: one byte for each query and key, 1 where the query attends to the key.
        dense_strides: strides of sequences, heads, queries and keys.
        bias_strides: strides of sequences, heads, queries and keys.
    """

    q: Any
    k: Any
    q_strides: Any
    k_strides: Any
    head_dim: Any
    heads: Any
    group: Any
    queries: Any
    keys: Any
    scale: Any
    head_scale: Any
    softcap: Any
    sinks: Any
    ranges: Any
    ranges_strides: Any
    dense: Any
    dense_strides: Any
    bias: Any
    bias_strides: Any


class Head(NamedTuple):
    """One head of one sequence: the index of the sequence, the index of the head, and the index among the heads of all
    sequences.
    """

    sequence: Any
    head: Any
    index: Any


class Spans(NamedTuple):
    """Blocks of keys (or of query rows) that each program (instance of a GPU kernel) reads. They are stored as spans,
    which are ranges of adjacent blocks. A span is stored as its first block and the block before which it stops, and
    may be empty.

    Attributes:
        edges: first and stop of each span, `(batch or 1, heads or 1, programs, spans, 2)`; None for all blocks.
        strides: strides of sequences, heads and programs.
    """

    edges: Any
    strides: Any


@triton.jit
def block_and_head(call: "Call", blocks: "tl.tensor") -> "tuple[tl.tensor, Head]":
    """Return the block and the head that this program (instance of the kernel) computes. Programs of one head are
    adjacent, since they read the same keys. The last blocks begin first: under a causal mask, the last rows see the
    most keys.
    """
    program = tl.program_id(0)
    index = (program // blocks).to(tl.int64)
    return blocks - 1 - program % blocks, Head(index // call.heads, index % call.heads, index)


@triton.jit
def span_edges(
    spans: "Spans", head: "Head", program: "tl.tensor", number: "tl.tensor", blocks: "tl.tensor"
) -> "tuple[tl.tensor, tl.tensor]":
    """Return the first block of span `number` of a program, and the block before which it stops. A span is a range of
    adjacent blocks that the program reads.
    """
    first, stop = 0, blocks
    if spans.edges is not None:
        strides = spans.strides
        at = spans.edges + head.sequence * strides[0] + head.head * strides[1] + program * strides[2] + 2 * number
        first, stop = tl.load(at), tl.load(at + 1)
    return first, stop


@triton.jit
def query_features(
    call: "Call", head: "Head", row: "tl.tensor", begin: "int", head_dim: tl.constexpr, features: tl.constexpr
) -> "tl.tensor":
    """Return `features` features of each query row, starting at feature `begin`, as `(rows, features)`. Elements for
    rows and features that do not exist are 0.
    """
    feature = begin + tl.arange(0, features)
    at = call.q + head.sequence * call.q_strides[0] + head.head * call.q_strides[1]
    at += row.to(tl.int64)[:, None] * call.q_strides[2] + feature[None, :] * call.q_strides[3]
    return tl.load(at, (row < call.queries)[:, None] & (feature < head_dim)[None, :], other=0.0)


@triton.jit
def key_features(
    call: "Call", head: "Head", key: "tl.tensor", begin: "int", head_dim: tl.constexpr, features: tl.constexpr
) -> "tl.tensor":
    """Return `features` features of each key, starting at feature `begin`, as `(keys, features)`. Elements for keys and
    features that do not exist are 0.
    """
    feature = begin + tl.arange(0, features)
    at = call.k + head.sequence * call.k_strides[0] + head.head // call.group * call.k_strides[1]
    at += key.to(tl.int64)[:, None] * call.k_strides[2] + feature[None, :] * call.k_strides[3]
    exists = (key >= 0) & (key < call.keys)
    return tl.load(at, exists[:, None] & (feature < head_dim)[None, :], other=0.0)


@triton.jit
def tile_products(
    call: "Call",
    head: "Head",
    row: "tl.tensor",
    key: "tl.tensor",
    q: "tl.tensor",
    k: "tl.tensor",
    head_dim: tl.constexpr,
    features: tl.constexpr,
) -> "tl.tensor":
    """Return the dot products of query rows and keys, `(rows, keys)` in float32. `q` and `k` have the first `features`
    features; any further features of the head are read here, `features` at a time.
    """
    # "ieee": products of float32 numbers are not rounded to TF32.
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    if features < head_dim:
        # The number of steps is not a constant, so that they are not unrolled, which would need too many registers.
        for begin in range(features, call.head_dim, features):
            q = query_features(call, head, row, begin, head_dim, features)
            k = key_features(call, head, key, begin, head_dim, features)
            products = tl.dot(q, tl.trans(k), products, input_precision="ieee")
    return products


@triton.jit
def is_visible(call: "Call", head: "Head", row: "tl.tensor", key: "tl.tensor", ranges: tl.constexpr) -> "tl.tensor":
    """Return True where a query row may attend to a key: the key is in one of the row's ranges of keys, and the dense
    mask, a boolean matrix, allows it. `row` and `key` are tensors of indices that broadcast.
    """
    visible = (row < call.queries) & (key >= 0) & (key < call.keys)
    if call.ranges is not None:
        strides = call.ranges_strides
        at = call.ranges + head.sequence * strides[0] + head.head * strides[1] + row.to(tl.int64) * strides[2]
        inside = key < 0
        for number in tl.static_range(ranges):
            start = tl.load(at + 2 * number, row < call.queries, other=0)
            stop = tl.load(at + 2 * number + 1, row < call.queries, other=0)
            inside = inside | (key >= start) & (key < stop)
        visible = visible & inside
    if call.dense is not None:
        at = call.dense + _offsets(call.dense_strides, head, row, key)
        visible = visible & (tl.load(at, visible, other=0) != 0)
    return visible


@triton.jit
def scale_products(call: "Call", head: "Head", products: "tl.tensor") -> "tl.tensor":
    """Return the scores before softcap and bias: `products` times the scale of the call and the factor of the head."""
    scores = products * call.scale
    if call.head_scale is not None:
        scores = scores * tl.load(call.head_scale + head.head)
    return scores


@triton.jit
def finish_scores(
    call: "Call", head: "Head", row: "tl.tensor", key: "tl.tensor", scores: "tl.tensor", visible: "tl.tensor"
) -> "tl.tensor":
    """Return the scores as they enter the softmax: with softcap and bias, and -inf at hidden keys. The argument
    `scores` is the scaled products, before the softcap.
    """
    if call.softcap is not None:
        scores = call.softcap * _tanh(scores / call.softcap)
    if call.bias is not None:
        scores += tl.load(call.bias + _offsets(call.bias_strides, head, row, key), visible, other=0.0)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _offsets(strides: "tl.tensor", head: "Head", row: "tl.tensor", key: "tl.tensor") -> "tl.tensor":
    """Return the memory offset of each pair of a query row and a key in a tensor `(batch, heads, queries, keys)`, for
    one head. `strides` are the strides of the tensor.
    """
    of_head = head.sequence * strides[0] + head.head * strides[1]
    return of_head + row.to(tl.int64) * strides[2] + key.to(tl.int64) * strides[3]


@triton.jit
def _tanh(x: "tl.tensor") -> "tl.tensor":
    """Return tanh(x), with an error of a few units in the last place of float32 for every x."""
    square = x * x
    # The Taylor series; its next term is below 2e-8 of tanh at `SERIES_BELOW`.
    series = -929569.0 / 638512875.0 * square + 21844.0 / 6081075.0
    series = series * square - 1382.0 / 155925.0
    series = series * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    power = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < SERIES_BELOW, x + x * square * series, tl.where(x < 0.0, -quotient, quotient))


# -- sums over the keys of query rows ----------------------------------------------------------------------------------

HIDDEN = tl.constexpr(float("-inf"))
"""Score of a key that a row may not attend to."""

FARTHEST = tl.constexpr(1000.0)
"""Bound of the distance of a score from the largest one: its weight is 0 long before, and 0 times infinity is NaN."""


class Tokens(NamedTuple):
    """Positions and tokens of the queries and keys of an attention call, as the GPU kernels read them. If a tensor is
    None, the compiled kernel has no code that reads it.

    Attributes:
        positions: index that a key has, or would have, at the position of each query, `(batch, queries)`.
        first_key: index of the key of the first token, for each query.
        special: one byte for each key, 1 at special tokens, `(batch, keys)`.
        key_tokens: number of the token of each key.
        query_tokens: number of the token of each query, `(batch, queries)`.
    """

    positions: Any
    first_key: Any
    special: Any
    key_tokens: Any
    query_tokens: Any


class Rows(NamedTuple):
    """Query rows of one program (instance of a GPU kernel), with four numbers for each row: the row's index, the index
    of the key at the row's position, the index of the key of the sequence's first token, and a number that is equal for
    rows with equal tokens (0 if unknown).
    """

    row: Any
    position: Any
    first_key: Any
    token: Any


class RowSums(NamedTuple):
    """Maxima and sums for each query row, over the keys that a GPU kernel has read so far. Each sum adds up e =
    exp(score - `top`) over some of these keys, where `top` is the largest score of the row so far.

    Attributes:
        top: largest score.
        top_uncapped: largest score before the softcap and the bias.
        top_content: largest score of a key that is not a special token.
        powers: sum of e.
        below: sum of e times the distance of the score from `top`.
        own: e of the key at the position of the row.
        previous: e of the key before it.
        following: e of the key after it.
        first: e of the key of the first token.
        special: sum of e over special tokens.
        duplicates: sum of e over earlier copies of the query's token.
        inductions: sum of e over the keys after them.
    """

    top: Any
    top_uncapped: Any
    top_content: Any
    powers: Any
    below: Any
    distances: Any
    own: Any
    previous: Any
    following: Any
    first: Any
    special: Any
    duplicates: Any
    inductions: Any
    visible: Any


@triton.jit
def no_sums(block_rows: tl.constexpr) -> "RowSums":
    """Return the initial `RowSums` (running sums of each query row), before any key is read: largest scores of -inf,
    and sums of 0.
    """
    top = tl.full([block_rows], HIDDEN, tl.float32)
    zeros = tl.zeros([block_rows], tl.float32)
    return RowSums(top, top, top, *(zeros, zeros, zeros, zeros, zeros, zeros, zeros), zeros, zeros, zeros, zeros)


@triton.jit
def add_tile(
    sums: "RowSums",
    call: "Call",
    tokens: "Tokens",
    head: "Head",
    rows: "Rows",
    key: "tl.tensor",
    products: "tl.tensor",
    ranges: tl.constexpr,
) -> "RowSums":
    """Return the sums of each query row with a tile, a block of further keys, added. Sums are relative to the largest
    score of the row so far. If the tile has a larger score, the earlier sums are first rescaled to this score.
    """
    row, column = rows.row[:, None], key[None, :]
    visible = is_visible(call, head, row, column, ranges)
    uncapped = scale_products(call, head, products)
    scores = finish_scores(call, head, row, column, uncapped, visible)
    if call.bias is not None:
        visible = scores != HIDDEN
    top = tl.maximum(sums.top, tl.max(scores, 1))
    shift = tl.where(top == HIDDEN, 0.0, top)
    # Earlier sums are relative to the largest score so far.
    raised = tl.where(sums.top == HIDDEN, 0.0, tl.minimum(shift - sums.top, FARTHEST))
    factor = tl.exp(-raised)
    powers = tl.where(visible, tl.exp(scores - shift[:, None]), 0.0)
    below = tl.minimum(shift[:, None] - scores, FARTHEST)
    distance = tl.abs(rows.position[:, None] - column).to(tl.float32)
    single = _single_keys(rows, key, powers)
    copies = _copy_sums(call, tokens, head, rows, key, powers)
    content = _content(call, tokens, head, key, powers, scores)
    top_uncapped = sums.top_uncapped
    if call.softcap is not None:
        top_uncapped = tl.maximum(top_uncapped, tl.max(tl.where(visible, uncapped, HIDDEN), 1))
    visible_keys = sums.visible
    if call.dense is not None or call.bias is not None:
        visible_keys += tl.sum(visible.to(tl.float32), 1)
    return RowSums(
        top,
        top_uncapped,
        tl.maximum(sums.top_content, content[1]),
        factor * sums.powers + tl.sum(powers, 1),
        factor * (sums.below + raised * sums.powers) + tl.sum(powers * below, 1),
        factor * sums.distances + tl.sum(powers * distance, 1),
        factor * sums.own + single[0],
        factor * sums.previous + single[1],
        factor * sums.following + single[2],
        factor * sums.first + single[3],
        factor * sums.special + content[0],
        factor * sums.duplicates + copies[0],
        factor * sums.inductions + copies[1],
        visible_keys,
    )


@triton.jit
def _single_keys(rows: "Rows", key: "tl.tensor", powers: "tl.tensor") -> "tuple[tl.tensor, ...]":
    """Return, for each query row, the unnormalized weights of four keys: the key at the row's own position, the one
    before it, the one after it, and the key of the first token. A weight is 0 if the key is not in the tile. Most tiles
    have none of these keys.
    """
    own = tl.zeros_like(rows.position).to(tl.float32)
    previous, following, first = own, own, own
    start, stop = tl.min(key), tl.max(key)
    if (start <= tl.max(rows.position) + 1) & (stop >= tl.min(rows.position) - 1):
        own = _power_at(key, rows.position, powers)
        previous = _power_at(key, rows.position - 1, powers)
        following = _power_at(key, rows.position + 1, powers)
    if (start <= tl.max(rows.first_key)) & (stop >= tl.min(rows.first_key)):
        first = _power_at(key, rows.first_key, powers)
    return own, previous, following, first


@triton.jit
def _power_at(key: "tl.tensor", chosen: "tl.tensor", powers: "tl.tensor") -> "tl.tensor":
    """Return the number in `powers` (unnormalized weights) at the chosen key of each row; 0 where this key is not in
    the tile.
    """
    return tl.sum(tl.where(key[None, :] == chosen[:, None], powers, 0.0), 1)


@triton.jit
def _content(
    call: "Call", tokens: "Tokens", head: "Head", key: "tl.tensor", powers: "tl.tensor", scores: "tl.tensor"
) -> "tuple[tl.tensor, tl.tensor]":
    """Return two numbers for each row of a tile: the sum of its unnormalized weights on special tokens, and its largest
    score of other tokens.
    """
    special, content = 0.0, HIDDEN
    if tokens.special is not None:
        at = tokens.special + head.sequence * call.keys + key
        is_special = (tl.load(at, key < call.keys, other=0) != 0)[None, :]
        special = tl.sum(tl.where(is_special, powers, 0.0), 1)
        content = tl.max(tl.where(is_special, HIDDEN, scores), 1)
    return special, content


@triton.jit
def _copy_sums(
    call: "Call", tokens: "Tokens", head: "Head", rows: "Rows", key: "tl.tensor", powers: "tl.tensor"
) -> "tuple[tl.tensor, tl.tensor]":
    """Return two sums of unnormalized weights for each row of a tile. The first is over the keys that are earlier
    copies of the row's token, the second over the keys that directly follow such a copy.
    """
    duplicates, inductions = 0.0, 0.0
    if tokens.key_tokens is not None:
        at, token = tokens.key_tokens + head.sequence * call.keys + key, rows.token[:, None]
        own = tl.load(at, key < call.keys, other=-2)[None, :]
        before = tl.load(at - 1, (key > 0) & (key < call.keys), other=-2)[None, :]
        position = rows.position[:, None]
        is_copy = (own == token) & (key[None, :] < position)
        is_after_copy = (before == token) & (key[None, :] <= position)
        duplicates = tl.sum(tl.where(is_copy, powers, 0.0), 1)
        inductions = tl.sum(tl.where(is_after_copy, powers, 0.0), 1)
    return duplicates, inductions


# -- statistics of the rows --------------------------------------------------------------------------------------------

ENTROPY, CONFIDENCE, DISTANCE, SELF, PREVIOUS, NEXT, FIRST, SPECIAL, DUPLICATE, INDUCTION, CONTENT = (
    tl.constexpr(ROWS.index(name))
    for name in (
        *("entropy", "confidence", "distance", "self", "previous", "next", "first"),
        *("special", "duplicate", "induction", "confidence_content"),
    )
)
MAX_LOGIT, UNCAPPED, VISIBLE = (
    tl.constexpr(ROWS.index(name)) for name in ("max_logit", "max_logit_uncapped", "visible keys")
)
"""Index of each number of a row."""


class Results(NamedTuple):
    """Tensors that the GPU kernel writes: the log-sum-exp of each query row, `(batch, heads, queries)`, and the
    statistics of each row in the order of `plain_statistics.ROWS`, `(numbers, batch, heads, queries)`. `plane` is batch
    x heads x queries, the stride of the first axis of the statistics.
    """

    lse: Any
    rows: Any
    plane: Any


class Normalizer(NamedTuple):
    """Log-sum-exp of each query row, and two numbers that turn the row's unnormalized weights exp(score - largest
    score) into attention weights.

    Attributes:
        share: weight of the largest score; 0 in a row without a key.
        above: log-sum-exp minus the largest score, at most about `FARTHEST`; 0 in a row without a key.
        lse: log-sum-exp; the sink logit, or -inf without one, in a row without a key.
    """

    share: Any
    above: Any
    lse: Any


@triton.jit
def row_kernel(
    call: "Call",
    tokens: "Tokens",
    spans: "Spans",
    results: "Results",
    head_dim: tl.constexpr,
    ranges: tl.constexpr,
    span_count: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    features: tl.constexpr,
) -> None:
    """Write the statistics of `block_rows` query rows of one head. The kernel reads `block_keys` keys at a time, and
    `features` features of the queries and keys at a time.
    """
    program, head = block_and_head(call, tl.cdiv(call.queries, block_rows))
    rows = _rows(call, tokens, head, program * block_rows + tl.arange(0, block_rows))
    q = query_features(call, head, rows.row, 0, head_dim, features)
    sums = no_sums(block_rows)
    for number in range(span_count):
        first, stop = span_edges(spans, head, program, number, tl.cdiv(call.keys, block_keys))
        for block in range(first, stop):
            key = block * block_keys + tl.arange(0, block_keys)
            k = key_features(call, head, key, 0, head_dim, features)
            products = tile_products(call, head, rows.row, key, q, k, head_dim, features)
            sums = add_tile(sums, call, tokens, head, rows, key, products, ranges)
    normalizer = _normalizer(call, head, sums)
    _write_sums(call, head, rows, results, sums, normalizer, ranges)


@triton.jit
def _rows(call: "Call", tokens: "Tokens", head: "Head", row: "tl.tensor") -> "Rows":
    """Return the data of the query rows with the indices `row`, read from memory: the position and the token of each
    row, and the key of the first token of the row's sequence.
    """
    at = head.sequence * call.queries + row
    position = tl.load(tokens.positions + at, row < call.queries, other=0)
    first_key = tl.load(tokens.first_key + at, row < call.queries, other=-1)
    token = row * 0
    if tokens.query_tokens is not None:
        token = tl.load(tokens.query_tokens + at, row < call.queries, other=-1)
    return Rows(row, position, first_key, token)


@triton.jit
def _normalizer(call: "Call", head: "Head", sums: "RowSums") -> "Normalizer":
    """Return the log-sum-exp of each row, and two numbers that turn the row's unnormalized weights into attention
    weights. The sink of the head is included in all three.
    """
    is_empty = sums.powers == 0.0
    powers = tl.where(is_empty, 1.0, sums.powers)
    largest, share_of_sink = sums.top, 0.0
    if call.sinks is not None:
        sink = tl.load(call.sinks + head.head)
        largest = tl.maximum(sums.top, sink)
        share_of_sink = tl.exp(tl.where(largest == HIDDEN, 0.0, sink - largest))
    # 0 in a row whose scores are all far below the sink
    below = tl.exp(tl.where(is_empty, 0.0, sums.top - largest))
    total = tl.where(is_empty, 1.0, powers * below + share_of_sink)
    log_total = tl.log(total)
    above = tl.where(is_empty, 0.0, tl.minimum(largest - sums.top, FARTHEST) + log_total)
    return Normalizer(tl.where(is_empty, 0.0, below / total), above, largest + log_total)


@triton.jit
def _write_sums(
    call: "Call",
    head: "Head",
    rows: "Rows",
    results: "Results",
    sums: "RowSums",
    normalizer: "Normalizer",
    ranges: tl.constexpr,
) -> None:
    """Write the log-sum-exp and the statistics of each query row, computed from the row's sums."""
    share, is_row = normalizer.share, rows.row < call.queries
    entropy = share * (sums.below + normalizer.above * sums.powers)
    content = share * tl.exp(tl.where(sums.top_content == HIDDEN, HIDDEN, sums.top_content - sums.top))
    visible = sums.visible
    if call.dense is None and call.bias is None:
        visible = _count_keys(call, head, rows.row, ranges).to(tl.float32)
    # A maximum leaves out NaN, a sum does not.
    is_number = sums.powers == sums.powers
    at = results.rows + head.index * call.queries + rows.row
    tl.store(results.lse + head.index * call.queries + rows.row, normalizer.lse, is_row)
    tl.store(at + ENTROPY * results.plane, entropy, is_row)
    tl.store(at + CONFIDENCE * results.plane, share, is_row)
    tl.store(at + DISTANCE * results.plane, share * sums.distances, is_row)
    tl.store(at + SELF * results.plane, share * sums.own, is_row)
    tl.store(at + PREVIOUS * results.plane, share * sums.previous, is_row)
    tl.store(at + NEXT * results.plane, share * sums.following, is_row)
    tl.store(at + FIRST * results.plane, share * sums.first, is_row)
    tl.store(at + SPECIAL * results.plane, share * sums.special, is_row)
    tl.store(at + DUPLICATE * results.plane, share * sums.duplicates, is_row)
    tl.store(at + INDUCTION * results.plane, share * sums.inductions, is_row)
    tl.store(at + CONTENT * results.plane, content, is_row)
    tl.store(at + MAX_LOGIT * results.plane, tl.where(is_number, sums.top, sums.powers), is_row)
    tl.store(at + UNCAPPED * results.plane, tl.where(is_number, sums.top_uncapped, sums.powers), is_row)
    tl.store(at + VISIBLE * results.plane, visible, is_row)


@triton.jit
def _count_keys(call: "Call", head: "Head", row: "tl.tensor", ranges: tl.constexpr) -> "tl.tensor":
    """Return the number of keys that are in the ranges of each row; without ranges, the number of all keys. The ranges
    of a row do not overlap.
    """
    count = row * 0
    if call.ranges is None:
        count += call.keys
    else:
        strides = call.ranges_strides
        at = call.ranges + head.sequence * strides[0] + head.head * strides[1] + row.to(tl.int64) * strides[2]
        for number in tl.static_range(ranges):
            start = tl.maximum(tl.load(at + 2 * number, row < call.queries, other=0), 0)
            stop = tl.minimum(tl.load(at + 2 * number + 1, row < call.queries, other=0), call.keys)
            count += tl.maximum(stop - start, 0)
    return count


# -- statistics of the keys --------------------------------------------------------------------------------------------


class KeySums(NamedTuple):
    """Tensors of the GPU kernel that computes statistics of keys. The kernel reads the largest score of each query row
    and the weight of this score. For each key it writes the sum of the weights on the key and the number of rows that
    may attend to it.

    Attributes:
        top: largest score of each row, `(batch, heads, queries)`.
        share: weight of the largest score; 0 in a row without a key.
        counted: one byte for each query, 1 at those that count, `(batch, queries)`; None for all.
        received: sum of the weights on each key over counted rows, `(batch, heads, keys)`.
        seen_by: number of counted rows that may attend to each key.
    """

    top: Any
    share: Any
    counted: Any
    received: Any
    seen_by: Any


@triton.jit
def key_kernel(
    call: "Call",
    spans: "Spans",
    sums: "KeySums",
    head_dim: tl.constexpr,
    ranges: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    features: tl.constexpr,
) -> None:
    """Write two sums for each of `block_keys` keys of one head. The first is the sum of the attention weights on the
    key, the second the number of query rows that may attend to it. Only rows that count in statistics are included. The
    kernel reads `block_rows` rows at a time, and `features` features at a time.
    """
    program, head = block_and_head(call, tl.cdiv(call.keys, block_keys))
    key = program * block_keys + tl.arange(0, block_keys)
    k = key_features(call, head, key, 0, head_dim, features)
    received, seen_by = tl.zeros([block_keys], tl.float64), tl.zeros([block_keys], tl.int32)
    first, stop = span_edges(spans, head, program, 0, tl.cdiv(call.queries, block_rows))
    for block in range(first, stop):
        row = block * block_rows + tl.arange(0, block_rows)
        q = query_features(call, head, row, 0, head_dim, features)
        products = tile_products(call, head, row, key, q, k, head_dim, features)
        visible = is_visible(call, head, row[:, None], key[None, :], ranges)
        scores = scale_products(call, head, products)
        scores = finish_scores(call, head, row[:, None], key[None, :], scores, visible)
        visible = scores != float("-inf")
        if sums.counted is not None:
            at = sums.counted + head.sequence * call.queries + row
            visible = visible & (tl.load(at, row < call.queries, other=0) != 0)[:, None]
        at = head.index * call.queries + row
        top = tl.load(sums.top + at, row < call.queries, other=0.0)
        share = tl.load(sums.share + at, row < call.queries, other=0.0)
        received += tl.sum(tl.where(visible, tl.exp(scores - top[:, None]) * share[:, None], 0.0), 0).to(tl.float64)
        seen_by += tl.sum(visible.to(tl.int32), 0)
    at = head.index * call.keys + key
    tl.store(sums.received + at, received, key < call.keys)
    tl.store(sums.seen_by + at, seen_by, key < call.keys)
