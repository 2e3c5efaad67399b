"""Conversion between our layer and attention written with `nn.Linear` modules, or as torch's layer.

Implementations of multi-head attention differ in how they store heads, not in what they compute:

    a list of heads, each with its own maps              from_heads            to_heads
    four linear maps, cut into heads                     from_projections      to_projections
    the same, as torch.nn.MultiheadAttention packs it    from_torch            to_torch
    one projection for queries, keys and values          separate_projections  fuse_projections
    heads narrower than the model                        any but torch's

Only projections are converted. Other options, such as a rotary embedding, are passed as arguments.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from headwise.attention.masks.base import Mask
from headwise.attention.position_bias import PositionBias
from headwise.attention.rotary import Rotary
from headwise.checks import whole_number
from headwise.errors import InputError
from headwise.nn.linear_engine import has_hooks
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import QKNorm, Scores
from headwise.shapes import Float

Layer = TypeVar("Layer", bound=MultiHeadAttention)


class LinearMap(NamedTuple):
    """Weight `(out, in)` and bias `(out,)` of a linear map `weight x + bias`; the bias is None for a map
    without one.
    """

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None

    @staticmethod
    def from_linear(argument: str, linear: Any) -> "LinearMap":
        """Return the weight and bias of an `nn.Linear` as a `LinearMap`, not copied. A parametrised `nn.Linear` and
        torch's `NonDynamicallyQuantizableLinear` are accepted too. Raise `InputError` for any other module and for a
        module with a hook; the error message names the caller's parameter `argument`.
        """
        if not isinstance(linear, nn.Linear):
            raise InputError(argument, expected="an nn.Linear for every map", got=type(linear).__name__)
        # A parametrised weight is computed when read. Torch's attention has its own class for the output map.
        is_linear = parametrize.type_before_parametrizations(linear) in (nn.Linear, NonDynamicallyQuantizableLinear)
        if not is_linear or has_hooks(linear):
            got = f"{type(linear).__name__}{' with a hook' if is_linear else ''}"
            expected = "a map that is its weight and bias and nothing more"
            raise InputError(argument, expected=expected, got=got, remedy="merge adapters and remove hooks first")
        return LinearMap(linear.weight, linear.bias)

    def split_rows(self, widths: list[int] | int) -> "list[LinearMap]":
        """Split the map by output rows and return the parts as maps, each with consecutive rows. `widths` is as in
        `torch.split`: a list with the number of rows of each part, or one number for all parts (the last may be
        smaller).
        """
        weights = torch.split(self.weight, widths)
        biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, widths)
        return [LinearMap(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def to_linear(self) -> nn.Linear:
        """Return a new `nn.Linear` with copies of the map's weight and bias."""
        made: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Linear,
            self.weight.shape[1],
            self.weight.shape[0],
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        self.copy_to(made)
        return made

    @torch.no_grad()
    def copy_to(self, target: "nn.Linear | LinearMap") -> None:
        """Copy the map's weight and bias into an `nn.Linear` or another map, in place. If the map has no bias, the bias
        of the target is left unchanged.
        """
        target.weight.copy_(self.weight)
        if self.bias is not None and target.bias is not None:
            target.bias.copy_(self.bias)


