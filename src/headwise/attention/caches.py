"""Key/value caches, so that generating a token costs one row of the attention matrix.

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

from headwise.attention.masks import factories as masks
from headwise.attention.masks.base import Mask
from headwise.attention.packed import real_lengths
from headwise.attention.tensors import KeyPositions
from headwise.checks import (
    collection_of,
    float_dtype,
    has_readable_values,
    has_values,
    pair_of,
    size_argument,
    whole_number,
    whole_numbers,
)
from headwise.errors import InputError
from headwise.shapes import Float, Int

CachedTensors = tuple[Float[Tensor, "_ _ _ _"], ...]
"""Tensors that a cache stores for one layer, `(batch, kv_heads, length, width)` each, such as keys and values."""


class CacheUpdate(NamedTuple):
    """Result of `Cache.prepare_update`: the tensors of the cached tokens followed by the new tokens of one call, with
    key positions and the number of tokens of each sequence. `Cache.commit` makes these tokens the content of the cache.

    Attributes:
        tensors: stored and new tokens, `(batch, kv_heads, keys, width)` each; the layer attends to them.
        key_positions: position of each of these keys, `(batch, keys)` or `(1, keys)`, and -1 for an empty slot; None
            where key j is at position j.
        token_counts: number of tokens that each sequence has received, the new ones included: one number for all
            sequences, or a tensor `(batch,)`.
        buffers: preallocated memory whose first tokens are `tensors`; None where the tensors have no spare memory.
    """

    tensors: CachedTensors
    key_positions: KeyPositions | None
    token_counts: Any
    buffers: CachedTensors | None = None


class Cache(ABC):
    """Base class of caches for generation. A cache stores the keys and values of the tokens that one layer has
    processed so far, or the latent vectors from which the layer computes both.

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
        """Make the tokens of an update, stored and new, the content of the cache. This is the last step of a forward
        pass.
        """

    @abstractmethod
    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Replace sequence b of the cache by sequence `index[b]`, as after a step of beam search."""

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
    """Return copies of the tensors with their sequences, along the first axis, in another order: sequence b of a copy
    is sequence `index[b]` of the original.
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


# -- caches that append tokens as they come, with the same number for every sequence -----------------------------------

MIN_SPARE_TOKENS = 64
"""Smallest number of spare tokens in a newly allocated buffer, where half the stored length is fewer."""


