"""A decoder of attention layers alone, whose heads can attend to neighbours from the first step.

Olsson et al. (2022) study attention-only models, in which two layers suffice for induction heads.
"""

from dataclasses import dataclass

import torch
from torch import nn

import headwise as hw
from headwise.shapes import Float, Int


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        vocabulary: number of tokens.
        width: features of a token.
        heads: heads of each layer.
        layers: number of layers.
    """

    vocabulary: int
    width: int = 64
    heads: int = 4
    layers: int = 2


class Layer(nn.Module):
    """Attention layer with a norm before it, and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width)
        self.attention = hw.MultiHeadAttention(shape.width, shape.heads, mask=hw.causal(), rotary=hw.Rotary())

    def forward(self, x: Float[torch.Tensor, "batch length width"]) -> Float[torch.Tensor, "batch length width"]:
        """Return the features of the tokens after the layer."""
        return x + self.attention(self.norm(x))


class Decoder(nn.Module):
    """Decoder without feed-forward layers. Positions enter by rotation alone.

    Embeddings, and the biases of queries and keys, have a standard deviation of 1 at the start; weights have that of
    their fan-in. Attention scores then differ between tokens and between distances from the first step. With the usual
    small weights, attention is uniform at first, and the heads form much later.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.unembedding = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name == "embedding.weight" or name.endswith(("q_proj.bias", "k_proj.bias")):
                nn.init.normal_(parameter)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, input_ids: Int[torch.Tensor, "batch length"]) -> Float[torch.Tensor, "batch length vocabulary"]:
        """Return the logits of the next tokens. The name of the argument lets headwise read the tokens."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.unembedding(self.norm(x))
