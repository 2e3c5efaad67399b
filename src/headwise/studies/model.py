"""A small transformer made of our layer, whose attention alone is free: its MLP takes up what heads leave.

ids (batch, length)
    | embed_tokens
x (batch, length, embed)
    | each block    x + attention(norm(x)),  x + mlp(norm(x))        Zhang and Sennrich 2019, Shazeer 2020
    | norm
    | the embedding again, as output           (batch, length, vocabulary)
    | or the mean over tokens, and a map       (batch, classes)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.caches.base import Cache
from headwise.attention.caches.dynamic import DynamicCache
from headwise.attention.masks.factories import causal, dense
from headwise.attention.rotary import Rotary
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Bool, Float, Int
from headwise.studies.space import Setting

EPS = 1e-5
"""Under the root of every normalisation."""

SPREAD = 0.02
"""Standard deviation of weights at first; of those that add to x, less by the root of how many do (Radford 2019)."""

MOST_COMMON = 96
"""The largest common multiple of numbers of heads to which a width is rounded."""

WIDTH_A_LAYER = 40
"""embed_dim / layers of a model whose size alone is given: between that of GPT-2 small, 64, and what is deep."""


@dataclass(frozen=True)
class Shape:
    """Everything of a model but its heads.

    Attributes:
        vocabulary: how many tokens there are.
        embed_dim: width of the model.
        layers: how many blocks.
        parameters: how many weights the model shall have; the width of its MLP is what makes it so.
        causal: whether a token sees only itself and those before it.
        classes: of a classifier; None gives every token's logits over the vocabulary.
    """

    vocabulary: int
    embed_dim: int
    layers: int
    parameters: int
    causal: bool = True
    classes: int | None = None

    def mlp_dim(self, setting: Setting) -> int:
        """The width of the MLP with which a model of these heads has as many parameters as it shall.

        Raises:
            InputError: heads that leave nothing for it.
        """
        width = round((self.parameters - self._fixed(setting)) / (3 * self.embed_dim * self.layers))
        if width < 1:
            least = self._fixed(setting) + 3 * self.embed_dim * self.layers
            raise InputError(
                "params",
                expected=f"at least {least:,} for {setting} at this width and depth",
                got=f"{self.parameters:,}",
            )
        return width

    def _fixed(self, setting: Setting) -> int:
        """Parameters outside the MLP."""
        attention = 2 * self.embed_dim * setting.head_dim * (setting.num_heads + setting.num_kv_heads)
        norms = self.embed_dim * (2 * self.layers + 1)
        top = 0 if self.classes is None else self.embed_dim**2 + self.embed_dim + (self.embed_dim + 1) * self.classes
        return self.vocabulary * self.embed_dim + self.layers * attention + norms + top

    @staticmethod
    def of_size(
        parameters: int,
        vocabulary: int,
        heads: Sequence[int],
        *,
        embed_dim: int | None = None,
        layers: int | None = None,
        **other: Any,
    ) -> "Shape":
        """A shape for so many parameters, of a width that these numbers of heads divide where that is not far.

        With heads of `embed_dim / heads` a block has about 12 embed_dim^2 parameters, its MLP a width of 2.7 embed_dim
        (Shazeer 2020). A width and a depth that are given stay.
        """
        common = 2 * math.lcm(*heads)
        step = common if common <= MOST_COMMON else 2

        def shape(layers: int) -> Shape:
            width = embed_dim or step * max(1, round(WIDTH_A_LAYER * layers / step))
            return Shape(vocabulary, width, layers, parameters, **other)

        def missed(shape: Shape) -> float:
            usual = vocabulary * shape.embed_dim + 12 * shape.layers * shape.embed_dim**2
            return abs(math.log(usual / parameters))

        return min((shape(number) for number in ((layers,) if layers else range(1, 49))), key=missed)


class Transformer(nn.Module):
    """A decoder or encoder of one shape, with the heads of one setting.

    Its parameters are named as those of Llama in `transformers`, to which it converts.

    Args:
        shape: everything but the heads.
        setting: the heads of each layer.

    Raises:
        InputError: heads that leave no parameters for the MLP.
    """

    def __init__(self, shape: Shape, setting: Setting) -> None:
        super().__init__()
        self.shape, self.setting, self.mlp_dim = shape, setting, shape.mlp_dim(setting)
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.embed_dim)
        self.layers = nn.ModuleList(Block(shape, setting) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.embed_dim, EPS)
        self.top = None if shape.classes is None else Top(shape.embed_dim, shape.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller where a block adds to x; biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            adds = name.endswith(("out_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=SPREAD / (math.sqrt(2 * self.shape.layers) if adds else 1.0))

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"] | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Float[Tensor, "batch length vocabulary"] | Float[Tensor, "batch classes"]:
        """Logits of every token, or of the whole.

        Args:
            input_ids: `(batch, length)`.
            attention_mask: `(batch, length)`, 0 where a token is padding, on the right.
            caches: one a layer, of a decoder that goes on where they end.
        """
        real = None if attention_mask is None else attention_mask.bool()
        x = self.embed_tokens(input_ids)
        for number, block in enumerate(self.layers):
            x = block(x, real, None if caches is None else caches[number])
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.embed_tokens.weight) if self.top is None else self.top(x, real)
        return logits

    def caches(self) -> list[DynamicCache]:
        """Empty ones, one a layer."""
        return [DynamicCache() for _ in self.layers]


class Block(nn.Module):
    """Attention and an MLP, each after a normalisation, each added to what came in."""

    def __init__(self, shape: Shape, setting: Setting) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.embed_dim, EPS)
        self.self_attn = MultiHeadAttention(
            shape.embed_dim,
            setting.num_heads,
            num_kv_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            bias=False,
            rotary=Rotary(),
            mask=causal() if shape.causal else None,
        )
        self.post_attention_layernorm = nn.RMSNorm(shape.embed_dim, EPS)
        self.mlp = MLP(shape.embed_dim, shape.mlp_dim(setting))

    def forward(
        self,
        x: Float[Tensor, "batch length embed"],
        real: Bool[Tensor, "batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch length embed"]:
        """The block's output, of the shape of x."""
        mask = None if real is None else dense(real[:, None, None, :])
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache)
        y: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + y


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, embed_dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed_dim, width, bias=False)
        self.up_proj = nn.Linear(embed_dim, width, bias=False)
        self.down_proj = nn.Linear(width, embed_dim, bias=False)

    def forward(self, x: Float[Tensor, "... embed"]) -> Float[Tensor, "... embed"]:
        """Each token by itself."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Top(nn.Module):
    """The classes of a sequence: each token's, and of these the mean."""

    def __init__(self, embed_dim: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.classifier = nn.Linear(embed_dim, classes)

    def forward(
        self, x: Float[Tensor, "batch length embed"], real: Bool[Tensor, "batch length"] | None
    ) -> Float[Tensor, "batch classes"]:
        """Logits, `(batch, classes)`; tokens that are padding do not count."""
        logits: Tensor = self.classifier(F.gelu(self.dense(x)))
        if real is None:
            return logits.mean(1)
        return (logits * real[..., None]).sum(1) / real.sum(1, keepdim=True)
