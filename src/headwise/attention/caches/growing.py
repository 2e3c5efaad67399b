"""Caches that append tokens as they come, with the same number for every sequence: all tokens, or the last and the
first ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.attention.caches.base import (
    Cache,
    CachedTensors,
    CacheUpdate,
    first_tokens,
    reordered,
    require_same_batch,
)
from headwise.attention.masks import factories as masks
from headwise.checks import has_values, whole_number
from headwise.errors import InputError
from headwise.shapes import Float, Int

MIN_SPARE_TOKENS = 64
"""Smallest number of spare tokens in a newly allocated buffer, where half the stored length is fewer."""


class GrowingCache(Cache):
    """Base class of caches to which every call appends the same number of tokens for every sequence.

    Under `torch.no_grad()` tokens are written into preallocated buffers that have half as much memory to spare, so
    that appending one token copies one token. `tensors` are then views of the buffers: a token that is written after
    a `crop` overwrites values that such a view may still show. With gradients enabled, while compiling and under
    `torch.func`, every call copies all tokens and overwrites nothing.

    Attributes:
        tensors: stored tokens, `(batch, kv_heads, length, width)` each; None before the first call.
        buffers: preallocated memory whose first tokens are `tensors`; None where nothing may be overwritten.
        token_count: number of tokens that each sequence has received.
    """

    tensors: CachedTensors | None
    buffers: CachedTensors | None
    token_count: int

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all tokens of all sequences, and release the buffers."""
        self.tensors, self.buffers, self.token_count = None, None, 0

    def next_positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "1 new"]:
        """Return the positions of the next `new` tokens, the same for every sequence: with n tokens received so far, n
        to n + new - 1. Raises `InputError` if `lengths` is not None.
        """
        if lengths is not None:
            expected = "a StaticCache, where each sequence may have its own length"
            raise InputError("lengths", expected=expected, got=repr(self))
        return torch.arange(self.token_count, self.token_count + new, device=device).unsqueeze(0)

    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Replace each cached sequence b by sequence `index[b]`; the length of `index` becomes the batch size."""
        if self.tensors is not None and self.buffers is not None:
            self.buffers = reordered(self.buffers, index)
            self.tensors = first_tokens(self.tensors[0].shape[2], self.buffers)
        elif self.tensors is not None:
            self.tensors = reordered(self.tensors, index)

    def _append(self, new: CachedTensors) -> tuple[CachedTensors, CachedTensors | None]:
        """Return the stored tokens followed by the new ones, and the preallocated buffers that contain both. In the
        first call the new tokens are returned unchanged, with None as buffers. Where tensors may not be written in
        place (`_may_write_in_place`), all tokens are copied, and the buffers are None too.

        Stored tokens and the attributes of the cache stay unchanged, so that the call may still fail.
        """
        if self.tensors is None:
            return tuple(new), None
        _require_same_kind(self.tensors, new)
        if not _may_write_in_place(new):
            return tuple(torch.cat(pair, dim=2) for pair in zip(self.tensors, new, strict=True)), None
        stored_length = self.tensors[0].shape[2]
        length = stored_length + new[0].shape[2]
        buffers = self.buffers
        # Outside of inference mode, torch refuses to write to what was made in it.
        is_writable = buffers is not None and (
            torch.is_inference_mode_enabled() or not any(buffer.is_inference() for buffer in buffers)
        )
        if buffers is None or buffers[0].shape[2] < length or not is_writable:
            buffers = tuple(_copy_with_spare_memory(tensor, length) for tensor in self.tensors)
        for buffer, tensor in zip(buffers, new, strict=True):
            buffer.narrow(2, stored_length, tensor.shape[2]).copy_(tensor)
        return first_tokens(length, buffers), buffers

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, with copied tensors and without the preallocated buffers.
        Two caches must not write to the same buffer.
        """
        tensors = None if self.tensors is None else tuple(tensor.clone() for tensor in self.tensors)
        return vars(self) | {"tensors": tensors, "buffers": None}


class DynamicCache(GrowingCache):
    """Cache that stores every token; its memory grows with the text."""

    reads_positions = False

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"] | None, *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Return the tensors of all stored tokens followed by the new ones, and the number of tokens per sequence, new
        ones included, as a `CacheUpdate`. The arguments `positions` and `full_capacity` are ignored.
        """
        tensors, buffers = self._append(new)
        return CacheUpdate(tensors, None, tensors[0].shape[2], buffers)

    def commit(self, update: CacheUpdate) -> None:
        """Make the tokens of an update, stored and new, the content of the cache."""
        self.tensors, self.buffers, self.token_count = update.tensors, update.buffers, update.token_counts

    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens of each sequence."""
        length = whole_number("length", length, least=0)
        if self.tensors is not None and length < self.token_count:
            self.tensors, self.token_count = first_tokens(length, self.tensors), length

    def __repr__(self) -> str:
        return f"DynamicCache({self.token_count} tokens)"


