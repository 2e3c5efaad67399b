"""Conversion between our layer and attention written as `nn.Linear` modules.

Implementations of multi-head attention differ in how they store heads, not in what they compute:

    a list of heads, each with its own maps              from_heads          to_heads
    four linear maps, cut into heads                     from_projections    to_projections
    the same, as torch.nn.MultiheadAttention packs it    from_torch          to_torch
    heads narrower than the model                        either of the first two

Only projections are converted. Other options, such as a rotary embedding, are passed as arguments.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks.base import Mask
from headwise.attention.position_bias import PositionBias
from headwise.attention.rotary import Rotary
from headwise.checks import whole_number
from headwise.convert.projection_maps import LinearMap, layer_from_maps, linear_maps_of
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import QKNorm, Scores
from headwise.shapes import Float

Head = tuple[nn.Linear, nn.Linear, nn.Linear]
"""Query, key and value projection of one head."""


def from_heads(
    heads: Sequence[Head],
    projection: nn.Linear | Float[Tensor, "concatenated out"],
) -> MultiHeadAttention:
    """Return a `MultiHeadAttention` with copies of the weights of separate heads, each a `(query, key, value)` triple
    of `nn.Linear` modules, and of an output projection. The output projection is an `nn.Linear`, or a matrix by which
    the concatenated head outputs are multiplied from the right.

    If consecutive heads share their key and value modules, in groups of equal size, the layer has one key/value head
    for each group.

    Args:
        heads: one triple for each head, in the order in which their outputs are concatenated. All heads have the
            same widths, and all or none of the projections of one kind (query, key, value) have a bias.
        projection: output projection: an `nn.Linear`, or a matrix `(num_heads * value_dim, out_dim)` that the
            concatenated outputs are multiplied by.

    Raises:
        InputError: no heads, heads of different shapes, or a projection of another width.
    """
    triples = list(heads) if isinstance(heads, Iterable) else []
    if not triples:
        raise InputError("heads", expected="at least one (query, key, value) triple", got=repr(heads))
    maps = [[LinearMap.from_linear("heads", linear) for linear in triple] for triple in map(_triple, triples)]
    shapes = {tuple(tuple(map_.weight.shape) for map_ in triple) for triple in maps}
    if len(shapes) > 1:
        raise InputError("heads", expected="the same (query, key, value) shapes in every head", got=sorted(shapes))
    queries, keys, values = zip(*maps, strict=True)
    group = _group_size(triples)
    stacked = [
        _stacked(name, kind) for name, kind in zip(_KINDS, (queries, keys[::group], values[::group]), strict=True)
    ]
    if isinstance(projection, Tensor) and projection.ndim == 2:
        output = LinearMap(projection.mT, None)
    else:
        output = LinearMap.from_linear("projection", projection)
    arguments = ("heads", "heads", "heads", "projection")
    return layer_from_maps([*stacked, output], arguments, len(triples), len(triples) // group)


def to_heads(layer: MultiHeadAttention) -> tuple[list[Head], nn.Linear]:
    """Return copies of the weights of a layer as new `nn.Linear` modules: a list with a `(query, key, value)` triple
    for each head, and the output projection. Heads that share a key/value head have the same key module and the same
    value module.

    `from_heads` makes the same layer from them. Code that multiplies by a matrix uses `projection.weight.mT`.

    Raises:
        InputError: not a `MultiHeadAttention`.
    """
    query, key, value, output = linear_maps_of(layer)
    queries = [map_.to_linear() for map_ in query.split_rows(layer.head_dim)]
    keys = [map_.to_linear() for map_ in key.split_rows(layer.head_dim)]
    values = [map_.to_linear() for map_ in value.split_rows(layer.value_dim)]
    group = layer.num_heads // layer.num_kv_heads
    return [
        (head_query, keys[i // group], values[i // group]) for i, head_query in enumerate(queries)
    ], output.to_linear()


def from_projections(
    query: nn.Linear,
    key: nn.Linear,
    value: nn.Linear,
    output: nn.Linear,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rotary: Rotary | None = None,
    position_bias: PositionBias | None = None,
    scores: Scores | None = None,
    qk_norm: QKNorm | None = None,
    mask: Mask | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> MultiHeadAttention:
    """Return a `MultiHeadAttention` with copies of the weights of four `nn.Linear` modules, each for all heads
    together: query, key, value and output projection. Heads stand side by side in the outputs of `query`, `key` and
    `value` and in the input of `output`: all features of the first head, then all features of the second, and so on.

    If one of query, key and value has a bias, the layer has one for all three, zero where there was none. The other
    arguments are options of the layer; their learned parameters start as in a new layer.

    Args:
        query: `embed_dim -> num_heads * head_dim`.
        key: `context_dim -> num_kv_heads * head_dim`.
        value: `value_context_dim -> num_kv_heads * value_dim`.
        output: `num_heads * value_dim -> out_dim`.
        num_heads: number of heads that the output of `query` contains.
        num_kv_heads: number of heads that the outputs of `key` and `value` contain; default `num_heads`.
        rotary: rotary embedding of queries and keys.
        position_bias: adds to the scores by distance.
        scores: scale, softcap, sinks, temperature, talking heads.
        qk_norm: normalises queries and keys.
        mask: mask that the layer always applies.
        dropout: probability of dropping an attention weight in training.
        backend: see `attend`.

    Raises:
        InputError: widths that the number of heads does not divide, or that do not fit each other.
    """
    num_heads = whole_number("num_heads", num_heads, least=1)
    num_kv_heads = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads, least=1)
    named = {"query": query, "key": key, "value": value, "output": output}
    return layer_from_maps(
        [LinearMap.from_linear(name, linear) for name, linear in named.items()],
        tuple(named),
        num_heads,
        num_kv_heads,
        rotary=rotary,
        position_bias=position_bias,
        scores=scores,
        qk_norm=qk_norm,
        mask=mask,
        dropout=dropout,
        backend=backend,
    )


def to_projections(layer: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """Return the query, key, value and output projections of a layer as four new `nn.Linear` modules; a fused
    `qkv_proj` is split into three.

    Raises:
        InputError: not a `MultiHeadAttention`.
    """
    query, key, value, output = linear_maps_of(layer)
    return query.to_linear(), key.to_linear(), value.to_linear(), output.to_linear()


_KINDS = ("query", "key", "value")


def _triple(head: Any) -> Any:
    """Return `head` unchanged if it is a sequence of three elements (query, key and value projection); raise
    `InputError` otherwise.
    """
    if not isinstance(head, Sequence) or len(head) != 3:
        raise InputError("heads", expected="a (query, key, value) triple for each head", got=type(head).__name__)
    return head


def _group_size(triples: Sequence[Any]) -> int:
    """Return the number of consecutive heads that share the same key and value modules. Each of `triples` is the
    `(query, key, value)` of one head. Return 1 if the groups of heads that share modules differ in size.
    """
    groups = groupby(triples, key=lambda triple: (id(triple[1]), id(triple[2])))
    sizes = {len(list(group)) for _, group in groups}
    return sizes.pop() if len(sizes) == 1 else 1


def _stacked(name: str, maps: Sequence[LinearMap]) -> LinearMap:
    """Return the projections of all heads of one kind (`name`: query, key or value) stacked as one map: its output rows
    are those of the first head, then those of the second, and so on. Raise `InputError` if only some of them have a
    bias.
    """
    weight = torch.cat([map_.weight for map_ in maps])
    biases = [map_.bias for map_ in maps if map_.bias is not None]
    if len(biases) not in (0, len(maps)):
        raise InputError(
            "heads", expected=f"a bias in every {name} map or in none", got=f"one in {len(biases)} of {len(maps)}"
        )
    return LinearMap(weight, torch.cat(biases) if biases else None)
