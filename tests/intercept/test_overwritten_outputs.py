"""Gates of heads whose outputs a model overwrites in place before the output projection, without a new tensor."""

import pytest
import torch
import torch.nn.functional as F
from test_watch import require_statistics
from torch import nn

import headwise as hw

HEADS, DIM, LENGTH = 3, 5, 7
WIDTH = HEADS * DIM
LATE = torch.arange(LENGTH)[:, None] > 4


class Attention(nn.Module):
    """Attention whose outputs are overwritten before or after the heads are merged."""

    def __init__(self, overwrite, where, route):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.overwrite, self.where, self.route = overwrite, where, route

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT * DIM**-0.5).exp()
        self.weights = scores / scores.sum(-1, keepdim=True)
        if self.route == "SDPA":
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.mT * DIM**-0.5).softmax(-1) @ v
        if self.where == "heads":
            out = out.clone()
            self.overwrite(out)
        merged = out.transpose(1, 2).flatten(2).clone()
        if self.where == "features":
            self.overwrite(merged)
        return self.out_proj(merged)


def hide_rows(out):
    out[0, ..., 2:, :] = 0.0


def multiply(out):
    out *= torch.linspace(0.5, 2.0, out.shape[-1])


LINEAR = {
    "mul_": lambda out: out.mul_(2.0),
    "operator": multiply,
    "masked_fill_": lambda out: out.masked_fill_(LATE, 0.0),
    "assignment": hide_rows,
}


@pytest.mark.parametrize("route", ["softmax", "SDPA"])
@pytest.mark.parametrize("where", ["heads", "features"])
@pytest.mark.parametrize("way", LINEAR)
@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_gates_act_on_outputs_that_are_overwritten(way, where, route):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(LINEAR[way], where, route)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        plain = model(x)
    require_statistics(heads, [model[0].weights])
    with hw.gate(model, {("0", 1): 0.0}):
        gated = model(x)
        gated.sum().backward()
    gradient = model[0].qkv.weight.grad.clone()
    torch.testing.assert_close(model(x), plain)
    with torch.no_grad():
        model[0].out_proj.weight[:, DIM : 2 * DIM] = 0.0
    model.zero_grad()
    expected = model(x)
    expected.sum().backward()
    torch.testing.assert_close(gated, expected)
    torch.testing.assert_close(gradient, model[0].qkv.weight.grad)


NOT_LINEAR = {
    "add_": lambda out: out.add_(1.0),
    "relu": lambda out: F.relu(out, inplace=True),
    "assignment by comparison": lambda out: out.__setitem__(out > 0.1, 0.1),
}


@pytest.mark.parametrize("route", ["softmax", "SDPA"])
@pytest.mark.parametrize("where", ["heads", "features"])
@pytest.mark.parametrize("way", NOT_LINEAR)
@torch.no_grad()
def test_gates_before_functions_in_place_that_are_not_linear_are_refused(way, where, route):
    model, x = nn.Sequential(Attention(NOT_LINEAR[way], where, route)), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with pytest.raises(hw.InputError, match="function that is not linear"), hw.gate(model, {("0", 1): 0.0}):
        model(x)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("where", ["heads", "features"])
@torch.no_grad()
def test_gates_are_refused_if_a_view_of_an_output_is_overwritten(where):
    model = nn.Sequential(Attention(lambda out: out[:, :1].mul_(3.0), where, "SDPA"))
    match = "changed its queries, keys, values, weights or output in place"
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0", 1): 0.0}):
        model(torch.randn(2, LENGTH, WIDTH))


@torch.no_grad()
def test_attention_is_named_if_the_data_of_its_output_are_overwritten():
    class Doubled(Attention):
        def forward(self, x):
            q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            out = F.scaled_dot_product_attention(q, k, v)
            out.data.mul_(2.0)
            return self.out_proj(out.transpose(1, 2).flatten(2))

    model = nn.Sequential(Doubled(None, None, None))
    with pytest.raises(hw.InputError, match="output in place before the output projection"), hw.watch(model):
        model(torch.randn(2, LENGTH, WIDTH))
