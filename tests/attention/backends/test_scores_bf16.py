"""Scores in bfloat16: close to those in float64 at any magnitude, and about as accurate as torch's kernel."""

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.attention.backends.blockwise import scores as blockwise_scores
from headwise.attention.backends.blockwise.tiles import LOG2_E, Pool, iterate_tiles, plan_of, score_of_hidden_key
from headwise.attention.backends.native import library
from headwise.attention.masks.grid import Grid
from oracles import plain_attention

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM = 2, 6, 3, 70, 517, 34
SCALE = HEAD_DIM**-0.5


def keys_of(kind: str) -> torch.Tensor:
    """Return keys whose scores are not normally distributed, or larger than a sample of the keys shows."""
    k = torch.randn(BATCH, KV_HEADS, KEYS, HEAD_DIM)
    if kind == "one far beyond":
        k[:, :, 311] *= 9
    elif kind == "two clusters":
        k[:, :, 200:230] += 5 * torch.randn(BATCH, KV_HEADS, 1, HEAD_DIM)
    elif kind == "all alike":
        k[:] = 3 * torch.randn(BATCH, KV_HEADS, 1, HEAD_DIM)
    elif kind == "features together":
        k[..., ::2] = k[..., 1::2]
    elif kind == "large":
        k *= 20
    return k.bfloat16()


KINDS = ["normal", "one far beyond", "two clusters", "all alike", "features together", "large"]