class GrowingCache(Cache):
    """Base class of caches in which all sequences have the same length: every call of the layer appends the same number
    of tokens to each sequence.

    Under `torch.no_grad()` tokens are written into preallocated buffers that have half as much memory to spare, so
    that appending one token copies one token. `tensors` are then views of the buffers: a token that is written after
    a `crop` overwrites values that such a view may still show. With gradients enabled and under `torch.func`, every
    call copies all tokens and overwrites nothing.

    Attributes:
        writes_compiled: True if compiled code writes into the buffers too. Otherwise it copies all tokens.
        tensors: stored tokens, `(batch, kv_heads, length, width)` each; None before the first call.
        buffers: preallocated memory whose first tokens are `tensors`; None where nothing may be overwritten.
        token_count: number of tokens that each sequence has received.
    """

    writes_compiled: ClassVar[bool] = False
    tensors: CachedTensors | None
    buffers: CachedTensors | None
    token_count: int

    def __init__(self) -> None:
        self.reset()

    @property
    def stored_length(self) -> int:
        """Number of tokens of `tensors`, which must not be None."""
        assert self.tensors is not None
        return self.tensors[0].shape[2]

    def reset(self) -> None:
        """Remove all tokens of all sequences, and release the buffers."""
        self.tensors, self.buffers, self.token_count = None, None, 0

    def next_positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "1 new"]:
        """Return the positions of the next `new` tokens, which are the same for every sequence: n to n + new - 1, if
        the cache has received n tokens. Raise `InputError` if `lengths` are passed, since all sequences have the same
        length.
        """
        if lengths is not None:
            expected = "a StaticCache, where each sequence may have its own length"
            raise InputError("lengths", expected=expected, got=repr(self))
        return torch.arange(self.token_count, self.token_count + new, device=device).unsqueeze(0)

    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Replace each cached sequence b by sequence `index[b]`; the length of `index` becomes the batch size."""
        if self.tensors is not None and self.buffers is not None:
            with torch.inference_mode(False):
                self.buffers = reordered(self.buffers, index)
            self.tensors = first_tokens(self.tensors[0].shape[2], self.buffers)
        elif self.tensors is not None:
            self.tensors = reordered(self.tensors, index)

    def commit(self, update: CacheUpdate) -> None:
        self.tensors, self.buffers, self.token_count = update.tensors, update.buffers, update.token_counts

    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens of each sequence.

        Raises:
            InputError: a sliding cache has dropped tokens before `length`.
        """
        length = whole_number("length", length, least=0)
        if self.tensors is None or length >= self.token_count:
            return
        if self.tensors[0].shape[2] < self.token_count:
            expected = f"{self.token_count} or more: a sliding cache has dropped what an earlier query would need"
            raise InputError("length", expected=expected, got=length)
        self.tensors, self.token_count = first_tokens(length, self.tensors), length

    def _append(self, new: CachedTensors) -> tuple[CachedTensors, CachedTensors | None]:
        """Return the stored tokens followed by the new ones, and the preallocated buffers that contain both. The
        buffers are None in the first call, and where tensors may not be written in place. The attributes of the cache
        stay unchanged, so that a call that fails later can be repeated.
        """
        if self.tensors is None:
            return tuple(new), None
        stored_length = self.stored_length
        stored = self.tensors if self.buffers is None else first_tokens(stored_length, self.buffers)
        _require_same_kind(stored, new)
        # Nothing is written in place with gradients, in subclasses of tensors, while exporting and under `torch.func`.
        may_write = self.writes_compiled and torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        if torch.is_grad_enabled() or not all(type(each) is Tensor and (may_write or has_values(each)) for each in new):
            return tuple(torch.cat(pair, dim=2) for pair in zip(stored, new, strict=True)), None
        length = stored_length + new[0].shape[2]
        buffers = self.buffers
        if buffers is None or buffers[0].shape[2] <= length:  # a full buffer would be another case to compile
            capacity = length + max(length // 2, MIN_SPARE_TOKENS)
            with torch.inference_mode(False):  # torch refuses to write to tensors of inference mode outside of it
                buffers = tuple(each.new_empty(*each.shape[:2], capacity, each.shape[3]) for each in stored)
            for buffer, tensor in zip(buffers, stored, strict=True):
                buffer[:, :, :stored_length] = tensor
        for buffer, tensor in zip(buffers, new, strict=True):
            buffer.narrow(2, stored_length, tensor.shape[2]).copy_(tensor)
        return first_tokens(length, buffers), buffers

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, with copied tensors: two caches must not share a buffer."""
        tensors = None if self.tensors is None else tuple(tensor.clone() for tensor in self.tensors)
        return vars(self) | {"tensors": tensors, "buffers": None}


class DynamicCache(GrowingCache):
    """Cache that stores every token; its memory grows with the text."""

    reads_positions = False
    writes_compiled = True

    @property
    def stored_length(self) -> int:
        return self.token_count  # not read from `tensors`: torch compiles no views of buffers that grow

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"] | None, *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Return all stored tokens followed by the new ones. `positions` and `full_capacity` are ignored."""
        tensors, buffers = self._append(new)
        return CacheUpdate(tensors, None, tensors[0].shape[2], buffers)

    def __repr__(self) -> str:
        return f"DynamicCache({self.token_count} tokens)"


class SlidingCache(GrowingCache):
    """Cache whose memory stops growing. A query attends to the last `window` tokens, its own included, and to the first
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
        """Return the stored tokens (the first `sinks` tokens and the most recent ones) followed by the new ones, as a
        `CacheUpdate`. Its key positions are None if no token has been dropped. Only `commit` drops tokens.
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
        """Store the first `sinks` and the last `window - 1` tokens of an update, which has the stored and the new
        tokens, and drop the tokens between them. The next query attends to the stored tokens and to its own key.
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


# -- a cache of fixed capacity, in which each sequence has its own length ----------------------------------------------

MOST_LISTED = 16
"""Largest number of positions that are compared in Python."""


class StaticCache(Cache):
    """Cache with preallocated slots for `capacity` tokens of each sequence. The slots never change their shape or their
    address. Therefore a decoding step is compiled only once, and can be captured in a CUDA graph on a GPU.

    Each sequence has its own length. Prompts of different lengths are padded on the right and come with `lengths`;
    later tokens are appended to each sequence at its end. Tokens are written in place, so they take no gradient.

    Args:
        batch: number of sequences.
        capacity: number of tokens that each sequence has slots for.
        tensor_sizes: heads and width of each stored tensor, such as `[(kv_heads, head_dim), (kv_heads, value_dim)]`.
        device: of the slots.
        dtype: of the slots, which must be that of the keys and values of the layer.

    Attributes:
        slots: stored tokens, `(batch, kv_heads, 1 + capacity, width)` each; padding is written to the first slot.
        lengths: number of tokens of each sequence, `(batch,)`.

    Raises:
        InputError: a `batch`, `capacity` or size below 1 or above 2**31; a dtype that is not of floating point.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        tensor_sizes: Sequence[tuple[int, int]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        batch, self.capacity = size_argument("batch", batch), size_argument("capacity", capacity)
        # The additional first slot receives padding and is never read. A token beyond the capacity has no slot, so
        # the index check of the device rejects it.
        expected = "a pair (heads, width) for each stored tensor"
        pairs = [
            pair_of("tensor_sizes", sizes, of=expected)
            for sizes in collection_of("tensor_sizes", tensor_sizes, of="pairs")
        ]
        shapes = [
            (batch, size_argument("tensor_sizes", heads), capacity + 1, size_argument("tensor_sizes", width))
            for heads, width in pairs
        ]
        dtype = float_dtype("dtype", dtype)
        self.slots = tuple(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._has_uncommitted_writes = False
        if self.lengths.is_cuda and has_values(self.lengths):
            keep_addresses((*self.slots, self.lengths))

    @property
    def tensors(self) -> CachedTensors:
        """Views of the slots for tokens, `(batch, kv_heads, capacity, width)` each, without the additional first slot,
        which receives padding.
        """
        return self._slots_of(range(self.capacity))

    def _slots_of(self, positions: range) -> CachedTensors:
        """Return views of the slots for the tokens at the given consecutive positions."""
        return tuple(slots.narrow(2, 1 + positions.start, len(positions)) for slots in self.slots)

    @property
    def can_omit_empty_slots(self) -> bool:
        """True if the lengths of the sequences can be read: on a CPU, and not while compiling or under `torch.func`.
        Then `prepare_update` may leave out the slots beyond the longest sequence.
        """
        return has_readable_values(self.lengths)

    def next_positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "#batch new"]:
        """Return the positions of the next `new` tokens of each sequence, after its cached tokens. The shape is `(1,
        new)` if the positions are known to be the same for all sequences. On a CPU, except while compiling, a token
        beyond the capacity raises `InputError`. On a GPU `lengths` are not read: a negative number counts as 0, and one
        above `new` as `new`.
        """
        require_same_batch(self.slots, batch)
        if lengths is None and new and self.can_omit_empty_slots:
            starts = self.lengths.tolist()
            if starts.count(starts[0]) == len(starts):
                self._require_room(starts[0] + new)
                return torch.arange(starts[0], starts[0] + new, device=device).unsqueeze(0)
        step = torch.arange(new, device=device)
        positions = self.lengths[:, None] + step
        if lengths is not None:
            positions = torch.where(step < real_lengths(lengths, batch, new, device)[:, None], positions, -1)
        # Where positions are not read, the index check of the device still rejects a token beyond the capacity.
        if has_readable_values(positions) and positions.numel():
            self._require_room(_extremes(positions)[1] + 1)
        return positions

    def _require_room(self, tokens: int) -> None:
        """Raise `InputError` if a sequence of `tokens` tokens is longer than the capacity of the cache."""
        if tokens > self.capacity:
            raise InputError("cache", expected=f"room for {tokens} tokens", got=f"a capacity of {self.capacity}")

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"], *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Write the new tokens of each sequence into the slots after its cached tokens. Return all slots with their key
        positions, -1 for empty slots. On a CPU, except while compiling, slots beyond the longest sequence are left out
        unless `full_capacity` is True.

        The written slots count as empty until `commit` sets the new lengths. If `commit` is never called, because the
        forward pass failed, the next update clears them.
        """
        self._check_new(new)
        if self._has_uncommitted_writes:
            self._clear_empty_slots(slice(None))
        self._has_uncommitted_writes = True
        can_omit = self.can_omit_empty_slots
        span = None  # of the new tokens, if it is the same in all sequences, without padding
        if can_omit and positions.numel():
            # The real tokens of a sequence are consecutive: all agree if together they fill a range of their number.
            first, last = _extremes(positions)
            if first >= 0 and last - first + 1 == positions.shape[1]:
                span = range(first, last + 1)
        if span is not None:
            for stored, tensor in zip(self._slots_of(span), new, strict=True):
                stored.copy_(tensor)
            if not full_capacity:
                return CacheUpdate(self._slots_of(range(span.stop)), None, span.stop)
            token_counts = self.lengths + positions.shape[1]
        else:
            slot_indices = positions + 1  # padding has position -1
            sequence_indices = torch.arange(slot_indices.shape[0], device=slot_indices.device)[:, None]
            for slots, tensor in zip(self.slots, new, strict=True):
                slots.transpose(1, 2)[sequence_indices, slot_indices] = tensor.transpose(1, 2)
            token_counts = self.lengths + (positions >= 0).sum(1)
        tensors = self.tensors if full_capacity or not can_omit else self._slots_of(range(int(token_counts.max())))
        slot_positions = torch.arange(tensors[0].shape[2], device=token_counts.device)
        key_positions = torch.where(slot_positions < token_counts[:, None], slot_positions, -1)
        return CacheUpdate(tensors, key_positions, token_counts)

    def _check_new(self, new: CachedTensors) -> None:
        """Raise `InputError` unless the new tensors have the heads, width, dtype and device of the slots. Also raise it
        if they need a gradient, which would be lost when they are written in place.
        """
        slot_sizes, new_sizes = ([tensor.shape[1::2] for tensor in tensors] for tensors in (self.slots, new))
        if slot_sizes != new_sizes:
            expected = f"room for {[tuple(size) for size in new_sizes]} heads and widths, the layer's"
            got = f"a cache made for {[tuple(size) for size in slot_sizes]}"
            raise InputError("cache", expected=expected, got=got, remedy="layer.static_cache(...) makes one that fits")
        for slots, tensor in zip(self.slots, new, strict=True):
            if slots.dtype != tensor.dtype or slots.device != tensor.device:
                got = f"{tensor.dtype} on {tensor.device}"
                raise InputError("cache", expected=f"keys and values of {slots.dtype} on {slots.device}", got=got)
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise InputError(
                    "cache",
                    expected="no gradient, since a static cache is written in place",
                    got="keys that require one",
                    remedy="call the layer under torch.no_grad(), or use a DynamicCache",
                )

    def commit(self, update: CacheUpdate) -> None:
        """Set the length of each sequence to its number of tokens in the update, so that the tokens that
        `prepare_update` has written count as cached.
        """
        if isinstance(update.token_counts, Tensor):
            self.lengths.copy_(update.token_counts)
        else:
            self.lengths.fill_(update.token_counts)
        self._has_uncommitted_writes = False

    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Replace each cached sequence b by sequence `index[b]`, in place; `index` has one number for each sequence."""
        *slots, lengths = reordered((*self.slots, self.lengths), index)
        if len(lengths) != len(self.lengths):
            expected = f"one for each of {len(self.lengths)} sequences"
            raise InputError("index", expected=expected, got=tuple(lengths.shape))
        for tensor, values in zip((*self.slots, self.lengths), (*slots, lengths), strict=True):
            tensor.copy_(values)

    def crop(self, length: int | Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Remove all but the first `length` tokens of each sequence. `length` is one number for all sequences, or one
        number for each, `(batch,)`. A negative number on a GPU, where it is not read, counts as 0.
        """
        if not isinstance(length, Tensor | Sequence):
            length = min(whole_number("length", length, least=0), self.capacity)
            self._crop_to(self.lengths.clamp(max=length))
            return
        lengths = whole_numbers("length", length, dimensions=(1,), shape="one for each sequence")
        if lengths.shape != self.lengths.shape or (has_readable_values(lengths) and (lengths < 0).any()):
            expected = f"a number of 0 or more, or one for each of {len(self.lengths)} sequences"
            raise InputError("length", expected=expected, got=lengths.tolist())
        lengths = lengths.to(self.lengths.device, non_blocking=True)
        self._crop_to(torch.minimum(self.lengths, lengths.clamp(min=0)))

    def reset(self) -> None:
        """Remove all tokens of all sequences and fill their slots with zeros; the memory stays allocated."""
        self._crop_to(torch.zeros_like(self.lengths))

    def _crop_to(self, lengths: Int[Tensor, " batch"]) -> None:
        """Set the length of each sequence to the given length, which is at most its present one, and clear the removed
        tokens.
        """
        removed = slice(None)
        if self.can_omit_empty_slots and not self._has_uncommitted_writes:
            removed = slice(int(lengths.min()), int(self.lengths.max()))
        self.lengths.copy_(lengths)
        self._clear_empty_slots(removed)
        self._has_uncommitted_writes = False

    def _clear_empty_slots(self, positions: slice) -> None:
        """Fill the slots beyond the length of their sequence with zeros, in the range `positions`. Attention multiplies
        the value of an empty slot by a weight of 0, which does not remove NaN and infinity.
        """
        is_empty = torch.arange(self.capacity, device=self.lengths.device)[positions] >= self.lengths[:, None]
        for tensor in self.tensors:
            tensor[:, :, positions].masked_fill_(is_empty[:, None, :, None], 0)

    def __repr__(self) -> str:
        return f"StaticCache(capacity={self.capacity}, lengths={self.lengths.tolist()})"


def keep_addresses(tensors: Sequence[Tensor]) -> None:
    """Mark tensors for `torch.compile` as tensors that stay at their memory addresses. Without the mark, a step of
    decoding, which writes to them, is not captured in a CUDA graph with `mode="reduce-overhead"`.
    """
    import torch._dynamo  # takes long to import

    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


def _extremes(positions: Int[Tensor, "batch new"]) -> tuple[int, int]:
    """Return the smallest and the largest of the given positions. If there are few, they are compared in Python, which
    is faster.
    """
    if positions.numel() <= MOST_LISTED:
        numbers = [position for row in positions.tolist() for position in row]
        return min(numbers), max(numbers)
    smallest, largest = positions.aminmax()
    return int(smallest), int(largest)
