"""The native kernels of linear projections: accuracy, special numbers, layouts, and the choice for few tokens."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import headwise as hw
from headwise.attention.backends.native import library
from headwise.nn import linear_engine

pytestmark = pytest.mark.skipif(library.why_not_loaded() is not None, reason="the native kernels are not available")

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [*range(1, 9), 21, 64, 191]
SIZES = [(1, 5), (17, 1), (513, 5), (33, 131), (512, 512), (768, 67), (2053, 19), (1025, 2)]
"""Widths of x and of the output."""


@pytest.fixture
def rule(monkeypatch):
    """Choose the kernel for up to 8 tokens on every processor."""
    monkeypatch.setattr(linear_engine, "native_rule", lambda _: linear_engine.NativeRule(range(1, 9), 0, "a test"))


def native(x, weight, bias=None):
    """Return the result of the kernels."""
    return torch.ops.headwise.linear_map(x, weight, bias)


def tensors(rows, width, out, dtype):
    """Return random x, weight and bias."""
    return [torch.randn(*shape).to(dtype) for shape in ((rows, width), (out, width), (out,))]


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 512, 513, 768, 2053, 8192])
@pytest.mark.parametrize("with_bias", [True, False])
def test_error_is_at_most_twice_that_of_torch(dtype, width, with_bias):
    for rows in ROWS:
        x, weight, bias = tensors(rows, width, 517, dtype)
        bias = bias if with_bias else None
        ours, plain = native(x, weight, bias), F.linear(x, weight, bias)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        error, allowed = (ours - exact).abs(), (plain - exact).abs()
        assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt()
        assert error.max() <= 2 * allowed.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_odd_sizes_against_whole_numbers(dtype, sizes, with_bias):
    """Products of small whole numbers have no rounding errors in float32, so that results are exact."""
    for rows in ROWS:
        x, weight, bias = (
            torch.randint(-2, 3, shape).to(dtype) for shape in ((rows, sizes[0]), sizes[::-1], sizes[1:])
        )
        bias = bias if with_bias else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert torch.equal(native(x, weight, bias), exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(1031, 517), (130, 66)])  # of several tasks, and of tasks of rows
def test_bits_depend_on_no_other_row_and_not_on_threads(dtype, width, out):
    x, weight, bias = tensors(1001, width, out, dtype)
    threads = torch.get_num_threads()
    try:
        for most, fewer in ((23, (*range(1, 9), 23)), (1001, (24, 37, 192, 1001))):  # of the two kernels of float32
            torch.set_num_threads(1)
            all_rows = native(x[:most], weight, bias)
            torch.set_num_threads(3)
            for rows in fewer:
                assert torch.equal(native(x[:rows], weight, bias), all_rows[:rows])
                assert torch.equal(native(x[most - rows : most], weight, bias), all_rows[most - rows :])
            assert torch.equal(native(x[:most], weight[:9], bias[:9]), all_rows[:, :9])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", range(3))
def test_special_numbers_reach_the_results_that_they_reach_in_torch(dtype, special, where):
    inputs = tensors(3, 67, 21, dtype)
    inputs[where].view(-1)[-2] = special
    inputs[1][4] = 0.0
    ours, exact = native(*inputs), F.linear(*(each.double() for each in inputs)).to(dtype)
    torch.testing.assert_close(ours, exact, equal_nan=True, rtol=2e-2, atol=1e-2)
    assert torch.equal(ours.isnan(), F.linear(*inputs).isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 5, 3), (3, 5, 0), (2, 0, 3)])
def test_empty_tensors(dtype, sizes):
    inputs = tensors(*sizes, dtype)
    assert torch.equal(native(*inputs), F.linear(*inputs))


@pytest.mark.parametrize("sizes", [*SIZES, (70, 300)])
@pytest.mark.parametrize("rows", [1, 7, 30, 1201])
@pytest.mark.parametrize("layout", ["transposed", "with gaps"])
def test_matrices_of_any_layout(sizes, rows, layout):
    """The gradients of a linear map are products of transposed matrices."""

    def laid_out(matrix, gap):
        stored = torch.full((matrix.shape[0] + gap, matrix.shape[1] + gap), float("nan"))
        stored = stored.t().contiguous().t() if layout == "transposed" else stored
        return stored[gap:, gap:].copy_(matrix)

    x, weight = (torch.randint(-2, 3, shape).float() for shape in ((rows, sizes[0]), sizes[::-1]))
    exact = x @ weight.t()
    for gap in (0, 3):
        for each in (x, laid_out(x, gap)):
            assert torch.equal(native(each, laid_out(weight, gap)), exact)
        assert torch.equal(native(laid_out(x, gap), weight), exact)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 1, 7), (1, 2, 3, 7)])
def test_leading_axes_are_free(shape):
    x, weight = torch.randn(shape), torch.randn(3, 7)
    y = native(x, weight)
    assert y.is_contiguous()
    torch.testing.assert_close(y, F.linear(x, weight))


def test_other_tensors_are_refused():
    x, weight, bias = tensors(2, 8, 6, torch.float32)
    for inputs in (
        (x[None, :, ::2], weight[:, :4].contiguous(), bias),
        (x, torch.randn(12, 16)[::2, ::2], bias),
        (x.bfloat16()[:, ::2], weight[:, :4].bfloat16(), bias.bfloat16()),
        (x.bfloat16(), torch.randn(8, 6).bfloat16().t(), bias.bfloat16()),
        (x, weight, torch.randn(12)[::2]),
        (x, weight.bfloat16(), bias),
        (x.double(), weight.double(), bias.double()),
        (x, weight, bias[:5]),
        (x[:, :7].contiguous(), weight, bias),
    ):
        with pytest.raises(RuntimeError):
            native(*inputs)


def test_torchs_checks_of_operators():
    x, weight, bias = tensors(2, 7, 3, torch.float32)
    for inputs in ((x, weight, bias), (x[None], weight, None)):
        torch.library.opcheck(
            torch.ops.headwise.linear_map.default, inputs, test_utils=("test_schema", "test_faketensor")
        )


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
def test_the_measured_rules(monkeypatch):
    def rule(dtype, instructions, onednn_has_bfloat16=False, cpuinfo="AuthenticAMD avx512f"):
        monkeypatch.setattr(library, "why_not_loaded", lambda: None)
        monkeypatch.setattr(library, "instruction_set", lambda: instructions)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn_has_bfloat16)
        monkeypatch.setattr(library, "cpuinfo", lambda: cpuinfo)
        monkeypatch.setattr(library, "mkl_uses_avx512", inspect.unwrap(library.mkl_uses_avx512))
        return linear_engine.native_rule.__wrapped__(dtype)[:2]

    bfloat16, float32, intel = torch.bfloat16, torch.float32, "GenuineIntel avx512f"
    assert rule(bfloat16, "amx", True) == rule(bfloat16, "avx2", True) == (range(1, 5), 2**14)
    assert rule(bfloat16, "avx512_bf16", True) == (range(1, 7), 0)
    assert rule(bfloat16, "avx2") == (range(1, 9), 0)
    assert rule(float32, "avx512", cpuinfo=intel) == (range(4, 9), 2**19)
    assert rule(float32, "avx2") == (range(2, 9), 2**16)
    assert rule(float32, "avx512") == rule(float32, "avx512_bf16") == (range(0), 0)  # all numbers of tokens are native
    for dtype, *others in ((bfloat16, "portable"), (float32, "portable"), (torch.float64, "avx512")):
        assert not rule(dtype, *others)[0]
    for dtype, instructions in itertools.product((bfloat16, float32), ("neon", "neon_bf16")):
        assert not rule(dtype, instructions, cpuinfo="")[0]
    assert not rule(float32, "avx512", cpuinfo="")[0]
    assert not rule(float32, "avx2", cpuinfo=intel)[0]


@pytest.mark.parametrize("name", ["torch", "onednn"])
def test_the_environment_variable_switches_the_kernel_off(name, monkeypatch):
    linear_engine.native_rule.cache_clear()
    monkeypatch.setenv(linear_engine.VARIABLE, name)
    assert linear_engine.native_rule(torch.bfloat16) == (range(0), 0, f"HEADWISE_LINEAR={name}")
    linear_engine.native_rule.cache_clear()


def test_without_native_kernels_torch_computes(monkeypatch):
    linear_engine.native_rule.cache_clear()
    monkeypatch.setattr(library, "why_not_loaded", lambda: "switched off")
    assert linear_engine.native_rule(torch.bfloat16) == (range(0), 0, "switched off")
    linear_engine.native_rule.cache_clear()


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make_x", [lambda x: x, lambda x: x[:, -1:], lambda x: x.transpose(0, 1), lambda x: x[0, 0].expand(3, -1)]
)
def test_projections_of_few_tokens_of_any_layout(dtype, bias, make_x):
    linear, x = nn.Linear(65, 37, bias=bias, dtype=dtype), make_x(torch.randn(2, 3, 65).to(dtype))
    with torch.no_grad():
        assert hw.explain_linear(linear, x) == ("native", "a test")
        ours = linear_engine.project(linear, x)
        assert torch.equal(ours, native(x.contiguous(), linear.weight, linear.bias))
        exact = linear.double()(x.double()).to(dtype)
        torch.testing.assert_close(ours, exact)


@pytest.mark.usefixtures("rule")
def test_other_calls_are_left_to_torch():
    linear, x = nn.Linear(64, 64), torch.randn(2, 64)

    def engine(linear=linear, x=x):
        return hw.explain_linear(linear, x).engine

    assert engine() == "torch"  # the weight requires a gradient
    assert linear_engine.project(linear, x).requires_grad
    linear.requires_grad_(False)
    assert engine() == "native"
    assert engine(x=torch.randn(2, 64, requires_grad=True)) == "torch"
    assert engine(x=torch.randn(9, 64)) == "torch"
    assert engine(x=torch.randn(64)) == engine(x=torch.randn(2, 63)) == engine(x=torch.randn(0, 64)) == "torch"
    assert engine(x=x.bfloat16()) == engine(x=x.double()) == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert engine() == "torch"
    with forward_ad.dual_level():
        dual = linear_engine.project(linear, forward_ad.make_dual(x, x))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, x @ linear.weight.t())
    torch.testing.assert_close(torch.vmap(lambda one: linear_engine.project(linear, one))(x[:, None])[:, 0], linear(x))
    traced = torch.jit.trace(lambda x: linear_engine.project(linear, x), x, check_trace=False)
    assert "aten::linear" in str(traced.graph)
    linear.weight.data = torch.randn(64, 64).t()
    assert engine() == "torch"
    linear.weight.data = torch.randn(64, 64)
    linear.register_forward_hook(lambda *call: call[-1] * 2)
    assert engine() == "torch"
    torch.testing.assert_close(linear_engine.project(linear, x), linear(x))


@pytest.mark.usefixtures("rule")
def test_the_operator_of_compiled_code_uses_the_kernel():
    linear_engine.register()
    x, weight, bias = (tensor.requires_grad_() for tensor in tensors(3, 65, 37, torch.float32))
    y = torch.ops.headwise.linear(x, weight, bias)
    assert torch.equal(y, native(x, weight, bias))
    upstream = torch.randn(3, 37)
    ours, theirs = (torch.autograd.grad(each, (x, weight, bias), upstream) for each in (y, F.linear(x, weight, bias)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("rule")
def test_a_layer_decodes_as_in_one_call():
    layer, x = hw.MultiHeadAttention(64, 4, mask=hw.causal()).requires_grad_(False), torch.randn(2, 7, 64)
    cache = hw.DynamicCache()
    steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(7)], 1)
    torch.testing.assert_close(steps, layer(x), rtol=0, atol=1e-5)