class SlidingCache(GrowingCache):
    """Cache whose memory stops growing: a query attends to the last `window` tokens, its own included, and to the first
    `sinks` tokens of the text (attention sinks, Xiao et al. 2023). Tokens that no later query attends to are dropped.

    A layer with this cache attends as under the mask `window(window) | causal() & prefix(sinks)`. The output is the
    same for a whole text, for the text in pieces, and for one token at a time.

    Args:
        window: number of keys that each query attends to, its own among them.
        sinks: number of tokens at the beginning of the text that every query attends to as well.

    Raises:
        InputError: a `window` below 1 or negative `sinks`.
    """

    def __init__(self, window: int, *, sinks: int = 0) -> None:
        self.window = whole_number("window", window, least=1)
        self.sinks = whole_number("sinks", sinks, least=0)
        last_keys = masks.window(self.window)
        self.mask = last_keys | masks.causal() & masks.prefix(self.sinks) if self.sinks else last_keys
        super().__init__()

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"], *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Return the stored tokens (the first `sinks` tokens and the most recent ones) followed by the new ones, with
        their positions (None if no token has been dropped), as a `CacheUpdate`. Only `commit` drops tokens.
        `full_capacity` is ignored.
        """
        tensors, buffers = self._append(new)
        token_count = self.token_count + positions.shape[1]
        keys, key_positions = tensors[0].shape[2], None
        if keys != token_count:  # tokens between the first and the last ones were dropped
            sinks = torch.arange(self.sinks, device=positions.device)
            last = torch.arange(token_count - keys + self.sinks, token_count, device=positions.device)
            key_positions = torch.cat([sinks, last])[None]
        return CacheUpdate(tensors, key_positions, token_count, buffers)

    def commit(self, update: CacheUpdate) -> None:
        """Store the first `sinks` and the last `window - 1` tokens of an update, and drop those between. The next query
        attends to these and to its own key.
        """
        keys = update.tensors[0].shape[2]
        sinks = min(self.sinks, keys)
        dropped = max(keys - (self.window - 1) - sinks, 0)
        tensors, buffers = update.tensors, update.buffers
        if dropped and (buffers is None or dropped > keys - dropped):
            tensors = tuple(torch.cat([each[:, :, :sinks], each[:, :, sinks + dropped :]], dim=2) for each in tensors)
            buffers = None
        elif dropped and buffers is not None:
            if sinks:
                for buffer in buffers:  # the window stays where it is, and the sinks overwrite dropped tokens
                    buffer[:, :, dropped : dropped + sinks] = buffer[:, :, :sinks].clone()
            buffers = tuple(buffer[:, :, dropped:] for buffer in buffers)
            tensors = first_tokens(keys - dropped, buffers)
        self.tensors, self.buffers, self.token_count = tensors, buffers, update.token_counts

    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens of each sequence. Raises `InputError` once the cache has dropped
        tokens, unless `length` removes nothing.

        Raises:
            InputError: tokens before `length` have been dropped already.
        """
        length = whole_number("length", length, least=0)
        if self.tensors is None or length >= self.token_count:
            return
        if self.tensors[0].shape[2] < self.token_count:
            expected = f"{self.token_count} or more: a sliding cache has dropped what an earlier query would need"
            raise InputError("length", expected=expected, got=length)
        self.tensors, self.token_count = first_tokens(length, self.tensors), length

    def __repr__(self) -> str:
        return f"SlidingCache(window={self.window}, sinks={self.sinks}, {self.token_count} tokens seen)"


def _require_same_kind(stored: CachedTensors, new: CachedTensors) -> None:
    """Raise `InputError` unless the new tensors have the batch, heads, widths, dtypes and device of the stored ones."""
    require_same_batch(stored, new[0].shape[0])
    for one, other in zip(stored, new, strict=True):
        if one.shape[1::2] != other.shape[1::2] or one.dtype != other.dtype:
            kinds = [[(*tensor.shape[1::2], tensor.dtype) for tensor in tensors] for tensors in (new, stored)]
            expected = f"heads, widths and dtypes {kinds[0]}, the layer's"
            raise InputError("cache", expected=expected, got=kinds[1], remedy="a cache belongs to one layer")
    if stored[0].device != new[0].device:
        raise InputError("cache", expected=f"tensors on {new[0].device} like the layer", got=stored[0].device)


def _may_write_in_place(new: CachedTensors) -> bool:
    """Return True if new tokens may be written into buffers in place: gradients are disabled, and each tensor is a
    `torch.Tensor`, not of a subclass. Returns False while compiling, under `torch.func`, and for meta tensors.
    """
    return not torch.is_grad_enabled() and all(type(tensor) is Tensor and has_values(tensor) for tensor in new)


def _copy_with_spare_memory(
    tensor: Float[Tensor, "batch heads stored width"], length: int
) -> Float[Tensor, "batch heads capacity width"]:
    """Return a buffer whose first tokens are a copy of `tensor`. It has memory for `length` tokens, and spare memory
    for another `length // 2` tokens, or for another 64 if that is more.
    """
    batch, heads, stored_length, width = tensor.shape
    buffer = tensor.new_empty(batch, heads, length + max(length // 2, MIN_SPARE_TOKENS), width)
    buffer[:, :, :stored_length] = tensor
    return buffer
