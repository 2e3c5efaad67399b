"""Functions between the outputs of heads and the output projection, and gates of these heads."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, LENGTH, WIDTH, SelfAttention, merge, require_gate, sdpa, softmax
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")


class Attention(SelfAttention):
    """Attention whose outputs pass through a function before or after they are merged."""

    num_heads = HEADS

    def __init__(self, before, after, way=sdpa):
        def output(module, *qkv):
            self.values = qkv[2]
            return module.out_proj(after(module, merge(before(module, module.attend(*qkv)))))

        super().__init__(way, output)
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(DIM)
        self.scale = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x):
        self.x = x
        return super().forward(x)


def same(module, out):
    return out


HIDDEN = torch.arange(LENGTH)[:, None] > 5
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
def test_gates_act_through_linear_functions(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(*LINEAR[between])), torch.randn(2, LENGTH, WIDTH)
    state = torch.get_rng_state()
    require_gate(model, x, factor=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:these modules compute a softmax")
@pytest.mark.parametrize("between", OTHER)
def test_gates_before_other_functions_are_refused(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(*OTHER[between])), torch.randn(2, LENGTH, WIDTH)
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
    """A softmax in a module of its own, which ends before the outputs of the heads are used."""

    def forward(self, q, k, v):
        return softmax(q, k, v)


@pytest.mark.filterwarnings("ignore:these modules compute a softmax")
@pytest.mark.filterwarnings("ignore:the output projection was not seen")
@pytest.mark.parametrize("between", [name for name in OTHER if name != "sum in place"])
def test_gates_before_other_functions_are_refused_after_the_module_of_the_softmax(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(*OTHER[between], Core())), torch.randn(2, LENGTH, WIDTH)
    match = "a function that is not linear, such as a norm or a sum with another tensor, is between them .*: 0.way"
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0.way", 1): 0.5}):
        model(x)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])


@pytest.mark.parametrize("between", LINEAR)
def test_gates_act_through_linear_functions_after_the_module_of_the_softmax(between):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(*LINEAR[between], Core())), torch.randn(2, LENGTH, WIDTH)
    require_gate(model, x, factor=0.5, label="0.way")


REAL = torch.arange(LENGTH) < torch.tensor([7, 4])[:, None]
SELECTED = {
    "mask": lambda out: out[REAL],
    "two indices": lambda out: out[torch.arange(2), torch.tensor([6, 3])],
    "indices of a mask": lambda out: out[REAL.nonzero(as_tuple=True)],
    "step": lambda out: out[:, ::2],
    "other columns": lambda out: out.unflatten(-1, (5, 3)).flatten(2),
}


@pytest.mark.filterwarnings("ignore:the output projection was not seen")  # it sees other rows
@pytest.mark.parametrize("selected", SELECTED)
def test_gates_act_before_tokens_are_selected(selected):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(Attention(same, lambda module, out: SELECTED[selected](out))),
        torch.randn(2, LENGTH, WIDTH),
    )
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])
    require_gate(model, x, factor=0.5)
