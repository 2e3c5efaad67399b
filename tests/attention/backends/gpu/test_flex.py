"""The backend `flex` against plain attention, on the CPU: uncompiled with gradients, and compiled."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

import headwise as hw
from headwise.attention.attend import BACKENDS
from headwise.attention.backend_choice import choose_fastest
from headwise.attention.backends import reference
from headwise.attention.backends.gpu import flex
from headwise.attention.problem import Problem
from oracles import distance, plain_attention, plain_errors
from shape_checks import shapes_unchecked
from strategies import problems


@pytest.fixture
def uncompiled(monkeypatch):
    """Run FlexAttention without a compiler: products of matrices that apply the same rules, with gradients."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "compiled", lambda: flex_attention.flex_attention)


@pytest.fixture
def without_generated_code(monkeypatch):
    """Run the graphs of the compiler without code that is generated for them, which takes seconds for each."""
    torch.compiler.reset()
    flex.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch.compiler.reset()
    flex.compiled.cache_clear()


def checked(drawn, tensors, **options) -> Problem:
    return Problem.checked(*tensors, **drawn.attend_options, **options)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problems())
def check_drawn_problems(dtype, drawn):
    if drawn.talking is not None:
        return
    errors, budgets = {"out": 0.0, "lse": 0.0}, {"out": 0.0, "lse": 0.0}
    for number in range(8):
        tensors = drawn.tensors(dtype, number)
        exact = plain_attention(*(each.double() for each in tensors), **drawn.oracle_options)
        plain = plain_errors(*tensors, exact, **drawn.oracle_options)
        got = flex.run(checked(drawn, tensors, return_lse=True))
        for name, error in errors.items():
            errors[name] = max(error, distance(getattr(got, name), getattr(exact, name)))
            budgets[name] = max(budgets[name], 2 * plain[name])
        empty = ~drawn.rows_with_keys()
        assert not got.out[empty].any()
        if drawn.sinks is None:
            assert (got.lse[empty] == -torch.inf).all()
        if all(errors[name] <= budgets[name] for name in errors):
            return
    raise AssertionError(f"{errors} exceed {budgets}")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_drawn_problems_are_within_the_budget(uncompiled, dtype):
    check_drawn_problems(dtype)


