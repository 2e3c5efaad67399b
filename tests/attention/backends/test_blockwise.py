"""Blockwise attention: blocks without a visible key are never computed, and memory grows with length alone."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise import tiles
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from oracles import distance, plain_attention

PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_)


class Work(TorchDispatchMode):
    """Counts the multiplications of matrix products, and the elements of the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            self.multiplications += math.prod(left.shape) * right.shape[-1]
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        return result


def count_work(mask, *, length=1024, batch=2, heads=4, dtype=torch.float32, backward=False, **options) -> Work:
    q, k, v = (torch.randn(batch, heads, length, 16, dtype=dtype, requires_grad=backward) for _ in range(3))
    vars(tiles.Pool._of_thread).clear()  # buffers of earlier calls would not be counted
    with Work() as work:
        out = hw.attend(q, k, v, mask=mask, backend="blockwise", **options)
        if backward:
            out.sum().backward()
    return work


# Share of the score matrix that the mask leaves, rounded up to blocks of 64 to 256 rows and 64 columns.
SHARES = {
    "causal": (hw.causal(), 10 / 16),
    "window": (hw.window(64), (64 + 128) / 1024),
    "chunks": (hw.chunked(128), 128 / 1024),
    "packed": (hw.segments([0] * 512 + [1] * 256 + [2] * 256), (512**2 + 2 * 256**2) / 1024**2),
    "padding": (hw.padding([128, 512]), (128 + 512) / 2 / 1024),
    "left padding": (hw.causal() & hw.padding([128, 512], side="left"), (128**2 + 512**2) / 4 / 1024**2 + 0.05),
    "per head": (hw.window([64, 64, None, None]), ((64 + 128) / 1024 + 10 / 16) / 2),
    "per head in turn": (hw.window([64, None, 64, None]), ((64 + 128) / 1024 + 10 / 16) / 2),
    "both": (hw.window([64, 64, None, None]) & hw.padding([1024, 128]), 0.28),
    "first keys and a window": (hw.causal() & (hw.prefix(64) | hw.window(64)), (64 + 64 + 128) / 1024),
    "blocks of a matrix": (torch.arange(1024)[:, None] // 256 == torch.arange(1024) // 256, 1 / 4),
    "nothing": (hw.prefix(0), 0.0),
}


@pytest.mark.parametrize(
    "backward", [pytest.param(False, id="forward", marks=pytest.mark.slow), pytest.param(True, id="training")]
)
@pytest.mark.parametrize("case", SHARES)
def test_blocks_without_a_visible_key_are_never_computed(case, backward):
    mask, share = SHARES[case]
    batch = 16 if case.startswith("per head") else 2  # where taking heads apart is worth its calls
    whole = count_work(None, batch=batch, backward=backward).multiplications
    assert count_work(mask, batch=batch, backward=backward).multiplications <= share * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_without_a_visible_key_are_never_computed_in_bfloat16(dtype):
    whole = count_work(None, batch=16, dtype=dtype, backward=True).multiplications
    assert count_work(hw.window(64), batch=16, dtype=dtype, backward=True).multiplications <= (64 + 128) / 1024 * whole


def test_blocks_with_all_keys_visible_are_never_masked(monkeypatch):
    seen = []
    block = hw.Mask.block

    def spy(self, grid, rows=None, columns=None):
        seen.append((rows, columns))
        return block(self, grid, rows, columns)

    monkeypatch.setattr(hw.Mask, "block", spy)
    count_work(hw.causal(), length=256)
    assert seen == [(range(at, at + 128), range(at, at + 128)) for at in (0, 128)]


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": torch.zeros(4)}, {"dropout": 0.1}], ids=str)
def test_memory_is_linear_in_length(options):
    short, long = (count_work(hw.causal(), length=n, batch=1, backward=True, **options).largest for n in (2048, 4096))
    assert long <= 2 * short
    assert long < 4096**2  # the scores of one head


CASES = {
    "causal": hw.causal(),
    "window": hw.window(40, ahead=7),
    "dilated": hw.window(9, dilation=5),
    "padding": hw.padding([100, 517]),
    "left padding": hw.causal() & hw.padding([30, 400], side="left"),
    "per head, groups cut": hw.window([20, None, None, None, 30, 31]),
    "group from the middle of a kv head": hw.window([20] * 3 + [None] * 3),
    "some heads of several sequences": hw.window([20] * 4 + [None] * 2),
    "per head and sequence": hw.window([20, 20, None, None, 30, 30]) & hw.padding([100, 517]),
    "two spans": hw.causal() & (hw.prefix(8) | hw.window(40)),
    "sparse": hw.dense(torch.rand(2, 6, 300, 517, generator=torch.Generator().manual_seed(0)) < 0.002),
    "rule": hw.mask_rule(lambda b, h, q, k: (b + 2 * h + q * k) % 3 > 0),
    "rule, windows per head": hw.mask_rule(lambda b, h, q, k: (b + h + k) % 3 > 0) & hw.window([20] * 3 + [None] * 3),
}


@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.slow), 37])
@pytest.mark.parametrize("case", CASES)
def test_many_blocks_are_attention(case, rows, monkeypatch):
    """Six heads on three, over blocks that end anywhere, and few heads at once."""
    if rows is not None:
        monkeypatch.setattr(tiles, "rows_of", lambda *_: rows)
        monkeypatch.setattr(tiles, "TILE_BYTES", 2**16)
    mask = CASES[case]
    q = torch.randn(2, 6, 300, 13, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 3, 517, width, dtype=torch.float64, requires_grad=True) for width in (13, 17))
    bias = torch.randn(6, 1, 517, dtype=torch.float64)[None].requires_grad_()
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True)
    inputs = (q, k, v, bias, sinks)
    allowed = mask.block(Grid(2, 6, 300, 517)).expand(2, 6, 300, 517)
    exact = plain_attention(q, k, v, allowed, bias.expand(2, -1, 300, -1), softcap=3.0, sinks=sinks)
    out, lse = hw.attend(q, k, v, mask=mask, bias=bias, softcap=3.0, sinks=sinks, return_lse=True, backend="blockwise")
    assert distance(out, exact.out) < 1e-12
    assert distance(lse, exact.lse) < 1e-12
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad((out * upstream).sum() + lse.sum(), inputs)
    theirs = torch.autograd.grad((exact.out * upstream).sum() + exact.lse.sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e30, 1e34, 1e37])
