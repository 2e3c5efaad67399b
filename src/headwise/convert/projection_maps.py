"""Query, key, value and output projections as plain weights, read from a layer or made into one."""

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
    def copy_to(self, linear: nn.Linear) -> None:
        """Copy the map's weight and bias into an `nn.Linear`, in place. If the map has no bias, the bias of the module
        is left unchanged.
        """
        linear.weight.copy_(self.weight)
        if self.bias is not None:
            linear.bias.copy_(self.bias)


def linear_maps_of(layer: Any) -> tuple[LinearMap, LinearMap, LinearMap, LinearMap]:
    """Return the query, key, value and output projections of a `MultiHeadAttention` as four `LinearMap`s (weight and
    bias), not copied; a fused `qkv_proj` is split into three.

    Raises:
        InputError: not a `MultiHeadAttention`, or one of a derived class, whose projections may mean something else.
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
    """Return a new `MultiHeadAttention` whose query, key, value and output projections are copies of the four `maps`,
    in this order. Its widths follow from the shapes of the maps and the numbers of heads. For error messages,
    `arguments` names the caller's argument that each map came from; `options` are further constructor arguments.

    If one of query, key and value has a bias, the layer has one for all three, zero where there was none.

    Args:
        maps: query, key, value and output projection.
        arguments: names of the user's arguments that they came from, for errors.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        **options: of `MultiHeadAttention`.

    Raises:
        InputError: projections of different dtypes or devices, or widths that do not fit each other.
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
