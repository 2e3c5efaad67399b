"""Gradients of the native backend: those of a bias, also with dropout, and the memory of training."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from native_checks import SEED, Options, attend_with_seed

import headwise as hw
from headwise.attention.backends.native import library
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import Grid
from oracles import kept_by_dropout, plain_attention

pytestmark = pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 4, 2, 71, 613, 19
SHAPES = list(itertools.product((1, BATCH), (1, HEADS), (1, QUERIES), (1, KEYS)))
"""All shapes in which a bias can be broadcast."""

OPTIONS = {
    "nothing": {},
    "causal": {"mask": hw.causal()},
    "softcap": {"softcap": 3.0},
    "sinks": {"mask": hw.window(100), "sinks": torch.linspace(-1, 1, HEADS)},
    "dropout": {"mask": hw.causal(), "dropout": 0.3},
    "dropout and more": {"mask": hw.window(300), "softcap": 3.0, "sinks": torch.zeros(HEADS), "dropout": 0.6},
}


def random_bias(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a random bias, which hides some keys if it differs between keys."""
    bias = torch.randn(shape)
    if shape[-1] > 1:
        bias[..., ::7] = -torch.inf
    return bias


def bias_gradients(dtype: torch.dtype, shape: tuple[int, ...], options: dict) -> list[torch.Tensor]:
    """Return the gradient of a random bias by the kernels, by plain attention, and by plain attention in float64."""
    sizes = ((HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    q, k, v = (torch.randn(BATCH, *size, WIDTH).to(dtype) for size in sizes)
    upstream, lse_upstream = torch.randn(BATCH, HEADS, QUERIES, WIDTH), torch.randn(BATCH, HEADS, QUERIES)
    bias, options = random_bias(shape), dict(options)
    mask, dropout = options.pop("mask", None), options.pop("dropout", 0.0)
    kept = kept_by_dropout(dropout, SEED, BATCH, HEADS, QUERIES, KEYS) if dropout else None
    grid = Grid(BATCH, HEADS, QUERIES, KEYS)
    allowed = None if mask is None else mask.block(grid).expand(BATCH, HEADS, QUERIES, KEYS)

    def native(q, k, v, bias):
        if dropout:
            return attend_with_seed(q, k, v, Options(mask, {"bias": bias, **options}), dropout, SEED)
        return hw.attend(q, k, v, mask=mask, bias=bias, return_lse=True, backend="native", **options)

    def plain(q, k, v, bias):
        factors = None if kept is None else kept / (1 - dropout)
        result = plain_attention(q, k, v, allowed, bias=bias, factors=factors, **options)
        return result.out, result.lse

    def gradient(attention, tensor_type):
        leaf = bias.to(torch.float64 if tensor_type == torch.float64 else torch.float32).requires_grad_()
        out, lse = attention(*(tensor.to(tensor_type) for tensor in (q, k, v)), leaf)
        loss = (out * upstream.to(out.dtype)).sum() + (lse.clamp(min=-1e4) * lse_upstream).sum()
        return torch.autograd.grad(loss, leaf)[0]

    return [gradient(native, dtype), gradient(plain, dtype), gradient(plain, torch.float64)]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        # The last options contain softcaps and dropout, too.
        pytest.param(dtype, name, marks=() if name in by_default else pytest.mark.slow)
        for dtype, by_default in (
            (torch.float32, ("nothing", "causal", "sinks", "dropout and more")),
            (torch.bfloat16, ("dropout and more",)),
        )
        for name in OPTIONS
    ],
    ids=str,
)
def test_the_gradient_of_a_bias_is_within_the_error_budget(dtype, name):
    """Over some sets of values, the root of the summed squared errors is at most twice that of plain attention.

    A bias that is the same for all keys does not change the weights, so that its gradient is that of the log-sum-exp
    and the sinks: what remains of a sum of terms that cancel. Its error may be the rounding of this sum in float32.
    """
    for shape in SHAPES:
        is_same_for_all_keys = shape[3] == 1
        error = budget = 0.0
        for _ in range(2):
            ours, theirs, exact = bias_gradients(dtype, shape, OPTIONS[name])
            assert ours.shape == shape
            rounding = torch.finfo(torch.float32).eps * exact.norm() if is_same_for_all_keys else 0.0
            error = math.hypot(error, (ours.double() - exact).norm())
            budget = math.hypot(budget, 2 * max((theirs.double() - exact).norm(), rounding))
        assert error <= budget, f"{shape}: {error} beyond {budget}"


