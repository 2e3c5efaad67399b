"""A batch padded on the right: each sequence as if it were alone, and zeros where there is padding."""

import pytest
import torch

import headwise as hw
from headwise.attention import packed

LENGTHS = [7, 3, 0, 11]

LAYERS = {
    "plain": {},
    "causal": {"mask": hw.causal()},
    "grouped, rotary, a window": {"num_kv_heads": 2, "rotary": hw.Rotary(), "mask": hw.window(4)},
    "by distance": {"position_bias": hw.ALiBi()},
    "fused": {"fused_qkv": True, "qk_norm": hw.QKNorm("rms"), "output_gate": "head"},
}

CALLS = {
    "nothing": {},
    "gates of sequences": {"gate": torch.rand(4, 6)},
    "gates of queries": {"gate": torch.rand(4, 6, 11)},
    "a bias": {"bias": torch.randn(11, 11)},
    "a matrix": {"mask": torch.rand(11, 11) < 0.7},
    "positions": {"positions": torch.arange(11) * 3 % 13},
    "positions of each": {"positions": torch.arange(44).view(4, 11) * 3 % 13},
    "weights": {"return_weights": True},
}


def alone(call: dict, index: int, length: int) -> dict:
    """What a call says of one sequence."""
    own = dict(call)
    for name, value in call.items():
        if name == "gate":
            own[name] = value[index : index + 1, :, :length] if value.ndim == 3 else value[index : index + 1]
        elif name in ("bias", "mask"):
            own[name] = value[:length, :length]
        elif name == "positions":
            own[name] = (value[index] if value.ndim == 2 else value)[:length]
    return own


@pytest.fixture(params=[True, False], ids=["packed where possible", "masked"])
def _packing(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(packed.PaddedBatch, "should_pack", False)


@pytest.mark.usefixtures("_packing")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", LAYERS)
def test_each_sequence_is_as_if_alone(options, call):
    layer = hw.MultiHeadAttention(24, 6, dtype=torch.float64, **LAYERS[options])
    given = {name: value.double() if name in ("gate", "bias") else value for name, value in CALLS[call].items()}
    x = torch.randn(4, 11, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x, lengths=LENGTHS, **given)
    y, weights = y if isinstance(y, tuple) else (y, None)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    for index, length in enumerate(LENGTHS):
        assert not y[index, length:].any()
        assert not grad[index, length:].any()
        one = x[index : index + 1, :length].detach().requires_grad_()
        wanted = layer(one, **alone(given, index, length))
        if weights is not None:
            wanted, own = wanted
            torch.testing.assert_close(weights[index, :, :length, :length], own[0])
            assert weights[index].sum().item() == pytest.approx(6 * length)
        torch.testing.assert_close(y[index, :length], wanted[0])
        if length:
            (slope,) = torch.autograd.grad(wanted, one, upstream[index : index + 1, :length])
            torch.testing.assert_close(grad[index, :length], slope[0])


def test_nothing_is_computed_for_padding():
    seen = []
    layer = hw.MultiHeadAttention(24, 6)
    layer.q_proj.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    x = torch.randn(4, 11, 24)
    layer(x, lengths=LENGTHS)
    layer(x, lengths=[11, 11, 11, 10])  # too little padding to be worth a copy
    assert seen == [(1, 21, 24), (4, 11, 24)]


BAD = {"nan": float("nan"), "infinity": float("inf")}


@pytest.mark.usefixtures("_packing")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", ["fused", "blockwise", "reference"])
@pytest.mark.parametrize("options", LAYERS)
def test_non_finite_numbers_in_padding_reach_nothing(options, backend, bad):
    layer = hw.MultiHeadAttention(24, 6, backend=backend, **LAYERS[options])
    clean = torch.randn(4, 11, 24)
    is_padding = torch.arange(11) >= torch.tensor(LENGTHS)[:, None]
    x = clean.masked_fill(is_padding[..., None], BAD[bad]).requires_grad_()
    clean = clean.masked_fill(is_padding[..., None], 0.0).requires_grad_()
    y, expected = layer(x, lengths=LENGTHS), layer(clean, lengths=LENGTHS)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [clean, *layer.parameters()])
    for got, exact in zip(gradients, wanted, strict=True):
        assert torch.equal(got, exact)
    assert not gradients[0][is_padding].any()


@pytest.mark.parametrize("call", ["a bias", "a matrix", "weights", "gates of queries"])
def test_non_finite_numbers_in_padding_reach_nothing_of_a_call_that_is_not_packed(call):
    layer = hw.MultiHeadAttention(24, 6)
    x = torch.randn(4, 11, 24)
    x[torch.arange(11) >= torch.tensor(LENGTHS)[:, None]] = float("nan")
    result = layer(x, lengths=LENGTHS, **CALLS[call])
    for tensor in result if isinstance(result, tuple) else (result,):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("lengths", [[], torch.zeros(0, dtype=torch.int64)], ids=["list", "tensor"])
def test_a_batch_of_no_sequences(lengths):
    layer = hw.MultiHeadAttention(24, 6)
    assert layer(torch.randn(0, 5, 24), lengths=lengths).shape == (0, 5, 24)
    y, weights = layer(torch.randn(0, 5, 24), lengths=lengths, return_weights=True)
    assert (y.shape, weights.shape) == ((0, 5, 24), (0, 6, 5, 5))


def test_sequences_of_no_tokens():
    layer = hw.MultiHeadAttention(24, 6)
    assert layer(torch.randn(2, 0, 24), lengths=[0, 0]).shape == (2, 0, 24)
    with torch.no_grad():
        cache = layer.static_cache(2, 3)
        assert layer(torch.randn(2, 0, 24), lengths=[0, 0], cache=cache).shape == (2, 0, 24)
    assert not layer(torch.randn(2, 3, 24), lengths=[0, 0]).any()


def test_one_sequence_without_a_batch_is_refused():
    layer = hw.MultiHeadAttention(24, 6)
    with pytest.raises(hw.InputError, match=r"lengths: expected x of shape \(batch, queries, width\), got \(5, 24\)"):
        layer(torch.randn(5, 24), lengths=[5])
