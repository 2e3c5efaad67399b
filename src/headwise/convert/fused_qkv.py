"""Three projections as one, and one as three: the same layer otherwise, to the bit."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.convert.projection_maps import Map
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.projections import is_plain_linear

Layer = TypeVar("Layer", bound=MultiHeadAttention)

SEPARATE = ("q_proj", "k_proj", "v_proj")
"""The projections of a layer that is not fused, in the order in which they are stacked."""


def fuse_projections(layer: Layer) -> Layer:
    """A copy of a self-attention layer in which one matrix product, `qkv_proj`, makes queries, keys and values.

    All else is a deep copy, a `position_bias` that layers share too. `separate_projections` gives the layer back.

    Raises:
        InputError: a layer that is fused already or takes a context of another width; projections that are no plain
            `nn.Linear`, or that differ in what one can only have as a whole.
    """
    _require_layer(layer, fused=False)
    widths = (layer.context_dim, layer.value_context_dim)
    if widths != (layer.embed_dim, layer.embed_dim):
        raise InputError("layer", expected=f"contexts of width {layer.embed_dim} like x", got=f"widths {widths}")
    linears = [_plain(layer, name) for name in SEPARATE]
    _require_alike("one bias setting", ["a bias" if each.bias is not None else "none" for each in linears])
    for kind in ("weight", "bias") if linears[0].bias is not None else ("weight",):
        parameters = [getattr(each, kind) for each in linears]
        _require_alike(f"one dtype of every {kind}", [each.dtype for each in parameters])
        _require_alike(f"one device of every {kind}", [each.device for each in parameters])
        _require_alike(f"one requires_grad of every {kind}", [each.requires_grad for each in parameters])
    weights: list[Tensor] = [each.weight for each in linears]
    biases: list[Tensor] = [each.bias for each in linears if each.bias is not None]
    stacked = Map(torch.cat(weights), torch.cat(biases) if biases else None)
    return _replaced(layer, SEPARATE, {"qkv_proj": _like(linears[0], stacked)}, fused=True)


def separate_projections(layer: Layer) -> Layer:
    """A copy of a layer whose `qkv_proj` has become `q_proj`, `k_proj` and `v_proj`, so that it takes a context.

    All else is a deep copy, a `position_bias` that layers share too. `fuse_projections` gives the layer back.

    Raises:
        InputError: a layer that is not fused, or whose projection is no plain `nn.Linear`.
    """
    _require_layer(layer, fused=True)
    linear = _plain(layer, "qkv_proj")
    parts = Map.of("layer", linear).cut(list(layer.qkv_widths))
    made = {name: _like(linear, part) for name, part in zip(SEPARATE, parts, strict=True)}
    return _replaced(layer, ("qkv_proj",), made, fused=False)


def _require_layer(layer: Any, *, fused: bool) -> None:
    if not isinstance(layer, MultiHeadAttention):
        raise InputError("layer", expected="a MultiHeadAttention", got=type(layer).__name__)
    if layer.fused_qkv != fused:
        raise InputError("layer", expected=f"a layer with fused_qkv={fused}", got=f"fused_qkv={layer.fused_qkv}")


def _plain(layer: MultiHeadAttention, name: str) -> nn.Linear:
    """A projection that is its weight and bias and nothing more: anything else would be lost."""
    linear = getattr(layer, name, None)
    more = None
    if type(linear) is not nn.Linear:
        more = "none" if linear is None else type(linear).__name__
    elif not linear.state_dict().keys() <= {"weight", "bias"}:
        more = f"one with {', '.join(linear.state_dict())}"
    elif not is_plain_linear(linear):
        more = "one with a hook"
    if more is not None:
        raise InputError("layer", expected=f"a plain nn.Linear as {name}", got=more, remedy="merge or remove adapters")
    assert isinstance(linear, nn.Linear)
    return linear


def _require_alike(expected: str, values: Sequence[Any]) -> None:
    if len(set(values)) > 1:
        got = ", ".join(f"{name} {value}" for name, value in zip(SEPARATE, values, strict=True))
        raise InputError("layer", expected=expected, got=got)


def _like(linear: nn.Linear, map_: Map) -> nn.Linear:
    """The map as an `nn.Linear` whose flags are those of `linear`."""
    made = map_.linear()
    for name, parameter in made.named_parameters():
        like: Tensor = getattr(linear, name)
        parameter.requires_grad_(like.requires_grad)
    return made.train(linear.training)


def _replaced(layer: Layer, gone: Sequence[str], made: dict[str, nn.Linear], *, fused: bool) -> Layer:
    """A deep copy of the layer with other projections where those were, so that parameters keep their order."""
    new = copy.deepcopy(layer)
    modules = dict(new._modules)
    new._modules.clear()
    for name, module in modules.items():
        if name not in gone:
            new._modules[name] = module
        elif name == gone[0]:
            new._modules.update(made)
    new.fused_qkv = fused
    return new
