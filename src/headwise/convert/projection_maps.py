"""The four linear maps of attention, wherever they were kept, and the layer that has them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import Scores
from headwise.nn.projections import has_hooks
from headwise.shapes import Float


class Map(NamedTuple):
    """The weight `(out, in)` and bias of a linear map."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None

    @staticmethod
    def of(argument: str, linear: Any) -> "Map":
        """That of an `nn.Linear`, which `argument` gave."""
        if not isinstance(linear, nn.Linear):
            raise InputError(argument, expected="an nn.Linear for every map", got=type(linear).__name__)
        # A parametrised weight is what it is when read; torch's attention calls its output map by another name.
        known = parametrize.type_before_parametrizations(linear) in (nn.Linear, NonDynamicallyQuantizableLinear)
        if not known or has_hooks(linear):
            got = f"{type(linear).__name__}{' with a hook' if known else ''}"
            expected = "a map that is its weight and bias and nothing more"
            raise InputError(argument, expected=expected, got=got, remedy="merge adapters and remove hooks first")
        return Map(linear.weight, linear.bias)

    def cut(self, widths: list[int] | int) -> "list[Map]":
        """Its output rows in parts of these widths."""
        weights = torch.split(self.weight, widths)
        biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, widths)
        return [Map(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def linear(self) -> nn.Linear:
        """An `nn.Linear` of its own, with the same bits."""
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
    def copy_to(self, linear: nn.Linear) -> None:
        """Write it over the weights of `linear`; a bias only where there is one."""
        linear.weight.copy_(self.weight)
        if self.bias is not None:
            linear.bias.copy_(self.bias)


def maps_of(layer: Any) -> tuple[Map, Map, Map, Map]:
    """Query, key, value and output map of a layer, fused or not.

    Raises:
        InputError: no layer of ours, or one of a derived class, whose maps may mean something else.
    """
    if type(layer) is not MultiHeadAttention:
        raise InputError("layer", expected="a MultiHeadAttention, not of a derived class", got=type(layer).__name__)
    if layer.fused_qkv:
        query, key, value = Map.of("layer", layer.qkv_proj).cut(list(layer.qkv_widths))
    else:
        query, key, value = (Map.of("layer", each) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
    return query, key, value, Map.of("layer", layer.out_proj)


def scores_of(layer: MultiHeadAttention) -> Scores:
    """What the layer does to its scores, the scale as a number."""
    scores = layer.scores or Scores()
    return replace(scores, scale=layer.head_dim**-0.5) if scores.scale is None else scores


def filled(
    maps: Sequence[Map], arguments: Sequence[str], num_heads: int, num_kv_heads: int, **options: Any
) -> MultiHeadAttention:
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
