"""Clipping of logits in attention modules that are written by hand, against the rule of the paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw

HEADS, WIDTH, EMBED = 4, 6, 20
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()


def rotated(x):
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0, 100.0], dtype=x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def scores_of(q, k):
    return (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~CAUSAL, -1e9)


def by_bmm(q, k, v):
    weights = scores_of(q.flatten(0, 1), k.flatten(0, 1)).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).view(q.shape)


ATTEND: dict = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "softmax": lambda q, k, v: scores_of(q, k).softmax(-1) @ v,
    "bmm": by_bmm,
    "rotary": lambda q, k, v: ATTEND["sdpa"](rotated(q), rotated(k), v),
    "norm": lambda q, k, v: ATTEND["sdpa"](F.layer_norm(q, (WIDTH,)), k, v),
    "softcap": lambda q, k, v: (30 * (scores_of(q, k) / 30).tanh()).softmax(-1) @ v,
    "bias": lambda q, k, v: F.scaled_dot_product_attention(q, k + 0.3, v, is_causal=True),
}
FUSED = {
    "three, heads": lambda y: (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in y.chunk(3, -1)),
    "heads, three": lambda y: y.unflatten(-1, (HEADS, 3, WIDTH)).permute(3, 0, 2, 1, 4),
    "width, three": lambda y: y.unflatten(-1, (HEADS, WIDTH, 3)).permute(4, 0, 2, 1, 3),
}


class Attention(nn.Module):
    """Attention with one projection of queries, keys and values, or with three."""

    def __init__(self, layout, attend, kv_heads=HEADS):
        super().__init__()
        self.layout, self.attend = layout, attend
        sizes = [3 * HEADS] if layout in FUSED else [HEADS, kv_heads, kv_heads]
        self.maps = nn.ModuleList(nn.Linear(EMBED, size * WIDTH) for size in sizes)
        self.last = nn.Linear(HEADS * WIDTH, EMBED)

    def forward(self, x, scale=1.0):
        if self.layout in FUSED:
            q, k, v = FUSED[self.layout](self.maps[0](x))
        else:
            q, k, v = (each(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in self.maps)
        return self.last(ATTEND[self.attend](q, k, v).transpose(1, 2).flatten(2)) * scale


class Model(nn.Module):
    """Two layers of attention, in a model with a number among its arguments."""

    def __init__(self, *options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, EMBED)
        self.layers = nn.ModuleList(Attention(*options) for _ in range(2))

    def forward(self, ids, *, scale=2.0):
        x = 3 * self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, scale=scale)
        return x


IDS = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))


def observed(model):
    """Return the monitor of a step of training, and the largest logit of each head."""
    with hw.monitor(model, every=1, statistics=["max_logit"]) as monitor:
        model(IDS, scale=2.0)
        monitor.step()
    return monitor, {(row["layer"], row["head"]): row["max_logit"] for row in monitor.history.rows(0)}


@pytest.mark.parametrize(
    "options",
    [
        *((layout, "sdpa") for layout in FUSED),
        ("own", "rotary"),
        ("own", "sdpa", 2),
        ("own", "rotary", 1),
        ("own", "softmax"),
        ("heads, three", "bmm"),
    ],
    ids=str,
)
def test_the_largest_logit_becomes_the_threshold_and_others_keep_their_bits(options):
    model = Model(*options).double()
    monitor, before = observed(model)
    threshold = sorted(before.values())[3]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    clipped = hw.qk_clip(model, monitor, threshold)
    assert {(each.layer, each.head) for each in clipped} == {head for head in before if before[head] > threshold}
    after = observed(model)[1]
    for layer, head in before:  # the second layer has other inputs
        if layer:
            continue
        if before[layer, head] > threshold:
            assert after[layer, head] == pytest.approx(threshold, rel=1e-12)
        else:
            assert after[layer, head] == before[layer, head]
    # Half of the factor goes to each projection if the head has its own key, and all of it to the query otherwise.
    exponent = 0.5 if len(options) == 2 else 1.0
    factors = {each.factor**exponent for each in clipped}
    for name, value in model.state_dict().items():
        ratios = (value / weights[name])[value != weights[name]].tolist()
        assert all(any(ratio == pytest.approx(factor) for factor in factors) for ratio in ratios)
        assert not ratios or "maps" in name


@pytest.mark.parametrize("attend", ["norm", "softcap", "bias"])
def test_logits_that_do_not_follow_the_projections_are_refused(attend):
    model = Model("own", attend).double()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    monitor, _ = observed(model)
    with pytest.raises(hw.InputError, match=r"got logits that are not halved with their projection.* in layers.0$"):
        hw.qk_clip(model, monitor, 1e-3)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_queries_without_a_linear_map_of_the_module_are_refused():
    class Bare(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    model = nn.Sequential(nn.Linear(EMBED, EMBED), Bare(), nn.Linear(EMBED, EMBED)).double()
    x = torch.randn(2, 5, EMBED, dtype=torch.float64)
    logits = {(0, 1): 3.0}
    with pytest.raises(hw.InputError, match=r"got Bare in 1, whose class is unknown; pass the monitor, or inputs="):
        clip_bare(model, logits, None)
    with pytest.raises(hw.InputError, match=r"got no linear map of its own that computes the queries .* in 1$"):
        clip_bare(model, logits, x)


def clip_bare(model, logits, inputs):
    """Clip a module that is found by a history alone, since its class is not called attention."""
    rows = [
        {"layer": 0, "head": head, "kv_head": head, "module": "1", "kind": "self", "sequences": 1}
        | {"nonfinite_rows": 0, "max_logit": 3.0}
        for head in range(HEADS)
    ]
    history = hw.History({})
    history.append(0, rows)
    hw.qk_clip(model, history, 1.0, inputs=inputs)
