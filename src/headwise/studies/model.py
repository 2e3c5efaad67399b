"""Small transformer for studies: attention with any number of heads, and an MLP that uses the remaining parameters.

Trained models are saved in Hugging Face format: as a Llama, or an encoder as a EuroBERT.

ids (batch, length)
    | embed_tokens
x (batch, length, embed)
    | each layer    x + attention(norm(x)),  x + mlp(norm(x))        Zhang and Sennrich 2019, Shazeer 2020
    | norm
    | product with the embedding matrix       (batch, length, vocabulary)
    | or class logits of each token, averaged over tokens   (batch, classes)
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.caches import Cache, DynamicCache
from headwise.attention.masks.factories import causal, dense
from headwise.attention.rotary import Rotary
from headwise.convert.transformers import to_transformers
from headwise.data.batches import device_of, evaluation_mode
from headwise.errors import InputError, require
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Bool, Float, Int
from headwise.studies.space import Setting

NORM_EPS = 1e-5
"""Epsilon of every RMSNorm."""

WEIGHT_STD = 0.02
"""Initial standard deviation of weights. Projections that add to the residual stream have a smaller one, by the square
root of their number (Radford et al. 2019)."""

MAX_COMMON_MULTIPLE = 96
"""Largest step of the widths of models. A width is rounded to a multiple of twice the least common multiple of the
numbers of heads, so that every number of heads divides it. If this step exceeds 96, the width is rounded to an even
number only.
"""

WIDTH_PER_LAYER = 40
"""Width of a model divided by its number of layers, if only the number of parameters is given. For GPT-2 small this
ratio is 64; deeper models have a smaller one.
"""

DECODED_TOKENS = 48
"""Number of tokens that are decoded and timed."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that all models of a study share: width, depth, vocabulary, number of parameters, and kind (decoder,
    encoder or classifier). The models differ in their heads alone.

    Attributes:
        vocabulary: number of tokens.
        embed_dim: width of the model.
        layers: number of layers.
        parameters: intended number of parameters, which the width of the MLP is chosen to match.
        causal: True for a decoder, False for an encoder.
        classes: number of classes of a classifier; None for logits over the vocabulary.
    """

    vocabulary: int
    embed_dim: int
    layers: int
    parameters: int
    causal: bool = True
    classes: int | None = None

    def mlp_dim(self, setting: Setting) -> int:
        """Return the hidden width of each layer's MLP for a model with the heads of `setting`. With this width, the
        number of parameters is closest to the intended one. Raise `InputError` if the other parts of the model leave no
        parameters for the MLP.
        """
        attention = 2 * self.embed_dim * setting.head_dim * (setting.num_heads + setting.num_kv_heads)
        norms = self.embed_dim * (2 * self.layers + 1)
        top = 0 if self.classes is None else self.embed_dim**2 + self.embed_dim + (self.embed_dim + 1) * self.classes
        outside_mlp = self.vocabulary * self.embed_dim + self.layers * attention + norms + top
        parameters_per_unit = 3 * self.embed_dim * self.layers
        width = round((self.parameters - outside_mlp) / parameters_per_unit)
        if width < 1:
            expected = f"at least {outside_mlp + parameters_per_unit:,} for {setting} at this width and depth"
            raise InputError("params", expected=expected, got=f"{self.parameters:,}")
        return width

    @staticmethod
    def of_size(
        parameters: int,
        vocabulary: int,
        heads: Sequence[int],
        *,
        embed_dim: int | None = None,
        layers: int | None = None,
        **other: Any,
    ) -> "ModelShape":
        """Return the shape (depth and width) whose estimated number of parameters is closest to `parameters`. The depth
        is 1 to 48 layers, or `layers`. The width is `embed_dim`, or about 40 features per layer, divisible by all
        `heads` where possible. The estimate is that of the embedding plus 12 embed_dim^2 per layer, for heads of width
        `embed_dim / heads` and an MLP of width 2.7 embed_dim (Shazeer 2020).
        """
        common = 2 * math.lcm(*heads)
        step = common if common <= MAX_COMMON_MULTIPLE else 2
        shapes = []
        for number in (layers,) if layers else range(1, 49):
            width = embed_dim or step * max(1, round(WIDTH_PER_LAYER * number / step))
            shapes.append(ModelShape(vocabulary, width, number, parameters, **other))
        estimates = (vocabulary * shape.embed_dim + 12 * shape.layers * shape.embed_dim**2 for shape in shapes)
        return min(zip(shapes, estimates, strict=True), key=lambda pair: abs(math.log(pair[1] / parameters)))[0]


class Transformer(nn.Module):
    """Small pre-norm transformer for studies, with rotary positions and SwiGLU: a decoder, encoder or classifier. Its
    layers have the heads of `setting`. Its parameters have the names of Llama in `transformers`, to which it can be
    converted.
    """

    def __init__(self, shape: ModelShape, setting: Setting) -> None:
        super().__init__()
        self.shape, self.setting, self.mlp_dim = shape, setting, shape.mlp_dim(setting)
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.embed_dim)
        self.layers = nn.ModuleList(TransformerLayer(shape, setting) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.embed_dim, NORM_EPS)
        self.top = None if shape.classes is None else ClassifierHead(shape.embed_dim, shape.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize biases with 0, norms with 1, and matrices with the standard deviation `WEIGHT_STD`."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            is_residual = name.endswith(("out_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=WEIGHT_STD / (math.sqrt(2 * self.shape.layers) if is_residual else 1.0))

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"] | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Float[Tensor, "batch length vocabulary"] | Float[Tensor, "batch classes"]:
        """Return the vocabulary logits of every token (batch, length, vocabulary) or, for a classifier, the class
        logits of every sequence (batch, classes). `attention_mask` is 0 at padding, which must be on the right, and 1
        at other tokens; it is None if no sequence has padding. `caches`, one per layer, contain the keys and values of
        earlier tokens. The keys and values of the tokens `input_ids` are appended to the caches.
        """
        is_token = None if attention_mask is None else attention_mask.bool()
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, is_token, None if caches is None else caches[number])
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.embed_tokens.weight) if self.top is None else self.top(x, is_token)
        return logits


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: self-attention with the numbers of heads and the head dimension of `setting`, then a
    SwiGLU MLP.
    """

    def __init__(self, shape: ModelShape, setting: Setting) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.embed_dim, NORM_EPS)
        self.self_attn = MultiHeadAttention(
            shape.embed_dim,
            setting.num_heads,
            num_kv_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            bias=False,
            rotary=Rotary(),
            mask=causal() if shape.causal else None,
        )
        self.post_attention_layernorm = nn.RMSNorm(shape.embed_dim, NORM_EPS)
        self.mlp = SwiGLU(shape.embed_dim, shape.mlp_dim(setting))

    def forward(
        self,
        x: Float[Tensor, "batch length embed"],
        is_token: Bool[Tensor, "batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch length embed"]:
        """Return the output of this layer: `x` after self-attention and MLP. No token attends to padding, where
        `is_token` is False. If `is_token` is None, no sequence has padding.
        """
        mask = None if is_token is None else dense(is_token[:, None, None, :])
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache)
        y: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + y


