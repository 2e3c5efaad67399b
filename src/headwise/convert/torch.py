"""Conversion between our layer and `torch.nn.MultiheadAttention`, which packs three projections into one parameter."""

import torch
from torch import nn

from headwise.convert.projection_maps import LinearMap, layer_from_maps, linear_maps_of, scores_with_scale
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import Scores


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
    packed = layer.in_proj_weight
    weights = packed.chunk(3) if packed is not None else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    maps = [LinearMap(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    output = LinearMap.from_linear("layer", layer.out_proj)
    converted = layer_from_maps(
        [*maps, output], ("layer",) * 4, layer.num_heads, layer.num_heads, dropout=layer.dropout
    )
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
    packed = converted.in_proj_weight
    targets = (
        packed.chunk(3)
        if packed is not None
        else (converted.q_proj_weight, converted.k_proj_weight, converted.v_proj_weight)
    )
    with torch.no_grad():
        for target, map_ in zip(targets, maps[:3], strict=True):
            target.copy_(map_.weight)
        for index, map_ in enumerate(maps[:3]):
            if map_.bias is not None:
                converted.in_proj_bias.chunk(3)[index].copy_(map_.bias)
    maps[3].copy_to(converted.out_proj)
    return converted.train(layer.training)


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
