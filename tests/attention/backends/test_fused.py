"""Traps of torch's operators that `fused` avoids: each test shows the trap, and then that it does not affect `attend`.

If torch fixes a trap, the first half of its test fails; then the detour in `fused.py` can be removed.
"""

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from oracles import plain_attention

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def test_the_operator_reads_a_wide_stride_as_if_it_were_one():
    q = torch.randn(2, 3, 5, 16)[..., ::2]
    exact = plain_attention(q, q, q)
    assert not torch.allclose(flash(q, q, q)[0], exact.out, atol=0.1)
    out, lse = hw.attend(q, q, q, return_lse=True)
    torch.testing.assert_close(out, exact.out)
    torch.testing.assert_close(lse, exact.lse)


def test_the_operator_returns_lse_zero_for_a_row_without_a_key():
    q = torch.randn(2, 3, 5, 8)
    hidden = torch.full((2, 1, 1, 5), -torch.inf)
    assert not flash(q, q, q, attn_mask=hidden)[1].any()
    assert (hw.attend(q, q, q, bias=hidden, return_lse=True)[1] == -torch.inf).all()


def test_sdpa_misreads_a_float32_mask_with_float64_queries():
    q = torch.randn(2, 3, 33, 8, dtype=torch.float64)
    bias = torch.randn(2, 3, 33, 33)
    exact = plain_attention(q, q, q, bias=bias.double()).out
    assert not torch.allclose(F.scaled_dot_product_attention(q, q, q, attn_mask=bias), exact, atol=0.1)
    torch.testing.assert_close(hw.attend(q, q, q, bias=bias), exact)


def test_sdpa_aligns_causal_to_the_first_key():
    q, k = torch.randn(2, 3, 19, 8), torch.randn(2, 3, 23, 8)  # for fewer keys, `attend` passes a mask tensor anyway
    theirs = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    allowed = torch.ones(19, 23, dtype=torch.bool).tril(4).expand(2, 3, 19, 23)
    exact = plain_attention(q, k, k, allowed).out
    assert not torch.allclose(theirs, exact, atol=0.1)
    torch.testing.assert_close(hw.attend(q, k, k, mask=hw.causal(), backend="fused"), exact)


def test_the_gradient_of_the_lse_alone_is_the_weights():
    q, k = (torch.randn(1, 2, n, 5, dtype=torch.float64, requires_grad=True) for n in (3, 7))
    v = torch.randn(1, 2, 7, 5, dtype=torch.float64)
    lse = hw.attend(q, k, v, mask=hw.causal(), return_lse=True)[1]
    (got,) = torch.autograd.grad(lse.sum(), q)
    weights = hw.attend(q, k, v, mask=hw.causal(), return_weights=True, backend="reference")[1]
    torch.testing.assert_close(got, weights @ k * 5**-0.5)


def test_no_mask_tensor_is_made_for_square_causal_masks_and_masks_that_hide_nothing(monkeypatch):
    seen = []
    sdpa = F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q = torch.randn(2, 3, 16, 8)
    hw.attend(q, q, q, mask=hw.causal(), backend="fused")
    hw.attend(q[:, :, :1], q, q, mask=hw.causal() & hw.window(16), backend="fused")
    hw.attend(q, q, q, mask=hw.padding([16, 16]), backend="fused")
    assert seen == [(None, True), (None, False), (None, False)]


def test_a_padded_channels_last_layout_is_read_correctly():
    """Padding keeps this layout, whose last stride is not 1; the operator would read it as if the stride were 1."""
    q, k = (
        torch.randn(1, 2, 3, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    v = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    assert torch.nn.functional.pad(q, (0, 3)).stride(-1) != 1
    out, lse = hw.attend(q, k, v, return_lse=True)
    exact = plain_attention(q, k, v)
    torch.testing.assert_close(out, exact.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, exact.lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axes", [(1, 1), (1, 6), (2, 1), (2, 6)], ids=str)
def test_one_query_row_of_grouped_heads(axes, dtype):
    """The row is passed as rows of one head, twice in bfloat16; masks, biases and sinks stay with their heads."""
    q, k, v = (torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((6, 1), (3, 11), (3, 11)))
    allowed, bias, sinks = torch.rand(*axes, 1, 11) > 0.4, torch.randn(*axes, 1, 11), torch.randn(6)
    scale, gate = torch.rand(6) + 0.5, torch.randn(2, 6)
    for options in (
        {},
        {"mask": allowed},
        {"mask": allowed, "bias": bias, "sinks": sinks, "return_lse": True},
        {"bias": bias, "scale": scale, "gate": gate},
    ):
        wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        wide |= {"mask": allowed} if "mask" in options else {}
        got = hw.attend(q, k, v, **options, backend="fused")
        wanted = hw.attend(q.double(), k.double(), v.double(), **wide, backend="reference")
        tolerance = 1e-6 if dtype == torch.float64 else 0.02  # the options are float32
        for ours, exact in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, wanted)), strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance)


def test_one_query_row_reads_the_keys_of_a_group_once(monkeypatch):
    seen = []
    sdpa = F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        seen.append((tuple(q.shape), options.get("enable_gqa", False)))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    k = torch.randn(2, 3, 7, 8)
    for dtype, rows in ((torch.float32, 2), (torch.bfloat16, 2)):
        q = torch.randn(2, 6, 1, 8).to(dtype)
        hw.attend(q, k.to(dtype), k.to(dtype), mask=hw.causal(), backend="fused")
        assert seen.pop() == ((2, 3, rows, 8), False)
    hw.attend(torch.randn(2, 3, 1, 8).bfloat16(), k.bfloat16(), k.bfloat16(), backend="fused")
    assert seen.pop() == ((2, 3, 2, 8), False)  # the row twice, so that products are of matrices
