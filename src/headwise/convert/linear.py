"""Attention written as linear maps: a list of heads, each with its own, or four that are cut into heads.

Ways of writing multi-head attention differ in where the heads live, not in what they compute:

    a list of heads, each with its own maps              from_heads          to_heads
    four linear maps, cut into heads                     from_projections    to_projections
    the same, as torch.nn.MultiheadAttention packs it    from_torch          to_torch
    heads narrower than the model                        either of the first two

Only maps are converted. What else a layer does, such as rotary positions, is said beside them.
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
from headwise.convert.projection_maps import Map, filled, maps_of
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import QKNorm, Scores
from headwise.shapes import Float

Head = tuple[nn.Linear, nn.Linear, nn.Linear]
"""The query, key and value map of one head."""


def from_heads(
    heads: Sequence[Head],
    projection: nn.Linear | Float[Tensor, "concatenated out"],
) -> MultiHeadAttention:
    """A layer from a list of heads, each a `(query, key, value)` triple of `nn.Linear` of its own.

    Where the heads come in groups of one size, and all of a group have the same key and value modules, so does the
    layer: its key/value heads are shared.

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
    maps = [[Map.of("heads", linear) for linear in triple] for triple in map(_triple, triples)]
    shapes = {tuple(tuple(map_.weight.shape) for map_ in triple) for triple in maps}
    if len(shapes) > 1:
        raise InputError("heads", expected="the same (query, key, value) shapes in every head", got=sorted(shapes))
    queries, keys, values = zip(*maps, strict=True)
    group = _group(triples)
    stacked = [
        _stacked(name, kind) for name, kind in zip(_KINDS, (queries, keys[::group], values[::group]), strict=True)
    ]
    if isinstance(projection, Tensor) and projection.ndim == 2:
        output = Map(projection.mT, None)
    else:
        output = Map.of("projection", projection)
    arguments = ("heads", "heads", "heads", "projection")
    return filled([*stacked, output], arguments, len(triples), len(triples) // group)


def to_heads(layer: MultiHeadAttention) -> tuple[list[Head], nn.Linear]:
    """A layer as a list of heads, each a `(query, key, value)` triple, and the projection of their outputs.

    `from_heads` gives the same layer again. Heads that share a key/value head have the same two modules for it. A
    bare matrix, for code that multiplies by one, is `projection.weight.mT`.

    Raises:
        InputError: not a `MultiHeadAttention`.
    """
    query, key, value, output = maps_of(layer)
    queries = [map_.linear() for map_ in query.cut(layer.head_dim)]
    keys = [map_.linear() for map_ in key.cut(layer.head_dim)]
    values = [map_.linear() for map_ in value.cut(layer.value_dim)]
    group = layer.num_heads // layer.num_kv_heads
    return [(each, keys[i // group], values[i // group]) for i, each in enumerate(queries)], output.linear()


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
    """A layer from four linear maps whose output rows are the heads, one after the other.

    Where one of query, key and value has a bias, all three get one, zero where there was none. The other options
    are the layer's; what they learn starts as in a new layer.

    Args:
        query: `embed_dim -> num_heads * head_dim`.
        key: `context_dim -> num_kv_heads * head_dim`.
        value: `value_context_dim -> num_kv_heads * value_dim`.
        output: `num_heads * value_dim -> out_dim`.
        num_heads: how many heads the rows of `query` are cut into.
        num_kv_heads: how many those of `key` and `value` are; default `num_heads`.
        rotary: see `MultiHeadAttention`, as for all that follow.
        position_bias: adds to the scores by distance.
        scores: scale, softcap, sinks, temperature, talking heads.
        qk_norm: normalises queries and keys.
        mask: always holds.
        dropout: of the attention weights, in training.
        backend: see `attend`.

    Raises:
        InputError: widths that cannot be cut into so many heads, or that do not fit each other.
    """
    num_heads = whole_number("num_heads", num_heads, least=1)
    num_kv_heads = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads, least=1)
    named = {"query": query, "key": key, "value": value, "output": output}
    return filled(
        [Map.of(name, linear) for name, linear in named.items()],
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
    """The query, key, value and output map of a layer, fused or not, as new `nn.Linear`.

    Raises:
        InputError: not a `MultiHeadAttention`.
    """
    query, key, value, output = maps_of(layer)
    return query.linear(), key.linear(), value.linear(), output.linear()


_KINDS = ("query", "key", "value")


def _triple(head: Any) -> Any:
    if not isinstance(head, Sequence) or len(head) != 3:
        raise InputError("heads", expected="a (query, key, value) triple for each head", got=type(head).__name__)
    return head


def _group(triples: Sequence[Any]) -> int:
    """How many consecutive heads have the same key and value modules; 1 where that is not one number."""
    groups = groupby(triples, key=lambda triple: (id(triple[1]), id(triple[2])))
    sizes = {len(list(group)) for _, group in groups}
    return sizes.pop() if len(sizes) == 1 else 1


def _stacked(name: str, maps: Sequence[Map]) -> Map:
    """The maps of all heads as one, its output rows head after head."""
    weight = torch.cat([map_.weight for map_ in maps])
    biases = [map_.bias for map_ in maps if map_.bias is not None]
    if len(biases) not in (0, len(maps)):
        raise InputError(
            "heads", expected=f"a bias in every {name} map or in none", got=f"one in {len(biases)} of {len(maps)}"
        )
    return Map(weight, torch.cat(biases) if biases else None)
