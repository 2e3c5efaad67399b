"""Functions between the outputs of heads and the output projection, and gates of these heads."""

import pytest
import torch
import torch.nn.functional as F
from test_watch import require_statistics
from torch import nn

import headwise as hw

WIDTH = 15


class Attention(nn.Module):
    """Attention of 3 heads, whose outputs pass through a function before or after they are merged."""

    num_heads = 3

    def __init__(self, before, after):
        super().__init__()
        self.qkv, self.gate, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(15, 15)
        self.norm, self.scale = nn.LayerNorm(5), nn.Parameter(torch.randn(3, 1, 1))
        self.before, self.after, self.attend = before, after, self.fused

    def fused(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.x, self.values = x, v
        weights = (q @ k.mT * 5**-0.5).exp()
        self.weights = weights / weights.sum(-1, keepdim=True)
        out = self.before(self, self.attend(q, k, v))
        return self.out_proj(self.after(self, out.transpose(1, 2).flatten(2)))


def same(module, out):
    return out


HIDDEN = torch.arange(7)[:, None] > 5
LINEAR = {
    "product with a gate": (same, lambda module, out: out * torch.sigmoid(module.gate(module.x))),
    "product with a gate in place": (same, lambda module, out: out.mul_(torch.sigmoid(module.gate(module.x)))),
    "product with parameters": (lambda module, out: out * module.scale, same),
    "quotient": (lambda module, out: out / 3.0, same),
    "dropout": (lambda module, out: F.dropout(out, 0.5, training=False), same),
    "casts and hidden rows": (lambda module, out: out.double().masked_fill(HIDDEN, 0).nan_to_num().float(), same),
    "chosen rows": (lambda module, out: torch.where(HIDDEN, 0.0, out), same),
    "sum with itself": (lambda module, out: out - 0.3 * out, same),
}
OTHER = {
    "logarithm": (lambda module, out: (out.abs() + 1).log(), same),
    "activation": (same, lambda module, out: F.gelu(out)),
    "norm of each head": (lambda module, out: module.norm(out), same),
    "written norm": (same, lambda module, out: out * torch.rsqrt(out.square().mean(-1, keepdim=True))),
    "norm without an axis": (lambda module, out: out / out.norm(dim=-1)[..., None], same),
    "gate of itself": (same, lambda module, out: out * torch.sigmoid(module.gate(out))),
    "softmax": (same, lambda module, out: out.softmax(-1)),
    "sum with values": (lambda module, out: out + module.values, same),
    "sum in place": (lambda module, out: out.add_(module.values), same),
    "clamp": (lambda module, out: out.clamp(-0.1, 0.1), same),
}


@pytest.mark.parametrize("between", LINEAR)
@torch.no_grad()
def test_gates_act_through_linear_functions(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(*LINEAR[between])), torch.randn(2, 7, WIDTH)
    state = torch.get_rng_state()
    with hw.gate(model, {("0", 1): 0.5}):
        gated = model(x)
    assert torch.equal(torch.get_rng_state(), state)
    model[0].out_proj.weight[:, 5:10] *= 0.5
    torch.testing.assert_close(gated, model(x))


@pytest.mark.filterwarnings("ignore:these modules compute a softmax")
@pytest.mark.parametrize("between", OTHER)
@torch.no_grad()
def test_gates_before_other_functions_are_refused(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(*OTHER[between])), torch.randn(2, 7, WIDTH)
    match = "a function that is not linear, such as a norm or a sum with another tensor, is between them .*: 0"
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0", 1): 0.5}):
        model(x)
    if between == "sum in place":
        with pytest.raises(hw.InputError, match="in place before the output projection"), hw.watch(model):
            model(x)
        return
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])


class Core(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT * 5**-0.5).softmax(-1) @ v


class WithCore(Attention):
    """Attention whose softmax is in a module of its own, which ends before the outputs are used."""

    def __init__(self, *between):
        super().__init__(*between)
        self.attend = Core()


@pytest.mark.filterwarnings("ignore:these modules compute a softmax")
@pytest.mark.filterwarnings("ignore:the output projection was not seen")
@pytest.mark.parametrize("between", [name for name in OTHER if name != "sum in place"])
@torch.no_grad()
def test_gates_before_other_functions_are_refused_after_the_module_of_the_softmax(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(WithCore(*OTHER[between])), torch.randn(2, 7, WIDTH)
    match = "a function that is not linear, such as a norm or a sum with another tensor, is between them .*: 0.attend"
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0.attend", 1): 0.5}):
        model(x)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])


@pytest.mark.parametrize("between", LINEAR)
@torch.no_grad()
def test_gates_act_through_linear_functions_after_the_module_of_the_softmax(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(WithCore(*LINEAR[between])), torch.randn(2, 7, WIDTH)
    with hw.gate(model, {("0.attend", 1): 0.5}):
        gated = model(x)
    model[0].out_proj.weight[:, 5:10] *= 0.5
    torch.testing.assert_close(gated, model(x))


REAL = torch.arange(7) < torch.tensor([7, 4])[:, None]
SELECTED = {
    "mask": lambda out: out[REAL],
    "two indices": lambda out: out[torch.arange(2), torch.tensor([6, 3])],
    "indices of a mask": lambda out: out[REAL.nonzero(as_tuple=True)],
    "step": lambda out: out[:, ::2],
    "other columns": lambda out: out.unflatten(-1, (5, 3)).flatten(2),
}


@pytest.mark.filterwarnings("ignore:the output projection was not seen")  # it sees other rows
@pytest.mark.parametrize("selected", SELECTED)
@torch.no_grad()
def test_gates_act_before_tokens_are_selected(selected):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(same, lambda module, out: SELECTED[selected](out))), torch.randn(2, 7, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])
    with hw.gate(model, {("0", 1): 0.5}):
        gated = model(x)
    model[0].out_proj.weight[:, 5:10] *= 0.5
    torch.testing.assert_close(gated, model(x))
