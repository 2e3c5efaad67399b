"""Packed sequences in a layer: checks of their offsets and options, and the inputs and options of each sequence."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from headwise.attention import packed
from headwise.attention.masks.key_ranges import is_constant
from headwise.attention.masks.kinds import InSequences, Segments
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
    query_offsets = packed.checked_offsets("offsets", offsets, len(x), x.device)
    if not cross:
        return packed.Offsets(query_offsets, query_offsets)
    key_offsets = packed.checked_offsets("context_offsets", context_offsets, num_keys, x.device)
    if type(key_offsets) is not type(query_offsets):
        remedy = "pass both as lists or on the CPU, or both on a GPU"
        raise InputError("context_offsets", expected="numbers where those of offsets are", got="others", remedy=remedy)
    if len(key_offsets) != len(query_offsets):
        expected = f"{len(query_offsets)} numbers like offsets"
        raise InputError("context_offsets", expected=expected, got=len(key_offsets))
    return packed.Offsets(query_offsets, key_offsets)


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


def _as_one_call(
    inputs: AttentionInputs, call: LayerCall, offsets: packed.Offsets
) -> tuple[AttentionInputs, LayerCall]:
    """Return inputs and options of one attention call for all packed sequences, whose offsets are tensors that cannot
    be read, as on a GPU. A mask keeps the sequences apart.

    Raises:
        InputError: a mask that may differ between the sequences or has a fixed number of keys.
    """
    assert isinstance(offsets.queries, Tensor)
    assert isinstance(offsets.keys, Tensor)
    mask = call.mask
    if mask is not None and not is_constant(mask):
        expected = "a list or a tensor on the CPU with a mask that is not made of numbers alone"
        raise InputError("offsets", expected=expected, got=f"a tensor on {offsets.queries.device}")
    of_queries = packed.sequence_numbers(offsets.queries, inputs.q.shape[2])
    if offsets.keys is offsets.queries and (mask is None or mask.depends_on_distance_only):
        documents = Segments(of_queries[None], known_one_piece=True)
        mask = documents if mask is None else documents & mask
    else:
        of_keys = packed.sequence_numbers(offsets.keys, inputs.k.shape[2])
        positions = packed.positions_in_sequences(offsets, len(of_queries), len(of_keys), of_queries.device)
        mask = InSequences(of_queries, of_keys, *positions, mask)
    gate = call.gate
    if gate is not None and gate.ndim == 2:
        gate = gate[of_queries].T[None]
    return inputs, call._replace(mask=mask, gate=gate, offsets=None)


def each_sequence(
    inputs: AttentionInputs, call: LayerCall, offsets: packed.Offsets
) -> Iterator[tuple[AttentionInputs, LayerCall]]:
    """Yield, for one packed sequence after the other, its queries, keys and values and its call options, as for a batch
    of one sequence. If the offsets are tensors that cannot be read, as on a GPU, yield one call for all sequences.
    """
    if isinstance(offsets.queries, Tensor):
        yield _as_one_call(inputs, call, offsets)
        return
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
        yield one_input, call._replace(mask=mask, gate=gate, offsets=None)
