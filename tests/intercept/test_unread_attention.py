"""Attention that is not followed is named next to attention that is observed; other computations are not named."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from self_attention import HEADS, WIDTH, merge, split
from torch import nn

import headwise as hw
from headwise.intercept.trace.refusals import NO_QUERIES, NORMALISED, NOT_FOLLOWED, NOT_NORMALISED, WEIGHTS_NOT_FOLLOWED

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH = 13


class Block(nn.Module):
    """Projections around a function of queries, keys and values, with names that say nothing of attention."""

    def __init__(self, way):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.way = way

    def forward(self, x):
        return self.o(merge(self.way(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


# -- weights that are normalised --------------------------------------------------------------------------------------


def gathered(q, k, v):
    scores, index = (q @ k.mT).topk(5, -1)
    return scores.softmax(-1)[..., None, :].matmul(torch.take_along_dim(v[:, :, None], index[..., None], 3))[..., 0, :]


def gathered_and_summed(q, k, v):
    scores, index = torch.topk(torch.einsum("bhqd,bhkd->bhqk", q, k), 3)
    return (F.softmax(scores, -1).unsqueeze(-1) * torch.take_along_dim(v[:, :, None], index[..., None], 3)).sum(3)


def scattered(q, k, v):
    scores = q @ k.mT
    best, index = scores.topk(2, -1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.zeros_like(scores).scatter_(-1, index, best.softmax(-1)), v)


def additive(q, k, v):
    return torch.tanh(q[:, :, :, None] + k[:, :, None]).mean(-1).softmax(-1) @ v


def by_distances(q, k, v):
    return F.softmin(torch.cdist(q, k), -1) @ v


def with_random_scores(q, k, v):
    return F.gumbel_softmax(q @ k.mT, tau=0.7, dim=-1) @ v


def with_the_best_key_alone(q, k, v):
    return F.gumbel_softmax(q @ k.mT, hard=True) @ v


def power_of_two(q, k, v):
    weights = (q @ k.mT).exp2()
    return weights / weights.sum(-1, keepdim=True) @ v


def exponential_in_place(q, k, v):
    weights = (q @ k.mT).exp_()
    weights /= weights.sum(-1, keepdim=True)
    return weights @ v


def masked_exponential(q, k, v):
    weights = (q @ k.mT).exp() * torch.ones(LENGTH, LENGTH).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def sparsemax(q, k, v):
    scores, count = q @ k.mT, torch.arange(1, LENGTH + 1)
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    size = (ordered * count > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, size - 1) / size).clamp(min=0) @ v


NORMALISING = [gathered, gathered_and_summed, scattered, additive, by_distances, with_random_scores, power_of_two]
NORMALISING += [exponential_in_place, masked_exponential, sparsemax, with_the_best_key_alone]

# -- weights that are not normalised, or after the product with the values ---------------------------------------------


def sigmoid(q, k, v):
    return (q @ k.mT - 2.5).sigmoid() @ v


def squares(q, k, v):
    return (q @ k.mT).relu().square() / LENGTH @ v


def normalised_later(q, k, v):
    weights = (q @ k.mT).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def softmax_over_heads(q, k, v):
    return (q @ k.mT).softmax(1) @ v


def exponential_of_a_mean(q, k, v):
    return (q @ k.mT - 1.7).exp() / LENGTH @ v


NOT_NORMALISING = [sigmoid, squares, normalised_later, softmax_over_heads, exponential_of_a_mean]

# -- functions that are not followed ----------------------------------------------------------------------------------


@torch.jit.script
def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return torch.from_numpy(numbers(q, k, v))


def numbers(*tensors):
    q, k, v = (tensor.detach().numpy() for tensor in tensors)
    weights = np.exp(q @ k.swapaxes(-1, -2))
    return weights / weights.sum(-1, keepdims=True) @ v


def by_numpy(q, k, v):
    return ByNumpy.apply(q, k, v)


def by_new_tensor(q, k, v):
    return torch.tensor(numbers(q, k, v))


NOT_FOLLOWING = [scripted, by_numpy, by_new_tensor]


def average_of_products(q, k, v):
    return ((q @ k.mT).softmax(-1)[..., None] * v[:, :, None]).mean(-2) * LENGTH


def changed_product(q, k, v):
    product = q[:, :, :, None] * k[:, :, None]
    product.masked_fill_(torch.ones(LENGTH, LENGTH).triu(1)[..., None] > 0, -9.0)
    return product.sum(-1).softmax(-1) @ v


def grouped_convolution(q, k, v):
    weights, groups = (q @ k.mT).softmax(-1), len(q) * HEADS
    out = F.conv1d(v.reshape(1, groups * LENGTH, -1), weights.view(groups * LENGTH, LENGTH, 1), groups=groups)
    return out.view(q.shape)


def product_of_sums(q, k, v):
    return torch.einsum("bhqk,bhd->bhqd", (q @ k.mT).softmax(-1), v.mean(2))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        *((way, NORMALISED) for way in (*NORMALISING, changed_product)),
        *((way, NOT_NORMALISED) for way in NOT_NORMALISING),
        *((way, NOT_FOLLOWED) for way in NOT_FOLLOWING),
        *((way, WEIGHTS_NOT_FOLLOWED) for way in (average_of_products, grouped_convolution, product_of_sums)),
    ],
)
def test_attention_that_is_not_followed_is_named(way, reason):
    torch.manual_seed(1)
    model, x = nn.Sequential(Block(plain), Block(way), Block(plain)), torch.randn(2, LENGTH, WIDTH)
    with pytest.warns(UserWarning, match=f"^{reason}: 1$"), hw.watch(model) as heads:
        model(x)
    assert {row["module"] for row in heads.rows()} == {"0", "2"}
    with pytest.raises(hw.InputError, match="^(values|model): expected"), hw.gate(model, {("1", 0): 0.0}):
        model(x)


def test_an_error_states_that_weights_are_not_followed():
    model = nn.Sequential(Block(product_of_sums))
    with pytest.raises(hw.InputError, match=f"none in 0; {WEIGHTS_NOT_FOLLOWED}$"), hw.watch(model):
        model(torch.randn(2, LENGTH, WIDTH))


def one_query(q, k, v):
    weights = torch.einsum("bhd,bhkd->bhk", q[:, :, -1], k).softmax(-1)
    return torch.einsum("bhk,bhkd->bhd", weights, v)[:, :, None]


def neighbours(q, k, v):
    k, v = (F.pad(part, (0, 0, 2, 2)).unfold(2, 5, 1).mT for part in (k, v))
    return ((q[..., None, :] * k).sum(-1).softmax(-1)[..., None] * v).sum(-2)


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
@pytest.mark.parametrize("way", [one_query, neighbours])
def test_queries_without_an_axis_of_their_own_are_named(way):
    model = nn.Sequential(Block(plain), Block(way))
    with pytest.warns(UserWarning, match=f"^{NO_QUERIES}: 1$"), hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"0"}


class Additive(nn.Module):
    """Attention by scores that a small network computes from queries and keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(WIDTH, width) for width in (7, 7, WIDTH))
        self.score = nn.Linear(7, 1)

    def forward(self, x):
        return self.o(self.score(torch.tanh(self.q(x)[:, :, None] + self.k(x)[:, None])).squeeze(-1).softmax(-1) @ x)


