"""Layouts of attention weights that users state: used where heads are not derived, and compared otherwise."""

import pytest
import torch
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

X = torch.randn(2, 7, 24)
SPLITS = {
    "b h q k": lambda x: x.unflatten(-1, (3, 8)).transpose(1, 2),
    "(b h) q k": lambda x: x.unflatten(-1, (3, 8)).transpose(1, 2).flatten(0, 1),
    "(h b) q k": lambda x: torch.cat(x.chunk(3, -1)),
}


class Mixer(nn.Module):
    """Attention whose outputs are summed over the heads, so that no axis is seen to be merged with the values."""

    def __init__(self, layout, merges=False):
        super().__init__()
        self.qkv, self.read, self.layout, self.merges = nn.Linear(24, 72), nn.Linear(8, 24), layout, merges

    def forward(self, x):
        q, k, v = map(SPLITS[self.layout], self.qkv(x).chunk(3, -1))
        self.weights = (q @ k.mT * 8**-0.5).softmax(-1)
        self.heads = heads = self.weights @ v
        if self.merges:
            return heads.transpose(1, 2).flatten(2)
        heads = heads.flatten(0, -3).relu().reshape(3 if self.layout.startswith("(h") else 2, -1, 7, 8)
        return self.read(heads.sum(0 if self.layout.startswith("(h") else 1))


def by_head(model, tensor):
    if model.layout == "(h b) q k":
        return tensor.unflatten(0, (3, 2)).transpose(0, 1)
    return tensor.unflatten(0, (2, 3)) if tensor.ndim == 3 else tensor


@pytest.mark.parametrize("layout", SPLITS)
def test_a_stated_layout_says_which_axis_is_the_heads(layout):
    torch.manual_seed(0)
    model = nn.Sequential(Mixer(layout))
    with hw.watch(model, sites=[hw.Site("0", heads=3, layout=layout)]) as heads:
        model(X)
    weights = by_head(model[0], model[0].weights)
    entropy = -torch.xlogy(weights, weights).sum(-1).mean((0, 2))
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-5)


@pytest.mark.parametrize("layout", SPLITS)
def test_heads_of_a_stated_layout_are_gated(layout):
    torch.manual_seed(0)
    model = nn.Sequential(Mixer(layout))
    weight, bias = model[0].qkv.weight, model[0].qkv.bias
    with hw.gate(model, {("0", 1): 0.0}, sites=[hw.Site("0", heads=3, layout=layout)]):
        gated = model(X)
    weight[56:64], bias[56:64] = 0.0, 0.0  # values of head 1
    torch.testing.assert_close(gated, model(X))


def test_without_a_statement_the_module_is_named():
    model = nn.Sequential(Mixer("(h b) q k"))
    with pytest.raises(hw.InputError, match="state their layout in hw.Site$"), hw.watch(model):
        model(X)


CONTRADICTIONS = {
    "axes": ({"layout": "b h w q k", "heads": 3}, "^sites: expected weights with axes 'b h w q k' in 0, as stated"),
    "no number": ({"layout": "b (h w) q k"}, r"^sites: expected a number of heads that divides axis 'h w' in 0; state"),
    "parts": ({"layout": "b (h w) q k", "heads": 2}, r"^sites: expected a number of heads that divides axis 'h w' in"),
    "heads": ({"layout": "b h q k", "heads": 2}, "^sites: expected 2 heads in 0, as stated, got 3"),
    "other axes": ({"layout": "h b q k"}, "^sites: expected the layout that is stated for 0, got 3 heads in another"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_layout_that_contradicts_the_model_is_refused(name):
    statement, sentence = CONTRADICTIONS[name]
    model = nn.Sequential(Mixer("b h q k", merges=True))
    with pytest.raises(hw.InputError, match=sentence), hw.watch(model, sites=[hw.Site("0", **statement)]):
        model(X)


@pytest.mark.parametrize("layout", ["b h q", "h q k k", "b h (q k)", "b (w h x) q k", "b h q k )", "b 2 h q k"])
def test_unusable_layouts_are_refused(layout):
    with pytest.raises(hw.InputError, match="^layout: expected axes of the attention weights, such as 'b h q k'"):
        hw.Site("0", layout=layout)
