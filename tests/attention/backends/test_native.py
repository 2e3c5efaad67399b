"""The native backend: its kernels on each instruction set, its operators in torch, and its refusals."""

import os
import subprocess
import sys
from pathlib import Path

import native_checks
import pytest
import torch

import headwise as hw
from headwise.attention.backends.native import build, installed, library
from headwise.attention.backends.native.backend import arguments
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import Part, visible_keys
from headwise.attention.problem import Problem
from oracles import distance, plain_attention

NATIVE = pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))


def tensors(*shape: int, keys: int = 0, dtype: torch.dtype = torch.float32, **options) -> list[torch.Tensor]:
    """Return random q, k and v of one shape, or with another number of keys."""
    batch, heads, queries, width = shape
    return [
        torch.randn(batch, heads, length, width, dtype=dtype, **options) for length in (queries, *2 * [keys or queries])
    ]


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter with environment variables, and return what it prints."""
    paths = os.pathsep.join([str(Path(hw.__file__).parents[1]), *sys.path])
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@NATIVE
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_several_tiles_and_blocks_are_within_the_error_budget(dtype, half):
    native_checks.check_results(dtype, half=half)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_several_tiles_and_blocks_are_those_of_blockwise_attention(dtype):
    native_checks.check_statistics(dtype)


@NATIVE
def test_results_do_not_depend_on_the_number_of_threads():
    threads = torch.get_num_threads()
    try:
        native_checks.check_threads()
    finally:
        torch.set_num_threads(threads)


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("name", native_checks.OTHER_INSTRUCTION_SETS)
def test_every_instruction_set_passes_the_checks(name):
    question = "from headwise.attention.backends.native import library; print(library.why_not_loaded())"
    reason = run_python(question, **{library.VARIABLE: name})
    if reason != "None":
        pytest.skip(reason)
    assert run_python("import native_checks; native_checks.main()", **{library.VARIABLE: name}) == name


QUESTION = "import torch, headwise as hw; x = torch.randn(1, 2, 5, 8); print(hw.why_not('native', x, x, x))"


@pytest.fixture
def _loads_again():
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("_loads_again")
def test_the_environment_switches_the_kernels_off(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "off")
    reason = hw.why_not("native", *tensors(1, 2, 5, 8))
    assert reason == "the native kernels are switched off by HEADWISE_NATIVE=off"


@NATIVE
def test_the_environment_cannot_name_other_instructions():
    choices = ", ".join([*installed.supported_instruction_sets(), "off"])
    missing = f"the native kernels cannot run with HEADWISE_NATIVE=mmx here, which may be one of {choices}"
    assert run_python(QUESTION, HEADWISE_NATIVE="mmx") == missing


@pytest.mark.usefixtures("_loads_again")
def test_without_the_library_the_backend_states_it(monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "LIBRARY", tmp_path / "missing.so")
    assert hw.why_not("native", *tensors(1, 2, 5, 8)).startswith("the native kernels were not compiled; ")
    with pytest.warns(
        UserWarning, match="attention is not accelerated: the native kernels were not compiled; .*run: headwise"
    ):
        hw.accelerate(torch.nn.Linear(2, 3))


@NATIVE
@pytest.mark.usefixtures("_loads_again")
def test_a_damaged_library_is_not_used_and_named(monkeypatch, tmp_path):
    damaged = tmp_path / "damaged.so"
    damaged.write_text(build.sources_checksum())
    monkeypatch.setattr(installed, "LIBRARY", damaged)
    with pytest.warns(UserWarning, match=r"the native kernels cannot be loaded: .*damaged\.so"):
        assert library.load() is not None


@NATIVE
@pytest.mark.usefixtures("_loads_again")
def test_a_library_of_other_sources_is_not_used_and_named(monkeypatch):
    monkeypatch.setattr(build, "sources_checksum", lambda: "of newer sources")
    tensor = tensors(1, 2, 200, 8)[0]
    with pytest.warns(UserWarning, match="compiled from other sources; .*run: headwise kernels build"):
        choice = hw.explain(tensor, tensor, tensor)
    assert choice.backend == "fused"


REFUSALS = {
    "in torch.float64": (torch.float64, {}),
    "talking_heads mixes them": (torch.float32, {"talking_heads": (torch.eye(2), torch.eye(2))}),
}


@NATIVE
@pytest.mark.parametrize("words", REFUSALS)
def test_what_the_kernels_cannot_compute_is_refused_by_name(words):
    dtype, options = REFUSALS[words]
    assert words in hw.why_not("native", *tensors(1, 2, 5, 8, dtype=dtype), **options)


@NATIVE
def test_a_call_has_the_same_bits_with_and_without_gradients():
    q, k, v = tensors(2, 3, 5, 8, keys=70, requires_grad=True)
    options = {"mask": hw.causal(), "return_lse": True, "backend": "native"}
    with torch.no_grad():
        plain = hw.attend(q, k, v, **options)
    with_gradients = hw.attend(q, k, v, **options)
    assert with_gradients[0].requires_grad
    assert all(map(torch.equal, plain, with_gradients))


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_any_size_and_rows_without_keys(dtype):
    q, k, v = tensors(2, 3, 70, 16, keys=190, dtype=dtype)
    q[:, :, ::2] *= 1e5
    allowed = (torch.rand(2, 1, 70, 190) < 0.5).expand(2, 3, 70, 190).clone()
    allowed[:, :, 11:40] = False
    out, lse = hw.attend(q, k, v, mask=allowed, return_lse=True, backend="native")
    exact = plain_attention(q.double(), k.double(), v.double(), allowed)
    scores = (q.double() @ k.double().mT).abs().max() / 4
    assert scores > 1e5
    assert not out[:, :, 11:40].any()
    assert (lse[:, :, 11:40] == -torch.inf).all()
    # A score has half a unit in its last place of error, and a weight that times itself.
    assert distance(lse, exact.lse) < scores * 2**-22
    normal = slice(41, None, 2)
    assert distance(out[:, :, normal], exact.out[:, :, normal]) < (1e-5 if dtype == torch.float32 else 2e-2)


@NATIVE
@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_whose_whole_bias_is_the_least_number_is_not_empty(dtype, queries):
    """Models add such a bias to the scores of padding."""
    q, k, v = tensors(1, 2, queries, 16, keys=150, dtype=dtype)
    bias = torch.zeros(queries, 150, dtype=dtype)
    bias[:, :40] = bias[-1] = torch.finfo(dtype).min
    out, lse = hw.attend(q, k, v, bias=bias, return_lse=True, backend="native")
    exact = hw.attend(q, k, v, bias=bias, return_lse=True, backend="reference")
    assert distance(out, exact[0].double()) < (1e-6 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(lse, exact[1], rtol=5e-3, atol=1e-5)


@NATIVE
@pytest.mark.parametrize("mask", [None, hw.causal(), hw.mask_rule(lambda b, h, q, k: q > k)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 2, 0, 8)], ids=str)
def test_calls_without_queries_have_results_without_numbers(shape, dtype, mask):
    q, k, v = tensors(*shape, keys=7, dtype=dtype, requires_grad=True)
    out = hw.attend(q, k, v, mask=mask, backend="native")
    assert out.shape == shape
    out.sum().backward()
    assert k.grad.shape == k.shape
    assert not k.grad.any()
    assert not v.grad.any()


@NATIVE
def test_nan_in_a_query_or_a_bias_stays_in_its_row():
    q, k, v = tensors(1, 2, 70, 8)
    bias = torch.zeros(1, 2, 70, 70)
    q[0, 0, 11], bias[0, 1, 33, 7] = torch.nan, torch.nan
    out = hw.attend(q, k, v, bias=bias, backend="native")
    is_nan = torch.zeros(1, 2, 70, dtype=torch.bool)
    is_nan[0, 0, 11] = is_nan[0, 1, 33] = True
    assert torch.equal(out.isnan().any(-1), is_nan)


@NATIVE
@pytest.mark.slow
def test_a_million_keys():
    q, k, v = tensors(1, 1, 2, 16, keys=1_000_003)
    exact = plain_attention(q.double(), k.double(), v.double())
    out, lse = hw.attend(q, k, v, return_lse=True, backend="native")
    assert distance(out, exact.out) < 1e-7
    assert distance(lse, exact.lse) < 4e-6


LONG = """
import resource, torch, headwise as hw
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 1, 131_072, 64, requires_grad=True) for _ in range(3))
upstream = torch.randn(1, 1, 131_072, 64)
out = hw.attend(q[:, :, :512], k[:, :, :512], v[:, :, :512], mask=hw.window(256), backend="native")
torch.autograd.grad(out.sum(), (q, k, v))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = hw.attend(q, k, v, mask=hw.window(256), backend="native")
gradients = torch.autograd.grad(out, (q, k, v), upstream)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
"""Program that prints the growth of memory, in KiB, in a training step under a window."""


