"""Sums over the keys of query rows in Triton, to which tiles of scores are added one by one."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from headwise.attention.backends.gpu.score_tiles import Call, Head, finish_scores, is_visible, scale_products

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


@triton.jit
def no_sums(block_rows: tl.constexpr) -> "RowSums":
    """Return the sums over no key."""
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
