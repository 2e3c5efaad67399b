"""Attention in plain PyTorch, and statistics of each sequence alone in float64, with which tests compare `watch`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oracles import statistics_of

HEADS, WIDTH = 3, 21
COMMON_POSITIONS = {"distance", "self", "previous", "next", "duplicate", "induction"}


class Attention(nn.Module):
    """Attention of 3 heads from x to `context`, by default x. Its mask is any mask of SDPA; `memory` are learned keys
    in front of the others.
    """

    def __init__(self, memory=0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.memory = nn.Parameter(torch.randn(1, HEADS, memory, 7))
        for projection in (self.q, self.k):
            nn.init.normal_(projection.weight, std=0.4)

    def split(self, x, context):
        return (
            layer(each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, each in ((self.q, x), (self.k, context), (self.v, context))
        )

    def joined(self, q, k, v, mask=None, is_causal=False):
        memory = self.memory.expand(len(q), -1, -1, -1)
        k, v = torch.cat([memory, k], 2), torch.cat([memory, v], 2)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        return self.out(out.transpose(1, 2).flatten(2))

    def forward(self, x, context=None, mask=None, is_causal=False):
        return self.joined(*self.split(x, x if context is None else context), mask, is_causal)


@torch.no_grad()
def weights_alone(attention, x, context=None, *, causal=False):
    """Return the weights `(heads, queries, keys)` of one sequence `(tokens, width)`, computed in float64."""
    attention = copy.deepcopy(attention).double()
    context = x if context is None else context
    q, k, _ = attention.split(x[None].double(), context[None].double())
    scores = (q @ torch.cat([attention.memory, k], 2).mT * 7**-0.5)[0]
    if causal:
        hidden = ~torch.ones(scores.shape[1:]).tril(scores.shape[2] - scores.shape[1]).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1)


def mean_statistics(weights, **options):
    """Return the statistics of each head: their means over sequences with these weights `(heads, queries, keys)`."""
    rows = []
    for head in range(len(weights[0])):
        found = [statistics_of(each[head], **options) for each in weights]
        names = set().union(*found)
        values = {name: [each[name] for each in found if name in each] for name in names}
        rows.append({name: sum(numbers) / len(numbers) for name, numbers in values.items()})
    return rows


def require_statistics(rows, expected, *, without=frozenset(), tolerance=1e-4):
    """Compare the rows of `watch` with expected statistics; those in `without` must be absent."""
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        assert not without & row.keys()
        for name, value in values.items():
            if name not in without:
                assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
