"""Attention written in other ways, converted into `MultiHeadAttention`: the same function, weights copied.

Four ways of writing multi-head attention are in use. They differ in where the heads live, not in what they
compute:

    a list of heads, each with its own maps              from_heads
    four linear maps, cut into heads                     from_projections
    the same, as torch.nn.MultiheadAttention packs it    from_torch
    heads narrower than the model                        from_heads or from_projections
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checks import whole_number
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
    triples = list(heads) if isinstance(heads, Iterable) else []
    if not triples:
        raise InputError("heads", expected="at least one (query, key, value) triple", got=repr(heads))
    maps = [[_Map.of("heads", linear) for linear in triple] for triple in map(_triple, triples)]
    shapes = {tuple(tuple(map_.weight.shape) for map_ in triple) for triple in maps}
    if len(shapes) > 1:
        raise InputError("heads", expected="the same (query, key, value) shapes in every head", got=sorted(shapes))
    stacked = [_stacked(name, kind) for name, kind in zip(_KINDS, zip(*maps, strict=True), strict=True)]
    if isinstance(projection, Tensor) and projection.ndim == 2:
        output = _Map(projection.mT, None)
    else:
        output = _Map.of("projection", projection)
    return _filled([*stacked, output], ("heads", "heads", "heads", "projection"), len(triples), len(triples))


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

    Where one of query, key and value has a bias, all three get one, zero where there was none.

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
    num_heads = whole_number("num_heads", num_heads, least=1)
    num_kv_heads = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads, least=1)
    named = {"query": query, "key": key, "value": value, "output": output}
    maps = [_Map.of(name, linear) for name, linear in named.items()]
    return _filled(maps, tuple(named), num_heads, num_kv_heads)


def from_torch(layer: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer from `torch.nn.MultiheadAttention`.

    Ours takes `(batch, length, embed)` whatever `batch_first` was, True in a mask means *attends*, and
    weights come for each head; `weights.mean(1)` is the average that torch's layer returns.

    Raises:
        InputError: key and value widths that differ, or `add_bias_kv` or `add_zero_attn`, which append keys.
    """
    if not isinstance(layer, nn.MultiheadAttention):
        raise InputError("layer", expected="a torch.nn.MultiheadAttention", got=type(layer).__name__)
    for option, given in (("add_bias_kv", layer.bias_k is not None), ("add_zero_attn", layer.add_zero_attn)):
        if given:
            raise InputError("layer", expected=f"torch.nn.MultiheadAttention without {option}", got=f"{option}=True")
    if layer.kdim != layer.vdim:
        raise InputError("layer", expected="kdim equal to vdim", got=f"kdim {layer.kdim} and vdim {layer.vdim}")
    packed = layer.in_proj_weight
    weights = packed.chunk(3) if packed is not None else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    maps = [_Map(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    output = _Map(layer.out_proj.weight, layer.out_proj.bias)
    converted = _filled([*maps, output], ("layer",) * 4, layer.num_heads, layer.num_heads)
    converted.dropout = layer.dropout
    return converted.train(layer.training)


_KINDS = ("query", "key", "value")


class _Map(NamedTuple):
    """The weight `(out, in)` and bias of a linear map, wherever they were kept."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None

    @staticmethod
    def of(argument: str, linear: Any) -> "_Map":
        if not isinstance(linear, nn.Linear):
            raise InputError(argument, expected="an nn.Linear for every map", got=type(linear).__name__)
        return _Map(linear.weight, linear.bias)


def _triple(head: Any) -> Any:
    if not isinstance(head, Sequence) or len(head) != 3:
        raise InputError("heads", expected="a (query, key, value) triple for each head", got=type(head).__name__)
    return head


def _stacked(name: str, maps: Sequence[_Map]) -> _Map:
    """The maps of all heads as one, its output rows head after head."""
    weight = torch.cat([map_.weight for map_ in maps])
    biases = [map_.bias for map_ in maps if map_.bias is not None]
    if len(biases) not in (0, len(maps)):
        raise InputError(
            "heads", expected=f"a bias in every {name} map or in none", got=f"one in {len(biases)} of {len(maps)}"
        )
    return _Map(weight, torch.cat(biases) if biases else None)


def _filled(maps: Sequence[_Map], arguments: Sequence[str], num_heads: int, num_kv_heads: int) -> MultiHeadAttention:
    """The layer with these maps: query, key, value, output, which came in as `arguments`.

    Where one of the first three has a bias, all get one, of zeros.
    """
    for argument, map_ in zip(arguments, maps, strict=True):
        like = maps[0].weight
        if (map_.weight.dtype, map_.weight.device) != (like.dtype, like.device):
            got = f"{map_.weight.dtype} on {map_.weight.device}"
            raise InputError(argument, expected=f"{like.dtype} on {like.device} in every map", got=got)
    query, key, value, output = (map_.weight for map_ in maps)
    for argument, weight, count in zip(
        arguments, (query, key, value), (num_heads, num_kv_heads, num_kv_heads), strict=False
    ):
        if weight.shape[0] % count:
            raise InputError(argument, expected=f"an output width that {count} heads divide", got=weight.shape[0])
    head_dim, value_dim = query.shape[0] // num_heads, value.shape[0] // num_kv_heads
    if key.shape[0] != num_kv_heads * head_dim:
        raise InputError(arguments[1], expected=f"{num_kv_heads * head_dim} wide keys", got=key.shape[0])
    if value.shape[1] != key.shape[1]:
        expected = f"a value map from width {key.shape[1]}, like the key map"
        raise InputError(arguments[2], expected=expected, got=value.shape[1])
    if output.shape[1] != num_heads * value_dim:
        expected = f"a map from width {num_heads * value_dim}, all heads side by side"
        raise InputError(arguments[3], expected=expected, got=output.shape[1])
    layer = MultiHeadAttention(
        query.shape[1],
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        context_dim=key.shape[1],
        out_dim=output.shape[0],
        bias=any(map_.bias is not None for map_ in maps[:3]),
        out_bias=maps[3].bias is not None,
        device=query.device,
        dtype=query.dtype,
    )
    with torch.no_grad():
        ours = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
        for projection, map_ in zip(ours, maps, strict=True):
            projection.weight.copy_(map_.weight)
            if map_.bias is not None:
                projection.bias.copy_(map_.bias)
    return layer
