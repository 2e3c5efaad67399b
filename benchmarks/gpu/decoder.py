"""A small decoder in plain torch, whose attention `hw.watch` observes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention by torch's `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention, `(batch, length, width)`."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: attention and a perceptron, both after a norm and added to their input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, `(batch, length, width)`."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Decoder without an output layer, whose memory would hide that of attention."""

    def __init__(self, width: int, heads: int, layers: int, words: int = 1000):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the last hidden states, `(batch, length, width)`."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def decoder(width: int, heads: int, layers: int, device: str, dtype: torch.dtype) -> Decoder:
    """Return a decoder with random weights, the same for every device and dtype up to rounding."""
    torch.manual_seed(0)
    return Decoder(width, heads, layers).eval().to(device, dtype)


def tokens(length: int, device: str, *, batch: int = 1) -> Tensor:
    """Return random token ids `(batch, length)`, with repetitions."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1000, (batch, length), generator=generator).to(device)
