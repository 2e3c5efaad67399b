"""Self-attention of three heads in plain PyTorch, written in several ways, and the check of a gate of one head."""

import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw

HEADS, DIM, LENGTH = 3, 5, 7
WIDTH = HEADS * DIM


def split(x):
    """Return features `(batch, length, width)` as those of the heads, `(batch, heads, length, features)`."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merge(heads):
    """Return `(batch, length, width)` from the features of the heads."""
    return heads.transpose(1, 2).flatten(2)


def sdpa(q, k, v, visible=None):
    return F.scaled_dot_product_attention(q, k, v, visible)


def softmax(q, k, v, visible=None):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(-1) @ v


def einsum(q, k, v, visible=None):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores if visible is None else scores + torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class SelfAttention(nn.Module):
    """Self-attention that stores its weights.

    Args:
        way: function of queries, keys and values, or module, that computes the outputs of the heads.
        output: function of this module, queries, keys and values that computes the output of the module, by
            `attend` as a rule; by default the projection of the merged heads.
    """

    def __init__(self, way=sdpa, output=lambda module, q, k, v: module.out_proj(merge(module.attend(q, k, v)))):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.output = way, output

    def attend(self, q, k, v):
        scores = (q @ k.mT * DIM**-0.5).exp()  # a softmax would be one more, without a product
        self.weights = scores / scores.sum(-1, keepdim=True)
        return self.way(q, k, v)

    def forward(self, x):
        return self.output(self, *map(split, self.qkv(x).chunk(3, -1)))


@torch.no_grad()
def require_gate(model, x, *, head=1, factor=0.0, label="0"):
    """Check that the gate of a head in the first module acts as the same factor of its columns of the projection."""
    with hw.gate(model, {(label, head): factor}):
        gated = model(x)
    model[0].out_proj.weight[:, DIM * head : DIM * (head + 1)] *= factor
    torch.testing.assert_close(gated, model(x))
