"""Small transformer for studies: attention with any number of heads, and an MLP that uses the remaining parameters.

ids (batch, length)
    | embed_tokens
x (batch, length, embed)
    | each layer    x + attention(norm(x)),  x + mlp(norm(x))        Zhang and Sennrich 2019, Shazeer 2020
    | norm
    | product with the embedding matrix       (batch, length, vocabulary)
    | or a classifier, averaged over tokens   (batch, classes)
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.caches.base import Cache
from headwise.attention.caches.dynamic import DynamicCache
from headwise.attention.masks.factories import causal, dense
from headwise.attention.rotary import Rotary
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Bool, Float, Int
from headwise.studies.model_shape import ModelShape
from headwise.studies.space import Setting

NORM_EPS = 1e-5
"""Epsilon of every RMSNorm."""

WEIGHT_STD = 0.02
"""Initial standard deviation of weights. Projections that add to the residual stream have a smaller one, by the square
root of their number (Radford et al. 2019)."""


class Transformer(nn.Module):
    """Decoder, encoder or classifier of a given shape, with the attention heads of one setting.

    Its parameters have the names of Llama in `transformers`, to which it converts.

    Args:
        shape: width, depth, vocabulary and number of parameters.
        setting: heads of each layer.

    Raises:
        InputError: the attention needs so many parameters that none are left for the MLP.
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
        """Initialize weights from a normal distribution, biases with 0 and norms with 1."""
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
        """Return the logits of every token, or of a classifier's classes.

        Args:
            input_ids: token ids.
            attention_mask: 0 where a token is padding, which must be on the right.
            caches: one cache per layer, with the keys and values of the tokens before `input_ids`.
        """
        is_token = None if attention_mask is None else attention_mask.bool()
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, is_token, None if caches is None else caches[number])
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.embed_tokens.weight) if self.top is None else self.top(x, is_token)
        return logits

    def caches(self) -> list[DynamicCache]:
        """Return an empty key/value cache for each layer."""
        return [DynamicCache() for _ in self.layers]


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: attention and MLP, each after a normalization, each added to its input."""

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
        """Return the output of the layer; keys where `is_token` is False are not attended to."""
        mask = None if is_token is None else dense(is_token[:, None, None, :])
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache)
        y: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + y


class SwiGLU(nn.Module):
    """Gated MLP (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, embed_dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed_dim, width, bias=False)
        self.up_proj = nn.Linear(embed_dim, width, bias=False)
        self.down_proj = nn.Linear(width, embed_dim, bias=False)

    def forward(self, x: Float[Tensor, "... embed"]) -> Float[Tensor, "... embed"]:
        """Return the output of the MLP for each token."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class ClassifierHead(nn.Module):
    """Classifier of a sequence: the mean over tokens of the class logits of each token."""

    def __init__(self, embed_dim: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.classifier = nn.Linear(embed_dim, classes)

    def forward(
        self, x: Float[Tensor, "batch length embed"], is_token: Bool[Tensor, "batch length"] | None
    ) -> Float[Tensor, "batch classes"]:
        """Return the class logits of each sequence, averaged over its tokens without padding."""
        logits: Tensor = self.classifier(F.gelu(self.dense(x)))
        if is_token is None:
            return logits.mean(1)
        return (logits * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
