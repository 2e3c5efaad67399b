"""Regimes of the benchmarks: sizes, dtype and mask of a layer, and its input and weights. Nothing here imports
headwise.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

MASKS = {
    "full": "every query attends to every key",
    "causal": "every query attends to its own position and all before it",
    "window": "every query attends to 256 keys that end with its own position",
    "heads": "the first half of the heads attends to 128 keys that end with the query; the others are causal",
    "padding": "sequences with equally spaced lengths, from 1/16 of the longest to its full length",
}
WINDOW, NARROW = 256, 128


class Weights(NamedTuple):
    """Weights of a layer, as `(out_features, in_features)` matrices.

    Attributes:
        qkv: the projections to queries, keys and values, concatenated in this order.
        out: the output projection.
        qkv_bias: biases of the projections; None for a layer without biases.
        out_bias: bias of the output projection; None for a layer without biases.
    """

    qkv: Tensor
    out: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """Return the weights and existing biases by the oracle's names: "qkv", "out_proj", "qkv_bias", "out_bias"."""
        by_name = {"qkv": self.qkv, "out_proj": self.out, "qkv_bias": self.qkv_bias, "out_bias": self.out_bias}
        return {name: tensor for name, tensor in by_name.items() if tensor is not None}


class Data(NamedTuple):
    """Input, weights and output gradient, which are the same for every contestant.

    Attributes:
        x: the input, `(batch, length, embed)`.
        upstream: the gradient of the output; 0 for padding, which no loss reads.
        weights: the weights of the layer.
    """

    x: Tensor
    upstream: Tensor
    weights: Weights


@dataclass(frozen=True)
class Regime:
    """Sizes, mask, dtype and kind of layer of one comparison. The head dim is `embed / heads`.

    Attributes:
        batch, length, embed, heads: sizes.
        mask: one of `MASKS`.
        dtype: "float32" or "bfloat16".
        training: whether the backward pass is included.
        kv_heads: number of key/value heads; by default as many as query heads.
        bias: whether the projections have biases.
        rotary: whether the layer applies rotary position embeddings.
    """

    batch: int
    length: int
    embed: int
    heads: int
    mask: str = "full"
    dtype: str = "float32"
    training: bool = False
    kv_heads: int | None = None
    bias: bool = True
    rotary: bool = False

    @property
    def name(self) -> str:
        """The regime as it is printed: sizes, mask, dtype, and "forward" or "training"."""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else str(self.heads)
        phase = "training" if self.training else "forward"
        return f"({self.batch}, {self.length}, {self.embed}, {heads}) {self.mask} {self.dtype} {phase}"

    @property
    def head_dim(self) -> int:
        """Number of features of one head."""
        return self.embed // self.heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of the projected queries, keys and values."""
        shared = (self.kv_heads or self.heads) * self.head_dim
        return self.embed, shared, shared

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a `torch.dtype`."""
        return getattr(torch, self.dtype)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each sequence without padding, `(batch,)`."""
        if self.mask != "padding":
            return torch.full((self.batch,), self.length)
        return torch.linspace(self.length / 16, self.length, self.batch).round().long()

    @property
    def real(self) -> Tensor:
        """Boolean tensor `(batch, length)` that is False for padding."""
        return torch.arange(self.length) < self.lengths[:, None]

    @property
    def matrix_bytes(self) -> int:
        """Size in bytes of one copy of the score matrix in float32."""
        return self.batch * self.heads * self.length**2 * 4

    @property
    def flops(self) -> int:
        """Number of floating-point operations of the layer's forward pass: those of attention and of the projections.
        A product and its sum are two operations.
        """
        return self.attention_flops + 2 * self.batch * self.length * self.embed * (sum(self.widths) + self.embed)

    @property
    def attention_flops(self) -> int:
        """Number of floating-point operations of attention without projections. Masked scores are not counted."""
        if self.mask not in ("full", "causal"):
            raise ValueError(f'flops are only defined for the masks "full" and "causal", not for "{self.mask}"')
        pairs = self.length**2 if self.mask == "full" else self.length * (self.length + 1) // 2
        return 4 * self.batch * self.embed * pairs

    def allowed(self, rows: range | None = None) -> Tensor | None:
        """Return the mask for the given query rows, by default all: True where a query may attend to a key, `(batch or
        1, heads or 1, rows or 1, length)`; None for the full mask.
        """
        rows = range(self.length) if rows is None else rows
        i, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(self.length)
        if self.mask == "full":
            return None
        if self.mask == "padding":
            return self.real[:, None, None]
        seen = j <= i
        if self.mask == "window":
            seen = seen & (i - j < WINDOW)
        if self.mask != "heads":
            return seen[None, None]
        is_windowed = torch.arange(self.heads) < self.heads // 2
        return (seen & ((i - j < NARROW) | ~is_windowed[:, None, None]))[None]

    def attention_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random queries, keys, values and output gradient of attention without projections, each `(batch,
        heads, length, head_dim)`.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v, upstream = (torch.randn(shape, generator=generator).to(self.torch_dtype) for _ in range(4))
        return q, k, v, upstream

    def data(self) -> Data:
        """Return random input, weights and output gradient in the regime's dtype. They depend only on the sizes. The
        scores have a standard deviation of about 2.
        """
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(self.torch_dtype)

        queries, keys, values = self.widths
        unit = self.embed**-0.5
        qkv = torch.cat(
            [normal(queries + keys, self.embed, scale=2**0.5 * unit), normal(values, self.embed, scale=unit)]
        )
        out = normal(self.embed, self.embed, scale=unit)
        biases = normal(queries + keys + values, scale=0.5), normal(self.embed, scale=0.5)
        x, upstream = (normal(self.batch, self.length, self.embed) for _ in range(2))
        weights = Weights(qkv, out, *(biases if self.bias else (None, None)))
        return Data(x, upstream * self.real[..., None], weights)


def both(regime: Regime) -> tuple[Regime, Regime]:
    """Return the regime once without and once with the backward pass."""
    return replace(regime, training=False), replace(regime, training=True)
