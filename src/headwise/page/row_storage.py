"""Attention weights as bytes of a page: all of them for short texts, the largest ones of each query for long texts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.page.contents import AllWeights, HeadAttention, LargestWeights
from headwise.page.encoding import angular, as_bytes
from headwise.shapes import Float

DENSE_WEIGHTS = 1 << 20
"""Number of weights of a page up to which none is left out."""

LISTED_WEIGHTS = 2_400_000
"""Number of weights in pages that leave small weights out."""

LISTED_KEYS = 32
"""Largest number of keys that are listed for a query."""


class StoredRows(NamedTuple):
    """Attention weights of one head on one passage.

    Attributes:
        storage: "dense" for all weights, "sparse" for the largest ones.
        data: the weights as bytes.
    """

    storage: str
    data: bytes


def stored_rows(heads: Sequence[HeadAttention]) -> list[StoredRows]:
    """Return the weights of all heads of a page, on all passages, as bytes.

    If there are at most `DENSE_WEIGHTS` of them, all are stored, with 16 bits. Otherwise the `LISTED_WEIGHTS` largest
    are stored, with 8 bits, rounded down: first the same number for every query, as far as half of the budget allows,
    then the largest others.
    """
    dense = [head.weights.weights for head in heads if isinstance(head.weights, AllWeights)]
    if len(dense) == len(heads) and sum(weights.numel() for weights in dense) <= DENSE_WEIGHTS:
        return [StoredRows("dense", as_bytes(angular(weights, torch.uint16))) for weights in dense]
    listed = [_largest(head.weights) for head in heads]
    least, threshold = _selection([weights.weights for weights in listed])
    return [
        StoredRows("sparse", _sparse_bytes(weights, head.number_of_keys, least, threshold))
        for weights, head in zip(listed, heads, strict=True)
    ]


def _largest(weights: AllWeights | LargestWeights) -> LargestWeights:
    """Return the largest weights of each query, at most `LISTED_KEYS`."""
    if isinstance(weights, LargestWeights):
        return weights
    top = weights.weights.topk(min(LISTED_KEYS, weights.weights.shape[-1]))
    return LargestWeights(top.indices, top.values, weights.weights.sum(-1))


def _selection(weights: Sequence[Float[Tensor, "_ _"]]) -> tuple[int, float]:
    """Return which weights are stored so that there are at most `LISTED_WEIGHTS`: the number of largest weights of each
    query that are stored in any case, and the value above which others are stored.
    """
    queries = sum(len(of_head) for of_head in weights)
    least = LISTED_WEIGHTS // 2 // max(queries, 1)
    others = torch.cat([of_head[:, least:].flatten() for of_head in weights])
    remaining = LISTED_WEIGHTS - least * queries
    if len(others) <= remaining:
        return least, 0.0
    return least, float(others.kthvalue(len(others) - remaining).values)


def _sparse_bytes(listed: LargestWeights, number_of_keys: int, least: int, threshold: float) -> bytes:
    """Return the stored weights of one head as bytes: their number; for each query their number and the sum of all its
    weights; then the keys, ascending for each query, and the weights. Keys have two bytes if that is enough for
    `number_of_keys`, otherwise four.
    """
    rank = torch.arange(listed.weights.shape[1])
    is_stored = (listed.weights > 0) & ((rank < least) | (listed.weights > threshold))
    past_all_keys = torch.iinfo(listed.keys.dtype).max
    keys, order = listed.keys.masked_fill(~is_stored, past_all_keys).sort(dim=1)  # those that are stored come first
    is_stored, weights = is_stored.gather(1, order), listed.weights.gather(1, order)
    keys = keys[is_stored]
    key_type = torch.uint16 if number_of_keys <= 1 << 16 else torch.uint32
    return as_bytes(
        torch.tensor([len(keys)], dtype=torch.int32),
        is_stored.sum(1).to(torch.uint16),
        angular(listed.totals, torch.uint16),
        keys.to(key_type),
        angular(weights[is_stored], torch.uint8, down=True),
    )
