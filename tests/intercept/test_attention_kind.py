"""Self- or cross-attention, by the tensors from which queries and keys are computed, under any names."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from self_attention import merge, split
from torch import nn

import headwise as hw
from tiny import TOKENS

pytestmark = pytest.mark.usefixtures("no_grad")


class Attention(nn.Module):
    """Attention whose queries and keys are projections of its arguments, by SDPA or by a softmax."""

    def __init__(self, width=24, softmax=False):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.softmax = softmax

    def forward(self, tokens, others=None, positions=0, key_positions=0, values=None):
        others = tokens if others is None else others
        q, k = split(self.q(tokens + positions)), split(self.k(others + key_positions))
        v = split(self.v(others if values is None else values))
        heads = (q @ k.mT * 0.3).softmax(-1) @ v if self.softmax else F.scaled_dot_product_attention(q, k, v)
        return self.out(merge(heads))


X, Y, P, Z = torch.randn(2, 7, 24), torch.randn(2, 5, 24), torch.randn(2, 7, 24), torch.randn(2, 7, 24)
CALLS = {
    "one argument": (lambda attend: attend(X), "self"),
    "None as the second": (lambda attend: attend(X, None), "self"),
    "the same by position": (lambda attend: attend(X, X), "self"),
    "another by position": (lambda attend: attend(X, Y), "cross"),
    "another of the same length": (lambda attend: attend(X, P), "cross"),
    "another by name": (lambda attend: attend(X, others=Y), "cross"),
    "positions of the queries": (lambda attend: attend(X, positions=P), "self"),
    "positions of the keys": (lambda attend: attend(X, key_positions=P, values=X), "self"),
    "two kinds of positions": (lambda attend: attend(X, positions=P, key_positions=Z), "self"),
    "shared positions": (lambda attend: attend(X, Z.exp(), positions=P, key_positions=P), "cross"),
    "the first tokens to all": (lambda attend: attend(X[:, :3], X), "cross"),
    "the first tokens to the others": (lambda attend: attend(X[:, :3], X[:, 3:]), "cross"),
    "the first tokens to themselves": (lambda attend: attend(X[:, :3], X[:, :3]), "self"),
    "one half of the batch to the other": (lambda attend: attend(*torch.cat([X, P]).chunk(2)), "cross"),
    "each sequence to the other": (lambda attend: attend(X, X.flip(0)), "cross"),
    "halves of the features": (lambda attend: attend(*(x.repeat(1, 1, 2) for x in X.chunk(2, -1))), "self"),
    "computed from one tensor": (lambda attend: attend(X * 2, X.relu()), "self"),
}


class Caller(nn.Module):
    """A module that calls the attention in it as it is told."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *_):
        return self.call(self.inner)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_kind_follows_from_the_sources_of_queries_and_keys(name, softmax):
    call, kind = CALLS[name]
    model = Caller(Attention(softmax=softmax), call)
    with hw.watch(model) as heads:
        model(X, Y, P)
    assert {row["kind"] for row in heads.rows()} == {kind}


