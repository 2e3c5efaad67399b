"""Self- or cross-attention where scores are sums of products, keys are cached before their projection, and queries are
selected tokens.
"""

import pytest
import torch
import torch.nn.functional as F
from self_attention import merge, split
from torch import nn

import headwise as hw


def kinds_of(model, *arguments, **options):
    with torch.no_grad(), hw.watch(model, **options) as heads:
        model(*arguments)
    return {row["kind"] for row in heads.rows()}


X, Y, BOXES = torch.randn(2, 7, 24), torch.randn(2, 7, 24), torch.randn(2, 7, 2)


class PositionProducts(nn.Module):
    """Attention whose scores are the sum of a product with keys and one with embeddings of pairs of boxes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.box = nn.Linear(2, 8)

    def forward(self, x, others, boxes):
        q, k, v = split(self.q(x)), split(self.k(others)), split(self.v(others))
        x, y = boxes[..., 0], boxes[..., 1]
        pairs = torch.stack([x[:, :, None] - x[:, None], y[:, :, None] - y[:, None]], -1).sin()
        scores = torch.einsum("bnid,bijd->bnij", q, self.box(pairs)) + q @ k.mT
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("others", "kind"), [(X, "self"), (Y, "cross")])
def test_a_product_of_queries_with_positions_does_not_decide_the_kind(others, kind):
    assert kinds_of(PositionProducts(), X, others, BOXES) == {kind}


class LatentAttention(nn.Module):
    """Attention whose keys and values are projections of latents, which are cached: appended to those before, or
    written to their places in memory that is allocated once.
    """

    def __init__(self, is_static, cache):
        super().__init__()
        self.q, self.down, self.up, self.out = nn.Linear(24, 24), nn.Linear(24, 5), nn.Linear(5, 48), nn.Linear(24, 24)
        self.is_static, self.cache = is_static, cache

    def forward(self, x):
        latents, cache, length = self.down(x), self.cache, x.shape[1]
        if self.is_static:
            if "latents" not in cache:
                cache |= {"latents": x.new_zeros(2, 19, 5), "end": torch.tensor([0])}
            places = torch.arange(length) + cache["end"]
            cache["latents"].index_copy_(1, places, latents)
            cache["end"] = cache["end"] + length
            visible = torch.arange(19) <= places[:, None]
        else:
            cache["latents"] = torch.cat([cache.get("latents", latents[:, :0]), latents], 1)
            keys = cache["latents"].shape[1]
            visible = torch.arange(keys) <= torch.arange(keys - length, keys)[:, None]
        k, v = map(split, self.up(cache["latents"]).chunk(2, -1))
        heads = F.scaled_dot_product_attention(split(self.q(x)), k, v, attn_mask=visible)
        return self.out(merge(heads))


@pytest.mark.parametrize("is_static", [False, True])
@torch.no_grad()
def test_cached_latents_stay_self_attention(is_static):
    torch.manual_seed(0)
    model, x = LatentAttention(is_static, {}), torch.randn(2, 11, 24)
    with hw.watch(model) as whole:
        model(x)
    model.cache.clear()
    with hw.watch(model) as cached:
        for part in x.split([7, 1, 3], 1):
            model(part)
    assert [row["kind"] for row in cached.rows()] == ["self"] * 3
    for row, expected in zip(cached.rows(), whole.rows(), strict=True):
        assert row["distance"] == pytest.approx(expected["distance"], rel=1e-5)
        assert row["first"] == pytest.approx(expected["first"], rel=1e-5)


class LatentWindow(LatentAttention):
    """The same for single tokens after a prompt, with memory for the latents of the last 5 tokens. These move to the
    left at each token.
    """

    def __init__(self):
        super().__init__(True, {})

    def forward(self, x):
        latents, cache = self.down(x), self.cache
        if "latents" in cache:
            moved = cache["latents"].roll(-1, dims=1)
            moved[:, torch.tensor([-1])] = latents
            latents = cache["latents"].copy_(moved)
        else:
            cache["latents"] = latents[:, -5:].clone()
        k, v = map(split, self.up(latents).chunk(2, -1))
        keys, queries = torch.arange(latents.shape[1]), torch.arange(latents.shape[1])[-x.shape[1] :, None]
        visible = (keys <= queries) & (keys > queries - 5)
        heads = F.scaled_dot_product_attention(split(self.q(x)), k, v, attn_mask=visible)
        return self.out(merge(heads))


@torch.no_grad()
def test_cached_latents_that_move_to_other_places_stay_self_attention():
    torch.manual_seed(0)
    model, x = LatentWindow(), torch.randn(2, 11, 24)
    with hw.watch(model) as whole:
        model(x)
    model.cache.clear()
    with hw.watch(model) as cached:
        for part in x.split([7, 1, 1, 1, 1], 1):
            model(part)
    assert [row["kind"] for row in cached.rows()] == ["self"] * 3
    for row, expected in zip(cached.rows(), whole.rows(), strict=True):
        for name in ("distance", "first", "entropy", "output_norm"):
            assert row[name] == pytest.approx(expected[name], rel=1e-5), name


@torch.no_grad()
def test_cached_latents_of_unknown_tokens_are_named_and_can_be_stated():
    model = LatentAttention(False, {"latents": torch.randn(2, 5, 5)})
    with pytest.warns(UserWarning, match="it is unknown if queries and keys of these modules come from"):
        assert kinds_of(model, X) == {"cross"}
    with pytest.warns(UserWarning, match="positions of queries among the keys could not be established"):
        assert kinds_of(model, X, sites=[hw.Site("", kind="self")]) == {"self"}


class ContextOrNone(nn.Module):
    """Two layers with the same weights: the second attends to a context, too."""

    def __init__(self):
        super().__init__()
        self.inner = LatentAttention(False, {})

    def forward(self, x, context):
        self.inner.cache.clear()
        x = self.inner(x)
        self.inner.cache = {"latents": self.inner.down(context)}
        return self.inner(x)


def test_a_context_is_not_taken_for_cached_keys():
    assert kinds_of(ContextOrNone(), X, Y) == {"self", "cross"}


class Segments(nn.Module):
    """Attention to the hidden states of the segment before, which the model stores, or to an encoder's output."""

    def __init__(self, is_own):
        super().__init__()
        self.first, self.encoder, self.kv = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 48)
        self.q, self.is_own, self.memory = nn.Linear(24, 24), is_own, None

    def forward(self, x, y):
        x = self.first(x)
        tokens = x if self.memory is None else torch.cat([self.memory, x], 1)
        k, v = map(split, self.kv(tokens).chunk(2, -1))
        self.memory = x if self.is_own else self.encoder(y)
        return F.scaled_dot_product_attention(split(self.q(x)), k, v).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:positions of queries among the keys")
