"""Cache of fixed capacity, in which each sequence has its own length."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attention.caches.base import (
    Cache,
    CachedTensors,
    CacheUpdate,
    reordered,
    require_same_batch,
)
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
from headwise.shapes import Int

MOST_LISTED = 16
"""Largest number of positions that are compared in Python."""


class StaticCache(Cache):
    """Cache with preallocated slots for `capacity` tokens of each sequence. The slots never change their shape or their
    address, so decoding compiles once, and a step of decoding on a GPU can be captured in a CUDA graph.

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
        """Views of the slots for tokens, one view for each stored tensor, `(batch, kv_heads, capacity, width)`. The
        first slot of each sequence, which receives padding, is left out.
        """
        return self._slots_of(range(self.capacity))

    def _slots_of(self, positions: range) -> CachedTensors:
        """Return views of the slots for the tokens at consecutive positions."""
        return tuple(slots.narrow(2, 1 + positions.start, len(positions)) for slots in self.slots)

    @property
    def can_omit_empty_slots(self) -> bool:
        """True if `prepare_update` may leave out the slots beyond the length of the longest sequence. For that it has
        to read the lengths, so this is True only on a CPU, and not while compiling or under `torch.func`.
        """
        return has_readable_values(self.lengths)

    def next_positions(
        self, batch: int, new: int, lengths: Int[Tensor, " batch"] | Sequence[int] | None, device: torch.device
    ) -> Int[Tensor, "#batch new"]:
        """Return the positions of the next `new` tokens of each sequence, starting at the number of tokens that the
        sequence has cached; `(1, new)` if they are known to be the same for all sequences. If `lengths` is passed, only
        the first `lengths[b]` new tokens of sequence b are real, and the padding after them has position -1. Raises
        `InputError` if `lengths` is not one number from 0 to `new` for each sequence, or if `batch` is not that of the
        cache. A token beyond the capacity raises it too, on a CPU and not while compiling. On a GPU `lengths` are not
        read: numbers out of range count as 0 or as `new`.
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
            counts = whole_numbers("lengths", lengths, dimensions=(1,), shape="one for each sequence")
            if counts.shape != (batch,):
                raise InputError("lengths", expected=f"one for each of {batch} sequences", got=tuple(counts.shape))
            if has_readable_values(counts) and ((counts < 0) | (counts > new)).any():
                raise InputError("lengths", expected=f"numbers from 0 to {new}, the tokens", got=counts.tolist())
            counts = counts.to(device, non_blocking=True)
            positions = torch.where(step < counts[:, None], positions, -1)
        # Where positions are not read, the index check of the device still rejects a token beyond the capacity.
        if has_readable_values(positions) and positions.numel():
            self._require_room(_extremes(positions)[1] + 1)
        return positions

    def _require_room(self, tokens: int) -> None:
        """Raise `InputError` if a sequence of so many tokens has no room in the cache."""
        if tokens > self.capacity:
            raise InputError("cache", expected=f"room for {tokens} tokens", got=f"a capacity of {self.capacity}")

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"], *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Write the new tokens of each sequence into the slots after its cached tokens, and return a `CacheUpdate` of
        all slots with their key positions, -1 for empty slots. On a CPU outside of compiling, slots beyond the longest
        sequence are left out unless `full_capacity` is True.

        The written slots count as empty until `commit` sets the new lengths. If `commit` is never called, because the
        forward pass failed, the next update clears them.
        """
        self._check_new(new)
        if self._has_uncommitted_writes:
            self._clear_empty_slots(slice(None))
        self._has_uncommitted_writes = True
        can_omit = self.can_omit_empty_slots
        span = _common_span(positions) if can_omit and positions.numel() else None
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
        """Raise `InputError` unless new keys and values have the heads, width, dtype and device of the cache's slots.
        Raises it too if gradients are enabled and a new tensor requires a gradient, since writing in place loses it.
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
        """Set the length of each sequence to that of the update, so that its written tokens count as cached."""
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
        """Set the length of each sequence to its number in `lengths`, which callers keep at or below the current
        length. Fill the slots of the removed tokens with zeros.
        """
        removed = slice(None)
        if self.can_omit_empty_slots and not self._has_uncommitted_writes:
            removed = slice(int(lengths.min()), int(self.lengths.max()))
        self.lengths.copy_(lengths)
        self._clear_empty_slots(removed)
        self._has_uncommitted_writes = False

    def _clear_empty_slots(self, positions: slice) -> None:
        """Fill empty slots with zeros: those at the positions in the slice `positions` that are beyond the length of
        their sequence.

        Attention multiplies the value of an empty slot by a weight of 0, which leaves NaN and infinity.
        """
        is_empty = torch.arange(self.capacity, device=self.lengths.device)[positions] >= self.lengths[:, None]
        for tensor in self.tensors:
            tensor[:, :, positions].masked_fill_(is_empty[:, None, :, None], 0)

    def __repr__(self) -> str:
        return f"StaticCache(capacity={self.capacity}, lengths={self.lengths.tolist()})"


def keep_addresses(tensors: Sequence[Tensor]) -> None:
    """Tell the compiler that these tensors stay at their addresses. With `mode="reduce-overhead"` it captures a CUDA
    graph of a step of decoding only then, since the step writes to them.
    """
    import torch._dynamo  # takes long to import

    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


def _common_span(positions: Int[Tensor, "batch new"]) -> range | None:
    """Return the positions of new tokens, as `next_positions` returns them, as one range if they are the same in all
    sequences, without padding; otherwise None.
    """
    # The real tokens of a sequence are consecutive. So all positions agree if together they fill a range of this size.
    first, last = _extremes(positions)
    is_shared = first >= 0 and last - first + 1 == positions.shape[1]
    return range(first, last + 1) if is_shared else None


def _extremes(positions: Int[Tensor, "batch new"]) -> tuple[int, int]:
    """Return the smallest and the largest of some positions. Few of them are compared in Python, as in a step of
    decoding, which takes less time than an operator.
    """
    if positions.numel() <= MOST_LISTED:
        numbers = [position for row in positions.tolist() for position in row]
        return min(numbers), max(numbers)
    smallest, largest = positions.aminmax()
    return int(smallest), int(largest)