class SwiGLU(nn.Module):
    """Gated MLP with `width` hidden features and without biases: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, embed_dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed_dim, width, bias=False)
        self.up_proj = nn.Linear(embed_dim, width, bias=False)
        self.down_proj = nn.Linear(width, embed_dim, bias=False)

    def forward(self, x: Float[Tensor, "... embed"]) -> Float[Tensor, "... embed"]:
        """Return `down(silu(gate(x)) * up(x))`."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class ClassifierHead(nn.Module):
    """Output layer of a sequence classifier: it computes class logits for each token, and averages them over the tokens
    of a sequence.
    """

    def __init__(self, embed_dim: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.classifier = nn.Linear(embed_dim, classes)

    def forward(
        self, x: Float[Tensor, "batch length embed"], is_token: Bool[Tensor, "batch length"] | None
    ) -> Float[Tensor, "batch classes"]:
        """Return the class logits of each sequence: the mean of the class logits of its tokens. Padding, where
        `is_token` is False, does not count. If `is_token` is None, no sequence has padding.
        """
        logits: Tensor = self.classifier(F.gelu(self.dense(x)))
        if is_token is None:
            return logits.mean(1)
        return (logits * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)


def decode_speed(model: Transformer, context: int) -> float:
    """Return the decoding speed in tokens per second: 1 divided by the median time of 48 steps. The steps decode one
    token each, and the cache contains `context` tokens before the first step.
    """
    device = device_of(model)
    ids = torch.arange(context, device=device)[None] % model.shape.vocabulary
    caches, seconds = [DynamicCache() for _ in model.layers], []
    with evaluation_mode(model), torch.no_grad():
        model(ids, caches=caches)
        for _ in range(DECODED_TOKENS):
            start = time.perf_counter()
            logits = model(ids[:, -1:], caches=caches)
            logits[0, -1, 0].item()  # waits for the device
            seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)


