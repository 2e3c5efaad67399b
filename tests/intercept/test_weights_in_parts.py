"""Softmaxes of which a model multiplies only some weights with values: named if it may use the others elsewhere."""

import re

import pytest
import torch
import torch.nn.functional as F
from self_attention import HEADS, WIDTH, merge, split
from torch import nn

import headwise as hw
from headwise.intercept.trace.refusals import WEIGHTS_IN_PARTS

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH, FIRST = 11, 4


class Block(nn.Module):
    """Projections around a function of attention weights and values."""

    def __init__(self, mix):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = mix

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        self.weights = (q @ k.mT).softmax(-1)
        return self.o(merge(self.mix(self.weights, v)))


def first_keys(weights, v):
    return weights[..., :FIRST] @ v[:, :, :FIRST]


def two_products(weights, v):
    return first_keys(weights, v) + weights[..., FIRST:] @ v[:, :, FIRST:]


def others_are_padded(weights, v):
    return first_keys(weights, v) + F.pad(weights[..., FIRST:], (FIRST, 0)) @ v


def others_are_flipped(weights, v):
    return first_keys(weights, v) + weights[..., FIRST:].flip(-1) @ v[:, :, FIRST:].flip(-2)


def others_come_first(weights, v):
    others = torch.cat([weights[..., FIRST:]], -1) @ v[:, :, FIRST:]
    return others + first_keys(weights, v)


def others_overlap(weights, v):
    return first_keys(weights, v) + weights[..., FIRST - 1 :].roll(1, -1) @ v[:, :, FIRST - 1 :].roll(1, -2)


def others_of_the_rolled_whole(weights, v):
    return first_keys(weights, v) + weights.roll(-FIRST, -1)[..., :-FIRST] @ v[:, :, FIRST:]


IN_PARTS = [two_products, others_are_padded, others_are_flipped, others_come_first, others_overlap]
IN_PARTS += [others_of_the_rolled_whole]


@pytest.mark.filterwarnings("ignore:the output projection was not seen", "ignore:module forward hook")
@pytest.mark.parametrize("mix", IN_PARTS)
def test_modules_that_use_other_weights_elsewhere_are_named(mix):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(torch.matmul), Block(mix)), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with pytest.warns(UserWarning, match=f"^{WEIGHTS_IN_PARTS}: 1$"), hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    assert [row["module"] for row in heads.rows()] == ["0"] * HEADS
    with pytest.raises(hw.InputError, match="^(values|model): expected"), hw.gate(model, {("1", 0): 0.0}):
        model(x)


def mean_of_the_same(weights, v):
    weights[..., :FIRST].mean()
    return first_keys(weights, v)


def mean_of_fewer(weights, v):
    weights[:, :, :3, 1:FIRST].mean()
    return first_keys(weights, v)


def mean_of_all(weights, v):
    weights.mean()
    return first_keys(weights, v)


def largest_of_all(weights, v):
    weights.amax(-1)
    return first_keys(weights, v)


@pytest.mark.filterwarnings("ignore:positions of queries among the keys could not be established")
@pytest.mark.parametrize("mix", [first_keys, mean_of_the_same, mean_of_fewer, mean_of_all, largest_of_all])
def test_weights_whose_other_keys_have_no_values_are_observed(mix):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(mix)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    weights = model[0].weights[..., :FIRST].double()
    for name, of_row in (("entropy", torch.special.entr(weights).sum(-1)), ("confidence", weights.amax(-1))):
        expected = of_row.mean((0, 2)).tolist()
        assert [row[name] for row in heads.rows()] == pytest.approx(expected, rel=1e-4)


class Rounded(torch.autograd.Function):
    """Weights in float32 that are rounded to bfloat16."""

    @staticmethod
    def forward(ctx, weights):
        return weights.to(torch.bfloat16).to(weights.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("is_training", [False, True])
def test_weights_that_an_autograd_function_rounds_are_those_observed(is_training):
    def rounded(weights, v):
        rounded.weights = Rounded.apply(weights)
        return rounded.weights @ v

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(rounded)), torch.randn(2, LENGTH, WIDTH)
    with torch.set_grad_enabled(is_training), hw.watch(model) as heads:
        model(x)
    confidence = rounded.weights.detach().double().amax(-1).mean((0, 2))
    exact = model[0].weights.detach().double().amax(-1).mean((0, 2))
    observed = [row["confidence"] for row in heads.rows()]
    assert observed == pytest.approx(confidence.tolist(), rel=1e-6)
    assert observed != pytest.approx(exact.tolist(), rel=1e-6)  # rounding is seen


@pytest.mark.filterwarnings("ignore:it is unknown which tokens")
def test_global_attention_of_longformer_is_named():
    from transformers import LongformerConfig, LongformerModel

    sizes = {"hidden_size": 21, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 29}
    torch.manual_seed(0)
    model = LongformerModel(LongformerConfig(vocab_size=61, attention_window=4, max_position_embeddings=64, **sizes))
    is_global = torch.zeros(2, 12, dtype=torch.long)
    is_global[:, 0] = 1
    with pytest.raises(hw.InputError, match=re.escape(WEIGHTS_IN_PARTS)), hw.watch(model):
        model(input_ids=torch.randint(5, 61, (2, 12)), global_attention_mask=is_global)
