"""Checks of accelerated models under torch.compile and torch.export; tests run them in separate processes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

import headwise as hw
from headwise.intercept import accelerated_sdpa


class Attention(nn.Module):
    """Heads of self-attention, with a mask."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(36, 108), mask

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 12)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)


def runs_as_without():
    """Check that compiled and exported models have the same output as before, and are accelerated elsewhere."""
    accelerated_sdpa._why_slower = lambda problem, hides_nothing: None
    x = torch.randn(2, 7, 36)
    for model in (
        nn.Sequential(Attention(None), Attention(torch.ones(7, 7).bool())),
        nn.Sequential(nn.TransformerEncoderLayer(36, 3, 7, 0.0, batch_first=True)),
        Attention(causal_lower_right(7, 7)),
    ):
        expected = model(x)
        acceleration = hw.accelerate(model)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        assert "no module has run outside of torch.compile" in str(acceleration), str(acceleration)
        torch.testing.assert_close(model(x), expected)
        assert "computed by the native kernels" in str(acceleration), str(acceleration)
        acceleration.restore()
        torch._dynamo.reset()
