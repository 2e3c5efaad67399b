"""Batches padded on the right: each sequence has the output of a call on its own, and padding has output 0."""

import pytest
import torch

import headwise as hw
from headwise.nn import layout

LENGTHS = [7, 3, 0, 11]

LAYERS = {
    "plain": {},
    "causal": {"mask": hw.causal()},
    "grouped, rotary, a window": {"num_kv_heads": 2, "rotary": hw.Rotary(), "mask": hw.window(4)},
    "ALiBi": {"position_bias": hw.ALiBi()},
    "fused": {"fused_qkv": True, "qk_norm": hw.QKNorm("rms"), "output_gate": "head"},
}

CALLS = {
    "nothing": {},
    "a gate per sequence": {"gate": torch.rand(4, 6)},
    "a gate per query": {"gate": torch.rand(4, 6, 11)},
    "a bias": {"bias": torch.randn(11, 11)},
    "a matrix": {"mask": torch.rand(11, 11) < 0.7},
    "positions": {"positions": torch.arange(11) * 3 % 13},
    "positions of each sequence": {"positions": torch.arange(44).view(4, 11) * 3 % 13},
    "weights": {"return_weights": True},
}


def arguments_of_sequence(call: dict, index: int, length: int) -> dict:
    """Return the arguments of a call on a batch, cut to the sequence with this index and length."""
    arguments = dict(call)
    for name, value in call.items():
        if name == "gate":
            arguments[name] = value[index : index + 1, :, :length] if value.ndim == 3 else value[index : index + 1]
        elif name in ("bias", "mask"):
            arguments[name] = value[:length, :length]
        elif name == "positions":
            arguments[name] = (value[index] if value.ndim == 2 else value)[:length]
    return arguments


@pytest.fixture(params=[True, False], ids=["packed where possible", "masked"])
def _packing(request, monkeypatch):
    """Run a test with padding removed where the layer can do so, and with padding masked."""
    if not request.param:
        monkeypatch.setattr(layout, "MOST_REAL", -1.0)


@pytest.mark.usefixtures("_packing")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", LAYERS)
def test_each_sequence_has_the_output_and_gradient_of_a_call_on_its_own(options, call):
    layer = hw.MultiHeadAttention(24, 6, dtype=torch.float64, **LAYERS[options])
    arguments = {name: value.double() if name in ("gate", "bias") else value for name, value in CALLS[call].items()}
    x = torch.randn(4, 11, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x, lengths=LENGTHS, **arguments)
    y, weights = y if isinstance(y, tuple) else (y, None)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    for index, length in enumerate(LENGTHS):
        assert not y[index, length:].any()
        assert not grad[index, length:].any()
        one = x[index : index + 1, :length].detach().requires_grad_()
        alone = layer(one, **arguments_of_sequence(arguments, index, length))
        if weights is not None:
            alone, weights_alone = alone
            torch.testing.assert_close(weights[index, :, :length, :length], weights_alone[0])
            assert weights[index].sum().item() == pytest.approx(6 * length)
        torch.testing.assert_close(y[index, :length], alone[0])
        if length:
            (slope,) = torch.autograd.grad(alone, one, upstream[index : index + 1, :length])
            torch.testing.assert_close(grad[index, :length], slope[0])


def test_nothing_is_computed_for_padding():
    shapes = []
    layer = hw.MultiHeadAttention(24, 6)
    layer.q_proj.register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    x = torch.randn(4, 11, 24)
    layer(x, lengths=LENGTHS)
    layer(x, lengths=[11, 11, 11, 10])  # too little padding to be worth a copy
    assert shapes == [(1, 21, 24), (4, 11, 24)]


BAD = {"nan": float("nan"), "infinity": float("inf")}


@pytest.mark.usefixtures("_packing")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", ["fused", "blockwise", "reference"])
@pytest.mark.parametrize("options", LAYERS)
def test_non_finite_padding_changes_no_output_or_gradient(options, backend, bad):
    layer = hw.MultiHeadAttention(24, 6, backend=backend, **LAYERS[options])
    clean = torch.randn(4, 11, 24)
    is_padding = torch.arange(11) >= torch.tensor(LENGTHS)[:, None]
    x = clean.masked_fill(is_padding[..., None], BAD[bad]).requires_grad_()
    clean = clean.masked_fill(is_padding[..., None], 0.0).requires_grad_()
    y, expected = layer(x, lengths=LENGTHS), layer(clean, lengths=LENGTHS)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    clean_gradients = torch.autograd.grad(expected.square().sum(), [clean, *layer.parameters()])
    torch.testing.assert_close(gradients, clean_gradients, rtol=0, atol=0)
    assert not gradients[0][is_padding].any()


@pytest.mark.parametrize("call", ["a bias", "a matrix", "weights", "a gate per query"])
def test_non_finite_padding_does_not_reach_the_result_of_a_call_that_is_not_packed(call):
    layer = hw.MultiHeadAttention(24, 6)
    x = torch.randn(4, 11, 24)
    x[torch.arange(11) >= torch.tensor(LENGTHS)[:, None]] = float("nan")
    result = layer(x, lengths=LENGTHS, **CALLS[call])
    for tensor in result if isinstance(result, tuple) else (result,):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("lengths", [[], torch.zeros(0, dtype=torch.int64)], ids=["list", "tensor"])
def test_a_batch_without_sequences_has_an_empty_output(lengths):
    layer = hw.MultiHeadAttention(24, 6)
    assert layer(torch.randn(0, 5, 24), lengths=lengths).shape == (0, 5, 24)
    y, weights = layer(torch.randn(0, 5, 24), lengths=lengths, return_weights=True)
    assert (y.shape, weights.shape) == ((0, 5, 24), (0, 6, 5, 5))


def test_sequences_without_tokens_have_an_empty_output_or_zeros():
    layer = hw.MultiHeadAttention(24, 6)
    assert layer(torch.randn(2, 0, 24), lengths=[0, 0]).shape == (2, 0, 24)
    with torch.no_grad():
        cache = layer.static_cache(2, 3)
        assert layer(torch.randn(2, 0, 24), lengths=[0, 0], cache=cache).shape == (2, 0, 24)
    assert not layer(torch.randn(2, 3, 24), lengths=[0, 0]).any()


def test_lengths_without_a_batch_axis_are_refused():
    layer = hw.MultiHeadAttention(24, 6)
    with pytest.raises(hw.InputError, match=r"lengths: expected x of shape \(batch, queries, width\), got \(5, 24\)"):
        layer(torch.randn(5, 24), lengths=[5])
