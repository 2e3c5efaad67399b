"""A model that attends by the function of an engine, and the statistics of its weights, sequence by sequence."""

import torch
from torch import nn

from oracles import statistics_of
from sequences_alone import require_statistics

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 6, 20


class EngineAttention(nn.Module):
    """Self- or cross-attention over `(..., tokens, width)`, in the layout `(..., tokens, heads, features)`.

    Args:
        attend: function of queries, keys and values in this layout, and of further arguments, that computes the
            outputs of the heads.
    """

    def __init__(self, attend, kv_heads=KV_HEADS, heads=HEADS):
        super().__init__()
        self.q, self.out_proj = nn.Linear(WIDTH, heads * DIM), nn.Linear(heads * DIM, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv_heads * DIM), nn.Linear(WIDTH, kv_heads * DIM)
        self.attend = attend
        for projection in (self.q, self.k):
            nn.init.normal_(projection.weight, std=0.4)

    def split(self, x, context=None):
        context = x if context is None else context
        tensors = (self.q(x), self.k(context), self.v(context))
        return [tensor.unflatten(-1, (-1, DIM)) for tensor in tensors]

    def forward(self, x, context=None, **options):
        return self.out_proj(self.attend(*self.split(x, context), **options).flatten(-2))


def model_of(attend, **options):
    """Return a model of one such module, in float64."""
    torch.manual_seed(11)
    return nn.Sequential(EngineAttention(attend, **options)).double()


def statistics_of_sequences(weights, outs=None, projection=None, **options):
    """Return the statistics of each head: their means over sequences with these weights `(heads, queries, keys)` and
    outputs `(queries, heads, value_dim)`.
    """
    rows = []
    for head in range(len(weights[0])):
        found = [
            statistics_of(each[head], out=None if outs is None else outs[n][:, head], **options)
            for n, each in enumerate(weights)
        ]
        names = set().union(*found)
        values = {name: [each[name] for each in found if name in each] for name in names}
        rows.append({name: sum(numbers) / len(numbers) for name, numbers in values.items()})
    return rows


def require_rows(heads, weights, outs=None, without=frozenset()):
    """Compare the rows of `watch` with the statistics of weights of several sequences. `output_norm` is compared if
    outputs are passed. `written_norm`, `max_logit` and `max_logit_uncapped` are not compared.
    """
    require_statistics(heads.rows(), statistics_of_sequences(weights, outs), without=without, tolerance=1e-9)
