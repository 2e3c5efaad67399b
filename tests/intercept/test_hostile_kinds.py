"""Kinds of attention in modules that are easily mistaken; the truth is stated for each."""

import math

import pytest
import torch
import torch.nn.functional as F
from self_attention import merge, split
from torch import nn

import headwise as hw

X, Y, Z = torch.randn(2, 7, 24), torch.randn(2, 7, 24), torch.randn(2, 5, 24)


class Attention(nn.Module):
    """Attention of projected queries to projected keys and values."""

    softmax = False

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = split(self.q(x)), split(self.k(context)), split(self.v(context))
        heads = (q @ k.mT).softmax(-1) @ v if self.softmax else F.scaled_dot_product_attention(q, k, v)
        return self.out(merge(heads))


class Case(nn.Module):
    """Base class: a model with attention modules `a`, `b` and `c`."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (Attention() for _ in range(3))
        self.norm, self.embed, self.time = nn.LayerNorm(24), nn.Embedding(11, 24), nn.Linear(1, 24)


class SumsOfLayers(Case):
    """Queries, keys and values come from three weighted sums of the outputs of two layers."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(24, 6)

    def forward(self, x):
        layers = torch.stack([x, x + self.a(x)])
        weights = self.weights(x).unflatten(-1, (3, 2)).softmax(-1)
        of_q, of_k, of_v = self.norm(torch.einsum("lbnd,bnvl->vbnd", layers, weights)).unbind(0)
        q, k, v = split(self.b.q(of_q)), split(self.b.k(of_k)), split(self.b.v(of_v))
        return self.b.out(merge(F.scaled_dot_product_attention(q, k, v)))


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
@torch.no_grad()
def test_weighted_sums_of_layers_are_of_unknown_kind_and_it_can_be_stated():
    model = SumsOfLayers()
    with (
        pytest.warns(UserWarning, match="it is unknown if queries and keys .*: SumsOfLayers$"),
        hw.watch(model) as heads,
    ):
        model(X)
    assert {(row["module"], row["kind"]) for row in heads.rows()} == {("a", "self"), ("", "cross")}
    with hw.watch(model, sites=[hw.Site("", kind="self")]) as heads:
        model(X)
    assert {row["kind"] for row in heads.rows()} == {"self"}


class ContextOfOtherContent(Case):
    truth = "a self, b cross, c self"

    def forward(self, x, y):
        return self.c(self.b(self.a(x, None), y), None)


class EncoderMemoryOfTheSameShape(Case):
    truth = "a self, b self, c cross"

    def forward(self, x, y):
        memory = self.norm(y + self.a(y))
        x = self.norm(x + self.b(x))
        return x + self.c(x, context=memory)


class MemoryOfTheSameInput(Case):
    """An encoder-decoder that is called with one input for both: its decoder attends to other features."""

    truth = "a self, b self, c cross"

    def forward(self, x, _):
        memory = self.norm(x + self.a(x))
        x = x + self.b(x)
        return x + self.c(x, memory)


class CachedMemory(Case):
    """Cross-attention to a memory that a module computes once and stores."""

    truth = "a self, b cross, c self"

    def forward(self, x, y):
        if not hasattr(self, "memory"):
            self.memory = self.a(y)
        for _ in range(2):
            x = x + self.b(x, self.memory)
        return self.c(x)


class SumOfStreams(Case):
    """Another stream is added in front of attention: still the same tokens on both sides."""

    truth = "a self, b self, c self"

    def forward(self, x, y):
        x = x + y
        x = x + self.a(x)
        x = self.norm(x + y)
        return self.c(x + self.b(self.norm(x)))


class TimeAddedToQueries(Case):
    """A time-step embedding is added to the queries' side only."""

    truth = "a self, b self, c cross"

    def forward(self, x, y):
        time = self.time(torch.tensor([[0.3], [0.7]]))[:, None]
        x = x + self.a(x + time, x)
        x = x + self.b(x, x + time)
        return self.c(x + time, y)


class Retrieved(Case):
    """Attention to the most similar tokens of a store, and to those of the input itself."""

    truth = "a cross, b cross, c self"

    def forward(self, x, y):
        nearest = (x @ y.mT).topk(3).indices.flatten(1)
        found = y.gather(1, nearest[..., None].expand(-1, -1, 24))
        own = (x @ x.mT).topk(3).indices.flatten(1)
        x = x + self.a(x, found) + self.b(x, x.gather(1, own[..., None].expand(-1, -1, 24)))
        return self.c(x)


class ObjectQueries(Case):
    """Learned queries attend to themselves and to an image, as in DETR; their content starts with zeros."""

    truth = "a self, b cross, c self"

    def forward(self, x, _):
        places = self.embed.weight[None].expand(2, -1, -1)
        content = torch.zeros_like(places)
        content = content + self.a(content + places)
        content = content + self.b(content + places, x)
        return self.c(content + places)


class KeysOfAnEarlierLayer(nn.Module):
    """Later layers use the keys and values of the first one (YOCO, cross-layer attention)."""

    truth = "layers.0 self, layers.1 self, layers.2 self"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SharedKeys(index == 0) for index in range(3))

    def forward(self, x, _):
        shared = None
        for layer in self.layers:
            out, shared = layer(x, shared)
            x = x + out
        return x