def test_scores_up_to_the_limit_of_the_dtype_do_not_reach_hidden_keys(size, dtype):
    q, k, v = (torch.randn(1, 2, 61, 7) for _ in range(3))
    q, k, v = (tensor.to(dtype) for tensor in (q * size**0.5, k * size**0.5, v))
    out = hw.attend(q, k, v, mask=hw.window(5), backend="blockwise")
    exact = hw.attend(q.double(), k.double(), v.double(), mask=hw.window(5), backend="reference")
    assert distance(out, exact) < 1e-6  # one key has all the weight


@pytest.mark.parametrize("given", [{}, {"scale": 0.3}, {"mask": hw.causal() & hw.padding([200, 517])}], ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_bfloat16_is_no_worse_than_plain_attention(given, spread):
    """Out and gradients; with a spread of 4 scores reach 100, where bfloat16 knows only whole numbers and halves."""
    q, k, v = (torch.randn(2, 2, n, 19).mul(each).bfloat16() for n, each in ((300, spread), (517, spread), (517, 1.0)))
    options = dict(given)
    mask = options.pop("mask", None)
    if mask is not None:
        options["allowed"] = mask.block(Grid(2, 2, 300, 517)).expand(2, 2, -1, -1)
    upstream = torch.randn(2, 2, 300, 19).bfloat16()

    def results(attention, dtype):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    exact = results(lambda q, k, v: plain_attention(q, k, v, **options).out, torch.float64)
    plain = results(lambda q, k, v: plain_attention(q, k, v, **options).out, torch.bfloat16)
    ours = results(lambda q, k, v: hw.attend(q, k, v, **given, backend="blockwise"), torch.bfloat16)
    for got, usual, wanted in zip(ours, plain, exact, strict=True):
        assert (got - wanted).norm() <= 1.1 * (usual - wanted).norm()


def test_the_gradient_of_dropout_drops_the_same_weights():
    q, k, v = (torch.randn(2, 3, 200, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        torch.manual_seed(0)
        return hw.attend(q, k, v, mask=hw.window(50), dropout=0.3, backend="blockwise")

    upstream, direction = torch.randn(2, 2, 3, 200, 7, dtype=torch.float64)
    for index, grad in enumerate(torch.autograd.grad(run(q, k, v), (q, k, v), upstream)):
        ahead, behind = (
            run(*(x + step * direction if at == index else x for at, x in enumerate((q, k, v))))
            for step in (1e-6, -1e-6)
        )
        slope = ((ahead - behind) * upstream).sum() / 2e-6
        torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def test_the_number_of_rows_of_a_block_does_not_change_the_result():
    q = torch.randn(1, 2, 50, 7)
    problem = Problem.checked(q, q, q, mask=hw.causal())
    torch.testing.assert_close(blockwise.run(problem, rows=3).out, blockwise.run(problem).out)
    torch.testing.assert_close(
        hw.attend(q, q, q, mask=hw.causal(), backend=hw.Blockwise(rows=3)), hw.attend(q, q, q, mask=hw.causal())
    )
    layer = hw.MultiHeadAttention(12, 2, backend=hw.Blockwise(rows=3))
    assert layer(torch.randn(2, 7, 12)).shape == (2, 7, 12)
    assert hw.why_not(hw.Blockwise(), q, q, q) is None


def test_blockwise_uses_the_given_number_of_rows(monkeypatch):
    asked = []
    monkeypatch.setattr(blockwise, "plan_of", lambda *args: asked.append(args[3]) or tiles.plan_of(*args))
    q = torch.randn(1, 2, 50, 7)
    hw.attend(q, q, q, backend=hw.Blockwise(rows=3))
    assert asked == [3]
    with pytest.raises(hw.InputError, match="rows: expected a whole number of 1 or more, got 0"):
        hw.Blockwise(rows=0)


@pytest.mark.parametrize(
    ("mask", "together", "rows"),
    [
        (None, 1, 512),
        (hw.causal() & hw.prefix(1000), 8, 256),
        (hw.window(256), 32, 128),
        (hw.window(64), 32, 64),
        (hw.window(64), 8, 128),
        (hw.window(64), 2, 256),
        (hw.prefix(0), 32, 64),
    ],
    ids=str,
)
def test_the_number_of_rows_follows_the_visible_columns_and_the_number_of_tiles(mask, together, rows):
    assert tiles.rows_of(mask, Grid(1, 1, 4096, 4096), 2**17, together) == rows


def test_reused_buffers_work_in_every_mode_and_thread():
    q, k, v = (torch.randn(2, 3, 65, 7) for _ in range(3))
    vars(tiles.Pool._of_thread).clear()
    with torch.inference_mode():
        inside = hw.attend(q, k, v, backend="blockwise")
    expected = plain_attention(q.double(), k.double(), v.double()).out
    assert distance(inside, expected) < 1e-5
    leaf = q.clone().requires_grad_()
    hw.attend(leaf, k, v, backend="blockwise").sum().backward()  # written to, outside that mode
    larger, smaller = torch.randn(2, 3, 165, 7), torch.randn(1, 1, 5, 7, dtype=torch.bfloat16)
    with ThreadPoolExecutor(4) as threads:
        each = threads.map(lambda _: hw.attend(larger, k, v, backend="blockwise"), range(16))
        assert distance(hw.attend(smaller, smaller, smaller, backend="blockwise"), smaller) < torch.inf
        alone = hw.attend(larger, k, v, backend="blockwise")
        assert all(torch.equal(out, alone) for out in each)


def test_why_not_returns_the_reason_in_one_sentence():
    q = torch.randn(2, 3, 5, 7)
    talking = (torch.eye(3), torch.eye(3))
    reason = "blocks hold some heads at a time, and talking_heads mixes all"
    assert hw.why_not("blockwise", q, q, q, talking_heads=talking) == reason
    assert hw.why_not("blockwise", q, q, q, softcap=30.0, dropout=0.1, return_lse=True) is None


def test_blockwise_is_refused_under_vmap_and_while_exporting(monkeypatch):
    q = torch.randn(2, 3, 5, 7)
    with pytest.raises(hw.InputError, match="its blocks are planned from sizes and masks, which cannot be read here"):
        torch.vmap(lambda q: hw.attend(q, q, q, backend="blockwise"))(q[None])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert hw.why_not("blockwise", q, q, q) == blockwise.UNREADABLE


def test_dropout_does_not_depend_on_the_number_of_threads():
    q, k, v = (torch.randn(1, 8, 800, 16, requires_grad=True) for _ in range(3))
    threads, results = torch.get_num_threads(), []
    try:
        for forward, backward in ((1, 1), (1, 2), (2, 1)):
            torch.set_num_threads(forward)
            torch.manual_seed(3)
            out = hw.attend(q, k, v, dropout=0.5, backend="blockwise")
            torch.set_num_threads(backward)
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-5)
