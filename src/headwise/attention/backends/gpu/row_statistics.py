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

from headwise.attention.backends.gpu.row_sums import (
    FARTHEST,
    HIDDEN,
    Rows,
    RowSums,
    Tokens,
    add_tile,
    no_sums,
)
from headwise.attention.backends.gpu.score_tiles import (
    Call,
    Head,
    Spans,
    block_and_head,
    key_features,
    query_features,
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


class Results(NamedTuple):
    """Results that the kernel writes.

    Attributes:
        lse: log-sum-exp of each row, `(batch, heads, queries)`.
        rows: the numbers of each row, `(numbers, batch, heads, queries)`, in the order of `plain_statistics.ROWS`.
        plane: number of rows of all heads and sequences.
    """

    lse: Any
    rows: Any
    plane: Any


class Normalizer(NamedTuple):
    """Divisor of the powers of each row, and its logarithm.

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
    """Return the query rows of a program."""
    at = head.sequence * call.queries + row
    position = tl.load(tokens.positions + at, row < call.queries, other=0)
    first_key = tl.load(tokens.first_key + at, row < call.queries, other=-1)
    token = row * 0
    if tokens.query_tokens is not None:
        token = tl.load(tokens.query_tokens + at, row < call.queries, other=-1)
    return Rows(row, position, first_key, token)


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