@pytest.mark.parametrize("mask", [None, hw.causal(), hw.window(20)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_heavy_scores_of_every_row_are_near_the_shift(kind, mask):
    q, k = torch.randn(BATCH, HEADS, QUERIES, HEAD_DIM).bfloat16(), keys_of(kind)
    plan = plan_of(mask, Grid(BATCH, HEADS, QUERIES, KEYS), 1)
    shifts = torch.zeros(*q.shape[:-1], 1)
    scores = blockwise_scores.BFloat16Scores(q, k, SCALE, plan, Pool(plan, q, k, 2), shifts)
    exact = q.double() @ k.double().repeat_interleave(2, 1).mT
    if mask is not None:
        exact = exact.masked_fill(~mask.block(Grid(BATCH, HEADS, QUERIES, KEYS)), -torch.inf)
    for tile in iterate_tiles(plan, q, k, None, 2):
        shifted = tile.by_head(scores.shifted_scores(tile).clone()).double()
        assert torch.equal(shifted, tile.by_head(scores.recompute(tile)).double())
        wanted = (exact[tile.row_slices] - shifts[tile.row_slices].double()) * SCALE * LOG2_E
        wanted = torch.cat([wanted[..., span.start : span.stop] for span in tile.block.spans], -1)
        # The sums of bfloat16 products are rounded in float32, in addition to the result in bfloat16.
        noise = 2**-20 * q[tile.row_slices].double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
        near = wanted > -torch.inf
        assert ((shifted - wanted)[near].abs() <= 2**-8 * wanted[near].abs() + noise).all()
        assert (shifted[~near] <= 0.99 * score_of_hidden_key(torch.bfloat16)).all()
        # The second product subtracts the largest score, as the first product rounded it.
        first = 2**-7 * (wanted.amax(-1) - wanted.masked_fill(~near, 0.0).amin(-1)).max()
        assert wanted.amax(-1).abs().max() <= max(blockwise_scores.FARTHEST * LOG2_E * 1.01, first)


@pytest.mark.parametrize("lowest", [-3.0, 0.5, -70000.0])
def test_the_row_maximum_is_found_from_bits(lowest):
    scores = torch.randn(3, 5, 41) * torch.tensor([0.01, 1.0, 100.0])[:, None, None] + lowest
    scores = scores.bfloat16()
    scores[0, 0, 1:] = -torch.inf
    scores[1, 1] = 0.0
    scores[1, 2] = -0.0
    scores[2, 3, 7] = torch.inf
    assert torch.equal(blockwise_scores._row_maximum(scores), scores.amax(-1, keepdim=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("keys", [64, 512])
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_errors_are_at_most_twice_those_of_the_kernel(spread, keys, causal):
    """Compare output and gradients with torch's kernel, which is more accurate than plain attention in bfloat16."""
    q, k, v, upstream = (torch.randn(2, 4, keys, 64) * each for each in (spread, 1.0, 1.0, 1.0))
    q, k, v, upstream = (tensor.bfloat16() for tensor in (q, k, v, upstream))
    mask = hw.causal() if causal else None

    def results(attention, dtype):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    exact = results(lambda *qkv: hw.attend(*qkv, mask=mask, backend="reference"), torch.float64)
    blocks = results(lambda *qkv: hw.attend(*qkv, mask=mask, backend="blockwise"), torch.bfloat16)
    kernel = results(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=causal), torch.bfloat16)
    for ours, theirs, right in zip(blocks, kernel, exact, strict=True):
        assert (ours - right).norm() <= 2 * (theirs - right).norm()


def offset_keys(size: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose scores all lie near `size`, some nats apart."""
    q, k = torch.randn(1, 3, 257, 64), torch.randn(1, 3, 1031, 64)
    q[..., 0], k[..., 0] = 8.0, size
    return q.to(dtype), k.to(dtype)


@pytest.mark.parametrize("mask", [None, hw.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("factor", [3.0, 90.0, 1e3, 1e6, 1e12])
def test_scores_of_any_magnitude_are_as_near_as_those_of_others(factor, mask):
    """At 90 scores are about 36,000, where one bfloat16 shift left more than exp2 can represent."""
    q, k, v = (torch.randn(1, 3, n, 64) for n in (257, 1031, 1031))
    q, k, v = (q * factor).bfloat16(), (k * factor).bfloat16(), v.bfloat16()
    require_as_near_as_others(q, k, v, mask)


@pytest.mark.parametrize("size", [100.0, 3e3, 2e4, 2e5, -2e4])
def test_scores_that_share_an_offset_are_as_near_as_those_of_others(size):
    q, k = offset_keys(size, torch.bfloat16)
    require_as_near_as_others(q, k, torch.randn(1, 3, 1031, 64).bfloat16(), None)


def require_as_near_as_others(q, k, v, mask) -> None:
    """Check that results are at most twice as far from float64 as those of torch's kernel or of plain attention.

    The output is compared with the kernel alone, with at least the rounding of its result to bfloat16 as its error: it
    may be right by luck where one weight of a row is 1. Gradients are then small differences of large numbers, which
    depend on the order of operations, so they are compared with the worse of the two.
    """
    upstream = torch.randn(q.shape).bfloat16()
    allowed = None if mask is None else mask.block(Grid(1, 3, q.shape[2], k.shape[2]))

    def results(attention, dtype):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    def plain(q, k, v):
        return plain_attention(q, k, v, allowed).out

    exact = results(plain, torch.float64)
    ours = results(lambda *qkv: hw.attend(*qkv, mask=mask, backend="blockwise"), torch.bfloat16)
    kernel = results(lambda *qkv: hw.attend(*qkv, mask=mask, backend="fused"), torch.bfloat16)
    errors, of_kernel, of_plain = (
        [(got - right).norm() for got, right in zip(each, exact, strict=True)]
        for each in (ours, kernel, results(plain, torch.bfloat16))
    )
    assert all(tensor.isfinite().all() for tensor in ours)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * exact[0].norm()
    assert errors[0] <= 2 * max(of_kernel[0], rounding)
    for error, *others in zip(errors[1:], of_kernel[1:], of_plain[1:], strict=True):
        assert error <= 2 * max(others)


def test_a_call_with_large_scores_uses_blocks_without_native_kernels_and_is_right(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: "there are none")
    q, k, v = (torch.randn(1, 4, 2048, 64) for _ in range(3))
    q, k, v = (q * 90).bfloat16(), (k * 90).bfloat16(), v.bfloat16()
    assert hw.explain(q, k, v).backend == "blockwise"
    exact = hw.attend(q.double(), k.double(), v.double(), backend="reference")
    assert (hw.attend(q, k, v) - exact).abs().max() < 0.05