def linear_maps_of(layer: Any) -> tuple[LinearMap, LinearMap, LinearMap, LinearMap]:
    """Return the query, key, value and output projections of a `MultiHeadAttention` as four `LinearMap`s (weight and
    bias), not copied; a fused `qkv_proj` is split into three.
    """
    if type(layer) is not MultiHeadAttention:
        raise InputError("layer", expected="a MultiHeadAttention, not of a derived class", got=type(layer).__name__)
    if layer.fused_qkv:
        query, key, value = LinearMap.from_linear("layer", layer.qkv_proj).split_rows(list(layer.qkv_widths))
    else:
        query, key, value = (
            LinearMap.from_linear("layer", projection) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
    return query, key, value, LinearMap.from_linear("layer", layer.out_proj)


def scores_with_scale(layer: MultiHeadAttention) -> Scores:
    """Return the `Scores` option of a layer (scale, softcap, sinks and the like) with its scale as a number: if the
    scale is None, it is replaced by the default, `head_dim ** -0.5`. A layer without the option is treated as one with
    `Scores()`.
    """
    scores = layer.scores or Scores()
    return replace(scores, scale=layer.head_dim**-0.5) if scores.scale is None else scores


def layer_from_maps(
    maps: Sequence[LinearMap], arguments: Sequence[str], num_heads: int, num_kv_heads: int, **options: Any
) -> MultiHeadAttention:
    """Return a new `MultiHeadAttention` with copies of the query, key, value and output projections in `maps`. The
    widths of the layer follow from the shapes of the maps and the numbers of heads. `arguments` has, for error
    messages, the name of the caller's argument that each map came from. `options` are further constructor arguments.

    If one of query, key and value has a bias, the layer has one for all three, zero where there was none.
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
        value_context_dim=value.shape[1],
        out_dim=output.shape[0],
        bias=any(map_.bias is not None for map_ in maps[:3]),
        out_bias=maps[3].bias is not None,
        device=query.device,
        dtype=query.dtype,
        **options,
    )
    for projection, map_ in zip((layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), maps, strict=True):
        map_.copy_to(projection)
    return layer


# -- separate heads, four projections ---------------------------------------------------------------------------------

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
    for head in triples:
        if not isinstance(head, Sequence) or len(head) != 3:
            raise InputError("heads", expected="a (query, key, value) triple for each head", got=type(head).__name__)
    maps = [[LinearMap.from_linear("heads", linear) for linear in triple] for triple in triples]
    shapes = {tuple(tuple(map_.weight.shape) for map_ in triple) for triple in maps}
    if len(shapes) > 1:
        raise InputError("heads", expected="the same (query, key, value) shapes in every head", got=sorted(shapes))
    queries, keys, values = zip(*maps, strict=True)
    shared = groupby(triples, key=lambda triple: (id(triple[1]), id(triple[2])))  # the same key and value modules
    sizes = {len(list(heads_of_group)) for _, heads_of_group in shared}
    group = sizes.pop() if len(sizes) == 1 else 1
    stacked = [_stacked("query", queries), _stacked("key", keys[::group]), _stacked("value", values[::group])]
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


def _stacked(name: str, maps: Sequence[LinearMap]) -> LinearMap:
    """Stack the projections of all heads of one kind (`name`: query, key or value) along their output rows, and return
    them as one map. Raise `InputError` if only some of them have a bias.
    """
    weight = torch.cat([map_.weight for map_ in maps])
    biases = [map_.bias for map_ in maps if map_.bias is not None]
    if len(biases) not in (0, len(maps)):
        expected = f"a bias in every {name} map or in none"
        raise InputError("heads", expected=expected, got=f"one in {len(biases)} of {len(maps)}")
    return LinearMap(weight, torch.cat(biases) if biases else None)


# -- torch's layer ----------------------------------------------------------------------------------------------------


def from_torch(layer: nn.MultiheadAttention) -> MultiHeadAttention:
    """Return a `MultiHeadAttention` with copies of the weights of a `torch.nn.MultiheadAttention`, and with the same
    dropout and training flag.

    The inputs of our layer are `(batch, length, embed)` whatever `batch_first` was. True in a mask means that a query
    attends to a key. Weights are returned for each head; `weights.mean(1)` is the average that torch returns.

    Raises:
        InputError: another layer, or `add_bias_kv` or `add_zero_attn`, which append keys.
    """
    if not isinstance(layer, nn.MultiheadAttention):
        raise InputError("layer", expected="a torch.nn.MultiheadAttention", got=type(layer).__name__)
    for option, is_used in (("add_bias_kv", layer.bias_k is not None), ("add_zero_attn", layer.add_zero_attn)):
        if is_used:
            raise InputError("layer", expected=f"torch.nn.MultiheadAttention without {option}", got=f"{option}=True")
    maps = [*_input_maps(layer), LinearMap.from_linear("layer", layer.out_proj)]
    converted = layer_from_maps(maps, ("layer",) * 4, layer.num_heads, layer.num_heads, dropout=layer.dropout)
    return converted.train(layer.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """Return a `torch.nn.MultiheadAttention` with `batch_first=True` and with copies of the weights of a
    `MultiHeadAttention`, and with the same dropout and training flag.

    Its boolean masks have the opposite meaning: True masks a key out.

    Raises:
        InputError: a layer with an option that torch's layer does not have; the message names it.
    """
    maps = linear_maps_of(layer)
    if unsupported := _unsupported_option(layer):
        raise InputError("layer", expected="options that torch.nn.MultiheadAttention has", got=unsupported)
    weight = layer.out_proj.weight
    converted = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=layer.out_proj.bias is not None,
        kdim=layer.context_dim,
        vdim=layer.value_context_dim,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():  # writes to views of packed parameters
        for target, map_ in zip(_input_maps(converted), maps[:3], strict=True):
            map_.copy_to(target)
    maps[3].copy_to(converted.out_proj)
    return converted.train(layer.training)


def _input_maps(layer: nn.MultiheadAttention) -> list[LinearMap]:
    """Return the query, key and value projections of a `torch.nn.MultiheadAttention` as views of its parameters, not
    copies.
    """
    packed = layer.in_proj_weight
    weights = packed.chunk(3) if packed is not None else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    return [LinearMap(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _unsupported_option(layer: MultiHeadAttention) -> str | None:
    """Return a description of the first property of a layer that `torch.nn.MultiheadAttention` does not support: an
    option, a size, or a bias in only some of the projections. Return None if `torch.nn.MultiheadAttention` supports
    all properties of the layer.
    """
    for option in ("rotary", "position_bias", "qk_norm", "output_gate", "mask"):
        if getattr(layer, option) is not None:
            return f"a layer with {option}"
    if scores_with_scale(layer) != Scores(scale=layer.head_dim**-0.5):
        return f"a layer with {layer.scores}"
    if layer.num_kv_heads != layer.num_heads:
        return f"{layer.num_kv_heads} key/value heads for {layer.num_heads} heads"
    for name, width in (("head_dim", layer.head_dim), ("value_dim", layer.value_dim)):
        if layer.num_heads * width != layer.embed_dim:
            return f"{layer.num_heads} heads of {name} {width}, not {layer.embed_dim} wide together"
    if layer.out_dim != layer.embed_dim:
        return f"out_dim {layer.out_dim} with embed_dim {layer.embed_dim}"
    biases = {map_.bias is not None for map_ in linear_maps_of(layer)}
    return "a bias in some of the projections" if len(biases) > 1 else None


# -- one projection for queries, keys and values ----------------------------------------------------------------------

SEPARATE = ("q_proj", "k_proj", "v_proj")
"""Names of the projections of a layer that is not fused, in the order in which they are stacked."""


def fuse_projections(layer: Layer) -> Layer:
    """Return a copy of a self-attention layer in which one projection `qkv_proj` replaces `q_proj`, `k_proj` and
    `v_proj`. The weight of `qkv_proj` is the three weights stacked along the output features, and its bias, if any, is
    the three biases.

    Everything else is a deep copy, a shared `position_bias` included. `separate_projections` is the reverse.

    Raises:
        InputError: a layer that is fused already or has a context of another width; projections that are not plain
            `nn.Linear` modules, or that differ in bias, dtype, device or `requires_grad`.
    """
    _require_layer(layer, fused=False)
    widths = (layer.context_dim, layer.value_context_dim)
    if widths != (layer.embed_dim, layer.embed_dim):
        raise InputError("layer", expected=f"contexts of width {layer.embed_dim} like x", got=f"widths {widths}")
    linears = [_plain_projection(layer, name) for name in SEPARATE]
    _require_alike("one bias setting", ["a bias" if each.bias is not None else "none" for each in linears])
    for kind in ("weight", "bias") if linears[0].bias is not None else ("weight",):
        parameters = [getattr(each, kind) for each in linears]
        _require_alike(f"one dtype of every {kind}", [each.dtype for each in parameters])
        _require_alike(f"one device of every {kind}", [each.device for each in parameters])
        _require_alike(f"one requires_grad of every {kind}", [each.requires_grad for each in parameters])
    stacked = _stacked("projection", [LinearMap(each.weight, each.bias) for each in linears])
    return _with_projections(layer, SEPARATE, {"qkv_proj": _linear_like(linears[0], stacked)}, fused=True)


def separate_projections(layer: Layer) -> Layer:
    """Return a copy of a layer in which separate projections `q_proj`, `k_proj` and `v_proj`, with the same weights,
    replace the fused `qkv_proj`. Unlike the fused layer, the copy can also compute cross-attention.

    Everything else is a deep copy, a shared `position_bias` included. `fuse_projections` is the reverse.

    Raises:
        InputError: a layer that is not fused, or whose projection is not a plain `nn.Linear`.
    """
    _require_layer(layer, fused=True)
    linear = _plain_projection(layer, "qkv_proj")
    parts = LinearMap(linear.weight, linear.bias).split_rows(list(layer.qkv_widths))
    made = {name: _linear_like(linear, part) for name, part in zip(SEPARATE, parts, strict=True)}
    return _with_projections(layer, ("qkv_proj",), made, fused=False)


def _require_layer(layer: Any, *, fused: bool) -> None:
    """Raise `InputError` unless `layer` is a `MultiHeadAttention` with `fused_qkv` equal to `fused`."""
    if not isinstance(layer, MultiHeadAttention):
        raise InputError("layer", expected="a MultiHeadAttention", got=type(layer).__name__)
    if layer.fused_qkv != fused:
        raise InputError("layer", expected=f"a layer with fused_qkv={fused}", got=f"fused_qkv={layer.fused_qkv}")


def _plain_projection(layer: MultiHeadAttention, name: str) -> nn.Linear:
    """Return the projection of `layer` that is called `name`, such as `q_proj`. Raise `InputError` if it is missing or
    not a plain `nn.Linear`, that is if it has another class, further parameters or a hook.
    """
    linear = getattr(layer, name, None)
    problem = None
    if type(linear) is not nn.Linear:
        problem = "none" if linear is None else type(linear).__name__
    elif not linear.state_dict().keys() <= {"weight", "bias"}:
        problem = f"one with {', '.join(linear.state_dict())}"
    elif has_hooks(linear):
        problem = "one with a hook"
    if problem is not None:
        expected = f"a plain nn.Linear as {name}"
        raise InputError("layer", expected=expected, got=problem, remedy="merge or remove adapters")
    assert isinstance(linear, nn.Linear)
    return linear


def _require_alike(expected: str, values: Sequence[Any]) -> None:
    """Raise `InputError` unless all `values` are equal: the values of one property, such as the dtype, in the query,
    key and value projection of a layer. The text `expected` describes the requirement in the error message.
    """
    if len(set(values)) > 1:
        got = ", ".join(f"{name} {value}" for name, value in zip(SEPARATE, values, strict=True))
        raise InputError("layer", expected=expected, got=got)


def _linear_like(linear: nn.Linear, map_: LinearMap) -> nn.Linear:
    """Return a new `nn.Linear` with copies of the weight and bias in `map_`. The training flag of the new module and
    the `requires_grad` of its parameters are those of `linear`.
    """
    made = map_.to_linear()
    for name, parameter in made.named_parameters():
        like: Tensor = getattr(linear, name)
        parameter.requires_grad_(like.requires_grad)
    return made.train(linear.training)


def _with_projections(layer: Layer, removed: Sequence[str], added: dict[str, nn.Linear], *, fused: bool) -> Layer:
    """Return a deep copy of `layer` in which the modules in `added` replace those named in `removed`, at the position
    of the first removed one, so that the order of all parameters is preserved. Set the copy's `fused_qkv` to `fused`.
    """
    new = copy.deepcopy(layer)
    modules = dict(new._modules)
    new._modules.clear()
    for name, module in modules.items():
        if name not in removed:
            new._modules[name] = module
        elif name == removed[0]:
            new._modules.update(added)
    new.fused_qkv = fused
    return new
