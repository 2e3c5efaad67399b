"""Softmax attention in other forms than softmax and matmul, against weights by definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, WIDTH, merge, require_gate, split
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH = 11
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
UNKNOWN_SCORES = "ignore:the scores behind the attention weights"
aten = torch.ops.aten


def scores_of(q, k, hidden):
    return (q @ k.mT).masked_fill(hidden, -torch.inf)


def padded(q, k, v, hidden):
    return F.pad(scores_of(q, k, hidden), (0, 1)).softmax(-1)[..., :-1] @ v


def padded_in_front(q, k, v, hidden):
    return torch.einsum("bhqk,bhkd->bhqd", F.pad(scores_of(q, k, hidden), (1, 0)).softmax(-1)[..., 1:], v)


def zeros_of_a_concatenation(q, k, v, hidden):
    scores = scores_of(q, k, hidden)
    return torch.cat([torch.zeros(2, HEADS, LENGTH, 1), scores], -1).softmax(-1).narrow(-1, 1, LENGTH) @ v


def one_more_in_the_sum(q, k, v, hidden):
    weights = scores_of(q, k, hidden).exp()
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


def one_more_without_the_largest(q, k, v, hidden):
    scores = scores_of(q, k, hidden)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    return torch.div(weights, weights.sum(-1, keepdim=True) + (-largest).exp()) @ v


def softmin(q, k, v, hidden):
    return F.softmin(-scores_of(q, k, hidden), dim=-1) @ v


def exponential_of_log_softmax(q, k, v, hidden):
    return torch.exp(F.log_softmax(scores_of(q, k, hidden), dim=-1)) @ v


def exponential_minus_logsumexp(q, k, v, hidden):
    scores = scores_of(q, k, hidden)
    return (scores - torch.logsumexp(scores, -1, keepdim=True)).exp() @ v


def exponential_and_sum(q, k, v, hidden):
    weights = scores_of(q, k, hidden).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def exponential_without_the_largest(q, k, v, hidden):
    scores = scores_of(q, k, hidden)
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return torch.einsum("bhqk,bhkd->bhqd", weights * weights.sum(-1, keepdim=True).reciprocal(), v)


def divided_in_place(q, k, v, hidden):
    weights = scores_of(q, k, hidden).exp()
    weights /= weights.sum(-1, keepdim=True)
    return weights @ v


def normalised_by_a_function(q, k, v, hidden):
    return F.normalize(scores_of(q, k, hidden).exp(), p=1, dim=-1) @ v


def operators(q, k, v, hidden):
    scores = aten.masked_fill.Scalar(aten.matmul.default(q, aten.transpose.int(k, -1, -2)), hidden, -torch.inf)
    return aten.matmul(aten._softmax.default(scores, -1, False), v)


def operators_of_batches(q, k, v, hidden):
    weights = aten.softmax.int(aten.view.default(scores_of(q, k, hidden), [2 * HEADS, LENGTH, LENGTH]), 2)
    return aten.view(aten.bmm(weights, aten.reshape(v, [2 * HEADS, LENGTH, DIM])), [2, HEADS, LENGTH, DIM])


def private_function(q, k, v, hidden):
    return torch._softmax(scores_of(q, k, hidden), -1, False) @ v


def multiplied_and_summed(q, k, v, hidden):
    scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(4).masked_fill(hidden, -torch.inf)
    return torch.sum(v[:, :, None] * scores.softmax(-1).unsqueeze(-1), dim=3)


def multiplied_by_expanded_keys(q, k, v, hidden):
    size = (2, HEADS, LENGTH, LENGTH, DIM)
    scores = torch.mul(k[:, :, None].expand(size), q[:, :, :, None].expand(size)).sum(dim=-1, keepdim=True)
    return scores.squeeze(-1).masked_fill(hidden, -torch.inf).softmax(-1) @ v


WITH_ZERO = [padded, padded_in_front, zeros_of_a_concatenation, one_more_in_the_sum, one_more_without_the_largest]
SHIFTED = [exponential_of_log_softmax, exponential_minus_logsumexp, exponential_without_the_largest]
SHIFTED += [one_more_without_the_largest]
OTHERS = [softmin, exponential_and_sum, divided_in_place, normalised_by_a_function, operators, operators_of_batches]
OTHERS += [private_function, multiplied_and_summed, multiplied_by_expanded_keys]


class Block(nn.Module):
    """Projections around a function of queries, keys, values and a mask, with names that say nothing of attention."""

    def __init__(self, way, causal):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.hidden = way, ~CAUSAL if causal else torch.zeros_like(CAUSAL)

    def truth(self, x):
        """Return scores and weights by definition."""
        q, k, _ = map(split, self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + torch.zeros(LENGTH, LENGTH).masked_fill(
            self.hidden, -torch.inf
        )
        return scores, scores.exp() / (scores.exp().sum(-1, keepdim=True) + (self.way in WITH_ZERO))

    def forward(self, x):
        return self.out_proj(merge(self.way(*map(split, self.qkv(x).chunk(3, -1)), self.hidden)))


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings(UNKNOWN_SCORES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", list(dict.fromkeys([*WITH_ZERO, *SHIFTED, *OTHERS])))
def test_every_form_has_the_statistics_of_its_definition(way, causal):
    model, x = nn.Sequential(Block(way, causal)), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    scores, weights = model[0].truth(x)
    require_statistics(heads, [weights])
    outputs = weights @ split(model[0].qkv(x).chunk(3, -1)[2])
    rows = heads.rows()
    assert [row["output_norm"] for row in rows] == pytest.approx(outputs.norm(dim=-1).mean((0, 2)).tolist(), rel=1e-9)
    if way in SHIFTED:
        assert all("max_logit" not in row for row in rows)
    else:
        assert [row["max_logit"] for row in rows] == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-9)
    require_gate(model, x)


@pytest.mark.filterwarnings(UNKNOWN_SCORES)
@pytest.mark.parametrize(
    "way", [exponential_and_sum, exponential_without_the_largest, divided_in_place, normalised_by_a_function]
)
def test_one_token_attends_to_itself(way):
    model, x = nn.Sequential(Block(way, False)), torch.randn(2, 1, WIDTH)
    model[0].hidden = torch.zeros(1, 1, dtype=torch.bool)
    with hw.watch(model) as heads:
        model(x)
    values = split(model[0].qkv(x).chunk(3, -1)[2])
    norms = values.norm(dim=-1).mean((0, 2)).tolist()
    assert [(row["entropy"], row["self"]) for row in heads.rows()] == [(0.0, 1.0)] * HEADS
    assert [row["output_norm"] for row in heads.rows()] == pytest.approx(norms, rel=1e-9)
    require_gate(model, x)


class Pool(nn.Module):
    """Pooling by learned queries, one for each head."""

    def __init__(self, way):
        super().__init__()
        self.query, self.way = nn.Parameter(torch.randn(HEADS, 2, DIM)), way
        self.key, self.value, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def scores(self, x):
        return torch.einsum("hqd,bhkd->bhqk", self.query.detach() + 0.0, split(self.key(x)))

    def forward(self, x):
        k, v = split(self.key(x)), split(self.value(x))
        scores = self.query @ k.mT if self.way == "matmul" else torch.einsum("hqd,bhkd->bhqk", self.query, k)
        return self.out_proj(merge(scores.softmax(-1) @ v))


@pytest.mark.parametrize("way", ["matmul", "einsum"])
def test_pooling_by_learned_queries_is_cross_attention(way):
    model, x = nn.Sequential(Pool(way)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    weights = model[0].scores(x).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
    assert [row["kind"] for row in heads.rows()] == ["cross"] * HEADS
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-9)
    received = weights.mean(2).amax(-1).mean(0)
    assert [row["received"] for row in heads.rows()] == pytest.approx(received.tolist(), rel=1e-9)
    assert "distance" not in heads.rows()[0]
    require_gate(model, x)


class Joined(nn.Module):
    """Attention of one head, or of three, whose output is concatenated with the queries before a common projection
    (Luong et al. 2015, equation 5).
    """

    def __init__(self, heads, is_first):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj, self.heads, self.is_first = nn.Linear(2 * WIDTH, WIDTH), heads, is_first

    def weights(self, x):
        q, k = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).exp()
        return weights / weights.sum(-1, keepdim=True)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.heads > 1:
            q, k, v = split(q), split(k), split(v)
        out = (q @ k.mT).softmax(-1) @ v
        if self.heads > 1:
            q, out = merge(q), merge(out)
        return self.out_proj(torch.cat([out, q] if self.is_first else [q, out], -1)).tanh()


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("is_first", [False, True])
def test_outputs_that_are_joined_with_queries_are_observed(heads, is_first):
    model, x = nn.Sequential(Joined(heads, is_first)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as results:
        model(x)
    require_statistics(results, [model[0].weights(x)])
    with hw.gate(model, {("0", heads - 1): 0.5}):
        gated = model(x)
    last = (0 if is_first else WIDTH) + WIDTH - WIDTH // heads
    model[0].out_proj.weight[:, last : last + WIDTH // heads] *= 0.5
    torch.testing.assert_close(gated, model(x))


class SharedKeys(nn.Module):
    """Attention of three heads with common keys and values; it returns the outputs of the heads."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // HEADS)

    def forward(self, x):
        k, v = self.kv(x).chunk(2, -1)
        weights = torch.einsum("bhid,bjd->bhij", split(self.q(x)), k).softmax(-1)
        return torch.einsum("bhij,bjd->bhid", weights, v)


class JoinedHeads(nn.Module):
    """Two attention modules whose outputs are concatenated for each head."""

    def __init__(self):
        super().__init__()
        self.parts, self.out_proj = nn.ModuleList([SharedKeys(), SharedKeys()]), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.out_proj(merge(torch.cat([part(x) for part in self.parts], -1)))


def test_heads_that_are_merged_after_their_outputs_were_joined_are_left_out():
    model = JoinedHeads()
    with pytest.raises(hw.InputError, match="not established which axis is the heads"), hw.watch(model):
        model(torch.randn(2, LENGTH, WIDTH))


def test_a_written_softmax_without_a_product_is_no_attention():
    def shown(q, k, v, hidden):
        weights = scores_of(q, k, hidden).exp()
        shown.weights = weights / weights.sum(-1, keepdim=True)  # as for a plot
        return F.scaled_dot_product_attention(q, k, v, ~hidden, scale=1.0)

    class Attention(Block):
        pass

    model, x = nn.Sequential(Attention(shown, True)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [shown.weights])
    require_gate(model, x)