@pytest.mark.parametrize("backend", ["native", "blockwise"])
@pytest.mark.parametrize("queries", [3, QUERIES])
@pytest.mark.parametrize("mask", [hw.causal(), hw.window(20, dilation=3)], ids=["causal", "in parts"])
def test_the_gradient_of_sinks_has_no_rounding_error_of_the_output(monkeypatch, backend, queries, mask):
    """The values have a large mean, so that the output in bfloat16 is much further off than its weights."""
    monkeypatch.setattr(key_ranges, "MATRIX_ELEMENTS", 10_000)
    q, k, v = (torch.randn(BATCH, HEADS, length, WIDTH) for length in (queries, KEYS, KEYS))
    upstream, sinks, row_bias = torch.randn(q.shape), torch.randn(HEADS) + 4, torch.randn(1, HEADS, queries, 1)
    q, k, v, upstream = (tensor.bfloat16() for tensor in (q, k, v + 5, upstream))
    allowed = mask.block(Grid(BATCH, HEADS, queries, KEYS)).expand(BATCH, HEADS, queries, KEYS)

    def gradients(attention, dtype):
        leaves = [tensor.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for tensor in (sinks, row_bias)]
        out = attention(*(tensor.to(dtype) for tensor in (q, k, v)), *leaves)
        return torch.autograd.grad(out, leaves, upstream.to(out.dtype))

    def plain(q, k, v, sinks, bias):
        return plain_attention(q, k, v, allowed, bias=bias, sinks=sinks).out

    def attend(q, k, v, sinks, bias):
        return hw.attend(q, k, v, mask=mask, bias=bias, sinks=sinks, backend=backend)

    results = (gradients(attend, torch.bfloat16), gradients(plain, torch.bfloat16), gradients(plain, torch.float64))
    for ours, theirs, exact in zip(*results, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


@pytest.mark.parametrize("queries", [2, QUERIES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_in_bfloat16_has_the_results_of_its_float32_copy(dtype, queries):
    options = itertools.cycle(
        [{}, {"mask": hw.window(50)}, {"softcap": 3.0}, {"mask": hw.dense(torch.rand(queries, KEYS) < 0.7)}]
    )
    q, k, v = (
        torch.randn(BATCH, heads, n, WIDTH) for heads, n in ((HEADS, queries), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    )
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
    biases = [
        random_bias(tuple(min(size, queries) if n == 2 else size for n, size in enumerate(shape))) for shape in SHAPES
    ]
    biases += [
        random_bias((1, HEADS, KEYS, queries)).mT,
        random_bias((1, 1, queries, KEYS)).expand(BATCH, HEADS, -1, -1),
    ]
    for bias in biases:
        narrow = bias.bfloat16().requires_grad_()
        wide = narrow.detach().float().requires_grad_()
        further = next(options)
        results = []
        for each in (narrow, wide):
            out = hw.attend(*leaves, bias=each, backend="native", **further)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [*leaves, each])])
        assert results[0][-1].dtype == torch.bfloat16
        results[1][-1] = results[1][-1].bfloat16()
        assert all(map(torch.equal, *results)), f"{bias.shape} {further}"


@pytest.mark.parametrize("queries", [1, 5])
def test_a_bias_of_few_queries_has_a_gradient(queries):
    q, k, v = (torch.randn(2, heads, length, 8) for heads, length in ((4, queries), (2, 40), (2, 40)))
    upstream = torch.randn(2, 4, queries, 8)
    bias = torch.randn(1, 4, queries, 40)

    def gradient(dtype, attention):
        leaf = bias.to(dtype).requires_grad_()
        out = attention(*(tensor.to(dtype) for tensor in (q, k, v)), leaf)
        return torch.autograd.grad((out * upstream).sum(), leaf)[0]

    ours = gradient(torch.float32, lambda *tensors: hw.attend(*tensors[:3], bias=tensors[3], backend="native"))
    exact = gradient(torch.float64, lambda *tensors: plain_attention(*tensors[:3], bias=tensors[3]).out)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_bias_has_the_same_bits_for_any_number_of_threads():
    q, k, v = (torch.randn(2, heads, 300, 32, requires_grad=True) for heads in (4, 2, 2))
    threads = torch.get_num_threads()
    try:
        for shape in ((1, 4, 300, 300), (1, 1, 300, 300), (1, 4, 1, 300), (2, 1, 300, 1), (1, 1, 1, 1)):
            bias = torch.randn(shape, requires_grad=True)
            results = []
            for count in (1, 2):
                torch.set_num_threads(count)
                out = hw.attend(q, k, v, mask=hw.causal(), bias=bias, backend="native")
                results.append(torch.autograd.grad(out.square().sum(), (q, k, v, bias)))
            assert all(map(torch.equal, *results))
    finally:
        torch.set_num_threads(threads)


def test_a_bias_has_a_gradient_if_nothing_else_has():
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    bias = torch.zeros(1, 2, 9, 9, requires_grad=True)
    hw.attend(q, k, v, bias=bias, backend="native").square().sum().backward()
    assert bias.grad.any()
    # The weights of a row have the sum 1 with every bias.
    torch.testing.assert_close(bias.grad.sum(-1), torch.zeros(1, 2, 9), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 4, 391, 523), (1, 4, 1, 523), (2, 1, 391, 1)])
