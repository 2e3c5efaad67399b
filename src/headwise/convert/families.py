"""Families of attention blocks of Hugging Face `transformers`: their options, and where their parameters are.

Parameters that are stored transposed are returned as views, so that they can be read and written bit by bit.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from headwise.attention.masks.factories import causal, window
from headwise.convert.rope import rotary_of
from headwise.errors import InputError
from headwise.nn.options import QKNorm, Scores
from headwise.nn.projections import has_hooks


class Family(Protocol):
    """Interface of a reader of attention blocks of `transformers`; each reader reads the blocks of one or more classes.
    For a block, it returns the constructor options and the parameters of the `MultiHeadAttention` that computes the
    same.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the `transformers` attention classes whose blocks this reader can convert. They are strings, so that
        `transformers` is not imported.
        """

    def options(self, block: Any) -> dict[str, Any]:
        """Return the constructor arguments of the `MultiHeadAttention` that computes the same as an attention block of
        `transformers`.
        """

    def parameters(self, block: Any) -> dict[str, Tensor]:
        """Return the parameters of an attention block of `transformers`, not copied, as a dict. Each key is the name of
        the `MultiHeadAttention` parameter that has the same values.
        """


class Decoder:
    """Reader of the attention blocks of Llama-type decoders (Llama, Mistral, Qwen, Gemma 2, gpt-oss, OLMo 2, Phi),
    which have separate query, key and value projections and rotary embedding. The reader returns the constructor
    options and the parameters of the `MultiHeadAttention` that computes the same as a block.

    The options are read from these attributes:

    - heads: `num_attention_heads`, `num_key_value_groups`, `head_dim`; biases from the projections;
    - scores: `scaling` (in Gemma 2 from `query_pre_attn_scalar`), `attn_logit_softcapping` (Gemma 2), one logit for
      each head from `sinks` (gpt-oss);
    - normalisation of queries and keys: `q_norm` and `k_norm`, for each head (Qwen3) or over all heads (OLMo 2);
      `q_layernorm` and `k_layernorm` (Phi);
    - mask: causal, or a window from `sliding_window`, which Mistral stores in its configuration;
    - rotary embedding: `rope_parameters`; in Phi it rotates a part of each head.

    A norm that multiplies by 1 + weight (Gemma 3) is not supported: rounding the sum loses bits of the weight.
    """

    classes: tuple[str, ...] = (
        *("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Gemma2Attention"),
        *("GptOssAttention", "Olmo2Attention", "PhiAttention"),
    )

    causal: ClassVar[bool] = True

    def options(self, block: Any) -> dict[str, Any]:
        """Return the constructor arguments of the `MultiHeadAttention` that computes the same as a block of a
        Llama-type decoder or of EuroBERT, read from the block and its configuration. Raise `InputError` if the block is
        causal but the reader's attribute `causal` is False, or if it is not causal but `causal` is True.
        """
        if block.is_causal != self.causal:
            expected = "one that is causal" if self.causal else "one that is not causal"
            raise InputError("block", expected=expected, got=f"is_causal {block.is_causal}")
        config, name, head_dim = block.config, type(block).__name__, block.head_dim
        output = _output_projection(block)
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

    def parameters(self, block: Any) -> dict[str, Tensor]:
        """Return the parameters of a block of a Llama-type decoder or of EuroBERT, not copied: weights and biases of
        its projections and, where the block has them, parameters of the query and key norms and sink logits. Each key
        of the dict is the name of the `MultiHeadAttention` parameter that has the same values.
        """
        parts = {"q_proj": block.q_proj, "k_proj": block.k_proj, "v_proj": block.v_proj}
        parameters = _linear_parameters(parts | {"out_proj": _output_projection(block)})
        for layer_name, norm in zip(("q_norm", "k_norm"), _qk_norm_modules(block), strict=False):
            parameters |= {f"{layer_name}.{kind}": parameter.detach() for kind, parameter in norm.named_parameters()}
        return parameters | ({"sinks": block.sinks.detach()} if hasattr(block, "sinks") else {})


class Encoder(Decoder):
    """Reader of the attention blocks of EuroBERT, which are those of Llama-type decoders without a causal mask. The
    reader returns the constructor options and the parameters of the `MultiHeadAttention` that computes the same as a
    block.
    """

    classes = ("EuroBertAttention",)
    causal = False


class Bert:
    """Reader of the attention blocks of BERT-type models, which have separate projections with biases, in the two
    submodules `self` and `output` of the block. The reader returns the constructor options and the parameters of the
    `MultiHeadAttention` that computes the same as a block.

    The block is the parent of both: `self` with the query, key and value projections, and `output` with the output
    projection `dense`. Dropout, residual connection and `LayerNorm` are not part of the layer: the block computes
    `LayerNorm(dropout(layer(x)) + x)`. The mask is causal if the model is a decoder. A cross-attention block becomes
    a layer to call with a context. Positions are added to the embeddings, outside the block.
    """

    classes = ("BertAttention", "RobertaAttention", "XLMRobertaAttention", "CamembertAttention", "ElectraAttention")

    def options(self, block: Any) -> dict[str, Any]:
        """Return the constructor arguments of the `MultiHeadAttention` that computes the same as a BERT-type attention
        block, read from the block's submodules `self` and `output`.
        """
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

    def parameters(self, block: Any) -> dict[str, Tensor]:
        """Return the weights and biases of the query, key, value and output projections of a BERT-type attention block,
        not copied, as a dict. Each key is the name of the `MultiHeadAttention` parameter that has the same values.
        """
        attention = block.self
        parts = {"q_proj": attention.query, "k_proj": attention.key, "v_proj": attention.value}
        return _linear_parameters(parts | {"out_proj": block.output.dense})


class GPT2:
    """Reader of the attention blocks of GPT-2, which have one projection for queries, keys and values together and
    store weights transposed (`Conv1D`). The reader returns the constructor options and the parameters of the
    `MultiHeadAttention` that computes the same as a block.

    The layer has `fused_qkv=True`. `scaling` of the block includes `scale_attn_weights` and
    `scale_attn_by_inverse_layer_idx`. Dropout of the output is not part of the layer, and positions are added to the
    embeddings.
    """

    classes = ("GPT2Attention",)

    def options(self, block: Any) -> dict[str, Any]:
        """Return the constructor arguments of the `MultiHeadAttention` that computes the same as a GPT-2 block. Raise
        `InputError` for a cross-attention block and for a block that is not causal.
        """
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

    def parameters(self, block: Any) -> dict[str, Tensor]:
        """Return the parameters of the two `Conv1D` modules of a GPT-2 block as a dict. Each key is the name of the
        corresponding `MultiHeadAttention` parameter. Weights are returned as transposed views, biases unchanged;
        neither is copied.
        """
        parameters = _linear_parameters({"qkv_proj": block.c_attn, "out_proj": block.c_proj}, kind="Conv1D")
        return {name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in parameters.items()}


FAMILIES: tuple[Family, ...] = (Decoder(), Encoder(), Bert(), GPT2())
"""All known families; the first one that lists the class name of a block converts it."""


def _scores(scale: float, head_dim: int, *, softcap: float | None = None, sinks: bool = False) -> Scores | None:
    """Return the `Scores` option for a layer with this scale, softcap and sinks; None if all three are the defaults.
    The default scale is `head_dim ** -0.5`.
    """
    scores = Scores(scale=None if scale == head_dim**-0.5 else scale, softcap=softcap, sinks=sinks)
    return None if scores == Scores() else scores


def _output_projection(block: Any) -> Any:
    """Return the output projection of a decoder block: `dense` in Phi, `o_proj` in all others."""
    return block.dense if type(block).__name__ == "PhiAttention" else block.o_proj


def _qk_norm_modules(block: Any) -> tuple[Any, ...]:
    """Return the two modules of a decoder block that normalise its queries and its keys; an empty tuple for a block
    without them.
    """
    name = "layernorm" if type(block).__name__ == "PhiAttention" else "norm"
    return (getattr(block, f"q_{name}"), getattr(block, f"k_{name}")) if hasattr(block, f"q_{name}") else ()


def _qk_norm(block: Any) -> QKNorm | None:
    """Return the `QKNorm` option that describes the query and key norms of a decoder block: their kind (RMS or layer
    norm), their span (each head, or all heads together) and their epsilon. Return None for a block without norms.
    """
    norms = _qk_norm_modules(block)
    if not norms:
        return None
    norm, over = norms[0], "head" if norms[0].weight.shape[0] == block.head_dim else "heads"
    if isinstance(norm, nn.LayerNorm):
        return QKNorm("layer", over, norm.eps)  # type: ignore[arg-type]
    return QKNorm("rms", over, norm.variance_epsilon)  # type: ignore[arg-type]


def _linear_parameters(parts: Mapping[str, Any], kind: str = "Linear") -> dict[str, Tensor]:
    """Return the weights and biases of the linear modules in `parts`, not copied, as a dict with keys `NAME.weight` and
    `NAME.bias`, where NAME is the module's key in `parts`. Raise `InputError` for a module whose class name differs
    from the string `kind`, that has other parameters, or that has a hook.
    """
    parameters: dict[str, Tensor] = {}
    for name, part in parts.items():
        extra = part.state_dict().keys() - {"weight", "bias"}
        if type(part).__name__ != kind or extra or has_hooks(part):
            inside = ", ".join(part.state_dict()) if extra else "a hook"
            got = f"{type(part).__name__} with {inside}"
            remedy = "merge adapters and remove hooks first"
            raise InputError("block", expected=f"a plain {kind} for {name}", got=got, remedy=remedy)
        parameters |= {f"{name}.{which}": parameter.detach() for which, parameter in part.named_parameters()}
    return parameters
