"""Sequences of different lengths end to end, without padding: where each begins, and where its tokens stand."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headwise.checks import whole_numbers
from headwise.errors import InputError
from headwise.shapes import Int

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


def slices(offsets: Sequence[int]) -> list[slice]:
    """Each sequence's place among the tokens."""
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def positions(
    of_queries: Sequence[int], of_keys: Sequence[int], device: torch.device
) -> tuple[Int[Tensor, "1 queries"], Int[Tensor, "1 keys"]]:
    """Where each token stands in its own sequence, whose last query stands at its last key."""
    at_q, at_k = [torch.arange(0, device=device)], [torch.arange(0, device=device)]
    for of_query, of_key in zip(slices(of_queries), slices(of_keys), strict=True):
        queries, keys = of_query.stop - of_query.start, of_key.stop - of_key.start
        at_q.append(torch.arange(keys - queries, keys, device=device))
        at_k.append(torch.arange(keys, device=device))
    return torch.cat(at_q)[None], torch.cat(at_k)[None]