class LinearPool(nn.Module):
    """Average of the tokens by one linear score for each of them."""

    def __init__(self):
        super().__init__()
        self.score, self.o = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.o((self.score(x).softmax(1) * x).sum(1, keepdim=True)).expand_as(x)


class VectorPool(LinearPool):
    """Average of the tokens by their products with a learned vector."""

    def forward(self, x):
        return self.o(torch.einsum("bk,bkd->bd", (x @ self.score.weight[0]).softmax(-1), x))[:, None].expand_as(x)


@pytest.mark.parametrize("kind", [Additive, LinearPool, VectorPool])
def test_averages_of_tokens_are_named(kind):
    model = nn.Sequential(Block(plain), kind())
    with pytest.warns(UserWarning, match=f"^{NORMALISED}: 1$"), hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"0"}


# -- operators of other libraries -------------------------------------------------------------------------------------


def operator(name, *mutated):
    return torch.library.custom_op(f"headwise_unread::{name}", mutates_args=mutated)


@operator("mixed")
def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


@operator("mixed_causally")
def mixed_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[-2], k.shape[-2]).triu(1) > 0, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@operator("mixed_into", "out")
def mixed_into(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    out.copy_((q @ k.mT).softmax(-1) @ v)


@operator("mixed_packed")
def mixed_packed(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.unbind(2)
    return (q @ k.mT).softmax(-1) @ v


@operator("gated")
def gated(x: torch.Tensor, gate: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * x + residual


@operator("normed")
def normed(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.layer_norm(x + y + z, x.shape[-1:]), x + y + z


@operator("rotated")
def rotated(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * angles.cos(), k * angles.cos()


@operator("divided")
def divided(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.clone().chunk(3, -1)
    return q.clone(), k.clone(), v.clone()


@operator("scaled_", "q", "k")
def scaled_(q: torch.Tensor, k: torch.Tensor) -> None:
    q.mul_(0.5)
    k.mul_(0.5)


def into(q, k, v):
    out = torch.empty_like(q)
    mixed_into(out, q, k, v)
    return out


@pytest.mark.parametrize(
    ("name", "way"),
    {
        "mixed": lambda q, k, v: mixed(q, k, v, 0.3),
        "mixed_causally": lambda q, k, v: mixed_causally(q, k, v)[0],
        "mixed_into": into,
        "mixed_packed": lambda q, k, v: mixed_packed(torch.stack([q, k, v], 2)),
    }.items(),
)
def test_operators_of_other_libraries_that_mix_tokens_are_named(name, way):
    model = nn.Sequential(Block(plain), Block(way))
    sentence = f"^these modules call the operator headwise_unread::{name}, which may be attention and is not read: 1$"
    with pytest.warns(UserWarning, match=sentence), hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"0"}


# -- computations that are no attention -------------------------------------------------------------------------------


class Layer(nn.Module):
    """Linear maps around a function that is no attention."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.c, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.experts = nn.Linear(WIDTH, 5), nn.Parameter(torch.randn(5, WIDTH, WIDTH))
        self.layers, self.way = nn.Parameter(torch.randn(3)), way

    def forward(self, x):
        return self.o(self.way(self, x))


@torch.jit.script
def scripted_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


def best_experts(m, x):
    weights, index = m.gate(x).softmax(-1).topk(2, -1)
    outputs = torch.einsum("bnd,edf->bnef", x, m.experts)
    chosen = outputs.gather(2, index[..., None].expand(*index.shape, WIDTH))
    return ((weights / weights.sum(-1, keepdim=True))[..., None] * chosen).sum(2)


def dispatched_experts(m, x):
    weights = m.gate(x).softmax(-1)
    dispatch = F.one_hot(weights.argmax(-1), 5).to(x.dtype)
    inputs = torch.einsum("bne,bnd->ebnd", dispatch, m.a(x))
    return torch.einsum("ebnf,bne->bnf", torch.einsum("ebnd,edf->ebnf", inputs, m.experts), weights * dispatch)


def stacked_experts(m, x):
    return (torch.stack([layer(x) for layer in (m.a, m.b, m.c)], -1) @ m.gate(x)[..., :3].softmax(-1)[..., None])[
        ..., 0
    ]


def average_of_visible(m, x):
    visible = (torch.arange(LENGTH) < 7).to(x.dtype).expand(2, 1, LENGTH)
    return (visible / visible.sum(-1, keepdim=True) @ m.a(x)).expand_as(x)


def interpolated_positions(m, x):
    place = torch.linspace(0.1, 1.7, LENGTH) + 0 * x[0, 0, 0]  # depends on an input
    weights = torch.stack([place.frac(), 1 - place.frac()], -1)
    return x + (weights[..., None] * m.experts[0][torch.stack([place.long(), place.long() + 1], -1)]).sum(1)


def scores_of_pairs(m, x):
    """Scores of several heads, added up with weights of their own, as in an indexer that selects keys."""
    scores = torch.einsum("bqhd,bkd->bqhk", m.a(x).unflatten(-1, (HEADS, -1)), m.b(x)[..., :5]).relu()
    return x + (m.gate(x)[..., None, :HEADS] @ scores)[..., 0, :1]


def powers_of_scores(m, x):
    scores = (m.a(x) @ m.b(x).mT).sigmoid()
    return x + (scores @ scores).sum(-1, keepdim=True)


NO_ATTENTION = {
    "powers of scores": powers_of_scores,
    "scores of pairs": scores_of_pairs,
    "gate of an operator": lambda m, x: gated(m.a(x), m.b(x), m.c(x)),
    "norm of an operator": lambda m, x: normed(m.a(x), m.b(x), m.c(x))[0],
    "scripted gate": lambda m, x: scripted_gate(m.a(x), m.b(x)),
    "best experts": best_experts,
    "dispatched experts": dispatched_experts,
    "stacked experts": stacked_experts,
    "learned average of layers": lambda m, x: torch.einsum(
        "l,lbnd->bnd", m.layers.softmax(0), torch.stack([m.a(x), m.b(x), m.c(x)])
    ),
    "codes": lambda m, x: m.gate(x).softmax(-1) @ m.experts[:, 0],
    "average of visible tokens": average_of_visible,
    "gate of the mean": lambda m, x: x * m.a(m.b(x).mean(1, keepdim=True)).sigmoid(),
    "products of features": lambda m, x: (m.a(x) * m.b(x)).sum(-1, keepdim=True) * m.c(x),
    "norm of tokens": lambda m, x: m.a(x) * torch.rsqrt(m.b(x).square().mean(-1, keepdim=True)),
}


@pytest.mark.parametrize("way", NO_ATTENTION)
def test_other_computations_are_not_named(way, recwarn):
    model = nn.Sequential(Block(plain), Layer(NO_ATTENTION[way]), Layer(NO_ATTENTION[way]))
    with hw.watch(model) as heads:
        for _ in range(2):
            model(torch.randn(2, LENGTH, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"0"}
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []


def test_weights_of_positions_are_not_named(recwarn):
    model = nn.Sequential(Layer(interpolated_positions), Block(plain))
    with hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"1"}
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []


@pytest.mark.parametrize("way", ["rotated", "divided", "scaled"])
def test_operators_before_observed_attention_are_not_named(way, recwarn):
    def prepared(q, k, v):
        if way == "rotated":
            q, k = rotated(q, k, torch.arange(LENGTH)[:, None] * 1.0)
        elif way == "divided":
            q, k, v = divided(torch.cat([q, k, v], -1))
        else:
            q, k = q.clone(), k.clone()
            scaled_(q, k)
        return plain(q, k, v)

    model = nn.Sequential(Block(prepared))
    with hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert len(heads.rows()) == HEADS
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []
