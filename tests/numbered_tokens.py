"""Cached tensors whose values are the numbers of their tokens, so that a test can read which tokens a cache returns."""

from typing import NamedTuple

import torch
from torch import Tensor

import headwise as hw
from headwise.attention.caches.base import Cache

BATCH, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 3, 5, 7
SIZES = [(KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)]
CPU = torch.device("cpu")


class Step(NamedTuple):
    """Numbers of the returned tokens `(batch, keys)`, their positions, and the positions of the new tokens."""

    tokens: Tensor
    key_positions: Tensor | None
    positions: Tensor


def numbered(first: int, count: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Keys and values filled with the number of their token, plus a hundredth of the index of their sequence."""
    number = torch.arange(first, first + count)[None, None, :, None] + torch.arange(batch)[:, None, None, None] / 100
    return number.expand(-1, KV_HEADS, -1, HEAD_DIM), number.expand(-1, KV_HEADS, -1, VALUE_DIM)


def append(cache: Cache, first: int, count: int, lengths=None) -> Step:
    """Append `count` tokens to the cache, numbered from `first`, as the forward pass of a layer does."""
    positions = cache.next_positions(BATCH, count, lengths, CPU)
    update = cache.prepare_update(numbered(first, count), positions)
    for tensor in update.tensors:
        assert torch.equal(tensor, tensor[:, :1, :, :1].expand_as(tensor))
    tokens = update.tensors[0][:, 0, :, 0].clone()
    cache.commit(update)
    return Step(tokens, update.key_positions, positions)


def first_sequence(step: Step) -> list[float]:
    """Return the numbers of the tokens that a step returned for sequence 0."""
    return step.tokens[0].tolist()


def static_cache(capacity: int = 6) -> hw.StaticCache:
    """Return an empty static cache for the tensors of `numbered`."""
    return hw.StaticCache(BATCH, capacity, SIZES)
