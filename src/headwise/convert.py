"""Attention written in other ways, converted into `MultiHeadAttention`: the same function, weights copied.

Four ways of writing multi-head attention are in use. They differ in where the heads live, not in what they
compute:

    a list of heads, each with its own maps              from_heads
    four linear maps, cut into heads                     from_projections
    the same, as torch.nn.MultiheadAttention packs it    from_torch
    heads narrower than the model                        from_heads or from_projections
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.layer import MultiHeadAttention
from headwise.shapes import Float


def from_heads(
    heads: Sequence[tuple[nn.Linear, nn.Linear, nn.Linear]],
    projection: nn.Linear | Float[Tensor, "concatenated out"],
) -> MultiHeadAttention:
    """A layer from a list of heads, each a `(query, key, value)` triple of `nn.Linear` of its own.

    Args:
        heads: one triple a head, in the order in which their outputs are concatenated; every head of the
            same widths, with a bias in all of a kind (query, key, value) or in none.
        projection: maps the concatenation to the output: an `nn.Linear`, or a bare matrix that the
            concatenation is multiplied by from the left, of shape `(num_heads * value_dim, out_dim)`.

    Raises:
        InputError: no heads, heads of different shapes, or a projection of another width.
    """
    if not heads:
        raise InputError("heads", expected="at least one (query, key, value) triple", got="none")
    shapes = {tuple(tuple(linear.weight.shape) for linear in head) for head in heads}
    if len(shapes) > 1:
        raise InputError("heads", expected="the same (query, key, value) shapes in every head", got=sorted(shapes))
    query, key, value = (_stacked(name, maps) for name, maps in zip(_KINDS, zip(*heads, strict=True), strict=True))
    output = _Map(projection.mT, None) if isinstance(projection, Tensor) else _Map.of(projection)
    return _filled([query, key, value, output], num_heads=len(heads), num_kv_heads=len(heads))


def from_projections(
    query: nn.Linear,
    key: nn.Linear,
    value: nn.Linear,
    output: nn.Linear,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
) -> MultiHeadAttention:
    """A layer from four linear maps whose output rows are the heads, one after the other.

    Args:
        query: `embed_dim -> num_heads * head_dim`.
        key: `context_dim -> num_kv_heads * head_dim`.
        value: `context_dim -> num_kv_heads * value_dim`.
        output: `num_heads * value_dim -> out_dim`.
        num_heads: how many heads the rows of `query` are cut into.
        num_kv_heads: how many those of `key` and `value` are; default `num_heads`.

    Raises:
        InputError: widths that cannot be cut into so many heads, or that do not fit each other.
    """
    maps = [_Map.of(linear) for linear in (query, key, value, output)]
    return _filled(maps, num_heads=num_heads, num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads)


def from_torch(layer: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer from `torch.nn.MultiheadAttention`.

    Ours takes `(batch, length, embed)` whatever `batch_first` was, True in a mask means *attends*, and
    weights come for each head; `weights.mean(1)` is the average that torch's layer returns.

    Raises:
        InputError: key and value widths that differ, or `add_bias_kv` or `add_zero_attn`, which append keys.
    """
    for option, given in (("add_bias_kv", layer.bias_k is not None), ("add_zero_attn", layer.add_zero_attn)):
        if given:
            raise InputError("layer", expected=f"torch.nn.MultiheadAttention without {option}", got=f"{option}=True")
    if layer.kdim != layer.vdim:
        raise InputError("layer", expected="kdim equal to vdim", got=f"kdim {layer.kdim} and vdim {layer.vdim}")
    packed = layer.in_proj_weight
    weights = packed.chunk(3) if packed is not None else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    maps = [_Map(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    converted = _filled([*maps, _Map.of(layer.out_proj)], num_heads=layer.num_heads, num_kv_heads=layer.num_heads)
    converted.dropout = layer.dropout
    return converted.train(layer.training)


_KINDS = ("query", "key", "value")


class _Map(NamedTuple):
    """The weight `(out, in)` and bias of a linear map, wherever they were kept."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None

    @staticmethod
    def of(linear: nn.Linear) -> "_Map":
        return _Map(linear.weight, linear.bias)


def _stacked(name: str, maps: Sequence[nn.Linear]) -> _Map:
    """The maps of all heads as one, its output rows head after head."""
    weight = torch.cat([linear.weight for linear in maps])
    biases: list[Tensor] = [linear.bias for linear in maps if linear.bias is not None]
    if len(biases) not in (0, len(maps)):
        raise InputError(
            "heads", expected=f"a bias in every {name} map or in none", got=f"one in {len(biases)} of {len(maps)}"
        )
    return _Map(weight, torch.cat(biases) if biases else None)


def _filled(maps: Sequence[_Map], *, num_heads: int, num_kv_heads: int) -> MultiHeadAttention:
    """The layer with these maps: query, key, value, output. Where one of the first three has a bias, all get one."""
    query, key, value, output = maps
    named = {"query": (query, num_heads), "key": (key, num_kv_heads), "value": (value, num_kv_heads)}
    for name, (map_, heads) in named.items():
        if heads < 1 or map_.weight.shape[0] % heads:
            raise InputError(name, expected=f"an output width that {heads} heads divide", got=map_.weight.shape[0])
    head_dim = query.weight.shape[0] // num_heads
    value_dim = value.weight.shape[0] // num_kv_heads
    widths = {
        "key": ((value.weight.shape[1], num_kv_heads * head_dim), key.weight),
        "output": ((num_heads * value_dim, output.weight.shape[0]), output.weight),
    }
    for name, (expected, weight) in widths.items():
        if (got := tuple(weight.mT.shape)) != expected:
            raise InputError(name, expected=f"a map of widths {expected} to fit the others", got=got)
    layer = MultiHeadAttention(
        query.weight.shape[1],
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        context_dim=key.weight.shape[1],
        out_dim=output.weight.shape[0],
        bias=any(map_.bias is not None for map_ in (query, key, value)),
        out_bias=output.bias is not None,
        device=query.weight.device,
        dtype=query.weight.dtype,
    )
    with torch.no_grad():
        ours = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
        for projection, map_ in zip(ours, maps, strict=True):
            projection.weight.copy_(map_.weight)
            if map_.bias is not None:
                projection.bias.copy_(map_.bias)
    return layer
