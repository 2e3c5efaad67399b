"""Gates of heads whose outputs a model overwrites in place before the output projection, without a new tensor."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, LENGTH, WIDTH, SelfAttention, merge, sdpa, softmax
from test_watch import require_statistics
from torch import nn

import headwise as hw

LATE = torch.arange(LENGTH)[:, None] > 4
WAYS = {"softmax": softmax, "SDPA": sdpa}


def attention(overwrite, where, way="SDPA"):
    """Return attention whose outputs are overwritten before ("heads") or after ("features") they are merged."""

    def output(module, q, k, v):
        out = module.attend(q, k, v)
        if where == "heads":
            out = out.clone()
            overwrite(out)
        merged = merge(out).clone()
        if where == "features":
            overwrite(merged)
        return module.out_proj(merged)

    return nn.Sequential(SelfAttention(WAYS[way], output))


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
    model, x = attention(LINEAR[way], where, route), torch.randn(2, LENGTH, WIDTH)
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
    model, x = attention(NOT_LINEAR[way], where, route), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with pytest.raises(hw.InputError, match="function that is not linear"), hw.gate(model, {("0", 1): 0.0}):
        model(x)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("where", ["heads", "features"])
@torch.no_grad()
def test_gates_are_refused_if_a_view_of_an_output_is_overwritten(where):
    model = attention(lambda out: out[:, :1].mul_(3.0), where)
    match = "changed its queries, keys, values, weights or output in place"
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0", 1): 0.0}):
        model(torch.randn(2, LENGTH, WIDTH))


@torch.no_grad()
def test_attention_is_named_if_the_data_of_its_output_are_overwritten():
    def doubled(module, q, k, v):
        out = module.attend(q, k, v)
        out.data.mul_(2.0)
        return module.out_proj(merge(out))

    model = nn.Sequential(SelfAttention(sdpa, doubled))
    with pytest.raises(hw.InputError, match="output in place before the output projection"), hw.watch(model):
        model(torch.randn(2, LENGTH, WIDTH))


def after(overwrite, way):
    """Return attention whose queries, keys and values are overwritten between attention and the output projection."""

    def output(module, q, k, v):
        out = module.attend(q, k, v)
        for tensor in (q, k, v):
            overwrite(tensor)
        return module.out_proj(merge(out))

    return nn.Sequential(SelfAttention(WAYS[way], output))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_uniform_attention_is_refused_if_the_values_are_overwritten(way, mode):
    torch.manual_seed(0)
    model, x = after(torch.zero_, way), torch.randn(2, LENGTH, WIDTH)
    with mode():
        with hw.gate(model, {("0", 1): 0.0}):
            gated = model(x)
        uniform = hw.gate(model, {("0", 1): hw.replacements.uniform()})
        with pytest.raises(hw.InputError, match=r"replacement that reads these in 0"), uniform:
            model(x)
        model[0].out_proj.weight[:, DIM : 2 * DIM] = 0.0
        torch.testing.assert_close(gated, model(x))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_uniform_attention_is_that_of_values_that_stay(way):
    torch.manual_seed(0)
    model, x = after(torch.Tensor.detach, way), torch.randn(2, LENGTH, WIDTH)
    with hw.gate(model, {("0", 1): hw.replacements.uniform()}):
        gated = model(x)
    values = model[0].qkv(x)[..., 2 * WIDTH :]
    out = merge(WAYS[way](*(part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in model[0].qkv(x).chunk(3, -1))))
    out[..., DIM : 2 * DIM] = values[..., DIM : 2 * DIM].mean(1, keepdim=True)
    torch.testing.assert_close(gated, model[0].out_proj(out))