OPTIONS = {
    "no mask": {},
    "causal": {"mask": hw.causal()},
    "window and first keys": {"mask": hw.causal() & (hw.window(30) | hw.prefix(4))},
    "padding": {"mask": hw.padding([200, 90])},
    "windows of heads": {"mask": hw.window([10, 20, None, 5])},
    "documents in pieces": {"mask": hw.segments([n // 7 % 5 for n in range(200)]) & hw.causal()},
    "function": {"mask": hw.mask_rule(lambda b, h, q, k: (q + k + h) % 3 > 0)},
    "matrix": {"mask": hw.dense(torch.rand(2, 1, 150, 200, generator=torch.Generator().manual_seed(1)) < 0.5)},
    "softcap": {"mask": hw.causal(), "softcap": 3.0},
    "bias and scales": {
        "bias": torch.linspace(-1, 1, 4 * 150 * 200).view(1, 4, 150, 200),
        "scale": torch.arange(1.0, 5),
    },
    "dilated": {"mask": hw.window(9, dilation=3)},
    "positions": {
        "mask": hw.window(9),
        "query_positions": torch.arange(150) - 3,
        "key_positions": torch.arange(200).flip(0) - 20,
    },
    "no visible key": {"mask": hw.window(1) & ~hw.window(1)},
}


def tensors(dtype=torch.float32, requires_grad: bool = False) -> list[torch.Tensor]:
    shapes = ((4, 150, 24), (2, 200, 24), (2, 200, 8))
    return [torch.randn(2, *shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


COMPILED = ("window and first keys", "bias and scales")
"""Options that are compiled by default; the kernel without a mask is that of `test_flex_takes_the_names_of_kernels`."""


@pytest.mark.parametrize(
    "name",
    [*COMPILED, *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPTIONS)[1:] if name not in COMPILED)],
)
def test_compiled_kernels_equal_the_reference(name):
    with shapes_unchecked():
        q, k, v = tensors()
        out = hw.attend(q, k, v, **OPTIONS[name], backend="flex")
        exact = hw.attend(q.double(), k.double(), v.double(), **OPTIONS[name], backend="reference")
        plain = hw.attend(q, k, v, **OPTIONS[name], backend="reference")
    assert distance(out, exact) <= 2 * max(distance(plain, exact), torch.finfo(torch.float32).eps)


def gradients(run, leaves, options, learned, upstream) -> list[torch.Tensor]:
    """Return the gradients of q, k, v and the learned options; zeros for what has no part in the result."""
    inputs = [each.detach().requires_grad_() for each in (*leaves, *(options[name] for name in learned))]
    options = options | dict(zip(learned, inputs[3:], strict=True))
    answer = run(Problem.checked(*inputs[:3], **options, return_lse=True))
    total = (answer.out * upstream[0]).sum() + (answer.lse.where(answer.lse.isfinite(), 0.0) * upstream[1]).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(each) if grad is None else grad for each, grad in zip(inputs, found, strict=True)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_gradients_of_the_rules_equal_the_reference_in_float64(uncompiled, monkeypatch, name, has_sinks):
    options = dict(OPTIONS[name]) | ({"sinks": torch.randn(4)} if has_sinks else {})
    options = {key: each.double() if key in ("bias", "scale", "sinks") else each for key, each in options.items()}
    learned = [key for key in ("bias", "scale", "sinks") if key in options]
    if "bias" in learned:  # torch traces the rule, to find the gradients of its tensors
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    upstream = torch.randn(2, 4, 150, 8).double(), torch.randn(2, 4, 150).double()
    inputs = tensors(torch.float64), options, learned, upstream
    with shapes_unchecked():
        for ours, exact in zip(gradients(flex.run, *inputs), gradients(reference.run, *inputs), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12 * max(1.0, float(exact.abs().max())))


COMPILED_CALLER = """
import torch, headwise as hw
torch.manual_seed(0)
def attend(q, k, v, bias):
    return hw.attend(q, k, v, bias=bias, softcap=3.0, backend="flex")
q, k, v, bias = (torch.randn(2, *sizes) for sizes in ((4, 150, 24), (2, 200, 24), (2, 200, 8), (4, 150, 1)))
out = torch.compile(attend, fullgraph=True, backend=BACKEND)(q, k, v, bias)
torch.testing.assert_close(out, attend(q, k, v, bias), rtol=1e-5, atol=1e-5)
"""


# By default the call next to the compiled one has no generated code either.
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_caller_gets_the_same_in_one_graph(backend, tracing_server):
    plain = "import torch; from functools import partial; torch.compile = partial(torch.compile, backend='eager')\n"
    code = COMPILED_CALLER.replace("BACKEND", repr(backend))
    tracing_server.run(plain + code if backend == "eager" else code)


def test_lengths_windows_and_ranges_share_kernels(without_generated_code):
    torch._dynamo.utils.counters.clear()
    with shapes_unchecked(), torch._dynamo.config.patch(recompile_limit=8):
        for length in (130, 140, 150, 257, 300):
            q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
            for width in (3, 50, 120):
                out = hw.attend(q, k, v, mask=hw.window(width), scale=0.3, backend="flex")
                expected = hw.attend(q, k, v, mask=hw.window(width), scale=0.3, backend="reference")
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_too_many_kernels_are_an_error_not_a_matrix(without_generated_code, monkeypatch):
    monkeypatch.setattr(flex, "MOST_COMPILED", 2)
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    with shapes_unchecked():
        for softcap in (1.0, 2.0):
            hw.attend(q, k, v, softcap=softcap, backend="flex")
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            hw.attend(q, k, v, softcap=3.0, backend="flex")


REFUSED = {
    "FlexAttention keeps heads apart, and talking_heads mixes them": {"talking_heads": (torch.eye(4), torch.eye(4))},
    "FlexAttention has no dropout": {"dropout": 0.1},
    "FlexAttention returns no log-sum-exp on a CPU, which sinks need too": {"return_lse": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(reason):
    q, k, v = tensors()
    assert hw.why_not("flex", q, k, v, **REFUSED[reason]) == reason
    with pytest.raises(hw.InputError, match=re.escape(reason)):
        hw.attend(q, k, v, **REFUSED[reason], backend="flex")


def test_gradients_on_a_cpu_float64_and_transforms_are_refused():
    assert hw.why_not("flex", *tensors(requires_grad=True)) == "FlexAttention has no gradients on a CPU"
    reason = "FlexAttention's kernels compute in float16, bfloat16 and float32, and q is in torch.float64"
    assert hw.why_not("flex", *tensors(torch.float64)) == reason
    with pytest.raises(hw.InputError, match="no rules for transforms of torch.func"):
        torch.vmap(partial(hw.attend, backend="flex"))(*(each[None] for each in tensors()))


class OwnMask(hw.Mask):
    """A mask of a user, which defines its rule alone."""

    def allows(self, grid, b, h, i, j):
        return grid.key_position(j, b) <= grid.query_position(i, b)


@pytest.mark.parametrize("backend", ["flex", "fused", "blockwise", "reference", None])
def test_a_mask_of_a_user_needs_its_rule_alone(uncompiled, backend):
    with shapes_unchecked():
        inputs = tensors()
        ours, causal = (
            hw.attend(*inputs, mask=hw.window(30) & mask, backend=backend) for mask in (OwnMask(), hw.causal())
        )
        torch.testing.assert_close(ours, causal, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [hw.Flex("triton"), hw.Flex("flash")])
def test_kernels_of_a_gpu_are_refused_on_a_cpu(backend):
    reason = f"FlexAttention's kernel '{backend.kernel}' is for GPUs, and q is on cpu"
    assert hw.why_not(backend, *tensors()) == reason


@pytest.mark.usefixtures("as_user")
def test_flex_takes_the_names_of_kernels():
    with pytest.raises(hw.InputError, match="kernel: expected one of auto, triton, flash, got 'fa4'"):
        hw.Flex("fa4")
    with shapes_unchecked():
        q, k, v = tensors()
        torch.testing.assert_close(
            hw.attend(q, k, v, backend=hw.Flex()), hw.attend(q, k, v, backend="reference"), rtol=1e-5, atol=1e-5
        )


def on_gpu(dtype=torch.bfloat16, queries: int = 150, requires_grad: bool = False, **options) -> Problem:
    """Return a problem whose tensors are on a GPU, without values. Call it under `FakeTensorMode`."""
    shapes = ((4, queries, 24), (2, 200, 24), (2, 200, 8))
    q, k, v = (torch.empty(2, *shape, dtype=dtype, device="cuda", requires_grad=requires_grad) for shape in shapes)
    # These keep their device: a build of torch for the CPU cannot index tensors of a GPU.
    kept = {name: options.pop(name) for name in ("sinks", "scale") if name in options}
    options = {name: make() if callable(make) else make for name, make in options.items()}
    return replace(Problem.checked(q, k, v, **options), **kept)


CHOICES = {
    "plain": ({}, "fused"),
    "causal": ({"mask": hw.causal(), "queries": 200}, "fused"),
    "causal after a cache": ({"mask": hw.causal()}, "flex"),
    "window": ({"mask": hw.window(20)}, "flex"),
    "windows of heads": ({"mask": hw.window([10, 20, None, 5])}, "flex"),
    "softcap": ({"softcap": 20.0}, "flex"),
    "log-sum-exp": ({"return_lse": True}, "flex"),
    "sinks": ({"sinks": torch.empty(4, 1)}, "flex"),
    "bias": ({"bias": lambda: torch.empty(1, 4, 150, 200, device="cuda", requires_grad=True)}, "flex"),
    "scales": ({"scale": torch.empty(4, 1, 1)}, "flex"),
    "step of decoding": ({"mask": hw.window(20), "queries": 1}, "fused"),
    "dropout": ({"mask": hw.window(20), "dropout": 0.1}, "fused"),
    "float64": ({"mask": hw.window(20), "dtype": torch.float64}, "fused"),
    "softcap in float64": ({"softcap": 20.0, "dtype": torch.float64}, "no backend"),
    "weights": ({"mask": hw.window(20), "return_weights": True}, "fused"),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_choice_on_a_gpu(name, requires_grad):
    options, expected = CHOICES[name]
    with FakeTensorMode(), shapes_unchecked():
        problem = on_gpu(requires_grad=requires_grad, **options)
        if expected == "no backend":
            with pytest.raises(hw.InputError, match="expected one that can do this"):
                choose_fastest(problem)
            return
        choice = choose_fastest(problem)
    assert choice.backend == expected, choice
    assert [candidate.name for candidate in choice.candidates] == ["fused", "flex", "blockwise"]
    assert choice.because in str(choice)


def test_limits_of_kernels_on_a_gpu_are_named():
    learned = {"bias": lambda: torch.empty(1, 4, 150, 200, device="cuda", requires_grad=True)}
    with FakeTensorMode(), shapes_unchecked():
        flash, bias = BACKENDS["flex"], on_gpu(**learned)
        assert flash.why_not(bias) is None
        torch.use_deterministic_algorithms(True)
        try:
            assert "no fixed order" in flash.why_not(bias)
        finally:
            torch.use_deterministic_algorithms(False)
        assert hw.Flex("flash").why_not(bias) == "FlashAttention has no gradients of a bias or of scales"
        assert "log-sum-exp" in hw.Flex("flash").why_not(on_gpu(return_lse=True))
        assert "pip install --pre flash-attn-4" in hw.Flex("flash").why_not(on_gpu())
        assert "float16 and bfloat16" in hw.Flex("flash").why_not(on_gpu(torch.float32))


def test_kernel_options_are_those_of_torch():
    with FakeTensorMode(), shapes_unchecked():
        learned = on_gpu(bias=lambda: torch.empty(1, 4, 150, 200, device="cuda", requires_grad=True))
        assert flex._kernel_options(learned, "auto") == {"BACKEND": "TRITON", "num_stages": flex.STAGES_WITH_BIAS}
        in_float32 = on_gpu(torch.float32, bias=lambda: torch.empty(1, 4, 150, 200, device="cuda"))
        assert flex._kernel_options(in_float32, "auto") is None
        assert flex._kernel_options(on_gpu(), "flash") == {"BACKEND": "FLASH"}
        assert flex._kernel_options(on_gpu(), "auto") is None
    assert {"TRITON", "FLASH"} <= set(flex_attention._Backend.__args__)