@NATIVE
@pytest.mark.slow
def test_a_training_step_of_131_072_tokens_under_a_window_needs_little_memory():
    results = 4 * 131_072 * 64 * 4 / 1024  # the output and three gradients
    assert int(run_python(LONG)) - results < 400 * 1024


@NATIVE
@pytest.mark.parametrize(
    ("dtype", "requires_grad"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((torch.float32, False), (torch.bfloat16, True))),
    ],
    ids=str,
)
def test_torch_accepts_the_operators(dtype, requires_grad):
    q, k, v = tensors(1, 4, 9, 8, dtype=dtype, requires_grad=requires_grad)
    problem = Problem.checked(
        *(q, k, v),
        mask=hw.causal() & hw.mask_rule(lambda b, h, q, k: (q + k) % 3 > 0),
        sinks=torch.randn(4, requires_grad=requires_grad),
        scale=torch.rand(4),
        softcap=5.0,
        bias=torch.randn(4, 9, 9)[None],
    )
    shared = arguments(problem, *visible_keys(problem.mask, problem.grid).of_part(Part(range(9), range(9))))
    operators = torch.ops.headwise
    torch.library.opcheck(operators.attend_forward, shared)
    if requires_grad:
        return
    torch.library.opcheck(operators.attend, shared)
    out, lse, normalizers = operators.attend_forward(*shared)
    upstream = (torch.randn_like(out), torch.randn_like(lse), out, normalizers)
    torch.library.opcheck(operators.attend_backward, (*upstream, *shared))
    indices = torch.arange(9, dtype=torch.int32)[None]
    gram = torch.randn(4, 8, 8)
    others = (indices, indices, torch.ones(1, 9, dtype=torch.bool), indices, indices, 9, None, gram)
    torch.library.opcheck(operators.attend_statistics, (*shared, *others))


