"""What is computed in one comparison: sizes, dtype, mask, and the numbers that go in. Nothing here imports headwise."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

MASKS = {
    "full": "every query attends to every key",
    "causal": "each to itself and what came before",
    "window": "to 256 keys that end with itself",
    "heads": "the first half of the heads to 128 keys that end with the query, the others to all before it",
    "padding": "sequences of evenly spread lengths, from 1/16 of the longest to all of it",
}
WINDOW, NARROW = 256, 128


class Weights(NamedTuple):
    """The two maps of a layer; queries, keys and values are one, in this order. No biases where there are none."""

    qkv: Tensor
    out: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """Those that there are, by the names that the oracle gives their gradients."""
        every = {"qkv": self.qkv, "out_proj": self.out, "qkv_bias": self.qkv_bias, "out_bias": self.out_bias}
        return {name: tensor for name, tensor in every.items() if tensor is not None}


class Data(NamedTuple):
    """What every contestant is given."""

    x: Tensor
    upstream: Tensor
    """The gradient of the output; 0 for padding, which no loss reads."""
    weights: Weights


@dataclass(frozen=True)
class Regime:
    """One layer on one input. The heads are `embed / heads` wide."""

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
        """In words, as it is printed."""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else str(self.heads)
        done = "training" if self.training else "forward"
        return f"({self.batch}, {self.length}, {self.embed}, {heads}) {self.mask} {self.dtype} {done}"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed // self.heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of the projected queries, keys and values."""
        shared = (self.kv_heads or self.heads) * self.head_dim
        return self.embed, shared, shared

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return getattr(torch, self.dtype)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence that are real, `(batch,)`."""
        if self.mask != "padding":
            return torch.full((self.batch,), self.length)
        return torch.linspace(self.length / 16, self.length, self.batch).round().long()

    @property
    def real(self) -> Tensor:
        """Which tokens are no padding, `(batch, length)`."""
        return torch.arange(self.length) < self.lengths[:, None]

    @property
    def matrix_bytes(self) -> int:
        """What one copy of the scores takes in float32."""
        return self.batch * self.heads * self.length**2 * 4

    @property
    def flops(self) -> int:
        """Of the forward pass, two for a product and its sum; of the scores only those that are not hidden."""
        if self.mask not in ("full", "causal"):
            raise ValueError(f"the work under the mask {self.mask} is not worked out")
        tokens, pairs = self.batch * self.length, self.length**2
        if self.mask == "causal":
            pairs = self.length * (self.length + 1) // 2
        projections = 2 * tokens * self.embed * (sum(self.widths) + self.embed)
        return projections + 4 * self.batch * self.embed * pairs

    def allowed(self, rows: range | None = None) -> Tensor | None:
        """The mask on some query rows or all, True where it attends, `(batch or 1, heads or 1, rows or 1, length)`."""
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
        narrow = torch.arange(self.heads) < self.heads // 2
        return (seen & ((i - j < NARROW) | ~narrow[:, None, None]))[None]

    def data(self) -> Data:
        """Numbers that depend on the sizes alone, rounded to the dtype. Scores have a deviation of about 2."""
        drawn = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=drawn) * scale).to(self.torch_dtype)

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
    """The regime forward, and forward with backward."""
    return replace(regime, training=False), replace(regime, training=True)
