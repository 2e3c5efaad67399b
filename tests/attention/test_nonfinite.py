"""NaN and infinity in keys and values change only the rows that may attend to them."""

import pytest
import torch

import headwise as hw
from headwise.attention.backends.native.library import why_not_loaded
from headwise.attention.nonfinite import all_finite
from oracles import distance

NATIVE = () if why_not_loaded() else ("native",)
BACKENDS = ("fused", "blockwise", *NATIVE, "reference", None)
LENGTH, BAD = 193, 101
ROWS, KEYS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
MASKS = {
    "causal": (hw.causal(), KEYS <= ROWS),
    "window": (hw.window(9), (KEYS <= ROWS) & (KEYS > ROWS - 9)),
    "both sides": (hw.window(9, ahead=2), (KEYS <= ROWS + 2) & (KEYS > ROWS - 9)),
    "padding": (hw.padding([BAD]), (KEYS < BAD).expand(LENGTH, -1)),
    "causal, padded": (hw.causal() & hw.padding([BAD]), (KEYS <= ROWS) & (KEYS < BAD)),
    "boolean tensor": (KEYS <= ROWS, KEYS <= ROWS),
    "bias": (torch.where(KEYS <= ROWS, 0.0, -torch.inf), KEYS <= ROWS),
}
"""Each mask, and True where a row may attend to a key."""


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Random queries, keys and values with two query heads for each of two key/value heads."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, LENGTH, 11, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bad", "dtype"),
    [*((bad, torch.float32) for bad in (torch.nan, torch.inf, -torch.inf)), (torch.nan, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("mask", MASKS)
def test_a_hidden_key_or_value_changes_nothing(mask, bad, dtype, backend):
    given, visible = MASKS[mask]
    sees_bad = visible[:, BAD]
    for place in (1, 2):
        inputs = tensors(dtype)
        expected = hw.attend(*inputs, mask=given, backend="reference")
        inputs[place][:, 1, BAD, 3] = bad
        out, lse = hw.attend(*inputs, mask=given, return_lse=True, backend=backend)
        alone = hw.attend(*inputs, mask=given, backend=backend)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        for got in (out, alone):
            assert distance(got[:, :2], expected[:, :2].double()) < tolerance  # heads with other keys
            assert distance(got[:, 2:, ~sees_bad], expected[:, 2:, ~sees_bad].double()) < tolerance
            if place == 2:  # a value has no part in the weights, so its other features stay
                assert not got[:, 2:, sees_bad, 3].isfinite().any()
                assert got[:, 2:, sees_bad, 4:].isfinite().all()
        assert lse[:, 2:, ~sees_bad].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
def test_nan_in_a_visible_key_is_not_removed(place, backend):
    inputs = tensors(torch.float32)
    inputs[place][:, 1, BAD] = torch.nan
    out = hw.attend(*inputs, mask=hw.causal(), backend=backend)
    assert out[:, 2:, BAD:].isnan().all()
    assert out[:, 2:, :BAD].isfinite().all()
    assert out[:, :2].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["padding", "causal, padded"])
@pytest.mark.parametrize("places", [(1,), (2,), (1, 2)], ids=["keys", "values", "both"])
def test_gradients_do_not_read_hidden_keys_and_values(places, mask, backend):
    given, _ = MASKS[mask]
    inputs = tensors(torch.float32)
    upstream = torch.randn(1, 4, LENGTH, 11)

    def gradients(*inputs):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(hw.attend(*leaves, mask=given, backend=backend), leaves, upstream)

    expected = gradients(*inputs)
    for place in places:
        inputs[place][:, :, BAD:] = torch.nan
    torch.testing.assert_close(gradients(*inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_gradients_of_earlier_rows_do_not_read_future_keys(backend):
    """The kernel skips future keys in the forward pass, so that only the gradient would be NaN."""
    q, k, v = tensors(torch.float32)
    k[:, :, BAD:] = torch.nan
    q.requires_grad_()
    out = hw.attend(q, k, v, mask=hw.causal(), backend=backend)
    (got,) = torch.autograd.grad(out[:, :, :BAD].sum(), q)
    short = [tensor.detach()[:, :, :BAD] for tensor in (q, k, v)]
    short[0].requires_grad_()
    (wanted,) = torch.autograd.grad(hw.attend(*short, mask=hw.causal(), backend="reference").sum(), short[0])
    torch.testing.assert_close(got[:, :, :BAD], wanted, rtol=0, atol=1e-5)


def test_talking_heads_spread_a_bad_key_to_all_heads_but_not_to_earlier_rows():
    q, k, v = tensors(torch.float32)
    talking = (torch.rand(4, 4) + 0.1, torch.rand(4, 4) + 0.1)
    expected = hw.attend(q, k, v, mask=hw.causal(), talking_heads=talking, backend="reference")
    k[:, 0, BAD] = torch.nan
    out = hw.attend(q, k, v, mask=hw.causal(), talking_heads=talking, backend="reference")
    assert out[:, :, BAD:].isnan().all()
    torch.testing.assert_close(out[:, :, :BAD], expected[:, :, :BAD])


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_returned_weights_do_not_read_hidden_keys(mask, backend):
    given, visible = MASKS[mask]
    sees_bad = visible[:, BAD]

    def gradients(q, k, v):
        q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
        _, weights = hw.attend(q, k, v, mask=given, return_weights=True, backend=backend)
        return torch.autograd.grad(weights[:, :, ~sees_bad].square().sum(), (q, k))

    q, k, v = tensors(torch.float32)
    expected = gradients(q, k, v)
    k[:, :, BAD] = torch.nan
    torch.testing.assert_close(gradients(q, k, v), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:a mask shows padding")  # it is of the context alone
def test_observed_attention_ignores_hidden_keys_and_values(bad):
    layer = hw.MultiHeadAttention(24, 3).eval()
    x, context, mask = torch.randn(2, 5, 24), torch.randn(2, 13, 24), hw.padding([13, 6])
    results = []
    for number in (0.0, bad):
        context[1, 6:] = number
        with torch.no_grad(), hw.watch(layer) as heads:
            y = layer(x, context, mask=mask)
        with torch.no_grad():
            torch.testing.assert_close(y, layer(x, context, mask=mask), rtol=0, atol=1e-5)
        results.append(next(record.statistics for record in heads.records))
    assert results[1].keys() == results[0].keys()
    for name, moments in results[1].items():
        torch.testing.assert_close(moments.value, results[0][name].value, rtol=1e-5, atol=1e-6, equal_nan=True)


@torch.no_grad()
def test_uniform_heads_ignore_hidden_values():
    layer = hw.MultiHeadAttention(24, 3, mask=hw.causal()).eval()
    x = torch.randn(1, 13, 24)
    with hw.gate(layer, {(0, 1): hw.replacements.uniform()}):
        expected = layer(x)
        x[:, 9:] = torch.nan
        out = layer(x)
    torch.testing.assert_close(out[:, :9], expected[:, :9])
    assert out[:, 9:].isnan().all()


def test_a_layer_ignores_nan_in_padding():
    layer = hw.MultiHeadAttention(24, 3, mask=hw.causal())
    x = torch.randn(2, 13, 24)
    lengths = torch.tensor([13, 6])
    expected = layer(x, lengths=lengths)
    x[1, 6:] = torch.nan
    torch.testing.assert_close(layer(x, lengths=lengths)[1, :6], expected[1, :6])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs_gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_in_a_query_of_few_keys_stays(dtype, needs_gradient, backend):
    if backend == "native" and dtype not in (torch.float32, torch.bfloat16):
        pytest.skip("the native kernels do not compute in this dtype")
    for queries, keys, mask in ((1, 1, None), (3, 3, hw.causal()), (11, 11, hw.causal()), (17, 5, None), (2, 13, None)):
        q, k = torch.randn(1, 4, queries, 8, dtype=dtype), torch.randn(1, 2, keys, 8, dtype=dtype)
        q[:, :, -1] = torch.nan
        q.requires_grad_(needs_gradient)
        out = hw.attend(q, k, k, mask=mask, backend=backend)
        assert out[:, :, -1].isnan().all(), (queries, keys)
        assert out[:, :, :-1].isfinite().all(), (queries, keys)
        lse = hw.attend(q, k, k, mask=mask, backend=backend, return_lse=True)[1]
        assert lse[:, :, -1].isnan().all(), (queries, keys)


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not there")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_native_operator_reads_all_numbers_of_a_view_and_no_others(dtype):
    generator = torch.Generator().manual_seed(0)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in range(0, 210, 13):
            x = torch.randn(210, generator=generator).to(dtype)
            x[place] = bad
            x = x.view(2, 3, 5, 7)
            views = (x, x.transpose(1, 2), x.mT, x[:, :, ::2], x[..., ::2], x[..., 1:4], x[:1].expand(4, 3, 5, 7))
            for view in (*views, x.flatten()[::3][:, None].expand(-1, 2), x[:0], x[0, 0, 0]):
                assert all_finite(view, torch.ones(3)) == bool(view.isfinite().all())
                assert all_finite(torch.ones(3), view) == bool(view.isfinite().all())
