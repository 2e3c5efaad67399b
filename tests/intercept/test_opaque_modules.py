"""Compiled and scripted modules inside of a model: without attention they are permitted, otherwise refused."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, LENGTH, WIDTH, SelfAttention
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")


def doubled(x):
    return 2 * x


class Gated(nn.Module):
    """An MLP of the model's own."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x):
        return doubled(self.down(F.silu(self.gate(x)) * self.up(x)))


def averaged(scores, values):
    return torch.softmax(scores, -1) @ values


class Mixer(nn.Module):
    """Attention in a function that the method `forward` calls."""

    def __init__(self):
        super().__init__()
        self.values = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return averaged(x @ x.mT, self.values(x))


class ByHand(Mixer):
    """Attention without a softmax."""

    def forward(self, x):
        scores = torch.exp(x @ x.mT)
        return scores / scores.sum(-1, keepdim=True) @ self.values(x)


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def traced(module):
    return torch.jit.trace(module, torch.randn(2, LENGTH, WIDTH))


WAYS = {"compile": compiled, "compile()": compiled_in_place, "script": torch.jit.script, "trace": traced}
WITHOUT = {"of the model": Gated, "of torch": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))}


class Residual(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module", WITHOUT)
@pytest.mark.parametrize("chain", [Residual, nn.Sequential])
def test_compiled_and_scripted_modules_without_attention_are_permitted(way, module, chain):
    torch.manual_seed(9)
    torch._dynamo.reset()
    model, x = chain(SelfAttention(), WAYS[way](WITHOUT[module]()), SelfAttention()), torch.randn(2, LENGTH, WIDTH)
    layers = model.parts if chain is Residual else model
    label = "parts.2" if chain is Residual else "2"
    for _ in range(2):
        with hw.watch(model) as heads:
            plain = model(x)
        require_statistics(heads, [layers[0].weights, layers[2].weights])
        assert {row["kind"] for row in heads.rows()} == {"self"}
    with hw.gate(model, {(label, HEADS - 1): 0.0}):
        gated = model(x)
    layers[2].out_proj.weight[:, -DIM:] = 0
    torch.testing.assert_close(gated, model(x))
    assert not torch.equal(gated, plain)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module", [Mixer, ByHand])
def test_compiled_and_scripted_modules_that_may_attend_are_refused(way, module):
    model = nn.Sequential(SelfAttention(), WAYS[way](module()))
    match = "^model: expected modules that run in Python, got a (compiled|scripted) one at 1"
    with pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(torch.randn(2, LENGTH, WIDTH))


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS),
        lambda: nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS)),
        lambda: nn.Sequential(nn.Softmax(-1)),
        lambda: SelfAttention(F.scaled_dot_product_attention),
    ],
)
def test_compiled_modules_with_attention_of_torch_are_refused(module):
    with pytest.raises(hw.InputError, match="a compiled one at 0"), hw.watch(nn.Sequential(compiled(module()))):
        pass
