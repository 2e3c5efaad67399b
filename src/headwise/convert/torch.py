"""`torch.nn.MultiheadAttention`, which packs three maps into one parameter."""

import torch
from torch import nn

from headwise.convert.projection_maps import Map, filled, maps_of, scores_of
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import Scores


def from_torch(layer: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer from `torch.nn.MultiheadAttention`.

    Ours takes `(batch, length, embed)` whatever `batch_first` was, True in a mask means *attends*, and
    weights come for each head; `weights.mean(1)` is the average that torch's layer returns.

    Raises:
        InputError: another layer, or `add_bias_kv` or `add_zero_attn`, which append keys.
    """
    if not isinstance(layer, nn.MultiheadAttention):
        raise InputError("layer", expected="a torch.nn.MultiheadAttention", got=type(layer).__name__)
    for option, given in (("add_bias_kv", layer.bias_k is not None), ("add_zero_attn", layer.add_zero_attn)):
        if given:
            raise InputError("layer", expected=f"torch.nn.MultiheadAttention without {option}", got=f"{option}=True")
    packed = layer.in_proj_weight
    weights = packed.chunk(3) if packed is not None else (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    maps = [Map(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    output = Map.of("layer", layer.out_proj)
    converted = filled([*maps, output], ("layer",) * 4, layer.num_heads, layer.num_heads, dropout=layer.dropout)
    return converted.train(layer.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """A layer as `torch.nn.MultiheadAttention`, with `batch_first=True`.

    Its masks mean the opposite: True is left out.

    Raises:
        InputError: a layer that torch's cannot be, and what of it.
    """
    maps = maps_of(layer)
    if unsaid := _unsaid(layer):
        raise InputError("layer", expected="what torch.nn.MultiheadAttention can say", got=unsaid)
    like = layer.out_proj.weight
    converted = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=layer.out_proj.bias is not None,
        kdim=layer.context_dim,
        vdim=layer.value_context_dim,
        batch_first=True,
        device=like.device,
        dtype=like.dtype,
    )
    packed = converted.in_proj_weight
    places = (
        packed.chunk(3)
        if packed is not None
        else (converted.q_proj_weight, converted.k_proj_weight, converted.v_proj_weight)
    )
    with torch.no_grad():
        for place, map_ in zip(places, maps[:3], strict=True):
            place.copy_(map_.weight)
        for number, map_ in enumerate(maps[:3]):
            if map_.bias is not None:
                converted.in_proj_bias.chunk(3)[number].copy_(map_.bias)
    maps[3].copy_to(converted.out_proj)
    return converted.train(layer.training)


def _unsaid(layer: MultiHeadAttention) -> str | None:
    """The first thing about a layer that torch's has no word for."""
    for option in ("rotary", "position_bias", "qk_norm", "output_gate", "mask"):
        if getattr(layer, option) is not None:
            return f"a layer with {option}"
    if scores_of(layer) != Scores(scale=layer.head_dim**-0.5):
        return f"a layer with {layer.scores}"
    if layer.num_kv_heads != layer.num_heads:
        return f"{layer.num_kv_heads} key/value heads for {layer.num_heads} heads"
    for name, width in (("head_dim", layer.head_dim), ("value_dim", layer.value_dim)):
        if layer.num_heads * width != layer.embed_dim:
            return f"{layer.num_heads} heads of {name} {width}, not {layer.embed_dim} wide together"
    if layer.out_dim != layer.embed_dim:
        return f"out_dim {layer.out_dim} beside embed_dim {layer.embed_dim}"
    biases = {map_.bias is not None for map_ in maps_of(layer)}
    return "a bias in some of the projections" if len(biases) > 1 else None
