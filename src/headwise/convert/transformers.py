"""Attention blocks of Hugging Face `transformers`, by family.

A family says two things of a block: the options of the layer that computes the same, and where each of the layer's
parameters lies in it. A parameter that lies transposed is given as a view, so that what is read through it can also
be written through it, bit by bit.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from headwise.attention.masks.factories import causal, window
from headwise.convert.projection_maps import maps_of, scores_of
from headwise.convert.rope import rotary_of
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import QKNorm, Scores
from headwise.nn.projections import has_hooks


def from_transformers(block: nn.Module, *, backend: str | None = None) -> MultiHeadAttention:
    """A layer from an attention block of `transformers`: its weights, rotary positions, mask and scores.

    Masks for padding, which the model makes around its blocks, are given to the layer's `forward`. A dropout of the
    block's output, the residual and a normalisation after it stay outside.

    Args:
        block: the attention module of one layer, such as `model.model.layers[0].self_attn` of a Llama.
        backend: see `attend`; the layer's.

    Raises:
        InputError: a block of another family, or one that does something which the layer does not.
    """
    options, theirs = _described(block)
    like = next(iter(theirs.values()))
    for name, tensor in theirs.items():
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            got = f"{tensor.dtype} on {tensor.device} as {name}"
            raise InputError("block", expected=f"{like.dtype} on {like.device} throughout", got=got)
    layer = MultiHeadAttention(**options, backend=backend, device=like.device, dtype=like.dtype)
    ours = dict(layer.named_parameters())
    if apart := sorted(ours.keys() ^ theirs.keys()):
        expected = "biases of query, key and value, all three or none"
        raise InputError("block", expected=expected, got=f"a difference in {', '.join(apart)}")
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])
    return layer.train(block.training)


def to_transformers(layer: MultiHeadAttention, block: nn.Module) -> None:
    """Write the weights of a layer into a block: all of them, or none where something does not fit.

    Args:
        layer: one that is built as `from_transformers(block)` would be.
        block: an attention module of a family we know.

    Raises:
        InputError: a block of another family, or a layer that computes something which the block does not.
    """
    options, theirs = _described(block)
    _require_same(layer, MultiHeadAttention(**options, device="meta"), type(block).__name__)
    ours = dict(layer.named_parameters())
    for name in sorted(ours.keys() | theirs.keys()):
        want, got = (_told(tensors.get(name)) for tensors in (theirs, ours))
        if want != got:
            expected = f"{name} of {want}, as the {type(block).__name__} has"
            raise InputError("layer", expected=expected, got=got)
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])


def _described(block: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options of the layer that computes what `block` does, and where its parameters lie."""
    name = type(block).__name__
    family = next((each for each in FAMILIES if name in each.classes), None)
    if family is None:
        known = ", ".join(each for family in FAMILIES for each in family.classes)
        raise InputError("block", expected=f"an attention block of transformers, one of {known}", got=name)
    try:
        places = family.weights(block)  # first: projections that are something more are best refused as such
        return family.options(block), places
    except AttributeError as error:
        expected = f"a {name} as transformers 5 has it"
        raise InputError("block", expected=expected, got=f"one without {error.name}") from error


_SAME = (
    *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim", "fused_qkv", "rotary"),
    *("position_bias", "qk_norm", "output_gate", "mask"),
)
"""What decides what the weights mean."""


def _require_same(layer: Any, wanted: MultiHeadAttention, block: str) -> None:
    """The layer is what `wanted` is, the weights apart."""
    maps_of(layer)
    pairs = {name: (getattr(wanted, name), getattr(layer, name)) for name in _SAME}
    for name, (want, got) in (pairs | {"scores": (scores_of(wanted), scores_of(layer))}).items():
        # Some masks hold tensors, which have no equality to rely on; what a mask is made of is in its repr.
        if repr(want) != repr(got) if name == "mask" else want != got:
            remedy = None
            if name == "fused_qkv":
                remedy = f"{'fuse' if want else 'separate'}_projections(layer) gives such a layer"
            raise InputError("layer", expected=f"{name} {want!r} as the {block} has", got=repr(got), remedy=remedy)


