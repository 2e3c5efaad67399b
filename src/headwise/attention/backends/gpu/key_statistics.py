"""Triton kernel for the sums of the attention weights on each key, and the number of rows that may attend to it.

A program has a block of keys of one head, and reads the blocks of query rows of which some row sees one of its keys.
The weights follow from the largest score and the largest weight of each row. The rows are added up in one order,
without atomic additions, so the sums have the same bits in every run; those of blocks are added in float64.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from headwise.attention.backends.gpu.score_tiles import (
    Call,
    Spans,
    block_and_head,
    finish_scores,
    is_visible,
    key_features,
    query_features,
    scale_products,
    span_edges,
    tile_products,
)


class KeySums(NamedTuple):
    """Values of each row, which the kernel reads, and sums over rows for each key, which it writes.

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
    """Write the sums of `block_keys` keys of one head, from `block_rows` rows and `features` features at a time."""
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
