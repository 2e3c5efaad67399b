"""Softmaxes and merges that look like attention of heads, and are not: they are named, and never reported."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, WIDTH, merge, split
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")


def weights_of(q, k):
    return torch.softmax(q @ k.mT * DIM**-0.5, -1)


class Block(nn.Module):
    """Projections around a function of queries, keys and values; named in no way that tells what it is."""

    def __init__(self, mix):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = mix

    def forward(self, x):
        return self.o(self.mix(self.q(x), self.k(x), self.v(x)))


class SelfAttention(Block):
    """The same, with a name and a number of heads."""

    num_heads = HEADS


def plain(q, k, v):
    return merge(weights_of(split(q), split(k)) @ split(v))


def linear(q, k, v):
    """Linear attention: softmax over features and over tokens, no weights of keys."""
    return merge(split(q).softmax(-1) @ (split(k).softmax(-2).mT @ split(v)))


def nystrom(q, k, v):
    """The weights are a product of three matrices, between queries, landmarks and keys."""
    q, k, v = split(q), split(k), split(v)
    to_queries, to_keys = q.unflatten(2, (-1, 4)).mean(-2), k.unflatten(2, (-1, 4)).mean(-2)
    middle = torch.linalg.pinv(weights_of(to_queries, to_keys))
    return merge(weights_of(q, to_keys) @ middle @ (weights_of(to_queries, k) @ v))


def not_moved(q, k, v):
    """Heads merged without moving their axis: features of the result are queries and values."""
    out = weights_of(split(q), split(k)) @ split(v)
    return out.reshape(len(q), -1, WIDTH)


def not_moved_by_sdpa(q, k, v):
    return F.scaled_dot_product_attention(split(q), split(k), split(v)).reshape(len(q), -1, WIDTH)


def heads_first(q, k, v):
    """(h*b, q, k), merged by concatenation."""
    q, k, v = (torch.cat(x.split(DIM, -1)) for x in (q, k, v))
    return torch.cat((weights_of(q, k) @ v).chunk(HEADS), -1)


def one_by_one(q, k, v):
    """A loop over heads whose outputs are concatenated."""
    parts = zip(*(x.split(DIM, -1) for x in (q, k, v)), strict=True)
    return torch.cat([weights_of(q, k) @ v for q, k, v in parts], -1)


def one_by_one_stacked(q, k, v):
    parts = zip(*(split(x).unbind(1) for x in (q, k, v)), strict=True)
    return torch.stack([F.scaled_dot_product_attention(*part) for part in parts], -2).flatten(-2)


def two_groups(q, k, v):
    """Heads of two sizes, each with a call of its own."""
    left, right = ([x[..., part] for x in (q, k, v)] for part in (slice(6), slice(6, None)))
    outs = [weights_of(*[x.unflatten(-1, (3, -1)).transpose(1, 2) for x in part[:2]]) for part in (left, right)]
    values = [part[2].unflatten(-1, (3, -1)).transpose(1, 2) for part in (left, right)]
    return torch.cat([merge(out @ value) for out, value in zip(outs, values, strict=True)], -1)


NAMED = {"linear": linear, "nystrom": nystrom, "not moved": not_moved, "not moved, SDPA": not_moved_by_sdpa}
NAMED |= {"heads first": heads_first, "one by one": one_by_one, "stacked": one_by_one_stacked, "groups": two_groups}


@pytest.mark.parametrize("kind", [Block, SelfAttention])
@pytest.mark.parametrize("mix", NAMED)
@pytest.mark.parametrize("length", [8, 12])
def test_what_is_not_attention_of_heads_is_never_reported(kind, mix, length):
    torch.manual_seed(0)
    model = nn.Sequential(kind(NAMED[mix]), nn.LayerNorm(WIDTH), kind(NAMED[mix]))
    x = torch.randn(2, length, WIDTH)
    with pytest.raises(hw.InputError, match="attention in a way that can be seen, got none in"), hw.watch(model):
        model(x)
    with (
        pytest.raises(hw.InputError, match="expected (modules|heads that can be gated)"),
        hw.gate(model, {("2", 0): 0.0}),
    ):
        model(x)


class HeadByHead(nn.Module):
    """A loop over heads, each with matrices of its own or slices of common ones; their projections are summed."""

    def __init__(self, own):
        super().__init__()
        self.own, self.qkv, self.o = own, nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(HEADS, WIDTH, DIM))
        self.heads = nn.ParameterList(torch.randn(WIDTH, 3 * DIM) * 0.3 for _ in range(HEADS))

    def forward(self, x):
        self.kept, y = [], 0
        for head in range(HEADS):
            if self.own:
                q, k, v = (x @ self.heads[head]).chunk(3, -1)
            else:
                q, k, v = (part[..., head * DIM : (head + 1) * DIM] for part in self.qkv(x).chunk(3, -1))
            y = y + F.linear(F.scaled_dot_product_attention(q, k, v), self.o[head])
            scores = (q @ k.mT * DIM**-0.5).exp()
            self.kept.append((scores / scores.sum(-1, keepdim=True))[:, None])
        return y


def test_heads_of_one_layer_are_not_averaged():
    model = nn.Sequential(HeadByHead(False))
    match = "they compute it in several calls, each of which may be one head"
    with pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(torch.randn(2, 7, WIDTH))


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_heads_with_matrices_of_their_own_have_rows_of_their_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(HeadByHead(True)), torch.randn(2, 7, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    assert [row["module"] for row in heads.rows()] == ["0", "0[1]", "0[2]"]
    require_statistics(heads, model[0].kept)
    with hw.gate(model, {("0[1]", 0): 0.0}):
        gated = model(x)
    model[0].o[1] = 0.0
    torch.testing.assert_close(gated, model(x))


class Pooling(nn.Module):
    """A softmax of one linear score for each token, after a layer of attention."""

    def __init__(self):
        super().__init__()
        self.block, self.score = Block(plain), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.block(x)
        return self.score(x).softmax(1).mT @ x


def test_pooling_by_a_linear_score_is_named():
    model = Pooling()
    sentence = "^these modules multiply weights that are normalised over an axis .*: Pooling$"
    with pytest.warns(UserWarning, match=sentence), hw.watch(model) as heads:
        model(torch.randn(2, 7, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"block"}


def test_queries_in_parts_are_one_head():
    """Two calls of one head with the same values."""

    def in_parts(q, k, v):
        return torch.cat([weights_of(part, k) @ v for part in q.split([3, 4], 1)], 1)

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(in_parts)), torch.randn(2, 7, WIDTH)
    warns = pytest.warns(UserWarning, match="^positions of queries among the keys")
    with warns, hw.watch(model) as heads:
        model(x)
    assert [row["head"] for row in heads.rows()] == [0]


@pytest.mark.parametrize("route", ["matmul", "einsum"])
def test_query_heads_that_share_keys_and_values_are_heads(route):
    """Six heads of queries for two of keys, or for one: the values have no axis of the query heads."""

    class Grouped(nn.Module):
        def __init__(self, groups):
            super().__init__()
            self.groups, self.q, self.o = groups, nn.Linear(30, 30), nn.Linear(30, 30)
            self.kv = nn.Linear(30, 10 * groups)

        def forward(self, x):
            q = self.q(x).unflatten(-1, (self.groups, -1, 5)).permute(0, 2, 3, 1, 4)  # b g h n d
            k, v = self.kv(x).unflatten(-1, (2, self.groups, 5)).permute(2, 0, 3, 1, 4)  # b g n d
            if route == "matmul":
                weights = weights_of(q, k[:, :, None])
                out = weights @ v[:, :, None]
            else:
                weights = (torch.einsum("bghid,bgjd->bghij", q, k) * DIM**-0.5).softmax(-1)
                out = torch.einsum("bghij,bgjd->bghid", weights, v)
            self.weights = weights.flatten(1, 2)
            return self.o(out.permute(0, 3, 1, 2, 4).flatten(2))

    for groups in (1, 2):
        torch.manual_seed(0)
        model, x = nn.Sequential(Grouped(groups)), torch.randn(2, 7, 30)
        with hw.watch(model) as heads:
            model(x)
        require_statistics(heads, [model[0].weights])
        with hw.gate(model, {("0", 4): 0.0}):
            gated = model(x)
        model[0].o.weight[:, 20:25] = 0.0
        torch.testing.assert_close(gated, model(x))
