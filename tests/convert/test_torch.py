"""Conversion of `torch.nn.MultiheadAttention` to our layer and back."""

import re

import pytest
import torch
from torch import nn

import headwise as hw
from oracles import gradients

pytestmark = pytest.mark.filterwarnings("error")


def assert_same(ours, theirs):
    """Check that two float64 tensors are equal up to rounding."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_design_2_as_torchs_layer_length_first(bias):
    ancestor = nn.MultiheadAttention(48, 8, bias=bias, dtype=torch.float64)
    if bias:
        nn.init.normal_(ancestor.in_proj_bias)
        nn.init.normal_(ancestor.out_proj.bias)
    layer = hw.from_torch(ancestor)
    x = torch.randn(10, 3, 48, dtype=torch.float64, requires_grad=True)
    expected, averaged = ancestor(x, x, x)
    y, weights = layer(x.transpose(0, 1), return_weights=True)
    assert_same(y.transpose(0, 1), expected)
    assert_same(weights.mean(1), averaged)
    grad_x, theirs = gradients(ancestor, x, expected)
    our_grad_x, ours = gradients(layer, x, y.transpose(0, 1))
    assert_same(our_grad_x, grad_x)
    kinds = ("weight", "bias") if bias else ("weight",)
    for kind in kinds:
        assert_same(torch.cat([ours[f"{name}_proj.{kind}"] for name in "qkv"]), theirs[f"in_proj_{kind}"])
        assert_same(ours[f"out_proj.{kind}"], theirs[f"out_proj.{kind}"])
    assert len(ours) == 4 * len(kinds)


def test_design_2_as_torchs_layer_with_other_context_widths():
    ancestor = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, batch_first=True, dtype=torch.float64, dropout=0.5).eval()
    layer = hw.from_torch(ancestor)
    assert layer.dropout == 0.5
    assert not layer.training
    x, keys, values = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((3, 12), (11, 7), (11, 5)))
    expected, weights = ancestor(x, keys, values, average_attn_weights=False)
    y, our_weights = layer(x, keys, values, return_weights=True)
    assert_same(y, expected)
    assert_same(our_weights, weights)


WIDTHS = {
    "one width": {},
    "no bias": {"bias": False},
    "another context": {"kdim": 7, "vdim": 7},
    "keys and values apart": {"kdim": 7, "vdim": 5, "dropout": 0.3},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("options", WIDTHS.values(), ids=WIDTHS)
def test_round_trip_keeps_the_bits(options):
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, **options).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = hw.from_torch(theirs)
    back = hw.to_torch(ours)
    assert vars(back).keys() == vars(theirs).keys()
    for name in ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "training"):
        assert getattr(back, name) == getattr(theirs, name), name
    assert_same_bits(back, theirs)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    assert_same_bits(hw.from_torch(hw.to_torch(ours)), ours)


def assert_same_bits(one, other):
    """Check that two layers have equal parameters, bit for bit, and do not share memory."""
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
        assert value.data_ptr() != other.state_dict()[name].data_ptr()


def test_a_fused_layer_converted_to_torch_computes_the_same():
    layer = hw.MultiHeadAttention(12, 3, fused_qkv=True, dtype=torch.float64, scores=hw.Scores(scale=0.5)).eval()
    theirs = hw.to_torch(layer)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert_same(layer(x), theirs(x, x, x)[0])


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_unsupported_layers_of_torch_are_refused(option):
    message = f"^layer: expected torch.nn.MultiheadAttention without {option}, got {option}=True"
    with pytest.raises(hw.InputError, match=message):
        hw.from_torch(nn.MultiheadAttention(8, 2, **{option: True}))
    with pytest.raises(hw.InputError, match=r"^layer: expected a torch.nn.MultiheadAttention, got Linear"):
        hw.from_torch(nn.Linear(2, 2))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"rotary": hw.Rotary()}, "a layer with rotary"),
        ({"position_bias": hw.ALiBi()}, "a layer with position_bias"),
        ({"qk_norm": hw.QKNorm()}, "a layer with qk_norm"),
        ({"output_gate": "head"}, "a layer with output_gate"),
        ({"mask": hw.causal()}, "a layer with mask"),
        ({"scores": hw.Scores(softcap=3.0)}, "a layer with Scores(scale=None, softcap=3.0"),
        ({"scores": hw.Scores(scale=3.0)}, "a layer with Scores(scale=3.0"),
        ({"num_kv_heads": 1}, "1 key/value heads for 3 heads"),
        ({"head_dim": 5}, "3 heads of head_dim 5, not 12 wide together"),
        ({"value_dim": 7}, "3 heads of value_dim 7, not 12 wide together"),
        ({"out_dim": 11}, "out_dim 11 with embed_dim 12"),
        ({"out_bias": False}, "a bias in some of the projections"),
    ],
)
def test_layers_that_torch_does_not_support_are_refused(options, got):
    sentence = f"layer: expected options that torch.nn.MultiheadAttention has, got {got}"
    with pytest.raises(hw.InputError, match="^" + re.escape(sentence)):
        hw.to_torch(hw.MultiHeadAttention(12, **{"num_heads": 3} | options))


@pytest.mark.usefixtures("as_user")
def test_a_layer_with_some_biases_is_refused():
    layer = hw.MultiHeadAttention(12, 3)
    layer.k_proj.bias = None  # of one projection alone
    with pytest.raises(hw.InputError, match="got a bias in some of the projections$"):
        hw.to_torch(layer)
