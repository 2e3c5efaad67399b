"""Slices of parameters that compute the queries and keys of single heads, and their powers of a factor of the logits.

The logit of head h is a bilinear form of its query and key, with their biases. Multiplying it by a factor g takes

- g^1/2 in the query projection and g^1/2 in the key projection, if the key is the head's own (Kimi Team 2025,
  section 2.1);
- g in the query projection, if heads share the key, which stays unchanged, so that the other heads keep their logits;
- in latent attention, g^1/2 in both parts that are not rotated and g in the rotated part of the query, since all heads
  share the rotated key.

A rotation by position is linear, and commutes with the factor.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from headwise.analysis.circuits.norms import is_norm
from headwise.attention.position_bias import ALiBi
from headwise.errors import InputError
from headwise.nn.differential import DifferentialAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.multihead import MultiHeadAttention
from headwise.removal.families import FAMILIES, HeadwiseLayer, head_module
from headwise.removal.head_axes import HeadAxis, HeadBlocks
from headwise.removal.head_module import HeadModule
from headwise.removal.plain_projections import require_plain_projections
from headwise.removal.remove_heads import parameter_with_heads


class HeadSlice(NamedTuple):
    """Slice of a parameter that computes a part of one head's query or key.

    Attributes:
        parameter: path of the parameter in the model.
        axis: axis along which it is cut.
        start: first index along the axis.
        length: number of indices.
        exponent: power of the factor of the head's logits by which the slice is multiplied.
    """

    parameter: str
    axis: int
    start: int
    length: int
    exponent: float


HeadSlices = tuple[tuple[HeadSlice, ...], ...]
"""Slices of each head of an attention module."""

DEEPSEEK = ("DeepseekV2Attention", "DeepseekV3Attention")
"""Names of the classes of latent attention in `transformers`."""


def is_known(module: nn.Module) -> bool:
    """Return True for an attention module of a class whose projections are known by name: of headwise, or of a family
    of torch and transformers.
    """
    name, package = type(module).__name__, type(module).__module__.partition(".")[0]
    families = {each for family in FAMILIES for each in family.classes}
    is_family = name in families or name in DEEPSEEK
    return package == "headwise" or (package in ("torch", "transformers") and is_family) or bool(_why_not(module))


def head_slices(model: nn.Module, path: str) -> HeadSlices:
    """Return the slices that compute the query and the key of each head of the attention module at `path`.

    Raises:
        InputError: the module is of no known family, its logits do not scale with its projections, or its projections
            do more than to multiply by a weight.
    """
    module = model.get_submodule(path)
    if reason := _why_not(module):
        expected = "attention modules whose logits scale with their query and key projections"
        raise InputError("model", expected=expected, got=f"{reason} in {path or type(module).__name__}")
    if type(module) is LatentAttention or type(module).__name__ in DEEPSEEK:
        return _slices_of_latent(model, path, module)
    if type(module) is MultiHeadAttention:
        places = HeadwiseLayer().places(model, path, module)
        require_plain_projections(model, places)
    else:
        places = head_module(model, path)
    _require_own_class(module, path)
    return _slices(model, places)


def _why_not(module: Any) -> str | None:
    """Return what keeps the logits of an attention module from following a factor of its query and key projections,
    as a noun phrase; None for nothing.
    """
    if isinstance(module, DifferentialAttention):
        return "two maps of each head, of which the logits of one are unknown,"
    if isinstance(module, MultiHeadAttention | LatentAttention) and module.talking_before is not None:
        return "talking heads, which mix the logits of all heads,"
    has_bias = isinstance(module, MultiHeadAttention) and type(module.position_bias) not in (type(None), ALiBi)
    if has_bias or hasattr(module, "has_relative_attention_bias"):
        return "a position bias, which may be positive and does not scale with them,"
    if isinstance(module, LatentAttention) or type(module).__name__ in DEEPSEEK:
        return None  # its norms are of the latents, in front of the projections into heads
    norms = (name for name, part in module.named_modules() if is_norm(part))
    norm = next((name for name in norms if name.rpartition(".")[2].startswith(("q", "k"))), None)
    return f"the norm {norm}, which undoes a factor of the projection before it," if norm else None


def _require_own_class(module: nn.Module, path: str) -> None:
    """Raise `InputError` for an attention module that has the name of a known class, but is defined elsewhere."""
    package = type(module).__module__.partition(".")[0]
    if package not in ("headwise", "torch", "transformers"):
        got = f"{type(module).__module__}.{type(module).__name__} in {path or 'the model'}"
        raise InputError("model", expected="attention modules of headwise, torch or transformers", got=got)


def _slices(model: nn.Module, places: HeadModule) -> HeadSlices:
    """Return the slices of each head from the places of heads in an attention module."""
    is_shared = places.num_kv_heads != places.num_heads
    exponent = 1.0 if is_shared else 0.5
    by_head: list[list[HeadSlice]] = [[] for _ in range(places.num_heads)]
    for axis in places.axes:
        parameter_with_heads(model, places, axis)
        start = 0
        for blocks in axis.blocks:
            length = 0 if is_shared and blocks.part == "key" else _query_key_length(places, blocks)
            for head in range(blocks.heads if length else 0):
                first = start + head * blocks.width
                by_head[head].append(HeadSlice(axis.parameter, axis.axis, first, length, exponent))
            start += blocks.length
    return tuple(tuple(slices) for slices in by_head)


def _query_key_length(places: HeadModule, blocks: HeadBlocks) -> int:
    """Return the number of features of queries and keys at the start of each block; 0 for other blocks."""
    if blocks.part in ("query", "key"):
        return blocks.width
    # GPT-NeoX: query, key and value of each head, in this order.
    is_joint = blocks.part is None and blocks.width == 2 * places.head_dim + places.value_dim
    return 2 * places.head_dim if is_joint else 0


def _slices_of_latent(model: nn.Module, path: str, module: Any) -> HeadSlices:
    """Return the slices of each head of a module with latent attention, whose projections compute, for each head, the
    query `[head_dim | rotary_dim]` and, from the latent, `[head_dim | value_dim]` of key and value.
    """
    if isinstance(module, LatentAttention):
        content, rotated, value = module.head_dim, module.rotary_dim, module.value_dim
        query, key, output = "q_proj" if module.q_rank is None else "q_up", "kv_up", "out_proj"
    else:
        _require_own_class(module, path)
        content, rotated, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        query, key, output = "q_proj" if module.q_lora_rank is None else "q_b_proj", "kv_b_proj", "o_proj"
    heads, prefix = module.num_heads, f"{path}." if path else ""
    widths = {f"{prefix}{query}": content + rotated, f"{prefix}{key}": content + value}
    axes = tuple(
        HeadAxis(parameter, 0, (HeadBlocks("query", heads, width),))
        for projection, width in widths.items()
        for parameter in _parameters_of(model, projection)
    )
    places = HeadModule(path, heads, heads, content + rotated, value, axes, f"{prefix}{output}", {})
    require_plain_projections(model, places)
    by_head: list[list[HeadSlice]] = [[] for _ in range(heads)]
    for axis in axes:
        parameter_with_heads(model, places, axis)
        width, is_query = axis.blocks[0].width, axis.parameter.startswith(f"{prefix}{query}.")
        for head in range(heads):
            start = head * width
            by_head[head].append(HeadSlice(axis.parameter, 0, start, content, 0.5))
            if is_query:
                by_head[head].append(HeadSlice(axis.parameter, 0, start + content, rotated, 1.0))
    return tuple(tuple(slices) for slices in by_head)


def _parameters_of(model: nn.Module, projection: str) -> Iterator[str]:
    """Yield the paths of the weight and, if there is one, of the bias of a projection."""
    yield f"{projection}.weight"
    if getattr(model.get_submodule(projection), "bias", None) is not None:
        yield f"{projection}.bias"
