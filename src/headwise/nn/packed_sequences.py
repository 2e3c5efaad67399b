"""Packed sequences in a layer: checks of their offsets and options, and the inputs and options of each sequence."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from headwise.attention import packed
from headwise.attention.prepare import AttentionInputs
from headwise.checks import float_tensor
from headwise.errors import InputError
from headwise.nn.call import LayerCall
from headwise.shapes import Float


def query_and_key_offsets(
    x: Float[Tensor, "*batch queries embed"], num_keys: int, offsets: Any, context_offsets: Any, *, cross: bool
) -> packed.Offsets | None:
    """Check the caller's `offsets` (starts of the packed sequences in x) and `context_offsets` (starts in a context of
    `num_keys` tokens). Return the starts among the queries and the starts among the keys, which are the same without a
    context (`cross` False). Return None if `offsets` is None.

    Args:
        x: input as the caller passed it.
        num_keys: number of tokens in the context.
        offsets: argument of the caller.
        context_offsets: argument of the caller.
        cross: True if the call attends to a context.

    Raises:
        InputError: offsets that do not fit the inputs or each other, or offsets with a batch axis in x.
    """
    if (context_offsets is not None) != (cross and offsets is not None):
        expected = "offsets of x and of a context, where both hold several sequences"
        raise InputError("context_offsets", expected=expected, got="one without the other")
    if offsets is None:
        return None
    if x.ndim == 3:
        expected = f"x of shape (tokens, {x.shape[-1]}), its sequences end to end"
        raise InputError("offsets", expected=expected, got=f"x of shape {tuple(x.shape)}")
    query_offsets = packed.offsets_as_list("offsets", offsets, len(x))
    if not cross:
        return query_offsets, query_offsets
    key_offsets = packed.offsets_as_list("context_offsets", context_offsets, num_keys)
    if len(key_offsets) != len(query_offsets):
        expected = f"{len(query_offsets)} numbers like offsets"
        raise InputError("context_offsets", expected=expected, got=len(key_offsets))
    return query_offsets, key_offsets


def check_packed_options(call: LayerCall, *, sequences: int, num_heads: int, like: Tensor) -> None:
    """Raise `InputError` for a bias or returned weights, which packed sequences do not support, and for a gate or mask
    that does not fit the number of sequences.

    Args:
        call: options of the call.
        sequences: number of packed sequences.
        num_heads: number of heads, each with one gate.
        like: tensor whose device the gate must have.
    """
    if call.bias is not None:
        raise InputError("bias", expected="none with packed sequences", got=f"shape {tuple(call.bias.shape)}")
    if call.return_weights:
        raise InputError("return_weights", expected="False with packed sequences", got="True")
    shapes = (num_heads,), (sequences, num_heads)
    if call.gate is not None and float_tensor("gate", call.gate, like=like).shape not in shapes:
        expected = f"shape {shapes[0]} or {shapes[1]} with packed sequences"
        raise InputError("gate", expected=expected, got=tuple(call.gate.shape))
    if call.mask is not None and call.mask.natural_grid().batch not in (0, sequences):
        expected = f"one for all sequences or for each of {sequences}"
        raise InputError("mask", expected=expected, got=f"one for each of {call.mask.natural_grid().batch}")


def each_sequence(
    inputs: AttentionInputs, call: LayerCall, offsets: packed.Offsets
) -> Iterator[tuple[AttentionInputs, LayerCall]]:
    """Yield, for one packed sequence after the other, its queries, keys and values and its call options, as for a batch
    of one sequence.
    """
    for index, (queries, keys) in enumerate(zip(*map(packed.sequence_slices, offsets), strict=True)):
        one_input = inputs._replace(
            q=inputs.q[:, :, queries],
            k=inputs.k[:, :, keys],
            v=inputs.v[:, :, keys],
            explicit_query_positions=inputs.query_positions[:, queries],
            explicit_key_positions=inputs.key_positions[:, keys],
        )
        mask = None if call.mask is None else call.mask.for_sequence(index)
        gate = call.gate if call.gate is None or call.gate.ndim == 1 else call.gate[index : index + 1]
        yield one_input, replace(call, mask=mask, gate=gate, offsets=None)
