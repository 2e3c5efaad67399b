"""Key/value caches: what a layer has seen, kept so that the next token costs one row of the matrix.

A cache belongs to one layer and one batch. It keeps any tensors of shape `(batch, kv_heads, length, width)`: keys and
values, or the latents of multi-head latent attention. A call goes in three steps, so that one that fails leaves the
cache as it was:

    positions    where the new tokens stand
    joined       everything there is to attend to, and where it stands
    keep         what stays for the next call
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask, can_be_read
from headwise.attention.masks.factories import causal, prefix, window
from headwise.checks import whole_number, whole_numbers
from headwise.errors import InputError
from headwise.shapes import Float, Int

Kept = tuple[Float[Tensor, "_ _ _ _"], ...]
"""What a cache keeps of a layer, each `(batch, kv_heads, length, width)`: keys and values, say."""

LEAST_ROOM = 64
"""Tokens that there is room for beyond those that are kept, where that is more than half as many again."""


class CacheUpdate(NamedTuple):
    """What was kept and what is new."""

    tensors: Kept
    key_positions: Int[Tensor, "#batch keys"] | None
    """None where keys lie as they stand: the last query's key is the last."""
    seen: Any
    """How many tokens have been seen, these among them."""
    room: Kept | None = None
    """What the tensors are the beginning of, where further tokens may be written behind them."""


class Cache(ABC):
    """What a layer has seen."""

    mask: Mask | None = None
    """What the cache itself forgets, as a mask; the layer adds it to its own."""

    @abstractmethod
    def positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "#batch new"]:
        """Where `new` more tokens stand; -1 for those beyond a sequence's own length."""

    @abstractmethod
    def joined(self, new: Kept, positions: Int[Tensor, "#batch new"], *, whole: bool = False) -> CacheUpdate:
        """What is kept, and these tensors after it; with `whole` also the room that holds nothing, if there is any."""

    @abstractmethod
    def keep(self, joined: CacheUpdate) -> None:
        """Keep what the next call will need."""

    @abstractmethod
    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Sequence b becomes what sequence `index[b]` was: after a step of beam search."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, as when a guess at the next ones was wrong."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""


class _Growing(Cache):
    """What caches share that take each token as it comes, for all sequences alike.

    Under `torch.no_grad()` tokens are written into room with some to spare, half as much again, so that one more costs
    what it takes itself. `tensors` are then views: what a later token is written over, after a crop say, changes in
    them. Where a gradient may be asked for, while compiling and under `torch.func`, all is copied with every call and
    nothing is written over.
    """

    tensors: Kept | None
    """What is kept, each `(batch, kv_heads, length, width)`; None before the first token."""
    room: Kept | None
    """What `tensors` are the beginning of, where the next tokens may be written; None where nothing may."""
    seen: int
    """How many tokens each sequence has had."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.tensors, self.room, self.seen = None, None, 0

    def positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "1 new"]:
        if lengths is not None:
            expected = "a StaticCache, where sequences may have lengths of their own"
            raise InputError("lengths", expected=expected, got=repr(self))
        _require_batch(self.tensors, batch)
        return torch.arange(self.seen, self.seen + new, device=device)[None]

    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        if self.tensors is not None and self.room is not None:
            self.room = _reordered(self.room, index)
            self.tensors = _first(self.tensors[0].shape[2], self.room)
        elif self.tensors is not None:
            self.tensors = _reordered(self.tensors, index)

    def _appended(self, new: Kept) -> tuple[Kept, Kept | None]:
        """What is kept and the new tokens behind it, and the room that they lie in."""
        if self.tensors is None:
            return tuple(new), None
        _require_alike(self.tensors, new)
        if not _may_write(new):
            return tuple(torch.cat(each, dim=2) for each in zip(self.tensors, new, strict=True)), None
        kept = self.tensors[0].shape[2]
        length = kept + new[0].shape[2]
        room = self.room
        if room is None or room[0].shape[2] < length or not _writable(room):
            room = tuple(_with_room(tensor, length) for tensor in self.tensors)
        for buffer, tensor in zip(room, new, strict=True):
            buffer[:, :, kept:length] = tensor
        return _first(length, room), room

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: no room, so that two caches never write into the same."""
        kept = None if self.tensors is None else tuple(tensor.clone() for tensor in self.tensors)
        return vars(self) | {"tensors": kept, "room": None}


