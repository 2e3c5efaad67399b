"""Packed sequences: texts of different lengths without padding, and conversion from and to padded batches."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.checks import has_readable_values, whole_numbers
from headwise.errors import InputError
from headwise.shapes import Int


class Offsets(NamedTuple):
    """Offsets of packed sequences, for the queries and for the keys. Offsets are the index of the first token of each
    sequence, followed by the number of all tokens. Other libraries call them `cu_seqlens`.

    Attributes:
        queries: offsets among the queries: a list, or a tensor that cannot be read, as on a GPU.
        keys: offsets among the keys, of the same type.
    """

    queries: list[int] | Int[Tensor, " sequences_and_1"]
    keys: list[int] | Int[Tensor, " sequences_and_1"]


def checked_offsets(
    name: str, offsets: Tensor | Sequence[int], total: int, device: torch.device
) -> list[int] | Int[Tensor, " sequences_and_1"]:
    """Return the offsets `(sequences + 1,)` of packed sequences as a list. Raise `InputError` unless they rise from 0
    to `total`. A tensor whose values cannot be read, as on a GPU, is not checked, and is returned as an int64 tensor on
    `device`.
    """
    tensor = whole_numbers(name, offsets, dimensions=(1,), shape="one more than there are sequences")
    if not has_readable_values(tensor) and len(tensor) > 1:
        return tensor.to(device)
    numbers: list[int] = tensor.tolist()
    is_rising = all(start <= stop for start, stop in pairwise(numbers))
    if not numbers or numbers[0] != 0 or numbers[-1] != total or not is_rising:
        raise InputError(name, expected=f"numbers that rise from 0 to {total}, the tokens", got=numbers)
    return numbers


def real_lengths(
    lengths: Tensor | Sequence[int], batch: int, tokens: int, device: torch.device
) -> Int[Tensor, " batch"]:
    """Return the number of real tokens of each sequence as a tensor on `device`. There are `batch` sequences of
    `tokens` tokens, and padding follows the real tokens. Lengths on a GPU are not read: a negative one counts as 0, and
    one above `tokens` as `tokens`.
    """
    numbers = whole_numbers("lengths", lengths, dimensions=(1,), shape="one for each sequence")
    if len(numbers) != batch:
        raise InputError("lengths", expected=f"one for each of {batch} sequences", got=len(numbers))
    if has_readable_values(numbers) and ((numbers < 0) | (numbers > tokens)).any():
        raise InputError("lengths", expected=f"numbers from 0 to {tokens}, the tokens", got=numbers.tolist())
    return numbers.to(device, non_blocking=True)


def from_nested(inputs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the packed tokens `(tokens, width)` and the offsets `(sequences + 1,)` of jagged nested tensors, as two
    dictionaries by argument name ("x", "context", "value_context"). Arguments that are None are left out. Raise
    `InputError` if context and value context have sequences of different lengths; lengths that cannot be read are not
    compared.
    """
    inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
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
    offsets: dict[str, Tensor] = {name: tensor.offsets() for name, tensor in inputs.items()}
    has_both = {"context", "value_context"} <= offsets.keys()
    is_compared = has_both and all(map(has_readable_values, offsets.values()))
    if is_compared and not torch.equal(offsets["context"], offsets["value_context"]):
        lengths = {name: starts.diff().tolist() for name, starts in offsets.items()}
        expected = f"sequences of lengths {lengths['context']} like context"
        raise InputError("value_context", expected=expected, got=lengths["value_context"])
    return {name: tensor.values() for name, tensor in inputs.items()}, offsets


def sequence_slices(offsets: Any) -> list[slice]:
    """Return for each sequence the slice of its tokens among all packed tokens, given the offsets as a list."""
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def positions_in_sequences(
    offsets: Offsets, queries: int, keys: int, device: torch.device
) -> tuple[Int[Tensor, "1 queries"], Int[Tensor, "1 keys"]]:
    """Return the position of each packed query and key within its own sequence, as `(1, tokens)` each. In every
    sequence the last query is aligned with the last key.
    """
    if isinstance(offsets.queries, Tensor) and isinstance(offsets.keys, Tensor):
        of_queries, of_keys = sequence_numbers(offsets.queries, queries), sequence_numbers(offsets.keys, keys)
        shifts = offsets.keys.diff() - offsets.queries.diff()
        query_positions = torch.arange(queries, device=device) - offsets.queries[of_queries] + shifts[of_queries]
        return query_positions[None], (torch.arange(keys, device=device) - offsets.keys[of_keys])[None]
    positions = [torch.arange(0, device=device)], [torch.arange(0, device=device)]
    for query_slice, key_slice in zip(*map(sequence_slices, offsets), strict=True):
        length = key_slice.stop - key_slice.start
        positions[0].append(torch.arange(length - (query_slice.stop - query_slice.start), length, device=device))
        positions[1].append(torch.arange(length, device=device))
    query_positions, key_positions = map(torch.cat, positions)
    return query_positions[None], key_positions[None]


def sequence_numbers(offsets: Int[Tensor, " sequences_and_1"], tokens: int) -> Int[Tensor, " tokens"]:
    """Return for each packed token the index of its sequence. Tokens after the last offset belong to the last
    sequence.
    """
    index = torch.arange(tokens, device=offsets.device)
    numbers = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    return numbers.clamp(max=max(len(offsets) - 2, 0))
