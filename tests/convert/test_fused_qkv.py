"""Fused and separated projections: the other parts of a layer stay the same, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import headwise as hw

EMBED, HEADS = 12, 6


LAYERS = {
    "plain": (hw.MultiHeadAttention, {}),
    "no bias": (hw.MultiHeadAttention, {"bias": False, "out_bias": True}),
    "grouped": (hw.MultiHeadAttention, {"num_kv_heads": 2, "head_dim": 4, "value_dim": 7, "rotary": hw.Rotary()}),
    "options": (
        hw.MultiHeadAttention,
        {
            "qk_norm": hw.QKNorm("layer", "heads"),
            "output_gate": "element",
            "scores": hw.Scores(sinks=True, temperature=True),
            "position_bias": hw.RelativeBias(HEADS),
            "mask": hw.window(3),
            "dropout": 0.3,
        },
    ),
    "derived": (hw.DifferentialAttention, {"num_kv_heads": 3, "norm_weight": True, "depth": 3}),
}


def layer_of(name, *, fused):
    """Return a layer with random weights in evaluation mode, some of its parameters frozen."""
    kind, options = LAYERS[name]
    layer = kind(EMBED, HEADS, fused_qkv=fused, dtype=torch.float64, **copy.deepcopy(options)).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.out_proj.weight.requires_grad_(False)
    for projection in (layer.qkv_proj,) if fused else (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.weight.requires_grad_(False)
    return layer


def assert_same_bits(one, other):
    """Check that two layers have equal parameters in the same order, with the same flags, and share no memory."""
    assert type(one) is type(other)
    pairs = list(zip(one.named_parameters(), other.named_parameters(), strict=True))
    for (name, value), (other_name, other_value) in pairs:
        assert name == other_name
        assert torch.equal(value, other_value)
        assert value.data_ptr() != other_value.data_ptr()
        assert (value.requires_grad, value.dtype) == (other_value.requires_grad, other_value.dtype)
    assert [each.training for each in one.modules()] == [each.training for each in other.modules()]
    for name in ("fused_qkv", "dropout", "scores", "qk_norm", "mask", "rotary"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("name", LAYERS)
def test_round_trip_keeps_the_bits(name):
    separate = layer_of(name, fused=False)
    fused = hw.fuse_projections(separate)
    stacked = torch.cat([separate.q_proj.weight, separate.k_proj.weight, separate.v_proj.weight])
    assert torch.equal(fused.qkv_proj.weight, stacked)
    assert [each for each, _ in fused.named_parameters()] == [
        each for each, _ in layer_of(name, fused=True).named_parameters()
    ]
    assert_same_bits(hw.separate_projections(fused), separate)

    fused = layer_of(name, fused=True)
    assert_same_bits(hw.fuse_projections(hw.separate_projections(fused)), fused)


@pytest.mark.parametrize("name", LAYERS)
def test_fused_and_separate_projections_compute_the_same(name):
    separate = layer_of(name, fused=False)
    x = torch.randn(2, 7, EMBED, dtype=torch.float64)
    backend = "reference" if name == "options" else None
    fused = hw.fuse_projections(separate)
    separate.backend = fused.backend = backend
    torch.testing.assert_close(fused(x), separate(x), rtol=0, atol=1e-11)
    assert not hasattr(fused, "q_proj")
    context = torch.randn(2, 11, EMBED, dtype=torch.float64)
    apart = hw.separate_projections(fused)
    torch.testing.assert_close(apart(x, context), separate(x, context), rtol=0, atol=1e-11)


def test_conversion_does_not_change_the_original_layer():
    layer = layer_of("options", fused=False)
    before = {name: value.clone() for name, value in layer.named_parameters()}
    fused = hw.fuse_projections(layer)
    for parameter in fused.parameters():
        nn.init.zeros_(parameter)
    for name, value in layer.named_parameters():
        assert torch.equal(value, before[name])
    assert fused.position_bias is not layer.position_bias


class Adapter(nn.Module):
    """Linear map with an additional computation, which a conversion must refuse."""

    def __init__(self, base):
        super().__init__()
        self.base = base


PLAIN = "a plain nn.Linear as "


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"fused_qkv": True}, None, "a layer with fused_qkv=False, got fused_qkv=True"),
        ({"context_dim": 5, "value_context_dim": 7}, None, r"contexts of width 12 like x, got widths \(5, 7\)"),
        ({}, lambda layer: setattr(layer, "k_proj", Adapter(layer.k_proj)), f"{PLAIN}k_proj, got Adapter; merge or re"),
        (
            *({}, lambda layer: prune.identity(layer.v_proj, "weight")),
            f"{PLAIN}v_proj, got one with bias, weight_orig, weight_mask; merge or remove",
        ),
        ({}, lambda layer: delattr(layer, "v_proj"), f"{PLAIN}v_proj, got none; merge or remove adapters"),
        ({}, lambda layer: layer.v_proj.register_forward_hook(print), f"{PLAIN}v_proj, got one with a hook; merge or"),
        (
            *({}, lambda layer: setattr(layer.k_proj, "bias", None)),
            "one bias setting, got q_proj a bias, k_proj none, v_proj a bias",
        ),
        (
            *({}, lambda layer: layer.v_proj.bias.requires_grad_(False)),
            "one requires_grad of every bias, got q_proj True, k_proj True, v_proj False",
        ),
        ({}, lambda layer: layer.v_proj.double(), "one dtype of every weight, got .*, v_proj torch.float64"),
        ({}, lambda layer: layer.v_proj.to("meta"), "one device of every weight, got .*, v_proj meta"),
    ],
)
def test_layers_that_cannot_be_fused_are_refused(options, change, message):
    layer = hw.MultiHeadAttention(EMBED, HEADS, **options)
    if change is not None:
        change(layer)
    with pytest.raises(hw.InputError, match=f"^layer: expected {message}"):
        hw.fuse_projections(layer)


@pytest.mark.usefixtures("as_user")
def test_layers_that_cannot_be_separated_are_refused():
    adapted = hw.MultiHeadAttention(EMBED, HEADS, fused_qkv=True)
    adapted.qkv_proj = Adapter(adapted.qkv_proj)
    for layer, message in (
        (hw.MultiHeadAttention(EMBED, HEADS), "a layer with fused_qkv=True, got fused_qkv=False"),
        (adapted, f"{PLAIN}qkv_proj, got Adapter; merge or remove adapters"),
    ):
        with pytest.raises(hw.InputError, match=f"^layer: expected {message}"):
            hw.separate_projections(layer)
    for convert in (hw.fuse_projections, hw.separate_projections):
        with pytest.raises(hw.InputError, match="^layer: expected a MultiHeadAttention, got Linear"):
            convert(nn.Linear(2, 2))