def test_masks_in_parts_have_the_gradient_of_a_bias(monkeypatch, shape):
    q, k, v = (torch.randn(2, heads, length, 16) for heads, length in ((4, 391), (2, 523), (2, 523)))
    mask, bias = hw.window(20, dilation=3), torch.randn(shape, requires_grad=True)

    def gradient():
        out = hw.attend(q, k, v, mask=mask, bias=bias, backend="native")
        return torch.autograd.grad(out.square().sum(), bias)[0]

    whole = gradient()
    monkeypatch.setattr(key_ranges, "MATRIX_ELEMENTS", 2**16)
    monkeypatch.setattr(key_ranges, "PIECE_ELEMENTS", 2**13)
    monkeypatch.setattr(key_ranges, "CACHED_ELEMENTS", 0)
    torch.testing.assert_close(gradient(), whole, rtol=1e-4, atol=1e-5)


EXTRA_MEMORY = """
import sys, torch, headwise as hw

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

length, heads, window, dtype = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
learns = len(sys.argv) > 5
mask = hw.causal() & hw.window(window)

def train(length):
    q, k, v = (torch.zeros(1, heads, length, 64, dtype=dtype).normal_().requires_grad_() for _ in range(3))
    bias = torch.zeros(1, heads, 1, length, requires_grad=True) if learns else None
    out = hw.attend(q, k, v, mask=mask, bias=bias, backend="native")
    out.backward(out.detach())

train(300)
before = peak()
train(length)
element = 2 if dtype == torch.bfloat16 else 4
print(peak() - before - 7 * heads * length * 64 * element / 2**20)
"""
"""Program that trains one step and prints the MiB that it needed beyond inputs, output and their gradients (that of the
output is the output itself)."""


def extra_memory(*arguments: object) -> float:
    """Return what the program prints."""
    command = [sys.executable, "-c", EXTRA_MEMORY, *map(str, arguments)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_training_with_a_bias_of_keys_keeps_no_matrix():
    whole_matrix = 2 * 4096 * 4096 * 4 / 2**20
    assert extra_memory(4096, 2, 256, "float32", "learns") < whole_matrix / 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 8])
def test_training_with_a_long_window_needs_little_memory(heads, dtype):
    assert extra_memory(131_072, heads, 256, dtype) < 400


def test_rows_whose_bias_is_the_least_number_have_the_gradients_of_uniform_attention():
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for length in (70, 130, 130))
    bias = torch.zeros(70, 130)
    bias[33:] = torch.finfo(torch.float32).min
    results = []
    for backend in ("native", "reference"):
        out = hw.attend(q, k, v, bias=bias, backend=backend)
        results.append(torch.autograd.grad((out * torch.arange(1.0, 71.0)[:, None]).sum(), (q, k, v)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 3, 0, 5), (2, 3, 5, 0), (0, 3, 5, 5)], ids=str)
def test_the_gradient_of_a_bias_of_no_elements_and_for_no_scores(sizes):
    batch, heads, queries, keys = sizes
    q = torch.randn(batch, heads, queries, 4, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, 4, requires_grad=True) for _ in range(2))
    for shape in (sizes, (1, heads, queries, 1), (1, 1, 1, keys), (1, 1, 1, 1)):
        bias = torch.zeros(shape, requires_grad=True)
        out = hw.attend(q, k, v, bias=bias, backend="native")
        (gradient,) = torch.autograd.grad(out.sum(), bias)
        assert gradient.shape == shape
        assert not gradient.any()