@pytest.mark.parametrize(("is_own", "kinds"), [(True, {"self"}), (False, {"self", "cross"})])
@torch.no_grad()
def test_stored_states_are_cached_if_the_same_weights_computed_them(is_own, kinds):
    model = Segments(is_own)
    with hw.watch(model) as heads:
        for _ in range(2):
            model(X, Y)
    assert {row["kind"] for row in heads.rows()} == kinds


class Routed(nn.Module):
    """Attention whose queries are projected by experts: tokens are sorted by expert, projected, and sorted back; or
    not sorted back.
    """

    def __init__(self, is_restored):
        super().__init__()
        self.experts, self.kv, self.out = nn.Parameter(torch.randn(2, 24, 24)), nn.Linear(24, 48), nn.Linear(24, 24)
        self.router, self.is_restored = nn.Linear(24, 1), is_restored

    def forward(self, x):
        choice = self.router(x).flatten().gt(0).long()
        order = choice.argsort()
        tokens = x.flatten(0, 1)[order]
        parts = tokens.split(torch.bincount(choice, minlength=2).tolist())
        q = torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.experts, strict=True)])
        if self.is_restored:
            q = torch.zeros_like(q).index_add(0, order, q)
        k, v = map(split, self.kv(x).chunk(2, -1))
        heads = F.scaled_dot_product_attention(split(q.view_as(x)), k, v)
        return self.out(merge(heads))


def test_queries_that_experts_project_are_named_and_their_kind_can_be_stated():
    model = Routed(is_restored=True)
    with pytest.warns(UserWarning, match="it is unknown if queries and keys of these modules come from"):
        assert kinds_of(model, X) == {"cross"}
    assert kinds_of(model, X, sites=[hw.Site("", kind="self")]) == {"self"}
    assert kinds_of(Routed(is_restored=False), X) == {"cross"}
