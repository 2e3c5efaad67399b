"""Sequences of different lengths end to end: where each begins, where its tokens stand, how they get there and back."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.checks import has_readable_values, whole_numbers
from headwise.errors import InputError
from headwise.shapes import Bool, Float, Int

Offsets = tuple[list[int], list[int]]
"""Where sequences begin, and last the number of tokens (`cu_seqlens` elsewhere): of the queries, and of the keys."""


def checked_offsets(name: str, offsets: Tensor | Sequence[int], total: int) -> list[int]:
    """The offsets as numbers: 0, the beginning of each further sequence, and `total`.

    Raises:
        InputError: offsets that do not begin with 0, that fall, or that do not end with the number of tokens.
    """
    numbers: list[int] = whole_numbers(
        name, offsets, dimensions=(1,), shape="one more than there are sequences"
    ).tolist()
    rising = all(start <= stop for start, stop in pairwise(numbers))
    if not numbers or numbers[0] != 0 or numbers[-1] != total or not rising:
        raise InputError(name, expected=f"numbers that rise from 0 to {total}, the tokens", got=numbers)
    return numbers


class PaddedBatch(NamedTuple):
    """A batch of sequences padded on the right: which of its tokens are real."""

    lengths: Int[Tensor, " batch"]
    is_real: Bool[Tensor, "batch queries"]

    @staticmethod
    def from_lengths(lengths: Tensor | Sequence[int], x: Float[Tensor, "*batch queries width"]) -> "PaddedBatch":
        """Raise `InputError` for an x without a batch, and for lengths that are not of its sequences."""
        if x.ndim != 3:
            raise InputError("lengths", expected="x of shape (batch, queries, width)", got=tuple(x.shape))
        numbers = whole_numbers("lengths", lengths, dimensions=(1,), shape="one for each sequence").to(x.device)
        if len(numbers) != len(x):
            raise InputError("lengths", expected=f"one for each of {len(x)} sequences", got=len(numbers))
        if has_readable_values(numbers) and ((numbers < 0) | (numbers > x.shape[1])).any():
            raise InputError("lengths", expected=f"numbers from 0 to {x.shape[1]}, the tokens", got=numbers.tolist())
        return PaddedBatch(numbers, torch.arange(x.shape[1], device=x.device) < numbers[:, None])

    @property
    def should_pack(self) -> bool:
        """Whether a sixteenth of the tokens is padding, and the lengths may be read: not while compiling."""
        return has_readable_values(self.lengths) and 16 * int(self.lengths.sum()) <= 15 * self.is_real.numel()

    @property
    def offsets(self) -> list[int]:
        """Where sequences begin among the packed tokens, and last the number of tokens."""
        return [0, *self.lengths.cumsum(0).tolist()]

    def pack(self, x: Float[Tensor, "batch queries width"]) -> Float[Tensor, "tokens width"]:
        """The real tokens, end to end."""
        return x.flatten(0, 1).index_select(0, self._places)

    def unpack(self, tokens: Float[Tensor, "tokens width"]) -> Float[Tensor, "batch queries width"]:
        """The tokens in their places, and 0 where there is padding."""
        room = tokens.new_zeros(self.is_real.numel(), tokens.shape[-1])
        return room.index_copy(0, self._places, tokens).view(*self.is_real.shape, tokens.shape[-1])

    @property
    def _places(self) -> Int[Tensor, " tokens"]:
        return self.is_real.flatten().nonzero()[:, 0]


def from_nested(inputs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values of jagged nested tensors, `(tokens, width)` each, and their offsets.

    Args:
        inputs: by name: "x", perhaps "context", perhaps "value_context".

    Raises:
        InputError: a tensor of another kind, gaps between sequences, values cut into sequences otherwise than keys.
    """
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise InputError(name, expected="a jagged nested tensor, like x", got=type(tensor).__name__)
        if not tensor.is_nested or tensor.layout != torch.jagged:
            got = f"a nested tensor of {tensor.layout}" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
            raise InputError(name, expected="a jagged nested tensor, like x", got=got)
        if tensor.ndim != 3 or not isinstance(tensor.shape[-1], int):
            expected = "a jagged nested tensor of shape (batch, lengths, width)"
            raise InputError(name, expected=expected, got=tuple(map(str, tensor.shape)))
        if tensor.lengths() is not None:  # type: ignore[attr-defined]
            expected = "a jagged nested tensor without gaps between its sequences"
            raise InputError(name, expected=expected, got="one with gaps", remedy="call contiguous() on it")
    own: dict[str, Tensor] = {name: tensor.offsets() for name, tensor in inputs.items()}
    if {"context", "value_context"} <= own.keys() and not torch.equal(own["context"], own["value_context"]):
        lengths = {name: each.diff().tolist() for name, each in own.items()}
        expected = f"sequences of lengths {lengths['context']} like context"
        raise InputError("value_context", expected=expected, got=lengths["value_context"])
    return {name: tensor.values() for name, tensor in inputs.items()}, own


def sequence_slices(offsets: Sequence[int]) -> list[slice]:
    """Each sequence's place among the tokens."""
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def positions_in_sequences(
    of_queries: Sequence[int], of_keys: Sequence[int], device: torch.device
) -> tuple[Int[Tensor, "1 queries"], Int[Tensor, "1 keys"]]:
    """Where each token stands in its own sequence, whose last query stands at its last key."""
    at_q, at_k = [torch.arange(0, device=device)], [torch.arange(0, device=device)]
    for of_query, of_key in zip(sequence_slices(of_queries), sequence_slices(of_keys), strict=True):
        queries, keys = of_query.stop - of_query.start, of_key.stop - of_key.start
        at_q.append(torch.arange(keys - queries, keys, device=device))
        at_k.append(torch.arange(keys, device=device))
    return torch.cat(at_q)[None], torch.cat(at_k)[None]