class TalkingHeads(Attention):
    """Attention whose scores pass through a linear map of the heads before the softmax (Shazeer et al. 2020)."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.map = mix, nn.Parameter(torch.randn(3, 3))

    def forward(self, tokens, others=None):
        others = tokens if others is None else others
        q, k, v = split(self.q(tokens)), split(self.k(others)), split(self.v(others))
        self.weights = (self.mix(q @ k.mT * 0.3, self.map) * 0.7).softmax(-1)
        return self.out(merge(self.weights @ v))


MIXED = {
    "einsum": lambda scores, of_heads: torch.einsum("hg,bgqk->bhqk", of_heads, scores),
    "einsum with the map on the right": lambda scores, of_heads: torch.einsum("bgqk,gh->bhqk", scores, of_heads),
    "convolution": lambda scores, of_heads: F.conv2d(scores, of_heads[..., None, None]),
    "linear": lambda scores, of_heads: F.linear(scores.permute(0, 2, 3, 1), of_heads).permute(0, 3, 1, 2),
    "matrix product": lambda scores, of_heads: (of_heads @ scores.flatten(2)).view(scores.shape),
    "two maps": lambda scores, of_heads: F.linear(F.linear(scores.transpose(1, 3), of_heads), of_heads).transpose(1, 3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mix", MIXED)
@pytest.mark.parametrize(("others", "kind"), [(None, "self"), (Y, "cross")])
def test_the_kind_of_scores_with_mixed_heads_is_that_of_queries_and_keys(mix, others, kind):
    model = nn.Sequential(TalkingHeads(MIXED[mix]))
    with hw.watch(model) as heads:
        model[0](X, others)
    entropy = torch.special.entr(model[0].weights).sum(-1).mean((0, 2))
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-4)
    assert {row["kind"] for row in heads.rows()} == {kind}
    if kind == "self":
        diagonal = model[0].weights.diagonal(0, 2, 3).mean((0, 2))
        assert [row["self"] for row in heads.rows()] == pytest.approx(diagonal.tolist(), rel=1e-4)


class JoinedScores(Attention):
    """Attention to the tokens and to others, whose scores `join` concatenates or writes into one tensor."""

    def __init__(self, join):
        super().__init__()
        self.join = join

    def forward(self, tokens, others):
        q, k, v = (split(each(tokens)) for each in (self.q, self.k, self.v))
        keys, values = (split(each(others)) for each in (self.k, self.v))
        scores, values = self.join(q @ k.mT * 0.3, q @ keys.mT * 0.3), torch.cat([v, values], 2)
        self.weights = scores.softmax(-1)
        return self.out(merge(self.weights @ values))


def cast_and_joined(one, other):
    return torch.concat([one.double(), other.double()], dim=3).float()


JOINED = {
    "concatenated": lambda one, other: torch.cat([one, other], -1),
    "cast": cast_and_joined,
    "transposed": lambda one, other: torch.cat([one.mT, other.mT], 2).mT,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("join", JOINED)
@pytest.mark.parametrize(("others", "kind"), [(Y, "cross"), (P, "cross"), (X, "self")])
def test_the_kind_of_concatenated_scores_is_that_of_concatenated_keys(join, others, kind):
    model = JoinedScores(JOINED[join])
    with warnings.catch_warnings(), hw.watch(model) as heads:
        if kind == "self":  # keys of the same tokens twice have no positions
            warnings.simplefilter("ignore")
        model(X, others)
    assert {row["kind"] for row in heads.rows()} == {kind}
    entropy = torch.special.entr(model.weights.double()).sum(-1).mean((0, 2))
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-4)


@pytest.mark.filterwarnings("error")
def test_concatenated_scores_of_parts_of_the_keys_are_self_attention():
    class Parts(Attention):
        def forward(self, x):
            q, k, v = (split(each(x)) for each in (self.q, self.k, self.v))
            self.weights = torch.cat([q @ part.mT for part in k.split(4, 2)], -1).softmax(-1)
            return self.out(merge(self.weights @ v))

    model = Parts()
    with hw.watch(model) as heads:
        model(X)
    own = model.weights.diagonal(dim1=-2, dim2=-1).mean((0, 2))
    assert [(row["kind"], row["self"]) for row in heads.rows()] == [
        ("self", pytest.approx(value, rel=1e-4)) for value in own.tolist()
    ]


class Perceiver(nn.Module):
    """Learned latents that attend to the input and to themselves, twice."""

    def __init__(self, softmax):
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.randn(5, 24)), nn.LayerNorm(24)
        self.layers = nn.ModuleList(Attention(softmax=softmax) for _ in range(4))

    def forward(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        for cross, own in zip(self.layers[::2], self.layers[1::2], strict=True):
            latents = latents + cross(latents, torch.cat([self.norm(x), latents], 1))
            latents = latents + own(latents)
        return latents


@pytest.mark.parametrize("softmax", [False, True])
def test_latents_that_attend_to_an_input_and_themselves_are_cross_attention(softmax):
    model = Perceiver(softmax)
    with hw.watch(model) as heads:
        model(X)
    kinds = {row["module"]: row["kind"] for row in heads.rows()}
    assert kinds == {f"layers.{index}": kind for index, kind in enumerate(["cross", "self"] * 2)}


@pytest.mark.parametrize("is_same", [True, False])
def test_torchs_transformer_has_cross_attention_also_of_one_input_with_itself(is_same):
    model = nn.Transformer(24, 3, 2, 2, 37, batch_first=True).eval()
    with hw.watch(model) as heads:
        model(X, X if is_same else P)
    kinds = {row["module"]: row["kind"] for row in heads.rows()}
    assert len(kinds) == 6
    assert kinds == {path: "cross" if path.endswith("multihead_attn") else "self" for path in kinds}


class DetrLayer(nn.Module):
    """Decoder layer as in DETR: positions are added to queries and keys, and not to values."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(24, 3, batch_first=True) for _ in range(2))

    def forward(self, x, memory, positions, memory_positions):
        x = x + self.own(x + positions, x + positions, x)[0]
        return x + self.cross(x + positions, memory + memory_positions, memory)[0]


