"""Position schemes of the trained models: how a model knows the order of its tokens.

| scheme | meaning |
| --- | --- |
| none | no positions; a causal model can still count the tokens that a query sees |
| learned | a learned vector for each position is added to the embedding of the token |
| rotary | rotary embeddings with the same frequencies in every head (Su et al. 2021), as in Llama |
| spread | rotary embeddings whose frequencies are distributed over the heads |

With "rotary", a head of two features has the fastest frequency alone, whatever the width of the model. With "spread",
the heads of a layer together always have the same frequencies, those of a single head as wide as the model: pair i of
head h rotates by theta^(-2 (i H + h) / (H head_dim)) radians a position, where H is the number of heads. With one head,
"spread" and "rotary" are the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.studies.model import WEIGHT_STD, ModelShape, Transformer
from headwise.studies.space import Setting

SCHEMES = ("none", "learned", "rotary", "spread")


@dataclass(frozen=True)
class SpreadRotary(hw.Rotary):
    """Rotary embedding whose frequencies are distributed over the heads, so that no two heads share one."""

    def rotate(self, x: Tensor, positions: Tensor, *, length: Any = None) -> Tensor:
        """Return queries or keys `(batch, heads, length, head_dim)` rotated by their positions `(batch, length)`."""
        heads, pairs = x.shape[1], x.shape[3] // 2
        exponents = (torch.arange(pairs) * heads + torch.arange(heads)[:, None]) / (heads * pairs)
        angles = positions[:, None, :, None] * self.theta ** -exponents[:, None]
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def rotate_both(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys, with equally many heads, rotated by their positions."""
        return self.rotate(q, query_positions), self.rotate(k, key_positions)


def rotary_of(scheme: str) -> hw.Rotary | None:
    """Return the rotation of a scheme, or None if it has none."""
    return {"rotary": hw.Rotary(), "spread": SpreadRotary()}.get(scheme)


class TokenAndPositionEmbedding(nn.Embedding):
    """Sum of the embedding of a token and a learned vector of its position.

    Args:
        vocabulary: number of tokens.
        embed_dim: width of the model.
        length: longest sequence.
    """

    def __init__(self, vocabulary: int, embed_dim: int, length: int) -> None:
        super().__init__(vocabulary, embed_dim)
        self.positions = nn.Parameter(torch.randn(length, embed_dim) * WEIGHT_STD)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of token ids `(batch, length)`."""
        return super().forward(input_ids) + self.positions[: input_ids.shape[1]]


def embedding_of(scheme: str, vocabulary: int, embed_dim: int, length: int) -> nn.Embedding:
    """Return the embedding of a scheme: with learned positions, or of tokens alone."""
    if scheme == "learned":
        return TokenAndPositionEmbedding(vocabulary, embed_dim, length)
    return nn.Embedding(vocabulary, embed_dim)


class PositionedTransformer(Transformer):
    """The transformer of `hw.study` with one of the `SCHEMES` in place of its rotary embeddings.

    Args:
        shape: width, depth, vocabulary and number of parameters; learned positions are added to these.
        setting: number and size of the heads.
        scheme: one of `SCHEMES`.
        length: longest sequence.
    """

    def __init__(self, shape: ModelShape, setting: Setting, scheme: str, length: int) -> None:
        super().__init__(shape, setting)
        self.embed_tokens = embedding_of(scheme, shape.vocabulary, shape.embed_dim, length)
        nn.init.normal_(self.embed_tokens.weight, std=WEIGHT_STD)
        for module in self.modules():
            if isinstance(module, hw.MultiHeadAttention):
                module.rotary = rotary_of(scheme)
