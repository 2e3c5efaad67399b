"""Keys that count as visible are those that the mask lets a row see, also where a weight underflows to 0."""

import math

import pytest
import torch
from torch import nn

import headwise as hw

MASKS = {
    "no mask": lambda scores, hidden: scores,
    "fill by -inf": lambda scores, hidden: scores.masked_fill(hidden, -torch.inf),
    "fill by the smallest number": lambda scores, hidden: scores.masked_fill(hidden, torch.finfo(scores.dtype).min),
    "fill in place": lambda scores, hidden: scores.masked_fill_(hidden, -1e4),
    "add -10,000": lambda scores, hidden: scores + hidden.to(scores) * -10000.0,
    "add 0 where visible": lambda scores, hidden: scores + (1.0 - (~hidden).to(scores.dtype)) * -10000.0,
    "add -inf": lambda scores, hidden: scores + torch.zeros_like(scores).masked_fill(hidden, -torch.inf),
    "where": lambda scores, hidden: torch.where(hidden, torch.full_like(scores, -1e4), scores),
    "product and difference": lambda scores, hidden: scores * ~hidden - 1e4 * hidden.to(scores),
}
"""Ways in which models hide keys from a softmax."""


class Attention(nn.Module):
    """Attention of three heads with scores so far apart that many weights underflow to 0 in half precision."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.out = mask, nn.Linear(24, 24)
        self.num_heads = 3

    def forward(self, x, hidden):
        heads = x.unflatten(-1, (3, 8)).transpose(1, 2)
        self.weights = self.mask(heads @ (heads * 3).mT, hidden).softmax(-1)
        return self.out((self.weights @ heads).transpose(1, 2).flatten(2))


def oracle(weights, visible):
    """Return `received` and `evenness` of each head, from the weights and visible keys `(batch, heads, rows, keys)`."""
    rows = []
    for head in range(weights.shape[1]):
        received, evenness = [], []
        for sequence, sees in zip(weights[:, head].double(), visible[:, head], strict=True):
            counts = sees.sum(0)
            means = sequence.sum(0) / counts.clamp(min=1)
            received.append(float(means[2 * counts >= counts.max()].max()))
            entropies = torch.special.entr(sequence).sum(-1)
            shares = [float(e) / math.log(n) for e, n in zip(entropies, sees.sum(-1).tolist(), strict=True) if n > 1]
            evenness.append(sum(shares) / len(shares))
        rows.append({"received": sum(received) / len(received), "evenness": sum(evenness) / len(evenness)})
    return rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_a_weight_of_0_is_not_a_hidden_key(name, dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(), torch.randn(2, 7, 24).to(dtype)
    model.add_module("attention", Attention(MASKS[name]).to(dtype))
    model.forward = model.attention.__call__
    hidden = (torch.rand(2, 1, 7, 7) < 0.4) & ~torch.eye(7, dtype=torch.bool)
    with hw.watch(model) as heads:
        model(x, hidden)
    visible = torch.ones(2, 3, 7, 7, dtype=torch.bool) if name == "no mask" else ~hidden.expand(2, 3, 7, 7)
    assert dtype != torch.float16 or (model.attention.weights[visible] == 0).any()
    for row, expected in zip(heads.rows(), oracle(model.attention.weights, visible), strict=True):
        for statistic, value in expected.items():
            assert row[statistic] == pytest.approx(value, rel=1e-4), (row["head"], statistic)