def test_positions_added_in_front_of_torchs_layer_do_not_change_the_kind():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Embedding(7, 24)
            self.layers = nn.ModuleList(DetrLayer() for _ in range(2))

        def forward(self, memory, positions):
            queries = self.queries.weight[None].expand(2, -1, -1)
            x = torch.zeros_like(queries)
            for layer in self.layers:
                x = layer(x, memory, queries, positions)
            return x

    model = Model()
    with hw.watch(model) as heads:
        model(Y, torch.randn_like(Y))
    kinds = {row["module"]: row["kind"] for row in heads.rows()}
    assert kinds == {f"layers.{i}.{name}": name.replace("own", "self") for i in range(2) for name in ("own", "cross")}


def test_cached_keys_stay_self_attention_and_cached_context_stays_cross_attention():
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    attention = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "forced_eos_token_id": None}
    config = transformers.BartConfig(vocab_size=97, **sizes, **attention)
    model = transformers.BartForConditionalGeneration(config).eval()
    with hw.watch(model) as heads:
        model.generate(TOKENS, max_new_tokens=4, min_new_tokens=4, num_beams=1)
    kinds = {row["module"]: row["kind"] for row in heads.rows()}
    assert len(kinds) == 5
    assert kinds == {path: "cross" if path.endswith("encoder_attn") else "self" for path in kinds}


class SharedKeys(nn.Module):
    """A second layer that uses the keys and values of the first."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.q = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        x = x + self.out(merge(F.scaled_dot_product_attention(q, k, v)))
        return F.scaled_dot_product_attention(split(self.q(x)), k, v)


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_shared_keys_stay_self_attention():
    model = SharedKeys()
    with hw.watch(model) as heads:
        model(X)
    assert {row["kind"] for row in heads.rows()} == {"self"}


class Core(nn.Module):
    def forward(self, a, b, c):
        return F.scaled_dot_product_attention(a, b, c)


def test_a_module_that_gets_projected_queries_and_keys_has_the_kind_of_their_sources():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv, self.core, self.cross = nn.Linear(24, 24), nn.Linear(24, 48), Core(), Core()

        def forward(self, x, y):
            own, other = (map(split, self.kv(z).chunk(2, -1)) for z in (x, y))
            return self.core(split(self.q(x)), *own) + self.cross(split(self.q(x)), *other)

    model = Model()
    with hw.watch(model) as heads:
        model(X, Y)
    assert {row["module"]: row["kind"] for row in heads.rows()} == {"core": "self", "cross": "cross"}


def test_a_kind_that_is_unknown_is_named():
    class Attention(nn.Module):
        def forward(self, _):
            return F.scaled_dot_product_attention(*map(split, (self.queries, self.keys, self.keys)))

    model = Attention()
    model.queries, model.keys = X, Y
    with (
        pytest.warns(UserWarning, match="it is unknown if queries and keys of these modules come from"),
        hw.watch(model),
    ):
        model(X)
