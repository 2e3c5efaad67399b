"""Fusion of the query, key and value projections of a layer into one, and the reverse, bit for bit."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.convert.projection_maps import LinearMap
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.projections import is_plain_linear

Layer = TypeVar("Layer", bound=MultiHeadAttention)

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
    weights: list[Tensor] = [each.weight for each in linears]
    biases: list[Tensor] = [each.bias for each in linears if each.bias is not None]
    stacked = LinearMap(torch.cat(weights), torch.cat(biases) if biases else None)
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
    parts = LinearMap.from_linear("layer", linear).split_rows(list(layer.qkv_widths))
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
    elif not is_plain_linear(linear):
        problem = "one with a hook"
    if problem is not None:
        raise InputError(
            "layer", expected=f"a plain nn.Linear as {name}", got=problem, remedy="merge or remove adapters"
        )
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
