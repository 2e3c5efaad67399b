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


def statistics_of_sequences(weights, outs=None, scores=None, uncapped=None, projection=None):
    """Return the statistics of each head: their means over sequences, and the largest of the largest logits.

    Args:
        weights: attention weights `(heads, queries, keys)` of each sequence.
        outs: outputs `(queries, heads, value_dim)` of each sequence, for "output_norm".
        scores: scores as they enter the softmax, in the shape of the weights, for "max_logit".
        uncapped: scores before the softcap and without the bias, for "max_logit_uncapped".
        projection: weight of the output projection `(width, heads * value_dim)`, for "written_norm".
    """
    rows = []
    for head in range(len(weights[0])):
        found = [
            statistics_of(
                each[head],
                out=None if outs is None else outs[n][:, head],
                projection=None if projection is None else projection.T.unflatten(0, (len(each), -1))[head],
                scores=None if scores is None else scores[n][head],
                uncapped=None if uncapped is None else uncapped[n][head],
            )
            for n, each in enumerate(weights)
        ]
        names = set().union(*found)
        values = {name: [each[name] for each in found if name in each] for name in names}
        rows.append(
            {
                name: max(numbers) if name.startswith("max_logit") else sum(numbers) / len(numbers)
                for name, numbers in values.items()
            }
        )
    return rows


def require_rows(heads, weights, outs=None, without=frozenset(), **options):
    """Compare the rows of `watch` with the statistics of weights of several sequences. `output_norm`, `written_norm`,
    `max_logit` and `max_logit_uncapped` are compared if the arguments that `statistics_of_sequences` needs for them are
    passed.
    """
    expected = statistics_of_sequences(weights, outs, **options)
    require_statistics(heads.rows(), expected, without=without, tolerance=1e-12)
