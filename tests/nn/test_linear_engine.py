"""The engines of linear projections: accuracy, gradients, the choice, and calls that must reach the module."""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

import headwise as hw
from headwise.attention.backends.native import library
from headwise.nn import linear_engine

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

ROWS, WIDTH, OUT = 263, 389, 131
"""Sizes of a product that is large enough for oneDNN, and that is computed in two blocks."""

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor"
)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Let oneDNN compute float32, also where MKL is as fast. Returns a function that sets the environment variable."""

    def choose(name):
        monkeypatch.setenv(linear_engine.VARIABLE, name)
        linear_engine.engine_of.cache_clear()

    choose("onednn")
    yield choose
    linear_engine.engine_of.cache_clear()


@pytest.fixture(params=["onednn", "native"])
def by_operators(request, monkeypatch):
    """Return the function that computes linear maps in float32, with this engine."""
    if request.param == "native" and library.why_not_loaded() is not None:
        pytest.skip(str(library.why_not_loaded()))
    with monkeypatch.context() as patch:
        patch.setattr(linear_engine, "engine_of", lambda _: linear_engine.LinearChoice(request.param, "a test"))
        yield linear_engine.by_operators


def tensors(rows, width, out, dtype=torch.float32, requires_grad=False):
    """Return random x, weight and bias."""
    return [
        torch.randn(*shape, dtype=dtype).requires_grad_(requires_grad)
        for shape in ((rows, width), (out, width), (out,))
    ]


def rms(tensor):
    """Return the root of the mean square."""
    return tensor.double().square().mean().sqrt().item()


# -- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [(300, 211, 101), (300, 521, 101), (257, 2053, 67), (4099, 131, 67), (131, 257, 2053)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_error_is_at_most_twice_that_of_torch(sizes, with_bias, by_operators):
    x, weight, bias = tensors(*sizes, requires_grad=True)
    inputs = [x, weight, bias] if with_bias else [x, weight]
    upstream = torch.randn(sizes[0], sizes[2])

    def results(linear, cast=lambda tensor: tensor):
        leaves = [cast(tensor).detach().requires_grad_() for tensor in inputs]
        y = linear(*leaves, *([] if with_bias else [None]))
        return [y, *torch.autograd.grad(y, leaves, cast(upstream))]

    exact = results(F.linear, lambda tensor: tensor.double())
    for ours, plain, true in zip(results(by_operators), results(F.linear), exact, strict=True):
        assert rms(ours - true) <= 2 * rms(plain - true)
        assert (ours - true).abs().max() <= 2 * (plain - true).abs().max()


@needs_bfloat16
@pytest.mark.parametrize("name", ["onednn", "native"])
@pytest.mark.parametrize("make_x", [lambda x: x, lambda x: x[::2], lambda x: x.view(-1, 3, x.shape[-1])], ids="abc")
def test_error_in_bfloat16_is_at_most_that_of_torch(make_x, name, monkeypatch):
    if name == "native" and library.why_not_loaded() is not None:
        pytest.skip(str(library.why_not_loaded()))
    x, weight, bias = tensors(330, 210, 101, torch.bfloat16)
    linear = nn.Linear(210, 101, dtype=torch.bfloat16)
    linear.weight.data, linear.bias.data = weight, 10 * bias
    x = make_x(x)
    exact = F.linear(x.double(), weight.double(), linear.bias.double())
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(linear_engine, "engine_of", lambda _: linear_engine.LinearChoice(name, "a test"))
        patch.setattr(linear_engine, "_smallest_bfloat16_work", lambda: 2**20)
        patch.setattr(linear_engine, "_has_threads", lambda: True)
        assert linear_engine.explain_linear(linear, x).engine == name
        ours, plain = linear_engine.project(linear, x), linear(x)
    assert rms(ours - exact) <= 1.01 * rms(plain - exact)
    assert (ours - exact).abs().max() <= 1.01 * (plain - exact).abs().max()


def test_results_have_the_same_bits_in_every_call(by_operators):
    inputs = tensors(ROWS, WIDTH, OUT)
    first = by_operators(*inputs)
    assert all(torch.equal(first, by_operators(*inputs)) for _ in range(3))


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (2, ROWS, WIDTH), (2, 3, ROWS, WIDTH)])
def test_leading_axes_and_layouts_are_free(shape, by_operators):
    weight, bias = torch.randn(OUT, WIDTH), torch.randn(OUT)
    x = torch.randn(shape)
    for each in (
        x,
        torch.randn(*shape, 2)[..., 0],
        x.expand(2, *shape),
        x.transpose(0, -2).contiguous().transpose(0, -2),
    ):
        torch.testing.assert_close(by_operators(each, weight, bias), F.linear(each, weight, bias), rtol=0, atol=2e-4)
    columns = torch.randn(WIDTH, OUT).t()
    torch.testing.assert_close(by_operators(x, columns, bias), F.linear(x, columns, bias), rtol=0, atol=2e-4)


@pytest.mark.parametrize("sizes", [(0, 5, 3), (3, 5, 0), (2, 0, 3)])
def test_empty_tensors(sizes, by_operators):
    inputs = tensors(*sizes, requires_grad=True)
    y = by_operators(*inputs)
    assert torch.equal(y, F.linear(*inputs))
    assert [gradient.shape for gradient in torch.autograd.grad(y.sum(), inputs)] == [each.shape for each in inputs]


# -- registration with torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 7, 3), (ROWS, WIDTH, OUT)])
def test_torchs_checks_of_operators(sizes):
    linear_engine.register()
    x, weight, bias = tensors(*sizes, requires_grad=True)
    for inputs in ((x, weight, bias), (x, weight, None), (x.detach(), weight, bias), (x, weight.detach(), None)):
        torch.library.opcheck(torch.ops.headwise.linear.default, inputs)


def test_second_derivatives_equal_those_of_torch(by_operators):
    inputs = tensors(ROWS, WIDTH, OUT, requires_grad=True)

    def second(linear, leaves):
        first = torch.autograd.grad(linear(*leaves).square().sum(), leaves[:2], create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    exact = second(F.linear, [tensor.detach().double().requires_grad_() for tensor in inputs])
    plain = second(F.linear, inputs)
    for ours, theirs, true in zip(second(by_operators, inputs), plain, exact, strict=True):
        assert rms(ours - true) <= 2 * rms(theirs - true)


def test_under_autocast_the_operator_computes_what_torch_does():
    linear_engine.register()
    inputs = tensors(ROWS, WIDTH, OUT)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = torch.ops.headwise.linear(*inputs), F.linear(*inputs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


TRACED = """
import os
os.environ["HEADWISE_LINEAR"] = "onednn"
import torch, headwise as hw
from headwise.nn.linear_engine import engine_of
engine_of.cache_clear()  # the process that this one was forked from has chosen
layer = hw.MultiHeadAttention(256, 4, mask=hw.causal())
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph

compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
aot = torch.compile(layer, fullgraph=True, backend="aot_eager")
for length in (66, 70):
    x = torch.randn(2, length, 256, requires_grad=True)
    upstream = torch.randn(2, length, 256)
    leaves = [x, *layer.parameters()]
    expected = layer(x)
    for y in (compiled(x), aot(x)):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(layer(x), leaves, upstream)
        for pair in zip(*gradients):
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
assert "headwise.linear" in graphs[0].print_readable(print_output=False)
program = torch.export.export(layer, (x,))
assert "headwise" not in str(program.graph), program.graph
torch.testing.assert_close(program.module()(x), expected, rtol=1e-5, atol=1e-5)
"""


def test_the_operator_is_compiled_and_left_out_of_exported_programs(tracing_server):
    tracing_server.run(TRACED)


# -- the choice -------------------------------------------------------------------------------------------------------


INTEL, AMD = (f"vendor_id : {vendor}\nflags : avx2 avx512f" for vendor in ("GenuineIntel", "AuthenticAMD"))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
@pytest.mark.parametrize(
    ("capability", "cpuinfo", "expected"),
    [
        ("AVX512", INTEL, ("torch", "uses AVX-512")),
        ("AVX512", AMD, ("native", "does not use AVX-512")),
        ("AVX512", AMD + " without kernels", ("onednn", "does not use AVX-512")),
        ("AVX512", "", ("torch", "unknown")),
        ("AVX2", AMD, ("torch", "instructions AVX2")),
        ("DEFAULT", "", ("torch", "instructions DEFAULT")),
    ],
)
def test_instructions_and_vendor_decide(capability, cpuinfo, expected, engine, monkeypatch):
    engine("")
    monkeypatch.setattr(library, "cpuinfo", lambda: cpuinfo)
    monkeypatch.setattr(library, "mkl_uses_avx512", inspect.unwrap(library.mkl_uses_avx512))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(library, "why_not_loaded", lambda: "switched off" if "without kernels" in cpuinfo else None)
    monkeypatch.setattr(library, "instruction_set", lambda: "avx512")
    linear, inputs = nn.Linear(512, 512), [torch.randn(*shape) for shape in ((1, 512), (4, 16, 512), (1024, 512))]
    choices = [hw.explain_linear(linear, x) for x in inputs]
    for_few = expected[0] if expected[0] == "native" else "torch"
    assert [choice.engine for choice in choices] == [for_few, for_few, expected[0]]
    assert expected[1] in linear_engine.engine_of(torch.float32).because


@needs_bfloat16
@pytest.mark.parametrize(
    ("instructions", "expected"), [("avx512_bf16", "native"), ("amx", "onednn"), ("avx512", "onednn")]
)
def test_instructions_decide_in_bfloat16(instructions, expected, engine, monkeypatch):
    def engines(**changes):
        linear = nn.Linear(width := changes.get("width", 512), 1024, dtype=torch.bfloat16)
        with torch.set_grad_enabled(changes.get("grad", False)):
            return hw.explain_linear(linear, torch.randn(256, width, dtype=torch.bfloat16)).engine

    engine("")
    monkeypatch.setattr(library, "why_not_loaded", lambda: None)
    monkeypatch.setattr(library, "instruction_set", lambda: instructions)
    monkeypatch.setattr(linear_engine, "_has_threads", lambda: True)
    assert engines() == expected
    assert engines(grad=True) == "torch"
    assert engines(width=511) == "onednn"  # which has no whole pairs
    monkeypatch.setattr(linear_engine, "_has_threads", lambda: False)
    assert engines() == "onednn"
    assert engines(width=256) == expected
    engine("onednn")
    assert engines() == "onednn"


def test_the_environment_variable_decides(engine):
    linear, x = nn.Linear(512, 512), torch.randn(256, 512)
    assert hw.explain_linear(linear, x) == ("onednn", "HEADWISE_LINEAR=onednn")
    engine("torch")
    assert hw.explain_linear(linear, x) == ("torch", "HEADWISE_LINEAR=torch")
    engine("mkl")
    with pytest.raises(hw.InputError, match="HEADWISE_LINEAR.*'torch' or 'onednn'.*'mkl'"):
        hw.explain_linear(linear, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_left_to_torch(dtype):
    assert hw.explain_linear(nn.Linear(512, 512, dtype=dtype), torch.randn(256, 512, dtype=dtype)).engine == "torch"


# -- calls that must reach the module ---------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A linear layer that multiplies its output by 2."""

    def forward(self, x):
        return 2 * super().forward(x)