class SharedKeys(nn.Module):
    def __init__(self, has_keys):
        super().__init__()
        self.q, self.out = nn.Linear(24, 24), nn.Linear(24, 24)
        self.kv = nn.Linear(24, 48) if has_keys else None

    def forward(self, x, shared):
        k, v = shared if self.kv is None else map(split, self.kv(x).chunk(2, -1))
        heads = F.scaled_dot_product_attention(split(self.q(x)), k, v, is_causal=True)
        return self.out(merge(heads)), (k, v)


class KeysOfAnEarlierStream(KeysOfAnEarlierLayer):
    """YOCO: the second half projects keys from the stream in the middle, without attention of that module before."""

    truth = "layers.0 self, layers.1 self, layers.2 self"

    def __init__(self):
        super().__init__()
        self.kv = nn.Linear(24, 48)

    def forward(self, x, _):
        out, __ = self.layers[0](x, None)
        x = x + out
        shared = tuple(map(split, self.kv(x).chunk(2, -1)))
        for layer in self.layers[1:]:
            x = x + layer(x, shared)[0]
        return x


class LowRank(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(24, 2, bias=False), nn.Linear(2, 24, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5


class Adapters(Case):
    truth = "a self, b cross, c self"

    def __init__(self):
        super().__init__()
        for layer in (self.a, self.b, self.c):
            layer.q = LowRank(layer.q)

    def forward(self, x, y):
        return self.c(self.b(self.a(x), y))


class Joint(nn.Module):
    """Two streams with projections of their own that attend to both, and one that attends to both alone."""

    truth = "both self, one cross"

    def __init__(self):
        super().__init__()
        self.both, self.one = JointAttention(True), JointAttention(False)

    def forward(self, x, y):
        return self.both(x, y).sum() + self.one(x, y).sum()


class JointAttention(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.x, self.y, self.out, self.both = nn.Linear(24, 72), nn.Linear(24, 72), nn.Linear(24, 24), both

    def forward(self, x, y):
        (q, k, v), (q2, k2, v2) = (map(split, part) for part in (self.x(x).chunk(3, -1), self.y(y).chunk(3, -1)))
        q = torch.cat([q, q2], 2) if self.both else q
        heads = F.scaled_dot_product_attention(q, torch.cat([k, k2], 2), torch.cat([v, v2], 2))
        return self.out(merge(heads))


class ContextBesideTheInput(Case):
    """Keys are the input and a context; before, the same module had no context."""

    truth = "a cross+self, b self, c self"

    def forward(self, x, y):
        x = x + self.a(x)
        x = x + self.a(x, torch.cat([x, y], 1))
        return self.c(x + self.b(x))


class Shifted(Case):
    """Each token attends to the tokens after it in another order: keys are other tokens than the queries."""

    truth = "a cross, b self, c cross"

    def forward(self, x, _):
        x = x + self.a(x, x.roll(1, 1))
        x = x + self.b(x.roll(1, 1))
        return self.c(x[:, 1:], x[:, :-1])


class Experts(Case):
    """The keys are a gated sum of two projections; the queries are scaled by a statistic of the input."""

    truth = "a self, b cross, c self"

    def forward(self, x, y):
        gate = self.time(x.mean((1, 2))[:, None, None]).sigmoid()
        x = self.a(x * gate, x)
        x = self.b(x * gate, y * gate)
        return self.c(x / math.sqrt(2), x.clone().detach())


class BatchOfBoth(Case):
    """Both inputs in one batch, each attending to itself; and each to the other."""

    truth = "a self, b cross, c self"

    def forward(self, x, y):
        both = torch.cat([x, y])
        both = both + self.a(both)
        other = torch.cat([both[2:], both[:2]])
        return self.c(both + self.b(both, other))


class FeaturesBesideTheQueries(Case):
    """Features of other streams are concatenated to those of the queries, token by token."""

    truth = "a self, b cross, c self"

    def __init__(self):
        super().__init__()
        self.a.q, self.b.q = nn.Linear(48, 24), nn.Linear(48, 24)

    def forward(self, x, y):
        place = self.time(torch.linspace(0, 1, 7)[:, None]).expand_as(x)
        x = x + self.a(torch.cat([x, place], -1), x)
        x = x + self.b(torch.cat([x, place], -1), y)
        return self.c(x + y)


class FeaturesOfAnInput(FeaturesBesideTheQueries):
    truth = "a self, b cross, c self"

    def forward(self, x, y):
        x = x + self.a(torch.cat([x, y], -1), x)
        return self.c(x + self.b(torch.cat([x, x], -1), y))


CASES = {
    case.__name__: case
    for case in (
        *(ContextOfOtherContent, EncoderMemoryOfTheSameShape, MemoryOfTheSameInput, CachedMemory, SumOfStreams),
        *(TimeAddedToQueries, Retrieved, ObjectQueries, KeysOfAnEarlierLayer, KeysOfAnEarlierStream, Adapters, Joint),
        *(ContextBesideTheInput, Shifted, Experts, BatchOfBoth, FeaturesBesideTheQueries, FeaturesOfAnInput),
    )
}


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_kinds_are_those_of_the_model(name, softmax, monkeypatch):
    monkeypatch.setattr(Attention, "softmax", softmax)
    torch.manual_seed(0)
    model = CASES[name]()
    with hw.watch(model) as heads:
        model(X, Y)
    kinds = {}
    for row in heads.rows():
        kinds.setdefault(row["module"], set()).add(row["kind"])
    assert ", ".join(f"{path} {'+'.join(sorted(found))}" for path, found in kinds.items()) == model.truth
