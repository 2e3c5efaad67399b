"""Families of attention modules whose heads can be removed, and where each of them keeps its heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.torch_compat import MultiheadAttention
from headwise.removal.head_axes import HeadAxis, HeadBlocks
from headwise.removal.head_module import HeadModule
from headwise.removal.plain_projections import require_plain_projections


class Family(Protocol):
    """Interface of a reader of the attention modules of some classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of attention modules that this reader knows. They are strings, so that `transformers` is
        not imported.
        """

    def read(self, model: nn.Module, path: str) -> HeadModule:
        """Return the places of the heads in the attention module at `path`."""


@dataclass(frozen=True)
class SeparateProjections:
    """Reader of attention modules with one projection each for queries, keys and values.

    Attributes:
        classes: names of the classes.
        query: name of the query projection in the module.
        key: name of the key projection.
        value: name of the value projection.
        output: name of the output projection; after `../` in the module's parent.
        head_dim: attribute with the width of a head.
        config_fields: see `HeadModule`.
        per_head: parameters with one number per query head, by name and axis.
    """

    classes: tuple[str, ...]
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    head_dim: str = "head_dim"
    config_fields: Mapping[str, str] = field(default_factory=dict)
    per_head: Mapping[str, int] = field(default_factory=dict)

    def read(self, model: nn.Module, path: str) -> HeadModule:
        """Return the places of the heads in the attention module at `path`."""
        module: Any = model.get_submodule(path)
        width = getattr(module, self.head_dim)
        heads, kv_heads = (getattr(module, name).out_features // width for name in (self.query, self.key))
        output = _relative(path, self.output)
        query, key, value, outputs = _blocks(heads, kv_heads, width, width)
        axes = [
            *_linear_axes(model, _relative(path, self.query), 0, query),
            *_linear_axes(model, _relative(path, self.key), 0, key),
            *_linear_axes(model, _relative(path, self.value), 0, value),
            HeadAxis(f"{output}.weight", 1, (outputs,)),
        ]
        for name, axis in self.per_head.items():
            if _has_parameter(module, name):
                axes.append(HeadAxis(_relative(path, name), axis, (HeadBlocks("query", heads, 1),)))
        return HeadModule(path, heads, kv_heads, width, width, tuple(axes), output, self.config_fields)


@dataclass(frozen=True)
class FusedProjection:
    """Reader of attention modules with one projection for queries, keys and values together.

    Attributes:
        classes: names of the classes.
        fused: name of the fused projection.
        output: name of the output projection.
        head_dim: attribute with the width of a head.
        heads_outermost: True if the queries, keys and values of one head stand together (GPT-NeoX); False if all
            queries come first, then all keys, then all values.
        transposed: True for weights `(in, out)` (`Conv1D` of GPT-2).
        config_fields: see `HeadModule`.
        reads_config: see `HeadModule`.
    """

    classes: tuple[str, ...]
    fused: str
    output: str
    head_dim: str = "head_dim"
    heads_outermost: bool = False
    transposed: bool = False
    config_fields: Mapping[str, str] = field(default_factory=dict)
    reads_config: bool = False

    def read(self, model: nn.Module, path: str) -> HeadModule:
        """Return the places of the heads in the attention module at `path`."""
        module: Any = model.get_submodule(path)
        if getattr(module, "is_cross_attention", False):
            raise InputError("model", expected="self-attention", got=f"cross-attention with fused keys in {path}")
        width, out_axis = getattr(module, self.head_dim), int(self.transposed)
        output = _relative(path, self.output)
        heads = _weight_shape(model, output)[1 - out_axis] // width
        all_heads = _weight_shape(model, _relative(path, self.fused))[out_axis] // width
        kv_heads = (all_heads - heads) // 2
        *qkv, outputs = _blocks(heads, kv_heads, width, width)
        blocks = (HeadBlocks("query", heads, 3 * width),) if self.heads_outermost else qkv
        axes = [
            *_linear_axes(model, _relative(path, self.fused), out_axis, *blocks),
            HeadAxis(f"{output}.weight", 1 - out_axis, (outputs,)),
        ]
        places = tuple(axes), output, self.config_fields, self.reads_config
        return HeadModule(path, heads, kv_heads, width, width, *places)


@dataclass(frozen=True)
class HeadwiseLayer:
    """Reader of headwise's own `MultiHeadAttention`, without options that depend on the other heads."""

    classes: tuple[str, ...] = ("MultiHeadAttention",)

    def read(self, model: nn.Module, path: str) -> HeadModule:
        """Return the places of the heads in the layer at `path`."""
        layer: Any = model.get_submodule(path)
        if type(layer) is not MultiHeadAttention:
            got = f"another {type(layer).__name__} in {path}"
            raise InputError("model", expected="headwise's MultiHeadAttention", got=got)
        if option := _option_over_heads(layer):
            raise InputError("model", expected=f"a layer without {option}", got=f"one in {path}")
        return self.places(model, path, layer)

    def places(self, model: nn.Module, path: str, layer: MultiHeadAttention) -> HeadModule:
        """Return the places of the heads in a layer, which is at `path`, with any options."""
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        query, key, value, outputs = _blocks(heads, kv_heads, layer.head_dim, layer.value_dim)
        if layer.fused_qkv:
            axes = _linear_axes(model, _relative(path, "qkv_proj"), 0, query, key, value)
        else:
            parts = {"q_proj": query, "k_proj": key, "v_proj": value}
            axes = [
                axis for name, part in parts.items() for axis in _linear_axes(model, _relative(path, name), 0, part)
            ]
        if layer.output_gate is not None:
            gates = HeadBlocks("query", heads, layer.gate_proj.out_features // heads)
            axes += _linear_axes(model, _relative(path, "gate_proj"), 0, gates)
        output = _relative(path, "out_proj")
        axes.append(HeadAxis(f"{output}.weight", 1, (outputs,)))
        for name in ("sinks", "temperature"):
            if getattr(layer, name) is not None:
                axes.append(HeadAxis(_relative(path, name), 0, (HeadBlocks("query", heads, 1),)))
        return HeadModule(path, heads, kv_heads, layer.head_dim, layer.value_dim, tuple(axes), output, {})


@dataclass(frozen=True)
class TorchLayer:
    """Reader of torch's `nn.MultiheadAttention`, and of headwise's replacement for it. Only the replacement computes
    with fewer heads.
    """

    classes: tuple[str, ...] = ("MultiheadAttention",)

    def read(self, model: nn.Module, path: str) -> HeadModule:
        """Return the places of the heads in the layer at `path`."""
        layer: Any = model.get_submodule(path)
        if type(layer) not in (nn.MultiheadAttention, MultiheadAttention):
            got = f"another {type(layer).__name__} in {path}"
            raise InputError("model", expected="torch's MultiheadAttention, or headwise's", got=got)
        heads, width = layer.num_heads, layer.head_dim
        query, key, value, outputs = _blocks(heads, heads, width, width)
        blocks = {
            "in_proj_weight": (0, (query, key, value)),
            "in_proj_bias": (0, (query, key, value)),
            "q_proj_weight": (0, (query,)),
            "k_proj_weight": (0, (key,)),
            "v_proj_weight": (0, (value,)),
            "bias_k": (2, (key,)),
            "bias_v": (2, (value,)),
            "out_proj.weight": (1, (outputs,)),
        }
        axes = [
            HeadAxis(_relative(path, name), *place) for name, place in blocks.items() if _has_parameter(layer, name)
        ]
        return HeadModule(path, heads, heads, width, width, tuple(axes), _relative(path, "out_proj"), {})


def _option_over_heads(layer: MultiHeadAttention) -> str | None:
    """Return the option of a layer by which its heads depend on the number of heads or on each other; None if there is
    none.
    """
    if layer.position_bias is not None:
        return "position_bias"
    if layer.talking_before is not None:
        return "talking heads"
    if layer.qk_norm is not None and layer.qk_norm.over == "heads":
        return "a norm over all heads"
    return "masks of single heads" if layer.mask is not None and "per_head(" in repr(layer.mask) else None


GROUPED = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
UNGROUPED = {"heads": "num_attention_heads", "head_dim": "head_dim"}

FAMILIES: tuple[Family, ...] = (
    HeadwiseLayer(),
    TorchLayer(),
    SeparateProjections(
        (
            *("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Gemma2Attention"),
            *("Gemma3Attention", "GptOssAttention"),
        ),
        config_fields=GROUPED,
        per_head={"sinks": 0},
    ),
    SeparateProjections(("PhiAttention",), output="dense", config_fields=GROUPED),
    FusedProjection(("Phi3Attention",), "qkv_proj", "o_proj", config_fields=GROUPED, reads_config=True),
    FusedProjection(("GPT2Attention",), "c_attn", "c_proj", transposed=True, config_fields=UNGROUPED),
    FusedProjection(
        ("GPTNeoXAttention",), "query_key_value", "dense", "head_size", heads_outermost=True, config_fields=UNGROUPED
    ),
    SeparateProjections(
        (
            *("BertSelfAttention", "BertCrossAttention", "RobertaSelfAttention", "RobertaCrossAttention"),
            *("XLMRobertaSelfAttention", "CamembertSelfAttention", "ElectraSelfAttention"),
        ),
        *("query", "key", "value", "../output.dense", "attention_head_size"),
        config_fields=UNGROUPED,
    ),
    SeparateProjections(("ViTAttention",), config_fields=UNGROUPED),
    SeparateProjections(("BartAttention", "WhisperAttention"), output="out_proj"),
    SeparateProjections(
        ("T5Attention",),
        *("q", "k", "v", "o", "key_value_proj_dim"),
        config_fields={"heads": "num_heads", "head_dim": "d_kv"},
        per_head={"relative_attention_bias.weight": 1},
    ),
)
"""All known families."""


def head_module(model: nn.Module, path: str) -> HeadModule:
    """Return the places of the heads in the attention module at `path`.

    Raises:
        InputError: there is no such module, it is of no known family, or its projections compute their weights.
    """
    module = dict(model.named_modules()).get(path)
    if module is None:
        raise InputError("model", expected=f"a module {path}", got="none")
    name = type(module).__name__
    family = next((each for each in FAMILIES if name in each.classes), None)
    if family is None:
        known = ", ".join(class_name for each in FAMILIES for class_name in each.classes)
        raise InputError("model", expected=f"attention modules of {known}", got=f"{name} in {path}")
    try:
        found = family.read(model, path)
    except AttributeError as error:  # a projection of another class
        got = f"{path or 'the model'}, where {error}"
        raise InputError("model", expected=f"a {name} with the modules of its family", got=got) from error
    require_plain_projections(model, found)
    return found


def _blocks(
    heads: int, kv_heads: int, head_dim: int, value_dim: int
) -> tuple[HeadBlocks, HeadBlocks, HeadBlocks, HeadBlocks]:
    """Return the blocks of queries, keys, values, and head outputs."""
    return (
        HeadBlocks("query", heads, head_dim, "query"),
        HeadBlocks("kv", kv_heads, head_dim, "key"),
        HeadBlocks("kv", kv_heads, value_dim, "value"),
        HeadBlocks("query", heads, value_dim, "output"),
    )


def _linear_axes(model: nn.Module, path: str, axis: int, *blocks: HeadBlocks) -> list[HeadAxis]:
    """Return the axes of the weight and the bias of a projection into heads."""
    axes = [HeadAxis(f"{path}.weight", axis, blocks)]
    if getattr(model.get_submodule(path), "bias", None) is not None:
        axes.append(HeadAxis(f"{path}.bias", 0, blocks))
    return axes


def _weight_shape(model: nn.Module, path: str) -> torch.Size:
    """Return the shape of the weight of a projection, which may be computed."""
    projection: Any = model.get_submodule(path)
    return projection.weight.shape  # type: ignore[no-any-return]


def _relative(path: str, name: str) -> str:
    """Return the path of `name` in the module at `path`, or in its parent if `name` begins with `../`. An empty path is
    that of the model itself.
    """
    if name.startswith("../"):
        return f"{path.rpartition('.')[0]}.{name.removeprefix('../')}".removeprefix(".")
    return f"{path}.{name}".removeprefix(".")


def _has_parameter(module: nn.Module, name: str) -> bool:
    """Return True if a module has a parameter of this dotted name."""
    return name in dict(module.named_parameters())