class DynamicCache(_Growing):
    """Grows with every token and drops none."""

    def joined(self, new: Kept, positions: Int[Tensor, "#batch new"], *, whole: bool = False) -> CacheUpdate:
        tensors, room = self._appended(new)
        return CacheUpdate(tensors, None, tensors[0].shape[2], room)

    def keep(self, joined: CacheUpdate) -> None:
        self.tensors, self.room, self.seen = joined.tensors, joined.room, joined.seen

    def crop(self, length: int) -> None:
        length = whole_number("length", length, least=0)
        if self.tensors is not None:
            self.tensors, self.seen = _first(length, self.tensors), min(self.seen, length)

    def __repr__(self) -> str:
        return f"DynamicCache({self.seen} tokens)"


class SlidingCache(_Growing):
    """Keeps the last `window` tokens, and the first `sinks` (Xiao et al. 2023): memory that stops growing.

    A layer that uses it attends as one whose mask is `window(window) | causal() & prefix(sinks)`: the same output
    whether the text comes at once, in pieces, or token by token.
    """

    def __init__(self, window: int, *, sinks: int = 0) -> None:
        self.window = whole_number("window", window, least=1)
        self.sinks = whole_number("sinks", sinks, least=0)
        self.mask = _sliding(self.window, self.sinks)
        super().__init__()

    def joined(self, new: Kept, positions: Int[Tensor, "#batch new"], *, whole: bool = False) -> CacheUpdate:
        tensors, room = self._appended(new)
        seen = self.seen + positions.shape[1]
        return CacheUpdate(tensors, self._key_positions(tensors[0].shape[2], seen, positions.device), seen, room)

    def _key_positions(self, keys: int, seen: int, device: torch.device) -> Int[Tensor, "1 keys"] | None:
        """Where the keys stand: the sinks first, the others up to the last that was seen."""
        if keys == seen:
            return None
        sinks = torch.arange(self.sinks, device=device)
        return torch.cat([sinks, torch.arange(seen - keys + self.sinks, seen, device=device)])[None]

    def keep(self, joined: CacheUpdate) -> None:
        keys = joined.tensors[0].shape[2]
        sinks = min(self.sinks, keys)
        # The next query brings its own key, the last of its window.
        dropped = max(keys - (self.window - 1) - sinks, 0)
        self.tensors, self.room, self.seen = joined.tensors, joined.room, joined.seen
        if dropped == 0:
            return
        if joined.room is None or dropped > keys - dropped:
            self.tensors, self.room = tuple(_without(each, sinks, sinks + dropped) for each in joined.tensors), None
            return
        if sinks:
            # They move up to the window, over what is dropped, and the window stays where it is.
            for buffer in joined.room:
                buffer[:, :, dropped : dropped + sinks] = buffer[:, :, :sinks].clone()
        self.room = tuple(buffer[:, :, dropped:] for buffer in joined.room)
        self.tensors = _first(keys - dropped, self.room)

    def crop(self, length: int) -> None:
        length = whole_number("length", length, least=0)
        if self.tensors is None or length >= self.seen:
            return
        kept = self.tensors[0].shape[2]
        if kept < self.seen:
            raise InputError(
                "length",
                expected=f"{self.seen} or more: a sliding cache has dropped what an earlier query would need",
                got=length,
            )
        self.tensors, self.seen = _first(length, self.tensors), length

    def __repr__(self) -> str:
        return f"SlidingCache(window={self.window}, sinks={self.sinks}, {self.seen} tokens seen)"


