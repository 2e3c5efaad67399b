"""Scores and weights that a model overwrites in place, and tensors that it adds in the product with the values."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, LENGTH, WIDTH, SelfAttention, require_gate
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def scores_of(q, k):
    return (q @ k.mT * DIM**-0.5).masked_fill(~CAUSAL, -torch.inf)


def into_scores(q, k, v):
    scores = scores_of(q, k)
    return torch.softmax(scores, -1, out=scores) @ v


def cleared(q, k, v):
    scores = scores_of(q, k)
    weights = scores.softmax(-1)
    scores[..., 0].fill_(-torch.inf)
    scores.mT.mul_(0)
    return weights @ v


def cleared_after_product(q, k, v):
    scores = scores_of(q, k)
    out = scores.softmax(-1) @ v
    torch._foreach_zero_([scores])
    return out


def one_buffer(q, k, v):
    buffer, outputs = torch.empty(HEADS, LENGTH, LENGTH), []
    for one in range(len(q)):
        torch.bmm(q[one], k[one].mT, out=buffer)
        buffer.mul_(DIM**-0.5).masked_fill_(~CAUSAL, -torch.inf)
        outputs.append(torch.softmax(buffer, -1) @ v[one])
    return torch.stack(outputs)


WRITTEN_SCORES = [into_scores, cleared, cleared_after_product, one_buffer]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("attend", WRITTEN_SCORES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scores_are_read_before_a_model_overwrites_them(attend, mode):
    torch.manual_seed(5)
    model, x = nn.Sequential(SelfAttention(attend)), torch.randn(2, LENGTH, WIDTH)
    with mode(), hw.watch(model) as heads:
        model(x)
    q, k, _ = (each.unflatten(-1, (HEADS, DIM)).transpose(1, 2).double() for each in model[0].qkv(x).chunk(3, -1))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * DIM**-0.5
    weights = scores.exp() * CAUSAL
    require_statistics(heads, [weights / weights.sum(-1, keepdim=True)])
    largest = scores.masked_fill(~CAUSAL, -torch.inf).amax((0, 2, 3))
    assert [row["max_logit"] for row in heads.rows()] == pytest.approx(largest.tolist(), rel=1e-4)
    if attend is not one_buffer:  # heads of outputs that are stacked afterwards are not gated
        require_gate(model, x)


def chunks_in_buffers(q, k, v):
    out, buffer = torch.empty_like(v), torch.empty(2, HEADS, 1, LENGTH)
    for row in range(LENGTH):
        torch.matmul(q[:, :, row : row + 1], k.mT, out=buffer)
        torch.softmax(buffer.mul_(DIM**-0.5), -1, out=buffer)
        torch.matmul(buffer, v, out=out[:, :, row : row + 1])
    return out


def weights_in_one_buffer(q, k, v):
    buffer, outputs = torch.empty(HEADS, LENGTH, LENGTH), []
    for one in range(len(q)):
        torch.softmax(scores_of(q, k)[one], -1, out=buffer)
        outputs.append(buffer @ v[one])
    return torch.stack(outputs)


@pytest.mark.parametrize("attend", [chunks_in_buffers, weights_in_one_buffer])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_in_a_buffer_that_is_used_again_are_named(attend, mode):
    model, x = nn.Sequential(SelfAttention(attend), SelfAttention()), torch.randn(2, LENGTH, WIDTH)
    with (
        mode(),
        pytest.warns(UserWarning, match=r"attention of these modules is left out.*: 0$"),
        hw.watch(model) as heads,
    ):
        model(x)
    assert {row["module"] for row in heads.rows()} == {"1"}


def changed_weights(change):
    def attend(q, k, v):
        weights = (q @ k.mT * DIM**-0.5).softmax(-1)
        change(weights)
        return weights @ v

    return attend


NO_AVERAGES = {
    "sum": lambda weights: weights.add_(0.3),
    "operator": lambda weights: weights.__iadd__(0.2),
    "root": lambda weights: weights.sqrt_(),
    "exponential": lambda weights: weights.exp_(),
    "largest": lambda weights: weights.clamp_(max=0.1),
    "list": lambda weights: torch._foreach_mul_([weights], 0.5),
    "out": lambda weights: torch.mul(weights, 3, out=weights),
    "view": lambda weights: weights[:, 1].mul_(2.0),
    "view of a view": lambda weights: weights.flatten(0, 1)[2].mT.add_(0.1),
    "parts": lambda weights: [part.mul_(1.5) for part in weights.chunk(3, 1)],
    "data": lambda weights: weights.data.mul_(2.0),
    "assignment": lambda weights: weights.__setitem__((..., 3), 0.4),
    "copy": lambda weights: weights.copy_(weights.clone() * 2),
    "difference": lambda weights: weights.sub_(0.6 * weights.roll(1, -1)),
    "rows": lambda weights: weights.index_add_(-1, torch.tensor([2]), weights[..., :1].clone()),
}


@pytest.mark.parametrize("name", NO_AVERAGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_are_changed_in_place_to_no_averages_are_named(name, mode):
    model = nn.Sequential(SelfAttention(changed_weights(NO_AVERAGES[name])))
    match = "change attention weights after the softmax so that they are no averages of keys"
    with mode(), pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(torch.randn(2, LENGTH, WIDTH))


AVERAGES = {
    "view of ones": lambda weights: weights[..., 0].mul_(1.0),
    "zeros": lambda weights: weights.tril_(),
    "assignment of zeros": lambda weights: weights.__setitem__((..., ~CAUSAL), 0.0),
    "quotient": lambda weights: weights.tril_().div_(weights.sum(-1, keepdim=True)),
    "mixture": lambda weights: weights.lerp_(torch.full_like(weights, 1 / LENGTH), 0.3),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_are_still_averages_after_a_change_in_place_are_observed(name, mode):
    model, x = nn.Sequential(SelfAttention(changed_weights(AVERAGES[name]))), torch.randn(2, LENGTH, WIDTH)
    with mode(), hw.watch(model) as heads:
        model(x)
    weights = model[0].weights.double().clone()
    AVERAGES[name](weights)
    require_statistics(heads, [weights])


def without_change(q, k, v):
    """Functions that return the same tensor, of weights that are sums of float32 in float64."""
    weights = torch.softmax((q @ k.mT * DIM**-0.5).double(), -1, dtype=torch.float32).double()
    weights = F.dropout(weights.contiguous().to(torch.float64), 0.5, training=False)
    return (weights @ v.double()).to(v.dtype)


@pytest.mark.filterwarnings("error")
def test_functions_that_return_the_same_weights_change_nothing():
    torch.manual_seed(11)
    model, x = nn.Sequential(SelfAttention(without_change)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])


def flat(x):
    return x.flatten(0, 1)


def baddbmm(added, **options):
    def attend(q, k, v):
        weights = (q @ k.mT * DIM**-0.5).softmax(-1)
        return torch.baddbmm(added(q, k, v), flat(weights), flat(v), **options).view(v.shape)

    return attend


def in_place(q, k, v):
    return flat(q).clone().baddbmm_(flat((q @ k.mT).softmax(-1)), flat(v)).view(v.shape)


def linear(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    one_by_one = [F.linear(w, x.mT, x[0]) for w, x in zip(flat(weights), flat(v), strict=True)]
    return torch.stack(one_by_one).view(v.shape)


ADDED = {
    "queries": baddbmm(lambda q, k, v: flat(q)),
    "factor of the product": baddbmm(lambda q, k, v: flat(q), beta=0, alpha=0.7),
    "by name": lambda q, k, v: torch.baddbmm(input=flat(k), batch1=flat((q @ k.mT).softmax(-1)), batch2=flat(v)).view(
        v.shape
    ),
    "in place": in_place,
    "bias of a linear map": linear,
}


@pytest.mark.parametrize("name", ADDED)
def test_a_tensor_that_is_added_to_the_outputs_of_heads_is_named(name):
    model, x = nn.Sequential(SelfAttention(ADDED[name])), torch.randn(2, LENGTH, WIDTH)
    match = "one function multiplies the weights with the values and adds another tensor"
    with pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(x)
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0", 0): 0.5}):
        model(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "attend",
    [baddbmm(lambda q, k, v: torch.zeros_like(flat(q))), baddbmm(lambda q, k, v: flat(q), beta=0)],
)
def test_products_that_add_zeros_are_observed(attend):
    model, x = nn.Sequential(SelfAttention(attend)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])
    v = model[0].qkv(x).chunk(3, -1)[2].unflatten(-1, (HEADS, DIM)).transpose(1, 2)
    norms = (model[0].weights.double() @ v.double()).norm(dim=-1).mean((0, 2))
    assert [row["output_norm"] for row in heads.rows()] == pytest.approx(norms.tolist(), rel=1e-5)
    require_gate(model, x)
