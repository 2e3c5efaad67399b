"""Conversion of attention blocks of Hugging Face `transformers` to our layer, and of weights back."""

import math
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.attention.masks.factories import causal, window
from headwise.attention.rotary import DynamicNTK, LinearScaling, Llama3, Rotary, Scaling, YaRN
from headwise.convert.layers import SEPARATE, linear_maps_of, scores_with_scale
from headwise.errors import InputError
from headwise.families.registry import NORMS, Family, converted_families, relative_path, softcap_of
from headwise.nn.linear_engine import has_hooks
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import QKNorm, Scores


def from_transformers(block: nn.Module, *, backend: str | None = None) -> MultiHeadAttention:
    """Return a `MultiHeadAttention` that computes the same as an attention block of `transformers`, with copies of the
    block's weights. The layer computes attention with `backend`, or with the fastest one if `backend` is None.

    Rotary embedding, causal or window mask and score options are converted too. The model computes padding masks
    outside its blocks: pass them to the layer's `forward`. A dropout of the output, the residual connection and a
    normalisation after it are not part of the layer: a BERT block computes `LayerNorm(dropout(layer(x)) + x)`. A block
    for cross-attention becomes a layer to call with a context.

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


_COMPARED_OPTIONS = (
    *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim", "fused_qkv", "rotary"),
    *("position_bias", "qk_norm", "output_gate", "mask"),
)
"""Options that change the meaning of the weights."""


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
    linear_maps_of(layer)  # its class and projections
    of_block = MultiHeadAttention(**options, device="meta")
    pairs = {name: (getattr(of_block, name), getattr(layer, name)) for name in _COMPARED_OPTIONS}
    pairs["scores"] = scores_with_scale(of_block), scores_with_scale(layer)
    for name, (wanted, got) in pairs.items():
        # Masks with tensors have no useful equality; their repr shows the values.
        if repr(wanted) != repr(got) if name == "mask" else wanted != got:
            remedy = None
            if name == "fused_qkv":
                remedy = f"{'fuse' if wanted else 'separate'}_projections(layer) gives such a layer"
            expected = f"{name} {wanted!r} as the {type(block).__name__} has"
            raise InputError("layer", expected=expected, got=repr(got), remedy=remedy)
    layer_parameters = dict(layer.named_parameters())
    for name in sorted(layer_parameters.keys() | block_parameters.keys()):
        wanted, got = (
            f"shape {tuple(tensors[name].shape)} in {tensors[name].dtype}" if name in tensors else "none"
            for tensors in (block_parameters, layer_parameters)
        )
        if wanted != got:
            expected = f"{name} of {wanted}, as the {type(block).__name__} has"
            raise InputError("layer", expected=expected, got=got)
    with torch.no_grad():
        for name, tensor in block_parameters.items():
            tensor.copy_(layer_parameters[name])


def _options_and_parameters(block: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return two dicts for an attention block of `transformers`. The first has the constructor arguments of a
    `MultiHeadAttention` that computes the same as the block. The second has the block's parameters, by the name of the
    `MultiHeadAttention` parameter with the same values. Raise `InputError` for a block of an unknown class or without
    an expected attribute.
    """
    name, families = type(block).__name__, converted_families()
    if name not in families:
        expected = f"an attention block of transformers, one of {', '.join(families)}"
        raise InputError("block", expected=expected, got=name)
    family = families[name]
    try:
        attention = attrgetter(family.inside)(block) if family.inside else block
        # Parameters first: an adapted projection is best rejected as such.
        parameters = _parameters(family, block, attention)
        return _options(family, block, attention, parameters), parameters
    except AttributeError as error:
        expected = f"a {name} as transformers 5 has it"
        raise InputError("block", expected=expected, got=f"one without {error.name}") from error


def _parameters(family: Family, block: Any, attention: Any) -> dict[str, Tensor]:
    """Return the parameters of an attention block, not copied: weights and biases of its projections and, if the block
    has them, sink logits and the parameters of query and key norms. Each key is the name of the `MultiHeadAttention`
    parameter with the same values. Weights that the block stores transposed are returned as transposed views, which are
    read and written without rounding.
    """
    names = ("qkv_proj",) if len(family.inputs) == 1 else SEPARATE
    kind = "Conv1D" if family.is_transposed else "Linear"
    parameters: dict[str, Tensor] = {}
    for name, path in zip((*names, "out_proj"), (*family.inputs, family.output), strict=True):
        part = attrgetter(relative_path(family.inside, path))(block)
        extra = part.state_dict().keys() - {"weight", "bias"}
        if type(part).__name__ != kind or extra or has_hooks(part):
            got = f"{type(part).__name__} with {', '.join(part.state_dict()) if extra else 'a hook'}"
            remedy = "merge adapters and remove hooks first"
            raise InputError("block", expected=f"a plain {kind} for {name}", got=got, remedy=remedy)
        for which, parameter in part.named_parameters():
            is_transposed = family.is_transposed and which == "weight"
            parameters[f"{name}.{which}"] = parameter.detach().T if is_transposed else parameter.detach()
    for name, norm in zip(NORMS, family.norms(attention), strict=False):
        parameters |= {f"{name}.{which}": parameter.detach() for which, parameter in norm.named_parameters()}
    return parameters | {name: getattr(attention, name).detach() for name in family.per_head}


def _options(family: Family, block: nn.Module, attention: Any, parameters: dict[str, Tensor]) -> dict[str, Any]:
    """Return the constructor arguments of the `MultiHeadAttention` that computes the same as an attention block."""
    is_fused, is_causal = len(family.inputs) == 1, attention.is_causal
    if is_fused and getattr(attention, "is_cross_attention", False):
        raise InputError("block", expected="causal self-attention", got="cross attention")
    if family.is_causal not in (None, is_causal):
        expected = "one that is causal" if family.is_causal else "one that is not causal"
        raise InputError("block", expected=expected, got=f"is_causal {is_causal}")
    places = family.places(block, family.inside)
    scale = None if attention.scaling == places.head_dim**-0.5 else attention.scaling
    scores = Scores(scale=scale, softcap=softcap_of(attention), sinks="sinks" in parameters)
    width = None if family.window is None else attrgetter(family.window)(attention)
    query = "qkv_proj" if is_fused else "q_proj"
    return {
        "embed_dim": parameters[f"{query}.weight"].shape[1],
        "num_heads": places.num_heads,
        "num_kv_heads": places.num_kv_heads,
        "head_dim": places.head_dim,
        "out_dim": parameters["out_proj.weight"].shape[0],
        "bias": f"{query}.bias" in parameters,
        "out_bias": "out_proj.bias" in parameters,
        "fused_qkv": is_fused,
        "rotary": _rotary(family, attention, places.head_dim),
        "scores": None if scores == Scores() else scores,
        "qk_norm": _qk_norm(family, attention, places.head_dim),
        "mask": None if not is_causal else causal() if width is None else window(width),
        "dropout": attrgetter(family.dropout)(attention),
    }


def _qk_norm(family: Family, attention: nn.Module, head_dim: int) -> QKNorm | None:
    """Return the `QKNorm` option that describes the query and key norms of an attention module: their kind (RMS or
    layer norm), their span (each head, or all heads together) and their epsilon. Return None for a module without such
    norms.
    """
    norm: Any = next(iter(family.norms(attention)), None)
    if norm is None:
        return None
    if not isinstance(getattr(norm, "weight", None), Tensor):  # such as a list with a norm for each head
        expected = "norms of queries and keys with one weight each"
        raise InputError("block", expected=expected, got=type(norm).__name__)
    over: Literal["head", "heads"] = "head" if norm.weight.shape[0] == head_dim else "heads"
    if isinstance(norm, nn.LayerNorm):
        return QKNorm("layer", over, norm.eps)
    return QKNorm("rms", over, norm.variance_epsilon)


ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def _rotary(family: Family, attention: Any, head_dim: int) -> Rotary | None:
    """Return the rotary embedding that the configuration of an attention module describes; None if the module rotates
    no features.
    """
    if not family.rotated_share(attention):
        return None
    config = attention.config
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise InputError("block", expected=f"a rope_type of {', '.join(ROPE_TYPES)}", got=repr(kind))
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != family.rotated_share(attention):
        raise InputError("block", expected="rotation of all features of a head", got=f"partial_rotary_factor {share}")
    scaling = None if kind == "default" else _scaling(kind, parameters, config.max_position_embeddings)
    width = None if share == 1.0 else int(head_dim * share)
    return Rotary(theta=float(parameters["rope_theta"]), width=width, scaling=scaling)


def _scaling(kind: str, parameters: dict[str, Any], longest: int) -> Scaling:
    """Return the scaling of rotary frequencies for a `rope_type`, from the `rope_parameters` of a configuration.
    `longest` is the configuration's `max_position_embeddings`. If the parameters do not state the context length of the
    original training, in tokens, `longest` is used as this length.
    """
    if kind == "linear":
        return LinearScaling(parameters["factor"])
    if kind == "dynamic":
        return DynamicNTK(parameters["factor"], longest)
    trained_length = parameters.get("original_max_position_embeddings") or longest
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        return Llama3(parameters["factor"], trained_length, low=low, high=high)
    factor = parameters.get("factor") or longest / trained_length
    attention_factor = parameters.get("attention_factor")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:  # DeepSeek
        attention_factor = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return YaRN(
        factor,
        trained_length,
        fast=parameters.get("beta_fast") or 32.0,
        slow=parameters.get("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=parameters.get("truncate", True),
    )