class StaticCache(Cache):
    """Room for `capacity` tokens, taken once: no shape ever changes, so decoding compiles once.

    Every sequence has a length of its own. A batch of prompts of different lengths comes padded on the right, with
    `lengths`; what follows is appended to each where it ends. Writing is in place, so it takes no gradient.

    Args:
        batch: sequences.
        capacity: tokens each has room for.
        kept: heads and width of each tensor kept: `[(kv_heads, head_dim), (kv_heads, value_dim)]`.
        device: where they lie.
        dtype: that of the keys and values the layer makes.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kept: Sequence[tuple[int, int]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        batch, self.capacity = whole_number("batch", batch, least=1), whole_number("capacity", capacity, least=1)
        # One slot more, the first, for tokens that are padding: they are written there and never read. A token beyond
        # the capacity has no slot then, where the device's own check of the index meets it.
        shapes = [(batch, heads, capacity + 1, width) for heads, width in kept]
        self.slots = tuple(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> Kept:
        """The room, without the slot for padding: `(batch, kv_heads, capacity, width)` each."""
        return tuple(slots[:, :, 1:] for slots in self.slots)

    @property
    def may_show_less(self) -> bool:
        """Whether the lengths can be read at no cost, and so room that holds nothing be left out."""
        return _is_read(self.lengths)

    def positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "batch new"]:
        _require_batch(self.slots, batch)
        step = torch.arange(new, device=device)
        positions = self.lengths[:, None] + step
        if lengths is not None:
            counts = whole_numbers("lengths", lengths, dimensions=(1,), shape="one for each sequence").to(device)
            if counts.shape != (batch,):
                raise InputError("lengths", expected=f"one for each of {batch} sequences", got=tuple(counts.shape))
            if can_be_read(counts) and ((counts < 0) | (counts > new)).any():
                raise InputError("lengths", expected=f"numbers from 0 to {new}, the tokens", got=counts.tolist())
            positions = torch.where(step < counts[:, None], positions, -1)
        # Where they are not read, the device's own check of the index remains.
        if _is_read(positions) and positions.numel():
            last = int(positions.max())
            if last >= self.capacity:
                raise InputError("cache", expected=f"room for {last + 1} tokens", got=f"a capacity of {self.capacity}")
        return positions

    def joined(self, new: Kept, positions: Int[Tensor, "#batch new"], *, whole: bool = False) -> CacheUpdate:
        room, sizes = ([each.shape[1:4:2] for each in tensors] for tensors in (self.slots, new))
        if room != sizes:
            expected = f"room for {[tuple(size) for size in sizes]} heads and widths, the layer's"
            got = f"a cache made for {[tuple(size) for size in room]}"
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
        span = self._span(positions)
        seen = self._write(new, positions, span)
        tensors = self.tensors
        if not whole and self.may_show_less:
            tensors = _first(int(seen.max()), tensors)
            if span is not None:
                return CacheUpdate(tensors, None, seen)
        there = torch.arange(tensors[0].shape[2], device=seen.device)
        return CacheUpdate(tensors, torch.where(there < seen[:, None], there, -1), seen)

    def _span(self, positions: Int[Tensor, "batch new"]) -> slice | None:
        """Where the tokens stand, if the same in every sequence and known; None otherwise."""
        if not (self.may_show_less and positions.numel()):
            return None
        first, new = int(positions[0, 0]), positions.shape[1]
        alike = first >= 0 and torch.equal(positions, torch.arange(first, first + new).expand_as(positions))
        return slice(first, first + new) if alike else None

    def _write(self, new: Kept, positions: Int[Tensor, "batch new"], span: slice | None) -> Int[Tensor, " batch"]:
        """Put the new tokens where they stand, in one piece where that is a span; how many each sequence has then."""
        if span is not None:
            for room, tensor in zip(self.tensors, new, strict=True):
                room[:, :, span] = tensor
            return positions[:, -1] + 1
        slot = positions + 1  # padding stands at -1
        sequence = torch.arange(slot.shape[0], device=slot.device)[:, None]
        for slots, tensor in zip(self.slots, new, strict=True):
            slots.transpose(1, 2)[sequence, slot] = tensor.transpose(1, 2)
        return self.lengths + (positions >= 0).sum(1)

    def keep(self, joined: CacheUpdate) -> None:
        self.lengths.copy_(joined.seen)

    def reorder(self, index: Int[Tensor, " batch"] | Sequence[int]) -> None:
        *slots, lengths = _reordered((*self.slots, self.lengths), index)
        if len(lengths) != len(self.lengths):
            expected = f"one for each of {len(self.lengths)} sequences"
            raise InputError("index", expected=expected, got=tuple(lengths.shape))
        for tensor, reordered in zip((*self.slots, self.lengths), (*slots, lengths), strict=True):
            tensor.copy_(reordered)

    def crop(self, length: int | Int[Tensor, " batch"] | Sequence[int]) -> None:
        """Forget all but the first `length` tokens; one number, or `(batch,)`."""
        if not isinstance(length, Tensor | Sequence):
            self.lengths.clamp_(max=whole_number("length", length, least=0))
            return
        lengths = whole_numbers("length", length, dimensions=(1,), shape="one for each sequence")
        if lengths.shape != self.lengths.shape or (can_be_read(lengths) and (lengths < 0).any()):
            expected = f"a number of 0 or more, or one for each of {len(self.lengths)} sequences"
            raise InputError("length", expected=expected, got=lengths.tolist())
        torch.minimum(self.lengths, lengths.to(self.lengths.device), out=self.lengths)

    def reset(self) -> None:
        self.lengths.zero_()

    def __repr__(self) -> str:
        return f"StaticCache(capacity={self.capacity}, lengths={self.lengths.tolist()})"


def _sliding(width: int, sinks: int) -> Mask:
    return window(width) | causal() & prefix(sinks) if sinks else window(width)


def _is_read(values: Tensor) -> bool:
    """Whether the values may be read on the way: elsewhere than on a CPU, that would wait for the device."""
    return values.device.type == "cpu" and can_be_read(values)


def _require_alike(old: Kept, new: Kept) -> None:
    """Raise `InputError` unless the new tensors can stand behind the old ones."""
    before, after = ([(each.shape[1], each.shape[3], each.dtype) for each in tensors] for tensors in (old, new))
    if before != after:
        remedy = "a cache belongs to one layer"
        raise InputError("cache", expected=f"heads, widths and dtypes {after}, the layer's", got=before, remedy=remedy)
    if old[0].device != new[0].device:
        raise InputError("cache", expected=f"tensors on {new[0].device} like the layer", got=old[0].device)


def _may_write(new: Kept) -> bool:
    """Whether tokens may be written in place: never where a gradient may be asked for, or where a program is traced."""
    return not torch.is_grad_enabled() and all(type(tensor) is Tensor and can_be_read(tensor) for tensor in new)


def _writable(room: Kept) -> bool:
    """Whether room taken before may still be written to, as that of `torch.inference_mode()` may only under it."""
    return torch.is_inference_mode_enabled() or not any(buffer.is_inference() for buffer in room)


def _with_room(tensor: Float[Tensor, "batch heads kept width"], length: int) -> Float[Tensor, "batch heads room width"]:
    """A copy of the tensor with room for `length` tokens, and for half as many again."""
    batch, heads, kept, width = tensor.shape
    room = tensor.new_empty(batch, heads, length + max(length // 2, LEAST_ROOM), width)
    room[:, :, :kept] = tensor
    return room


def _first(length: int, tensors: Kept) -> Kept:
    """The first `length` tokens of each tensor, as views."""
    return tuple(tensor[:, :, :length] for tensor in tensors)


def _reordered(tensors: tuple[Tensor, ...], index: Any) -> tuple[Tensor, ...]:
    """Sequence `index[b]` of each tensor in place of sequence b."""
    sequences = whole_numbers("index", index, dimensions=(1,), shape="one for each sequence").to(tensors[0].device)
    batch = tensors[0].shape[0]
    if can_be_read(sequences) and ((sequences < 0) | (sequences >= batch)).any():
        raise InputError("index", expected=f"numbers from 0 to {batch - 1}, the sequences", got=sequences.tolist())
    return tuple(tensor[sequences] for tensor in tensors)


def _without(
    tensor: Float[Tensor, "batch heads length width"], start: int, stop: int
) -> Float[Tensor, "batch heads rest width"]:
    """The tensor without the tokens from `start` to `stop`; a copy, so that nothing else is held."""
    return torch.cat([tensor[:, :, :start], tensor[:, :, stop:]], dim=2)


def _require_batch(tensors: Kept | None, batch: int) -> None:
    if tensors is not None and tensors[0].shape[0] != batch:
        expected = f"the batch of {tensors[0].shape[0]} that the cache holds"
        raise InputError("x", expected=expected, got=f"a batch of {batch}", remedy="reset() or reorder() the cache")