def _told(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"shape {tuple(tensor.shape)} in {tensor.dtype}"


# -- families -----------------------------------------------------------------------------------------------------


class Family(Protocol):
    """How the blocks of a family are read."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the block's class; `transformers` itself is not imported."""

    def options(self, block: Any) -> dict[str, Any]:
        """Arguments of the layer that computes what `block` does."""

    def weights(self, block: Any) -> dict[str, Tensor]:
        """For each of the layer's parameters, by name, the tensor of the block that holds it, or a view of it."""


class Decoder:
    """Decoders with separate projections and rotary positions.

    Heads, grouped or not: `num_attention_heads`, `num_key_value_groups`, `head_dim`; biases as the projections have
    them. Scores: `scaling` (Gemma 2's from `query_pre_attn_scalar`), a softcap from `attn_logit_softcapping` (Gemma
    2), a sink a head from `sinks` (gpt-oss). Queries and keys normalised by `q_norm` and `k_norm`: each head by
    itself (Qwen3), or all side by side (OLMo 2); by `q_layernorm` and `k_layernorm` (Phi). Mask: causal, or a window
    from `sliding_window`, which Mistral keeps in the configuration. Rotation from `rope_parameters`, of a part of each
    head in Phi.

    A norm that multiplies by 1 + weight (Gemma 3) cannot be one of these: rounding the sum loses bits of the weight.
    """

    classes: tuple[str, ...] = (
        *("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Gemma2Attention"),
        *("GptOssAttention", "Olmo2Attention", "PhiAttention"),
    )

    causal: ClassVar[bool] = True

    def options(self, block: Any) -> dict[str, Any]:
        if block.is_causal != self.causal:
            expected = "one that is causal" if self.causal else "one that is not causal"
            raise InputError("block", expected=expected, got=f"is_causal {block.is_causal}")
        config, name, head_dim = block.config, type(block).__name__, block.head_dim
        output = _output_of_decoder(block)
        width = config.sliding_window if name == "MistralAttention" else getattr(block, "sliding_window", None)
        softcap = getattr(block, "attn_logit_softcapping", None)
        return {
            "embed_dim": block.q_proj.in_features,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_attention_heads // block.num_key_value_groups,
            "head_dim": head_dim,
            "out_dim": output.out_features,
            "bias": block.q_proj.bias is not None,
            "out_bias": output.bias is not None,
            "rotary": rotary_of(config, head_dim, partial=name == "PhiAttention"),
            "scores": _scores(block.scaling, head_dim, softcap=softcap, sinks=hasattr(block, "sinks")),
            "qk_norm": _qk_norm(block),
            "mask": None if not self.causal else causal() if width is None else window(width),
            "dropout": block.attention_dropout,
        }

    def weights(self, block: Any) -> dict[str, Tensor]:
        parts = {"q_proj": block.q_proj, "k_proj": block.k_proj, "v_proj": block.v_proj}
        places = _linear(parts | {"out_proj": _output_of_decoder(block)})
        for ours, norm in zip(("q_norm", "k_norm"), _norms_of_decoder(block), strict=False):
            places |= {f"{ours}.{kind}": parameter.detach() for kind, parameter in norm.named_parameters()}
        return places | ({"sinks": block.sinks.detach()} if hasattr(block, "sinks") else {})


class Encoder(Decoder):
    """Encoders that are written as decoders are, and see both ways: EuroBERT."""

    classes = ("EuroBertAttention",)
    causal = False


class Bert:
    """Encoders with separate projections and biases, whose attention is two modules.

    The block is what holds both: `self` with the query, key and value maps, and `output`, of which `dense` is the
    output projection. Its dropout, the residual and the `LayerNorm` stay outside the layer: the block computes
    `LayerNorm(dropout(layer(x)) + x)`. Causal where the model is a decoder. A block for cross attention is one that
    is given a context. Positions are added to the embeddings, outside.
    """

    classes = ("BertAttention", "RobertaAttention", "XLMRobertaAttention", "CamembertAttention", "ElectraAttention")

    def options(self, block: Any) -> dict[str, Any]:
        attention = block.self
        return {
            "embed_dim": attention.query.in_features,
            "num_heads": attention.num_attention_heads,
            "head_dim": attention.attention_head_size,
            "out_dim": block.output.dense.out_features,
            "scores": _scores(attention.scaling, attention.attention_head_size),
            "mask": causal() if attention.is_causal else None,
            "dropout": attention.dropout.p,
        }

    def weights(self, block: Any) -> dict[str, Tensor]:
        attention = block.self
        parts = {"q_proj": attention.query, "k_proj": attention.key, "v_proj": attention.value}
        return _linear(parts | {"out_proj": block.output.dense})


class GPT2:
    """Decoders with one projection for queries, keys and values, its matrices transposed (`Conv1D`).

    The layer is one with `fused_qkv`. `scaling` holds what `scale_attn_weights` and
    `scale_attn_by_inverse_layer_idx` say. The dropout of the output stays outside; positions are added to the
    embeddings.
    """

    classes = ("GPT2Attention",)

    def options(self, block: Any) -> dict[str, Any]:
        if block.is_cross_attention or not block.is_causal:
            got = "cross attention" if block.is_cross_attention else "is_causal False"
            raise InputError("block", expected="causal self-attention", got=got)
        return {
            "embed_dim": block.embed_dim,
            "num_heads": block.num_heads,
            "fused_qkv": True,
            "scores": _scores(block.scaling, block.head_dim),
            "mask": causal(),
            "dropout": block.attn_dropout.p,
        }

    def weights(self, block: Any) -> dict[str, Tensor]:
        places = _linear({"qkv_proj": block.c_attn, "out_proj": block.c_proj}, kind="Conv1D")
        return {name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in places.items()}


FAMILIES: tuple[Family, ...] = (Decoder(), Encoder(), Bert(), GPT2())
"""Every family, asked in this order for the class of a block."""


def _scores(scale: float, head_dim: int, *, softcap: float | None = None, sinks: bool = False) -> Scores | None:
    """What is done to the scores; None where it is what any layer does."""
    scores = Scores(scale=None if scale == head_dim**-0.5 else scale, softcap=softcap, sinks=sinks)
    return None if scores == Scores() else scores


def _output_of_decoder(block: Any) -> Any:
    return block.dense if type(block).__name__ == "PhiAttention" else block.o_proj


def _norms_of_decoder(block: Any) -> tuple[Any, ...]:
    """The norms of queries and of keys; none where there are none."""
    name = "layernorm" if type(block).__name__ == "PhiAttention" else "norm"
    return (getattr(block, f"q_{name}"), getattr(block, f"k_{name}")) if hasattr(block, f"q_{name}") else ()


def _qk_norm(block: Any) -> QKNorm | None:
    norms = _norms_of_decoder(block)
    if not norms:
        return None
    norm, over = norms[0], "head" if norms[0].weight.shape[0] == block.head_dim else "heads"
    if isinstance(norm, nn.LayerNorm):
        return QKNorm("layer", over, norm.eps)  # type: ignore[arg-type]
    return QKNorm("rms", over, norm.variance_epsilon)  # type: ignore[arg-type]


def _linear(parts: Mapping[str, Any], kind: str = "Linear") -> dict[str, Tensor]:
    """Weights and biases of linear maps that are nothing more, under the names of our projections."""
    places: dict[str, Tensor] = {}
    for name, part in parts.items():
        extra = part.state_dict().keys() - {"weight", "bias"}
        if type(part).__name__ != kind or extra or has_hooks(part):
            inside = ", ".join(part.state_dict()) if extra else "a hook"
            got = f"{type(part).__name__} with {inside}"
            remedy = "merge adapters and remove hooks first"
            raise InputError("block", expected=f"a plain {kind} for {name}", got=got, remedy=remedy)
        places |= {f"{name}.{which}": parameter.detach() for which, parameter in part.named_parameters()}
    return places
