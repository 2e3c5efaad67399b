"""Interface of the key/value caches.

A cache belongs to one layer and one batch. It stores tensors of shape `(batch, kv_heads, length, width)`: keys and
values, or the latents of multi-head latent attention. The forward pass of a layer uses it in three steps:

    positions = cache.next_positions(...)              positions of the new tokens
    update = cache.prepare_update(new, positions)      stored and new tokens, to attend to
    cache.commit(update)                               the last step, once the output has been computed

The tokens of a call count as cached only after `commit`. A call that fails before it can therefore be repeated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.checks import has_readable_values, whole_numbers
from headwise.errors import InputError
from headwise.shapes import Float, Int

CachedTensors = tuple[Float[Tensor, "_ _ _ _"], ...]
"""Tensors that a cache stores for one layer, `(batch, kv_heads, length, width)` each, such as keys and values."""


class CacheUpdate(NamedTuple):
    """Tensors of the cached tokens followed by the new tokens of one call, with key positions and the number of tokens
    of each sequence. `Cache.commit` makes these tokens the content of the cache.

    Attributes:
        tensors: stored and new tokens, `(batch, kv_heads, keys, width)` each; the layer attends to them.
        key_positions: position of each of these keys, `(batch, keys)` or `(1, keys)`, and -1 for an empty slot; None
            where key j is at position j.
        token_counts: number of tokens that each sequence has received, the new ones included: one number for all
            sequences, or a tensor `(batch,)`.
        buffers: preallocated memory whose first tokens are `tensors`; None where the tensors have no spare memory.
    """

    tensors: CachedTensors
    key_positions: Int[Tensor, "#batch keys"] | None
    token_counts: Any
    buffers: CachedTensors | None = None


class Cache(ABC):
    """Base class of caches: keys and values (or latents) of the tokens that one layer has processed so far.

    Attributes:
        mask: keys that the cache lets each query attend to, which the layer combines with its own mask; None for all.
        reads_positions: False if no update depends on the positions of its tokens, because all are kept in order.
    """

    mask: Mask | None = None
    reads_positions: ClassVar[bool] = True

    @abstractmethod
    def next_positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "#batch new"]:
        """Return the positions of the next `new` tokens of each sequence. If `lengths` is passed, only the first
        `lengths[b]` new tokens of sequence b are real, and the padding after them has position -1.

        Args:
            batch: number of sequences.
            new: number of new tokens of each sequence, padding included.
            lengths: how many of the new tokens are real in each sequence, the first ones; None for all.
            device: of the result.

        Raises:
            InputError: lengths that the cache cannot represent, too many tokens.
        """

    @abstractmethod
    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"], *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Return the tensors of the stored tokens followed by the new ones, with key positions and token counts, as a
        `CacheUpdate`. The new tokens count as cached only once this update is passed to `commit`. With `full_capacity`,
        the empty slots of a `StaticCache` are returned too.

        Args:
            new: tensors of the new tokens, `(batch, kv_heads, new, width)` each.
            positions: of the new tokens, from `next_positions`.
            full_capacity: whether to return the empty slots of a `StaticCache` too.

        Raises:
            InputError: tensors whose batch, sizes, dtype or device differ from the stored ones.
        """

    @abstractmethod
    def commit(self, update: CacheUpdate) -> None:
        """Make the tokens of an update, stored and new, the content of the cache: the last step of a forward pass."""

    @abstractmethod
    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Replace sequence b by sequence `index[b]`, as after a step of beam search."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens of each sequence, as after a rejected guess of speculative decoding.

        A longer `length` changes nothing.
        """

    @abstractmethod
    def reset(self) -> None:
        """Remove all tokens of all sequences."""


def first_tokens(length: int, tensors: CachedTensors) -> CachedTensors:
    """Return views of the first `length` tokens of each tensor, along the third axis."""
    return tuple(tensor.narrow(2, 0, length) for tensor in tensors)


def reordered(tensors: tuple[Tensor, ...], index: Any) -> tuple[Tensor, ...]:
    """Return copies of the tensors in which sequence b is sequence `index[b]` of the original tensors. The first axis
    of each tensor is the batch.
    """
    sequences = whole_numbers("index", index, dimensions=(1,), shape="one for each sequence")
    batch = tensors[0].shape[0]
    if has_readable_values(sequences) and ((sequences < 0) | (sequences >= batch)).any():
        raise InputError("index", expected=f"numbers from 0 to {batch - 1}, the sequences", got=sequences.tolist())
    sequences = sequences.to(tensors[0].device, non_blocking=True)
    return tuple(tensor[sequences] for tensor in tensors)


def require_same_batch(tensors: CachedTensors | None, batch: int) -> None:
    """Raise `InputError` unless the stored tensors, if there are any, have `batch` sequences."""
    if tensors is not None and tensors[0].shape[0] != batch:
        expected = f"the batch of {tensors[0].shape[0]} that the cache holds"
        raise InputError("x", expected=expected, got=f"a batch of {batch}", remedy="reset() or reorder() the cache")