@NATIVE
@pytest.mark.slow
def test_recorded_calls_and_calls_in_parts_have_the_same_bits():
    run_python("import native_traced as n; n.traces_without_values(); n.compiles_in_parts()")


@NATIVE
@pytest.mark.slow
def test_every_option_can_be_compiled_and_exported():
    run_python("import native_traced as n\nfor name in n.OPTIONS: n.compiles(name); n.exports(name)")
    run_python("import native_traced as n; n.compiles('window with sinks', 'inductor')")


TRANSFORMS = {
    "vmap": (lambda f, x: torch.func.vmap(f)(x[None]), "no rules for transforms of torch.func"),
    "grad": (lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), "no rules for transforms of torch.func"),
    # Torch's operators without a forward-mode derivative silently have a derivative of 0.
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "no forward-mode derivative"),
}


@NATIVE
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_by_name(name):
    q, k, v = tensors(1, 2, 5, 8)
    transform, reason = TRANSFORMS[name]
    with pytest.raises(hw.InputError, match=f"native: the native kernels have {reason}"):
        transform(lambda x: hw.attend(x, k, v, backend="native"), q)


@NATIVE
def test_a_window_reads_only_the_keys_that_it_shows():
    """Without NaN in hidden tiles being read, no row needs to be computed again."""
    q, k, v = tensors(1, 1, 1000, 8)
    ranges = visible_keys(hw.window(10), Grid(1, 1, 1000, 1000)).ranges
    k[:, :, :800], v[:, :, :800] = torch.nan, torch.nan
    out = torch.ops.headwise.attend_forward(q, k, v, 0.3, None, 0.0, None, ranges, None, None)[0]
    assert out[:, :, 896 + 9 :].isfinite().all()
    assert out[:, :, :800].isnan().all()


@pytest.mark.parametrize("mask", [hw.causal(), hw.window(5), hw.window(5, dilation=2)], ids=str)
def test_a_call_in_inference_mode_leaves_nothing_that_training_cannot_use(mask):
    key_ranges._constant_visible_keys.cache_clear()
    key_ranges._constant_matrix.cache_clear()
    q = torch.randn(1, 2, 130, 8, requires_grad=True)
    with torch.inference_mode():
        hw.attend(q, q, q, mask=mask)
    assert torch.autograd.grad(hw.attend(q, q, q, mask=mask).sum(), q)[0].isfinite().all()


@NATIVE
@pytest.mark.parametrize("mask", [None, hw.causal(), hw.window(3, dilation=2)], ids=str)
def test_operations_are_counted_by_the_formula_of_torch(mask):
    from torch.utils import flop_counter

    def count(function):
        with flop_counter.FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    shapes = (2, 6, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)
    forward = flop_counter.sdpa_flop_count(*shapes)
    backward = flop_counter.sdpa_backward_flop_count((2, 6, 5, 13), *shapes)
    q, k, v = (torch.randn(shape) for shape in shapes)
    assert count(lambda: hw.attend(q, k, v, mask=mask, backend="native")) == forward
    trained = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert count(lambda: hw.attend(*trained, mask=mask, backend="native").sum().backward()) == forward + backward


@NATIVE
def test_a_counter_that_is_active_at_the_first_call_counts_it(monkeypatch):
    from torch.utils import flop_counter

    monkeypatch.setattr(flop_counter, "flop_registry", {})
    q = torch.randn(1, 2, 130, 8)
    with flop_counter.FlopCounterMode(display=False) as counter:
        hw.attend(q, q, q, mask=hw.window(7))
    assert counter.get_total_flops() == 2 * 2 * 2 * 130 * 130 * 8
