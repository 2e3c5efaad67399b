"""Architectures that are known by name, one record each. Conversion, removal of heads, merging, circuits and clipping
read these records.

A record states names. Sizes and numbers of heads follow from the weights of a module; options such as the scale follow
from its attributes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from headwise.compat import MultiheadAttention
from headwise.errors import InputError
from headwise.families.head_module import HeadBlocks, HeadModule, Part, blocks_along, projection_blocks
from headwise.nn.latent import LatentAttention
from headwise.nn.multihead import MultiHeadAttention

GROUPED = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
UNGROUPED = {"heads": "num_attention_heads", "head_dim": "head_dim"}


@dataclass(frozen=True)
class Family:
    """Description of the attention modules of one model architecture: the names of their classes and projections, and
    the kind of attention that they compute. The defaults are those of Llama.

    Attributes:
        name: name of the architecture.
        classes: names of the classes of attention modules. They are strings, so that `transformers` is not imported.
        types: the classes, where headwise or torch has them.
        inputs: names of the projections in the module into queries, keys and values, or of one for all three.
        output: name of the output projection; after `../` in the module's parent.
        head_dim: attribute with the width of a head.
        is_joint: True if the query, key and value of each head stand together in one projection (GPT-NeoX); False if
            all queries come first, then all keys, then all values. `from_transformers` reads only the second order, so
            a record with True must not set `is_converted`.
        is_transposed: True for weights `(in, out)`, as those of `Conv1D` in GPT-2.
        per_head: parameters with one number per query head, by name and axis.
        qk_norms: names of the modules that normalise queries and keys, where a module has them.
        positions: position scheme: embeddings that are added before the first layer; rotation of all features of a
            head, or of the first ones, in which feature i and feature i plus half of their number form a pair; a bias
            that the first module of a stack computes for the others; or an option of each module.
        config_fields: field of the configuration for each of "heads", "kv_heads" and "head_dim" that states this
            number; without "kv_heads", key/value heads cannot be merged. After a removal, the fields are set only if
            `transformers` then makes a model of the same shapes. So a field may also change other sizes: the number of
            heads of GPT-2 changes their width, and removed heads are recorded instead. An empty mapping means that
            removed heads are always recorded.
        reads_config: True if a module reads the number of heads from the configuration of all layers.
        why_not_removed: reason why no heads can be removed; None if they can.
        is_converted: True if `from_transformers` converts the modules to headwise's layer.
        parents: names of the classes of parents that are converted in place of the modules; see `inside`.
        inside: path of the attention module in such a parent.
        is_causal: True or False if only modules with this attribute `is_causal` are converted; None for all.
        window: path of an attribute with the length of a sliding window, or with None, such as `config.sliding_window`;
            None if no module has a window.
        dropout: path of an attribute with the probability of dropping an attention weight, such as `dropout.p`.
    """

    name: str
    classes: tuple[str, ...]
    types: tuple[type[nn.Module], ...] = ()
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    head_dim: str = "head_dim"
    is_joint: bool = False
    is_transposed: bool = False
    per_head: Mapping[str, int] = field(default_factory=dict)
    qk_norms: tuple[str, ...] = ()
    positions: Literal["added", "rotary", "partly rotary", "shared bias", "option"] = "rotary"
    config_fields: Mapping[str, str] = field(default_factory=lambda: GROUPED)
    reads_config: bool = False
    why_not_removed: str | None = None
    is_converted: bool = False
    parents: tuple[str, ...] = ()
    inside: str = ""
    is_causal: bool | None = True
    window: str | None = None
    dropout: str = "attention_dropout"

    @property
    def merges_kv_heads(self) -> bool:
        """True if key/value heads of these modules can be merged: heads can be removed, and a configuration (or
        headwise's layer) can state fewer key/value heads.
        """
        return "kv_heads" in self.config_fields and self.why_not_removed is None

    def head_dependence(self, module: Any) -> str | None:
        """Return the name of an option of the module because of which its heads cannot be removed: the option makes a
        head's output depend on other heads or on their number, or has parameters of single heads that no field of the
        record names. Circuits and merging refuse such a module, too. Return None if there is no such option.
        """
        return self.why_not_removed

    def norms(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Return the modules that normalise the queries and keys of an attention module, as a tuple; empty if it has
        none.
        """
        norms = (getattr(module, name, None) for name in self.qk_norms)
        return tuple(norm for norm in norms if norm is not None)

    def rotated_share(self, module: Any) -> float:
        """Return the share, from 0 to 1, of each head's features that the rotary position embedding rotates. The
        rotated features are the first ones of the head.
        """
        if self.positions == "partly rotary":
            return float(module.config.rope_parameters.get("partial_rotary_factor", 1.0))
        return 1.0 if self.positions == "rotary" else 0.0

    def places(self, model: nn.Module, path: str) -> HeadModule:
        """Return how many query and key/value heads the attention module at `path` has, their widths, and the rows and
        columns of the weights that belong to each head.
        """
        module: Any = model.get_submodule(path)
        if len(self.inputs) == 1 and getattr(module, "is_cross_attention", False):
            raise InputError("model", expected="self-attention", got=f"cross-attention with fused keys in {path}")
        width, out_axis = getattr(module, self.head_dim), int(self.is_transposed)
        *inputs, output = (relative_path(path, name) for name in (*self.inputs, self.output))
        heads = _features(model, output, 1 - out_axis, of_input=True) // width
        written = sum(_features(model, each, out_axis, of_input=False) for each in inputs)
        kv_heads = (written // width - heads) // 2
        parts: list[Part] = [("query", heads, width), ("key", kv_heads, width), ("value", kv_heads, width)]
        blocks: list[HeadBlocks] = []
        for projection, in_projection in zip(inputs, _split(parts, len(inputs)), strict=True):
            blocks += projection_blocks(model, projection, out_axis, in_projection, is_joint=self.is_joint)
        blocks += blocks_along(f"{output}.weight", 1 - out_axis, [("output", heads, width)])
        for name, axis in self.per_head.items():
            if name in dict(module.named_parameters()):
                blocks += blocks_along(relative_path(path, name), axis, [(None, heads, 1)])
        return HeadModule(path, heads, kv_heads, width, width, tuple(blocks), output)


@dataclass(frozen=True)
class LatentFamily(Family):
    """Description of attention modules that compute the keys and values of all heads from one latent vector per token
    (DeepSeek V2). A query is `[head_dim | rotary_dim]`: features without and with rotary positions. One projection
    computes the key and the value of a head together, `[head_dim | value_dim]`. `inputs` are the projections into
    queries, from a latent into queries, and from a latent into keys and values.

    Attributes:
        rotary_dim: attribute with the width of the rotated part of a query.
        value_dim: attribute with the width of a value.
    """

    rotary_dim: str = "rotary_dim"
    value_dim: str = "value_dim"
    config_fields: Mapping[str, str] = field(default_factory=dict)
    why_not_removed: str | None = "latents, which all heads share"

    def places(self, model: nn.Module, path: str) -> HeadModule:
        module: Any = model.get_submodule(path)
        heads = module.num_heads
        content, rotated, value = (getattr(module, name) for name in (self.head_dim, self.rotary_dim, self.value_dim))
        query, query_of_latent, keys_and_values = self.inputs
        query = query_of_latent if getattr(module, query, None) is None else query
        queries: list[Part] = [("query", heads, content), ("rotated query", heads, rotated)]
        others: list[Part] = [("key", heads, content), ("value", heads, value)]
        blocks = projection_blocks(model, relative_path(path, query), 0, queries, is_joint=True)
        blocks += projection_blocks(model, relative_path(path, keys_and_values), 0, others, is_joint=True)
        output = relative_path(path, self.output)
        return HeadModule(path, heads, heads, content + rotated, value, tuple(blocks), output)


class OwnFamily(Family):
    """Description of headwise's own `MultiHeadAttention`, with any of its options."""

    @property
    def merges_kv_heads(self) -> bool:
        return True

    def head_dependence(self, module: Any) -> str | None:
        if module.position_bias is not None:
            return "position_bias"
        if module.talking_before is not None:
            return "talking heads"
        if module.qk_norm is not None and module.qk_norm.over == "heads":
            return "a norm over all heads"
        return "masks of single heads" if module.mask is not None and "per_head(" in repr(module.mask) else None

    def places(self, model: nn.Module, path: str) -> HeadModule:
        layer: Any = model.get_submodule(path)
        heads, kv_heads, width, value_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
        parts: list[Part] = [("query", heads, width), ("key", kv_heads, width), ("value", kv_heads, value_dim)]
        inputs = ("qkv_proj",) if layer.fused_qkv else self.inputs
        parts_of = dict(zip(inputs, _split(parts, len(inputs)), strict=True))
        if layer.output_gate is not None:
            parts_of["gate_proj"] = [(None, heads, layer.gate_proj.out_features // heads)]
        blocks: list[HeadBlocks] = []
        for name, in_projection in parts_of.items():
            blocks += projection_blocks(model, relative_path(path, name), 0, in_projection)
        output = relative_path(path, self.output)
        blocks += blocks_along(f"{output}.weight", 1, [("output", heads, value_dim)])
        for name, axis in self.per_head.items():
            if getattr(layer, name) is not None:
                blocks += blocks_along(relative_path(path, name), axis, [(None, heads, 1)])
        return HeadModule(path, heads, kv_heads, width, value_dim, tuple(blocks), output)


class TorchFamily(Family):
    """Description of torch's `nn.MultiheadAttention`, and of headwise's replacement
    `headwise.compat.MultiheadAttention`. Only the replacement can have fewer heads.
    """

    def places(self, model: nn.Module, path: str) -> HeadModule:
        layer: Any = model.get_submodule(path)
        heads, width, output = layer.num_heads, layer.head_dim, relative_path(path, self.output)
        parts: tuple[Part, Part, Part] = (("query", heads, width), ("key", heads, width), ("value", heads, width))
        query, key, value = parts
        places: dict[str, tuple[int, tuple[Part, ...]]] = {
            "in_proj_weight": (0, parts),
            "in_proj_bias": (0, parts),
            "q_proj_weight": (0, (query,)),
            "k_proj_weight": (0, (key,)),
            "v_proj_weight": (0, (value,)),
            "bias_k": (2, (key,)),
            "bias_v": (2, (value,)),
            "out_proj.weight": (1, (("output", heads, width),)),
        }
        names = [name for name in places if name in dict(layer.named_parameters())]
        blocks = [each for name in names for each in blocks_along(relative_path(path, name), *places[name])]
        return HeadModule(path, heads, heads, width, width, tuple(blocks), output)


NORMS = ("q_norm", "k_norm")

FAMILIES: tuple[Family, ...] = (
    OwnFamily(
        "headwise's MultiHeadAttention",
        ("MultiHeadAttention",),
        (MultiHeadAttention,),
        output="out_proj",
        per_head={"sinks": 0, "temperature": 0},
        qk_norms=NORMS,
        positions="option",
        config_fields={},
    ),
    TorchFamily(
        "torch's MultiheadAttention, or headwise's",
        ("MultiheadAttention",),
        (nn.MultiheadAttention, MultiheadAttention),
        output="out_proj",
        positions="added",
        config_fields={},
    ),
    Family("Llama", ("LlamaAttention",), is_converted=True),
    Family("Mistral", ("MistralAttention",), is_converted=True, window="config.sliding_window"),
    Family("Qwen 2", ("Qwen2Attention",), is_converted=True, window="sliding_window"),
    Family("Qwen 3", ("Qwen3Attention",), is_converted=True, window="sliding_window", qk_norms=NORMS),
    Family("Gemma 2", ("Gemma2Attention",), is_converted=True, window="sliding_window"),
    # Not converted: its norms multiply by 1 + weight, and rounding the sum would lose bits of the weight.
    Family("Gemma 3", ("Gemma3Attention",), qk_norms=NORMS),
    Family("gpt-oss", ("GptOssAttention",), is_converted=True, window="sliding_window", per_head={"sinks": 0}),
    Family("OLMo 2", ("Olmo2Attention",), is_converted=True, qk_norms=NORMS, why_not_removed="a norm over all heads"),
    Family("EuroBERT", ("EuroBertAttention",), is_converted=True, is_causal=False),
    Family(
        "Phi",
        ("PhiAttention",),
        is_converted=True,
        output="dense",
        positions="partly rotary",
        qk_norms=("q_layernorm", "k_layernorm"),
    ),
    Family("Phi-3", ("Phi3Attention",), inputs=("qkv_proj",), positions="partly rotary", reads_config=True),
    Family(
        "GPT-2",
        ("GPT2Attention",),
        is_converted=True,
        inputs=("c_attn",),
        output="c_proj",
        is_transposed=True,
        positions="added",
        config_fields=UNGROUPED,
        dropout="attn_dropout.p",
    ),
    # Not converted: `from_transformers` does not change the order of rows, as a joint projection would need.
    Family(
        "GPT-NeoX",
        ("GPTNeoXAttention",),
        inputs=("query_key_value",),
        output="dense",
        head_dim="head_size",
        is_joint=True,
        positions="partly rotary",
        config_fields=UNGROUPED,
    ),
    Family(
        "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA",
        (
            *("BertSelfAttention", "BertCrossAttention", "RobertaSelfAttention", "RobertaCrossAttention"),
            *("XLMRobertaSelfAttention", "CamembertSelfAttention", "ElectraSelfAttention"),
        ),
        is_converted=True,
        parents=("BertAttention", "RobertaAttention", "XLMRobertaAttention", "CamembertAttention", "ElectraAttention"),
        inside="self",
        inputs=("query", "key", "value"),
        output="../output.dense",
        head_dim="attention_head_size",
        positions="added",
        config_fields=UNGROUPED,
        is_causal=None,
        dropout="dropout.p",
    ),
    Family("ViT", ("ViTAttention",), positions="added", config_fields=UNGROUPED),
    Family(
        "BART, Whisper",
        ("BartAttention", "WhisperAttention"),
        output="out_proj",
        positions="added",
        config_fields={},
    ),
    Family(
        "T5",
        ("T5Attention",),
        inputs=("q", "k", "v"),
        output="o",
        head_dim="key_value_proj_dim",
        per_head={"relative_attention_bias.weight": 1},
        positions="shared bias",
        config_fields={"heads": "num_heads", "head_dim": "d_kv"},
    ),
    LatentFamily(
        "headwise's LatentAttention",
        ("LatentAttention",),
        (LatentAttention,),
        inputs=("q_proj", "q_up", "kv_up"),
        output="out_proj",
    ),
    LatentFamily(
        "DeepSeek V2 and V3",
        ("DeepseekV2Attention", "DeepseekV3Attention"),
        inputs=("q_proj", "q_b_proj", "kv_b_proj"),
        head_dim="qk_nope_head_dim",
        rotary_dim="qk_rope_head_dim",
        value_dim="v_head_dim",
    ),
)
"""All known architectures."""


def family_of(module: nn.Module) -> Family | None:
    """Return the description of an attention module's architecture, found by the name of the module's class. Return
    None if no architecture has a class of this name. Also return None if the name is that of a layer of headwise or
    torch, but the class is another one.
    """
    family = next((family for family in FAMILIES if type(module).__name__ in family.classes), None)
    return family if family is None or not family.types or type(module) in family.types else None


def converted_families() -> dict[str, Family]:
    """Return the architectures that `from_transformers` converts, by the name of the class of the module that it
    accepts.
    """
    return {name: family for family in FAMILIES if family.is_converted for name in family.parents or family.classes}


def places_of_heads(model: nn.Module, path: str) -> HeadModule:
    """Return how many query and key/value heads the attention module at `path` has, their widths, and the rows and
    columns of the weights that belong to each head. Raise `InputError` if there is no such module, its class is
    unknown, or its projections have no plain weights.
    """
    module = dict(model.named_modules()).get(path)
    if module is None:
        raise InputError("model", expected=f"a module {path}", got="none")
    name, family = type(module).__name__, family_of(module)
    if family is None:
        if same_name := [each.name for each in FAMILIES if name in each.classes]:
            raise InputError("model", expected=same_name[0], got=f"another {name} in {path}")
        removable = (each for each in FAMILIES if each.why_not_removed is None)
        known = ", ".join(class_name for each in removable for class_name in each.classes)
        raise InputError("model", expected=f"attention modules of {known}", got=f"{name} in {path}")
    try:
        places = family.places(model, path)
    except AttributeError as error:  # a projection of another class
        got = f"{path or 'the model'}, where {error}"
        raise InputError("model", expected=f"a {name} with the modules of its family", got=got) from error
    names_of: dict[str, set[str]] = {}
    for each in places.blocks:
        owner, _, parameter = each.parameter.rpartition(".")
        names_of.setdefault(owner, set()).add(parameter)
    remedy = "merge adapters, and remove parametrizations"
    for owner, names in names_of.items():
        own = dict(model.get_submodule(owner).named_parameters())
        if missing := sorted(names - own.keys()):
            got = f"{owner} without a parameter {missing[0]}, with {', '.join(own) or 'none'}"
            raise InputError("model", expected="projections with plain weights", got=got, remedy=remedy)
        others = sorted(own.keys() - names - {"bias"})
        if owner != path and others:
            got = f"{owner} with {', '.join(others)}"
            raise InputError("model", expected="projections without further parameters", got=got, remedy=remedy)
    return places


def head_module(model: nn.Module, path: str) -> HeadModule:
    """Return how many query and key/value heads the attention module at `path` has, their widths, and the rows and
    columns of the weights that belong to each head. Raise `InputError` if these are unknown, or if heads of this module
    cannot be removed.
    """
    places, module = places_of_heads(model, path), model.get_submodule(path)
    family = family_of(module)
    if family is not None and (option := family.head_dependence(module)):
        raise InputError("model", expected=f"a layer without {option}", got=f"one in {path}")
    return places


def softcap_of(module: Any) -> float | None:
    """Return the softcap c of an attention module, which computes logits as `c * tanh(score / c)`. Return None if it
    has none.
    """
    cap: float | None = getattr(getattr(module, "scores", None), "softcap", None)
    return getattr(module, "attn_logit_softcapping", None) if cap is None else cap


def relative_path(path: str, name: str) -> str:
    """Return the path of the submodule or parameter `name` of the module at `path`. If `name` begins with `../`, it is
    in the parent of that module. The empty path is that of the model itself.
    """
    if name.startswith("../"):
        return f"{path.rpartition('.')[0]}.{name.removeprefix('../')}".removeprefix(".")
    return f"{path}.{name}".removeprefix(".")


def _split(parts: list[Part], projections: int) -> list[list[Part]]:
    """Return, for each projection of an attention module, the parts that it computes, such as queries, keys and values.
    A single projection computes all parts; several projections compute one part each.
    """
    return [parts] if projections == 1 else [[part] for part in parts]


def _features(model: nn.Module, path: str, axis: int, *, of_input: bool) -> int:
    """Return the number of input features (`of_input`) or output features of a projection. It is read from its
    attribute or, without one, from the length of the weight's `axis`.
    """
    projection: Any = model.get_submodule(path)
    stated = getattr(projection, "in_features" if of_input else "out_features", None)
    return stated if isinstance(stated, int) else projection.weight.shape[axis]
