"""Scores of a tile in Triton: some query rows of one head with some keys, scaled, capped, biased and masked.

The functions of this module are parts of the kernels in `row_statistics.py` and `key_statistics.py`. They define the
scores and the visible keys once, for tiles and for single keys of each row.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

SERIES_BELOW = tl.constexpr(0.5)
"""Absolute value below which tanh is computed as a series: there, the other formula would cancel."""


class Call(NamedTuple):
    """Tensors, sizes and strides of one attention call, as the kernels read them. The code that reads a tensor is left
    out of the compiled kernel where the tensor is None. The stride of an axis along which a tensor repeats is 0.

    Attributes:
        q, k: queries and keys.
        q_strides, k_strides: strides of sequences, heads, tokens and features.
        head_dim, heads, group, queries, keys: numbers of features of a head, of query heads, of query heads for each
            key/value head, of rows and of keys.
        scale: factor of the scores.
        head_scale: further factor for each head.
        softcap: limit of the scores.
        sinks: sink logit of each head.
        ranges: start and stop of each range of keys of each query.
        ranges_strides: strides of sequences, heads and queries.
        dense: one byte for each query and key, 1 where the query attends to the key.
        dense_strides: strides of sequences, heads, queries and keys.
        bias: number added to each score.
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
    """One head of one sequence.

    Attributes:
        sequence: index of the sequence.
        head: index of the query head.
        index: index among the heads of all sequences.
    """

    sequence: Any
    head: Any
    index: Any


class Spans(NamedTuple):
    """Blocks that each program reads, as spans from one block to before another; a span may be empty.

    Attributes:
        edges: first and stop of each span, `(batch or 1, heads or 1, programs, spans, 2)`; None for all blocks.
        strides: strides of sequences, heads and programs.
    """

    edges: Any
    strides: Any


@triton.jit
def block_and_head(call: "Call", blocks: "tl.tensor") -> "tuple[tl.tensor, Head]":
    """Return the block and the head of this program. Programs of one head are adjacent, since they read the same keys.
    Under a causal mask, the last rows see the most keys, and begin first.
    """
    program = tl.program_id(0)
    index = (program // blocks).to(tl.int64)
    return blocks - 1 - program % blocks, Head(index // call.heads, index % call.heads, index)


@triton.jit
def span_edges(
    spans: "Spans", head: "Head", program: "tl.tensor", number: "tl.tensor", blocks: "tl.tensor"
) -> "tuple[tl.tensor, tl.tensor]":
    """Return the first block of span `number` of a program, and the block at which it stops."""
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
    """Return `features` features of query rows, from feature `begin` on, `(rows, features)`, with zeros beyond the last
    row and feature.
    """
    feature = begin + tl.arange(0, features)
    at = call.q + head.sequence * call.q_strides[0] + head.head * call.q_strides[1]
    at += row.to(tl.int64)[:, None] * call.q_strides[2] + feature[None, :] * call.q_strides[3]
    return tl.load(at, (row < call.queries)[:, None] & (feature < head_dim)[None, :], other=0.0)


@triton.jit
def key_features(
    call: "Call", head: "Head", key: "tl.tensor", begin: "int", head_dim: tl.constexpr, features: tl.constexpr
) -> "tl.tensor":
    """Return `features` features of keys, from feature `begin` on, `(keys, features)`, with zeros for keys that are
    not there and beyond the last feature.
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
    """Return the products of query rows and keys, `(rows, keys)` in float32, of which `q` and `k` are the first
    `features` features.
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
    """Return True where a query row may attend to a key by its ranges and the dense mask. `row` and `key` broadcast."""
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
    """Return scores before the softcap and the bias."""
    scores = products * call.scale
    if call.head_scale is not None:
        scores = scores * tl.load(call.head_scale + head.head)
    return scores


@triton.jit
def finish_scores(
    call: "Call", head: "Head", row: "tl.tensor", key: "tl.tensor", scores: "tl.tensor", visible: "tl.tensor"
) -> "tl.tensor":
    """Return the scores as they enter the softmax, -inf at hidden keys. `scores` are those before the softcap."""
    if call.softcap is not None:
        scores = call.softcap * _tanh(scores / call.softcap)
    if call.bias is not None:
        scores += tl.load(call.bias + _offsets(call.bias_strides, head, row, key), visible, other=0.0)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _offsets(strides: "tl.tensor", head: "Head", row: "tl.tensor", key: "tl.tensor") -> "tl.tensor":
    """Return the offsets of query rows and keys in a tensor `(batch, heads, queries, keys)` with these strides."""
    of_head = head.sequence * strides[0] + head.head * strides[1]
    return of_head + row.to(tl.int64) * strides[2] + key.to(tl.int64) * strides[3]


@triton.jit
def _tanh(x: "tl.tensor") -> "tl.tensor":
    """Return tanh, with an error of a few units in the last place of float32 everywhere."""
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
