"""Small language models of our own, with streams that may be scaled, and their OV matrices."""

import torch
from torch import nn

import headwise as hw


class Block(nn.Module):
    """Block with our layer, and a stream that may be scaled."""

    def __init__(self, attention, *, written=1.0, kept=1.0, post_norm=False, mlp=False, own_norm=False):
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(24)
        self.mlp = nn.Linear(24, 24) if mlp else None
        self.written, self.kept, self.post_norm, self.own_norm = written, kept, post_norm, own_norm

    def forward(self, x):
        if self.post_norm:
            return self.norm(x + self.attention(x))
        inputs = x / x.norm(dim=-1, keepdim=True) if self.own_norm else self.norm(x)
        x = self.kept * x + self.written * self.attention(inputs)
        return x if self.mlp is None else x + self.mlp(x).relu()


class Model(nn.Module):
    """Language model of such blocks."""

    def __init__(self, *, layer=None, logits=None, named=True, blocks=3, **options):
        super().__init__()
        torch.manual_seed(5)
        make = layer or (lambda: hw.MultiHeadAttention(24, num_heads=3, mask=hw.causal()))
        self.embedding, self.unembedding = nn.Embedding(31, 24), nn.Linear(24, 31, bias=False)
        self.blocks = nn.ModuleList([Block(make(), **options) for _ in range(blocks)])
        self.norm, self.logits, self.named = nn.LayerNorm(24), logits, named
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.double().eval()

    def get_input_embeddings(self):
        """Return the token embedding."""
        if not self.named:
            raise NotImplementedError
        return self.embedding

    def get_output_embeddings(self):
        """Return the output embedding."""
        return self.unembedding if self.named else None

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.unembedding(self.norm(x))
        return logits if self.logits is None else self.logits(logits)


def dense_ov(model, layer, head, factor=1.0):
    """Return the OV matrix of a head of `Model`, with the norm before it folded in."""
    block = model.blocks[layer]
    attention, own = block.attention, slice(head * 8, head * 8 + 8)
    norm = torch.diag(block.norm.weight) @ (torch.eye(24, dtype=torch.float64) - 1 / 24)
    value = attention.qkv_proj.weight[48:] if attention.fused_qkv else attention.v_proj.weight
    return (factor * attention.out_proj.weight[:, own] @ value[own] @ norm).detach()


def close(one, other, tolerance=1e-10):
    """Return True if two tensors are equal but for a small part of their size."""
    return one.shape == other.shape and float((one - other).norm()) <= tolerance * float(other.norm())
