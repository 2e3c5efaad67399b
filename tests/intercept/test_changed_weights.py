"""Attention weights that a model changes after the softmax, and outputs that are factors of other attention."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import WIDTH, merge, split
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

HIDDEN = torch.ones(7, 7).tril() == 0


class Block(nn.Module):
    """Attention of 3 heads whose weights pass through a function after the softmax."""

    def __init__(self, change):
        super().__init__()
        self.qkv, self.queries, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(15, 15), nn.Linear(15, 15)
        self.scale, self.change = nn.Parameter(torch.tensor([1.3, 0.7, 1.1])[:, None, None]), change

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        self.weights = self.change(self, (q @ k.mT).softmax(-1), q @ k.mT)
        return self.out_proj(merge(self.weights @ v))


AVERAGES = {
    "mask": lambda block, weights, scores: weights * ~HIDDEN,
    "mask and quotient": lambda block, weights, scores: (kept := weights * ~HIDDEN) / kept.sum(-1, keepdim=True),
    "ones": lambda block, weights, scores: weights * torch.ones(3, 1, 1),
}
OTHERS = {
    "signs": lambda block, weights, scores: weights * scores.sign(),
    "factors of heads": lambda block, weights, scores: weights * block.scale,
    "numbers in place of some": lambda block, weights, scores: weights.masked_fill(HIDDEN, 0.3),
}


@pytest.mark.parametrize("change", AVERAGES)
def test_masked_weights_are_observed(change):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(AVERAGES[change])), torch.randn(2, 7, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    entropy = torch.special.entr(model[0].weights).sum(-1).mean((0, 2))
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-4)


@pytest.mark.parametrize("change", OTHERS)
def test_weights_that_average_no_keys_are_named(change):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(OTHERS[change])), torch.randn(2, 7, WIDTH)
    match = "change attention weights after the softmax so that they are no averages of keys"
    with pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(x)


class TwoSteps(Block):
    """Some queries attend to the keys; all queries attend to these, whose outputs are the values."""

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        agents = q[:, :, ::3]
        values = F.scaled_dot_product_attention(agents, k, v)
        return self.out_proj(merge(F.scaled_dot_product_attention(q, agents, values)))


def test_modules_in_which_the_output_of_attention_is_the_values_of_another_are_named():
    torch.manual_seed(0)
    model, x = nn.Sequential(TwoSteps(None)), torch.randn(2, 7, WIDTH)
    match = "its outputs are multiplied with other activations"
    with pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(x)


class Difference(Block):
    """Two attentions with weights of their own, the difference of whose outputs is projected."""

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        others = split(self.queries(x))
        first, second = ((each @ k.mT * 5**-0.5).softmax(-1) for each in (q, others))
        self.weights = [first, second]
        return self.out_proj(merge(first @ v - 0.4 * (second @ v)))


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_columns_that_two_layers_share_are_not_gated_for_one_of_them():
    torch.manual_seed(0)
    model, x = nn.Sequential(Difference(None)), torch.randn(2, 7, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, model[0].weights)
    match = "a function that is not linear, such as a norm or a sum with another tensor"
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0", 1): 0.0}):
        model(x)