class Adapted(nn.Module):
    """A linear layer with a low-rank addition, as adapters make it."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear
        self.down, self.up = nn.Linear(linear.in_features, 3), nn.Linear(3, linear.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Functions(TorchFunctionMode):
    """Records the functions of torch that are called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Records the operators that are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


SEEN = []
"""Calls that were observed."""


class Scaling(nn.Module):
    """A parametrization that multiplies by 3."""

    def forward(self, weight):
        return 3 * weight


def replace_forward(linear, monkeypatch):
    """Set another `forward` on the instance."""
    linear.forward = lambda x: F.linear(x, linear.weight) * 2


CHANGES = {
    "forward hook": lambda linear, _: linear.register_forward_hook(lambda *call: call[-1] * 2),
    "pre-hook": lambda linear, _: linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
    "instance forward": replace_forward,
    "pruning": lambda linear, _: prune.random_unstructured(linear, "weight", 0.5),
    "parametrization": lambda linear, _: parametrize.register_parametrization(linear, "weight", Scaling()),
    "class forward": lambda _, patch: patch.setattr(nn.Linear, "forward", lambda linear, x: x @ linear.weight.t() * 2),
    "module call": lambda _, patch: patch.setattr(nn.Module, "__call__", lambda linear, x: x @ linear.weight.t() * 2),
    "function": lambda _, patch: patch.setattr(F, "linear", lambda x, weight, bias: x @ weight.t() * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_module_have_their_effect(change, monkeypatch):
    linear, x = nn.Linear(512, 512), torch.randn(256, 512)
    unchanged = linear_engine.project(linear, x)
    assert linear_engine.explain_linear(linear, x).engine == "onednn"
    CHANGES[change](linear, monkeypatch)
    y = linear_engine.project(linear, x)
    assert linear_engine.explain_linear(linear, x).engine == "torch"
    assert torch.equal(y, linear(x))
    assert (y - unchanged).abs().max() > 0.1


@pytest.mark.parametrize("make", [lambda: Doubled(512, 512), lambda: Adapted(nn.Linear(512, 512)), nn.Identity])
def test_other_modules_are_called(make):
    module, x = make(), torch.randn(256, 512)
    assert torch.equal(linear_engine.project(module, x), module(x))
    assert linear_engine.explain_linear(module, x).engine == "torch"


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_modes_observe_the_call(mode):
    linear, x = nn.Linear(512, 512), torch.randn(256, 512)
    SEEN.clear()
    with torch.no_grad(), mode():
        linear_engine.project(linear, x)
    assert {F.linear, torch.ops.aten.addmm.default} & set(SEEN)


def test_global_and_backward_hooks_fire():
    linear, x, calls = nn.Linear(512, 512), torch.randn(256, 512, requires_grad=True), []
    handle = torch_module.register_module_forward_hook(lambda *_: calls.append("forward"))
    linear_engine.project(linear, x)
    handle.remove()
    handle = linear.register_full_backward_hook(lambda *_: calls.append("backward"))
    linear_engine.project(linear, x).sum().backward()
    handle.remove()
    assert calls == ["forward", "backward"]
    assert linear_engine.explain_linear(linear, x).engine == "onednn"


def test_transforms_traces_and_autocast_are_left_to_torch():
    linear, x = nn.Linear(512, 512), torch.randn(2, 256, 512)
    expected = linear(x)
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(torch.vmap(lambda one: linear_engine.project(linear, one))(x), expected, **close)
    _, tangent = torch.func.jvp(lambda x: linear_engine.project(linear, x), (x,), (x,))
    torch.testing.assert_close(tangent, expected - linear.bias, **close)
    with forward_ad.dual_level():
        dual = linear_engine.project(linear, forward_ad.make_dual(x, x))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected - linear.bias, **close)
    linear.requires_grad_(False)
    traced = torch.jit.trace(lambda x: linear_engine.project(linear, x), x, check_trace=False)
    assert "aten::linear" in str(traced.graph)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_engine.project(linear, x), linear(x))
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear_engine.project(linear, x), linear(x))


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_trains_as_with_torchs_engine(dtype, engine):
    layer, x = hw.MultiHeadAttention(192, 6, dtype=dtype), torch.randn(3, 131, 192, dtype=dtype)
    results = {}
    for name in ("onednn", "torch"):
        engine(name)
        # The gradient of the keys' bias is 0, and what is computed is rounding alone: it shifts all scores of a row.
        leaves = [leaf for parameter, leaf in layer.named_parameters() if parameter != "k_proj.bias"]
        results[name] = torch.autograd.grad(layer(x).float().square().sum(), leaves)
    for ours, plain in zip(results["onednn"], results["torch"], strict=True):
        assert rms(ours.double() - plain.double()) <= 1e-5 * rms(plain)
    assert all(gradient.abs().max() > 0 for gradient in results["onednn"][:1])


