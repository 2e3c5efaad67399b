"""The native backend in parts of the score matrix, where masks are too large to be evaluated at once."""

import subprocess
import sys

import pytest
import torch

import headwise as hw
from headwise.attention.backends.native import library
from headwise.attention.masks import key_ranges
from oracles import distance, plain_attention

pytestmark = pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 4, 2, 391, 523

MASKS = {
    "dilated": hw.window(20, dilation=3),
    "rule": hw.mask_rule(lambda b, h, q, k: (q + 2 * k + h) % 3 > 0),
    "rule of each sequence": hw.causal() & hw.mask_rule(lambda b, h, q, k: (q * k + b) % 5 > 1),
    "window": hw.window(40) & hw.mask_rule(lambda b, h, q, k: (q + k) % 3 > 0),
    "documents in pieces": hw.causal() & hw.segments(torch.arange(KEYS) // 100 % 2),
    "no key": hw.window(9, dilation=2) & hw.padding([KEYS, 100]),
    "dense": hw.dense(torch.rand(1, 1, QUERIES, KEYS) < 0.5) & hw.mask_rule(lambda b, h, q, k: k != 7),
}


@pytest.fixture
def small_limits(monkeypatch):
    """Limits with which the calls of these tests have several parts, and several pieces in each."""
    monkeypatch.setattr(key_ranges, "MATRIX_ELEMENTS", 2**16)
    monkeypatch.setattr(key_ranges, "PIECE_ELEMENTS", 2**13)
    monkeypatch.setattr(key_ranges, "CACHED_ELEMENTS", 0)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return random q, k and v that require grad."""
    sizes = ((HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    return [torch.randn(BATCH, *size, 32, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_parts_have_the_results_of_the_whole(name, dtype, monkeypatch, request):
    """Sums are rounded differently: gradients are sums over parts, blocks of parts may have fewer rows, and parts with
    few rows are not computed in pairs of bfloat16.
    """
    q, k, v = tensors(dtype)
    sinks = torch.randn(HEADS, requires_grad=True)
    bias = torch.randn(1, HEADS, QUERIES, 1, requires_grad=True)

    def results() -> list[torch.Tensor]:
        out, lse = hw.attend(q, k, v, mask=MASKS[name], sinks=sinks, bias=bias, return_lse=True, backend="native")
        loss = out.float().square().sum() + lse.sum()
        return [out, lse, *torch.autograd.grad(loss, (q, k, v, sinks, bias))]

    whole = results()
    request.getfixturevalue("small_limits")
    calls = []
    forward = torch.ops.headwise.attend_forward

    def counted(*arguments):
        calls.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(torch.ops.headwise, "attend_forward", counted)
    parts = results()
    assert len(calls) > 2
    for ours, expected in zip(parts, whole, strict=True):
        is_row = expected > -torch.inf
        assert distance(ours[is_row], expected[is_row]) <= 4 * torch.finfo(dtype).eps * expected[is_row].abs().max()


def test_parts_are_attention(small_limits):
    q, k, v = tensors()
    mask = MASKS["rule of each sequence"]
    out = hw.attend(q, k, v, mask=mask, backend="native")
    allowed = mask.block(key_ranges.Grid(BATCH, HEADS, QUERIES, KEYS))
    exact = plain_attention(*(each.double() for each in (q, k, v)), allowed)
    assert distance(out, exact.out) < 1e-6
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad((exact.out * upstream).sum(), (q, k, v))
    for ours, right in zip(torch.autograd.grad((out * upstream).sum(), (q, k, v)), expected, strict=True):
        assert distance(ours, right) < 1e-5


def test_a_rule_that_changes_before_the_backward_pass_raises(small_limits):
    q, k, v = tensors()
    hidden = torch.tensor(7)
    out = hw.attend(q, k, v, mask=hw.mask_rule(lambda b, h, q, k: (q + k) % 9 != hidden), backend="native")
    hidden += 1
    with pytest.raises(hw.InputError, match="same result in the backward pass as in the forward pass, got another"):
        out.sum().backward()


MEMORY = """
import resource, torch, headwise as hw
q, k, v = (torch.randn(1, 2, 32768, 32, requires_grad=True) for _ in range(3))
mask = hw.window(256, dilation=4)
hw.attend(*(x[:, :, :512] for x in (q, k, v)), mask=mask, backend="native").sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hw.attend(q, k, v, mask=mask, backend="native").sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
"""Program that prints the memory of a step of training in MiB. The whole matrix has 1,024 MiB."""


@pytest.mark.slow
def test_a_mask_with_gaps_needs_little_memory():
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    outputs_and_gradients = 5 * 8  # of 8 MiB each
    assert float(result.stdout) < 128 + outputs_and_gradients


def test_parts_without_a_key_are_empty():
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for n in (6000, 4000, 4000))
    mask = hw.causal() & hw.mask_rule(lambda b, h, q, k: (q + k) % 3 > 0)
    out = hw.attend(q, k, v, mask=mask, backend="native")
    assert not out[:, :, :2000].any()
    exact = hw.attend(q[:, :, -500:].double(), k.double(), v.double(), mask=mask, backend="reference")
    torch.testing.assert_close(out[:, :, -500:].double(), exact, rtol=0, atol=1e-5)
    assert all(each.isfinite().all() for each in torch.autograd.grad(out.sum(), (q, k, v)))
