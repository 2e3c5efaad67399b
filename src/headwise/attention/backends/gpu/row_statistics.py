"""Triton kernel for the statistics of each query row, without the values and without the weight matrix.

With s the scores of a row over its visible keys, t their largest, and l the log-sum-exp, sink included,

    A_j     = exp(s_j - l)
    entropy = sum_j A_j (l - s_j) = exp(t - l) (sum_j e_j (t - s_j) + (l - t) sum_j e_j)     e_j = exp(s_j - t)

A program has a block of query rows of one head, reads the blocks with a visible key, and carries t and the sums along
(Milakov and Gimelshein 2018). So it needs no log-sum-exp of an attention kernel, and returns its own. No term of the
entropy is negative, so nothing cancels. All sums are in float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from headwise.attention.backends.gpu.score_tiles import (
    block_and_head,
    finish_scores,
    is_visible,
    key_features,
    query_features,
    scale_products,
    span_edges,
    tile_products,
)
from headwise.attention.backends.plain_statistics import ROWS

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

HIDDEN = tl.constexpr(float("-inf"))
"""Score of a key that a row may not attend to."""

FARTHEST = tl.constexpr(1000.0)
"""Bound of the distance of a score from the largest one: its weight is 0 long before, and 0 times infinity is NaN."""


class Tokens(NamedTuple):
    """Positions and tokens of a call. The code that reads a tensor is left out where the tensor is None.

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


class Results(NamedTuple):
    """What the kernel writes.

    Attributes:
        lse: log-sum-exp of each row, `(batch, heads, queries)`.
        rows: the numbers of each row, `(numbers, batch, heads, queries)`, in the order of `plain_statistics.ROWS`.
        plane: number of rows of all heads and sequences.
    """

    lse: Any
    rows: Any
    plane: Any


class RowSums(NamedTuple):
    """Sums over the keys of each row so far, with e the power of a score relative to `top`.

    Attributes:
        top: largest score.
        top_uncapped: largest score before the softcap and the bias.
        top_content: largest score of a key that is not a special token.
        powers: sum of e.
        below: sum of e times the distance of the score from `top`.
        distances: sum of e times the distance between query and key.
        own: e of the key at the position of the row.
        previous: e of the key before it.
        following: e of the key after it.
        first: e of the key of the first token.
        special: sum of e over special tokens.
        duplicates: sum of e over earlier copies of the query's token.
        inductions: sum of e over the keys after them.
        visible: number of visible keys.
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


class Rows(NamedTuple):
    """The query rows of a program.

    Attributes:
        row: their indices.
        position: index of the key at the position of each.
        first_key: index of the key of the first token for each.
        token: number of the token of each; 0 where tokens are unknown.
    """

    row: Any
    position: Any
    first_key: Any
    token: Any


class Normalizer(NamedTuple):
    """What divides the powers of each row.

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
    """Write the statistics of `block_rows` query rows of one head, from `block_keys` keys and `features` features at a
    time.
    """
    program, head = block_and_head(call, tl.cdiv(call.queries, block_rows))
    rows = _rows(call, tokens, head, program * block_rows + tl.arange(0, block_rows))
    q = query_features(call, head, rows.row, 0, head_dim, features)
    sums = _start(block_rows)
    for number in range(span_count):
        first, stop = span_edges(spans, head, program, number, tl.cdiv(call.keys, block_keys))
        for block in range(first, stop):
            key = block * block_keys + tl.arange(0, block_keys)
            k = key_features(call, head, key, 0, head_dim, features)
            products = tile_products(call, head, rows.row, key, q, k, head_dim, features)
            sums = _add_tile(sums, call, tokens, head, rows, key, products, ranges)
    normalizer = _normalizer(call, head, sums)
    _write_sums(call, head, rows, results, sums, normalizer, ranges)


@triton.jit
def _rows(call: "Call", tokens: "Tokens", head: "Head", row: "tl.tensor") -> "Rows":
    """Return the query rows of a program."""
    at = head.sequence * call.queries + row
    position = tl.load(tokens.positions + at, row < call.queries, other=0)
    first_key = tl.load(tokens.first_key + at, row < call.queries, other=-1)
    token = row * 0
    if tokens.query_tokens is not None:
        token = tl.load(tokens.query_tokens + at, row < call.queries, other=-1)
    return Rows(row, position, first_key, token)


@triton.jit
def _start(block_rows: tl.constexpr) -> "RowSums":
    """Return the sums over no key."""
    top = tl.full([block_rows], HIDDEN, tl.float32)
    zeros = tl.zeros([block_rows], tl.float32)
    return RowSums(top, top, top, *(zeros, zeros, zeros, zeros, zeros, zeros, zeros), zeros, zeros, zeros, zeros)


@triton.jit
def _add_tile(
    sums: "RowSums",
    call: "Call",
    tokens: "Tokens",
    head: "Head",
    rows: "Rows",
    key: "tl.tensor",
    products: "tl.tensor",
    ranges: tl.constexpr,
) -> "RowSums":
    """Return the sums with a tile of keys added."""
    row, column = rows.row[:, None], key[None, :]
    visible = is_visible(call, head, row, column, ranges)
    uncapped = scale_products(call, head, products)
    scores = finish_scores(call, head, row, column, uncapped, visible)
    if call.bias is not None:
        visible = scores != HIDDEN
    top = tl.maximum(sums.top, tl.max(scores, 1))
    shift = tl.where(top == HIDDEN, 0.0, top)
    # Earlier sums are relative to the largest score so far.
    raised = tl.where(sums.top == HIDDEN, 0.0, shift - sums.top)
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
    """Return the powers of the own, the previous, the next and the first key of each row; 0 for keys that are not in
    the tile. Most tiles have none of them.
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
    """Return the power of the chosen key of each row; 0 where it is not in the tile."""
    return tl.sum(tl.where(key[None, :] == chosen[:, None], powers, 0.0), 1)


@triton.jit
def _content(
    call: "Call", tokens: "Tokens", head: "Head", key: "tl.tensor", powers: "tl.tensor", scores: "tl.tensor"
) -> "tuple[tl.tensor, tl.tensor]":
    """Return the sum of the powers of special tokens in a tile, and the largest score of other tokens, for each row."""
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
    """Return the sums of the powers of earlier copies of each row's token in a tile, and of the keys after copies."""
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


@triton.jit
def _normalizer(call: "Call", head: "Head", sums: "RowSums") -> "Normalizer":
    """Return what divides the powers of each row, the sink of the head included."""
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
    """Write the log-sum-exp and the statistics of each row but the weights of single keys."""
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
    """Return the number of keys in the ranges of each row; these have no key in common."""
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