def test_a_user_who_lowers_the_precision_of_products_gets_torchs(engine):
    linear, x = nn.Linear(512, 512), torch.randn(256, 512)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert "lower precision" in linear_engine.explain_linear(linear, x).because
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("stride", [0, 2])
def test_a_bias_with_gaps_is_read_right(stride, by_operators):
    x, weight, bias = torch.randn(300, 256), torch.randn(512, 256), torch.randn(1024)[::2]
    bias = bias if stride else bias[:1].expand(512)
    assert linear_engine.is_large_enough(x, weight)
    torch.testing.assert_close(by_operators(x, weight, bias), F.linear(x, weight, bias), rtol=0, atol=1e-4)


FORGET_CHOICES = """
from headwise.nn import linear_engine
linear_engine.engine_of.cache_clear()
linear_engine.native_rule.cache_clear()
"""
"""Code for a process that chose its engines before the environment variable was set."""

SEEN_BY_HOOKS = """
import torch
from torch import nn
import headwise as hw
from headwise.nn import linear_engine
assert linear_engine.engine_name(torch.float32) == "onednn"
layer = hw.MultiHeadAttention(64, 4, backend="reference")
x, direction = torch.randn(1, 40, 64), torch.randn(1, 40, 64)

def tangent(x, d):
    return torch.func.jvp(layer, (x,), (d,))[1]

compiled = torch.compile(tangent, backend="aot_eager")
torch.testing.assert_close(compiled(x, direction), tangent(x, direction), rtol=0, atol=1e-4)
calls = []
handle = layer.q_proj.register_full_backward_hook(lambda *_: calls.append(1))
torch.compile(layer, backend="aot_eager")(x).sum().backward()
handle.remove()
assert len(calls) == 1
torch._dynamo.reset()

def tripled(module, _, y, kind=nn.Linear):
    return 3 * y if isinstance(module, kind) else None

handle = nn.modules.module.register_module_forward_hook(tripled)
torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x), rtol=0, atol=1e-3)
handle.remove()
"""


@pytest.mark.slow
def test_compiled_code_has_derivatives_and_calls_hooks(tracing_server):
    tracing_server.run(f"import os; os.environ['HEADWISE_LINEAR'] = 'onednn'\n{FORGET_CHOICES}\n{SEEN_BY_HOOKS}")


class Mode(TorchFunctionMode):
    """Function mode that changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_repetition_by_another_library_is_an_error():
    """A square weight has the same shape as its transposition, which `F.linear` saves."""
    linear, x = nn.Linear(256, 256), torch.randn(400, 256, requires_grad=True)
    with Mode():
        out = checkpoint(functools.partial(linear_engine.project, linear), x, use_reentrant=False)
    with pytest.raises(CheckpointError):
        out.sum().backward()