def cache_bytes_per_token(model: nn.Module) -> float:
    """Return the bytes that one token takes in the key/value caches of all layers, in the parameters' data type."""
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    size = next(model.parameters()).element_size()
    return float(sum(size * layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers))


POSITIONS_FACTOR = 4
"""Largest number of positions in the saved configuration, as a multiple of the number of tokens of a training sequence.
Rotary positions themselves have no limit.
"""


def save_model(
    model: Transformer, tokenizer: Any, folder: str | Path, *, context: int, labels: Sequence[str] = ()
) -> None:
    """Save a trained study model to a folder in Hugging Face format: weights in float32, configuration, tokenizer, and
    the class names `labels` of a classifier. `context` is the number of tokens of its training sequences.
    """
    converted = as_transformers(model, tokenizer, context=context)
    if labels:
        converted.config.id2label = dict(enumerate(labels))
        converted.config.label2id = {label: number for number, label in enumerate(labels)}
    converted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def as_transformers(model: Transformer, tokenizer: Any, *, context: int) -> Any:
    """Convert a study model to a `transformers` model in evaluation mode: a Llama if it is a decoder, otherwise a
    EuroBERT.
    """
    transformers = require_transformers()
    shape, setting = model.shape, model.setting
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": setting.num_heads,
        "num_key_value_heads": setting.num_kv_heads,
        "head_dim": setting.head_dim,
        "rms_norm_eps": NORM_EPS,
        "max_position_embeddings": POSITIONS_FACTOR * context,
        "tie_word_embeddings": shape.classes is None,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if shape.causal and shape.classes is None:
        converted = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif not hasattr(transformers, "EuroBertConfig"):
        got = f"transformers {transformers.__version__}"
        raise InputError("task", expected="lm, or for an encoder a transformers version with EuroBERT", got=got)
    else:
        sizes["classifier_pooling"] = "late"
        if tokenizer.mask_token_id is not None:
            sizes["mask_token_id"] = tokenizer.mask_token_id
        if shape.classes is None:
            converted = transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**sizes))
        else:
            config = transformers.EuroBertConfig(**sizes, num_labels=shape.classes)
            converted = transformers.EuroBertForSequenceClassification(config)
    with torch.no_grad():
        for layer, converted_layer in zip(model.layers, converted.model.layers, strict=True):
            to_transformers(layer.self_attn, converted_layer.self_attn)  # type: ignore[arg-type]
        state = {
            name.removeprefix("top.") if name.startswith("top.") else f"model.{name}": tensor
            for name, tensor in model.state_dict().items()
            if ".self_attn." not in name
        }
        unexpected = set(converted.load_state_dict(state, strict=False).unexpected_keys)
    if unexpected:
        got = f"additional parameters {', '.join(sorted(unexpected))}"
        raise InputError("model", expected="a Transformer without changes", got=got)
    return converted.eval()


def require_transformers() -> Any:
    """Import and return the package transformers, or raise `MissingExtra` if it is not installed."""
    return require("transformers", purpose="a model in Hugging Face format", extra="hf")
