"""Conversion of attention blocks of Hugging Face `transformers` to our layer, and of weights back."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.convert.families import FAMILIES
from headwise.convert.projection_maps import linear_maps_of, scores_with_scale
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention


def from_transformers(block: nn.Module, *, backend: str | None = None) -> MultiHeadAttention:
    """Return a `MultiHeadAttention` that computes the same as an attention block of `transformers`, with copies of the
    block's weights. The layer computes attention with `backend`, or with the fastest one if `backend` is None.

    Rotary embedding, causal or window mask and score options are converted too. The model computes padding masks
    outside its blocks: pass them to the layer's `forward`. A dropout of the output, the residual connection and a
    normalisation after it are not part of the layer.

    Args:
        block: attention module of one layer, such as `model.model.layers[0].self_attn` of a Llama.
        backend: of the layer, as for `attend`.

    Raises:
        InputError: a block of an unknown family, or one that computes something the layer cannot.
    """
    options, block_parameters = _options_and_parameters(block)
    reference = next(iter(block_parameters.values()))
    for name, tensor in block_parameters.items():
        if (tensor.dtype, tensor.device) != (reference.dtype, reference.device):
            got = f"{tensor.dtype} on {tensor.device} as {name}"
            raise InputError("block", expected=f"{reference.dtype} on {reference.device} throughout", got=got)
    layer = MultiHeadAttention(**options, backend=backend, device=reference.device, dtype=reference.dtype)
    layer_parameters = dict(layer.named_parameters())
    if unmatched := sorted(layer_parameters.keys() ^ block_parameters.keys()):
        expected = "biases of query, key and value, all three or none"
        raise InputError("block", expected=expected, got=f"a difference in {', '.join(unmatched)}")
    with torch.no_grad():
        for name, parameter in layer_parameters.items():
            parameter.copy_(block_parameters[name])
    return layer.train(block.training)


def to_transformers(layer: MultiHeadAttention, block: nn.Module) -> None:
    """Copy the weights of a `MultiHeadAttention` into an attention block of `transformers`, in place. Raise
    `InputError` and write nothing if the two differ in a shape, a dtype, or an option other than dropout and backend.

    Args:
        layer: with the options of `from_transformers(block)`.
        block: attention module of a known family.

    Raises:
        InputError: a block of an unknown family, or a layer that computes something the block cannot.
    """
    options, block_parameters = _options_and_parameters(block)
    _require_same(layer, MultiHeadAttention(**options, device="meta"), type(block).__name__)
    layer_parameters = dict(layer.named_parameters())
    for name in sorted(layer_parameters.keys() | block_parameters.keys()):
        wanted, got = (_shape_and_dtype(tensors.get(name)) for tensors in (block_parameters, layer_parameters))
        if wanted != got:
            expected = f"{name} of {wanted}, as the {type(block).__name__} has"
            raise InputError("layer", expected=expected, got=got)
    with torch.no_grad():
        for name, tensor in block_parameters.items():
            tensor.copy_(layer_parameters[name])


def _options_and_parameters(block: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return two dicts for an attention block of `transformers`: the constructor arguments of the `MultiHeadAttention`
    that computes the same, and the block's parameters, where each key is the name of the `MultiHeadAttention` parameter
    with the same values. Raise `InputError` for a block of an unknown class, and for one that lacks an expected
    attribute.
    """
    name = type(block).__name__
    family = next((candidate for candidate in FAMILIES if name in candidate.classes), None)
    if family is None:
        known = ", ".join(class_name for family in FAMILIES for class_name in family.classes)
        raise InputError("block", expected=f"an attention block of transformers, one of {known}", got=name)
    try:
        # Parameters first: an adapted projection is best rejected as such.
        parameters = family.parameters(block)
        return family.options(block), parameters
    except AttributeError as error:
        expected = f"a {name} as transformers 5 has it"
        raise InputError("block", expected=expected, got=f"one without {error.name}") from error


_COMPARED_OPTIONS = (
    *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim", "fused_qkv", "rotary"),
    *("position_bias", "qk_norm", "output_gate", "mask"),
)
"""Options that change the meaning of the weights."""


def _require_same(layer: Any, wanted: MultiHeadAttention, block: str) -> None:
    """Raise `InputError` unless `layer` is a `MultiHeadAttention`, not of a derived class, with plain projections and
    the same sizes and options as `wanted`. Weights, context widths, dropout and backend are not compared. `block` is
    the class name of the `transformers` block, for the error message.
    """
    linear_maps_of(layer)
    pairs = {name: (getattr(wanted, name), getattr(layer, name)) for name in _COMPARED_OPTIONS}
    for name, (expected_option, got) in (
        pairs | {"scores": (scores_with_scale(wanted), scores_with_scale(layer))}
    ).items():
        # Masks with tensors have no useful equality; their repr shows the values.
        if repr(expected_option) != repr(got) if name == "mask" else expected_option != got:
            remedy = None
            if name == "fused_qkv":
                remedy = f"{'fuse' if expected_option else 'separate'}_projections(layer) gives such a layer"
            expected = f"{name} {expected_option!r} as the {block} has"
            raise InputError("layer", expected=expected, got=repr(got), remedy=remedy)


def _shape_and_dtype(tensor: Tensor | None) -> str:
    """Return shape and dtype of a parameter as text for an error message; "none" for a missing parameter."""
    return "none" if tensor is None else f"shape {tuple(tensor.shape)} in {tensor.dtype}"
