"""Conversion of a layer's input to rows of one sequence each, and of its output back; calls of packed sequences.

The layer itself computes with `(batch, length, width)` alone:

    one sequence per row      x is used as it is, with a batch axis of 1 if it has none
    packed or nested          all tokens end to end in one row, with the offsets of the sequences
    padded on the right       packed where that saves work; otherwise the padding is masked
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.attention import packed
from headwise.attention.masks.kinds import InSequences, Padding, Segments
from headwise.attention.prepare import AttentionInputs
from headwise.attention.tensors import Weights
from headwise.checks import float_tensor, has_readable_values
from headwise.errors import InputError
from headwise.nn.base import LayerCall
from headwise.shapes import Bool, Float, Int

MOST_REAL = 15 / 16
"""Largest share of real tokens for which padding is worth removing."""


def padded_lengths(lengths: Any, x: Tensor) -> Int[Tensor, " batch"]:
    """Return the number of real tokens of each sequence in a batch padded on the right, as a tensor. Raise `InputError`
    if x has no batch axis or `lengths` does not fit it.
    """
    if x.ndim != 3:
        raise InputError("lengths", expected="x of shape (batch, queries, width)", got=tuple(x.shape))
    return packed.real_lengths(lengths, x.shape[0], x.shape[1], x.device)


def without_padding(
    x: Float[Tensor, "batch queries embed"], lengths: Int[Tensor, " batch"], call: LayerCall
) -> tuple[Float[Tensor, "rows length embed"], LayerCall, Bool[Tensor, "batch queries"]]:
    """Convert a batch that is padded on the right so that padding has no effect. Return the new input, the call options
    for it, and a mask that is True at real tokens. The real tokens are packed end to end if that saves work and the
    options allow it. Otherwise the padding is masked. Inputs at padding become 0, because NaN or infinity there would
    affect the output even with an attention weight of 0.
    """
    # The mask may not prescribe a number of queries or keys, as a mask tensor does; nor may the gate have an axis of
    # queries.
    extent = None if call.mask is None else call.mask.natural_grid()
    has_free_mask = extent is None or not (extent.queries or extent.keys)
    has_free_gate = call.gate is None or call.gate.ndim < 3
    can_pack = has_free_mask and has_free_gate and call.bias is None and not call.return_weights
    is_real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    if can_pack and has_readable_values(lengths) and int(lengths.sum()) <= MOST_REAL * is_real.numel():
        offsets = [0, *lengths.cumsum(0).tolist()]
        positions = call.positions
        if positions is not None:
            positions = positions.expand(x.shape[:2])[is_real][None]
        real = x.flatten(0, 1).index_select(0, is_real.flatten().nonzero()[:, 0])
        return real[None], call._replace(positions=positions, offsets=packed.Offsets(offsets, offsets)), is_real
    if not (has_readable_values(lengths) and bool(is_real.all())):
        x = x.masked_fill(~is_real[..., None], 0.0)
    mask = Padding(lengths, "right")  # `padding` would read lengths on a GPU
    return x, call._replace(mask=mask if call.mask is None else mask & call.mask), is_real


def with_padding(
    y: Float[Tensor, "rows length out"],
    weights: Weights | None,
    is_real: Bool[Tensor, "batch queries"],
    *,
    is_packed: bool,
) -> tuple[Float[Tensor, "batch queries out"], Weights | None]:
    """Return the output `y` and the attention weights of a batch from which `without_padding` removed the padding, in
    the shape of the padded batch. They are 0 at padding.
    """
    if is_packed:
        padded = y.new_zeros(is_real.numel(), y.shape[-1])
        padded = padded.index_copy(0, is_real.flatten().nonzero()[:, 0], y.squeeze(0))
        return padded.view(*is_real.shape, y.shape[-1]), weights
    y = y.masked_fill(~is_real[..., None], 0.0)
    return y, None if weights is None else weights.masked_fill(~is_real[:, None, :, None], 0.0)


def output_and_weights(
    y: Float[Tensor, "batch queries out"], weights: Weights | None, *, has_batch: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of a layer's `forward`: the output, or a tuple of output and weights if `weights` is not None.
    The batch axis is removed if the layer's input had none (`has_batch` False).
    """
    if not has_batch:
        y, weights = y.squeeze(0), None if weights is None else weights.squeeze(0)
    return y if weights is None else (y, weights)


# -- packed sequences --------------------------------------------------------------------------------------------------


def query_and_key_offsets(
    x: Float[Tensor, "*batch queries embed"], num_keys: int, offsets: Any, context_offsets: Any, *, cross: bool
) -> packed.Offsets | None:
    """Return the checked offsets of packed sequences: the start of each sequence among the queries and among the keys.
    Return None if `offsets` is None. `x` is the input as the caller passed it. The keys are computed from `num_keys`
    tokens: those of x itself or, if `cross` is True, of a context.
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
    """Raise `InputError` for a bias or returned weights, which packed sequences do not support. A gate or mask is also
    refused if it does not fit the number of sequences.
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


def _as_one_call(inputs: AttentionInputs, call: LayerCall, offsets: packed.Offsets) -> LayerCall:
    """Return options with which one call of `attend` computes all packed sequences at once. A mask keeps the sequences
    apart. This is for offsets (starts of the sequences) on a GPU, which Python does not read.
    """
    assert isinstance(offsets.queries, Tensor)
    assert isinstance(offsets.keys, Tensor)
    mask = call.mask
    if mask is not None and not mask.is_constant:
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
    return call._replace(mask=mask, gate=gate, offsets=None)


def each_sequence(
    inputs: AttentionInputs, call: LayerCall, offsets: packed.Offsets
) -> Iterator[tuple[AttentionInputs, LayerCall]]:
    """Yield the inputs and call options of each packed sequence, as a batch of one. If the offsets (starts of the
    sequences) are on a GPU, Python does not read them. All sequences are then yielded together once, kept apart by a
    mask.
    """
    if isinstance(offsets.queries, Tensor):
        yield inputs, _as_one_call(inputs, call, offsets)
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
