"""Choice of the backend and its explanation."""

import inspect
import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import headwise as hw
from headwise.attention import backend_choice
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise import tiles
from headwise.attention.backends.native import library

HIDDEN_KEYS = "its kernels leave out hidden keys, and are as fast as torch's where none is hidden"
FULL = "where nothing is hidden, or the causal flag says it, products in float32 are the kernel's"


def problem(batch=1, heads=8, length=1024, width=16, dtype=torch.float32, **options):
    q = torch.randn(batch, heads, length, width, dtype=dtype)
    return {"q": q, "k": q, "v": q, **options}


needs_kernels = pytest.mark.skipif(library.load() is not None, reason="the native kernels are not built")


@pytest.fixture
def without_kernels(monkeypatch):
    """Without the native kernels, as where there is no compiler."""
    monkeypatch.setattr(library, "load", lambda: "there are none")


def with_few_queries(queries, requires_grad=False, **options):
    """A problem with fewer queries than keys."""
    full = problem(**options)
    return full | {"q": full["q"][:, :, :queries].clone().requires_grad_(requires_grad)}


def use_processor(monkeypatch, instructions, mkl_uses_avx512):
    """Choose as on a processor with these instructions."""
    monkeypatch.setattr(library, "instruction_set", lambda: instructions)
    monkeypatch.setattr(library, "mkl_uses_avx512", lambda: mkl_uses_avx512)
    uncached = inspect.unwrap(backend_choice._fewest_native_queries)
    monkeypatch.setattr(backend_choice, "_fewest_native_queries", uncached)


CASES_WITH_KERNELS = {
    "full": (problem(), "native", HIDDEN_KEYS),
    "causal": (problem(mask=hw.causal()), "native", HIDDEN_KEYS),
    "window, wide": (problem(mask=hw.window(64), width=192), "native", HIDDEN_KEYS),
    "wide": (problem(width=192), "fused", "for more than 128 features in float32"),
    "wide, bfloat16": (problem(width=192, dtype=torch.bfloat16), "native", HIDDEN_KEYS),
    "few queries": (with_few_queries(64), "fused", "for 9 rows to 127 queries"),
    "few queries, dropout": (with_few_queries(64, dropout=0.1), "native", HIDDEN_KEYS),
    "wide, dropout": (problem(width=192, dropout=0.1), "native", HIDDEN_KEYS),
    "a step of decoding": (with_few_queries(1), "native", HIDDEN_KEYS),
    "a step with a gradient": (with_few_queries(1, True), "fused", "for 9 rows to 127 queries"),
    "few queries, bfloat16, training": (
        with_few_queries(64, True, dtype=torch.bfloat16),
        "native",
        HIDDEN_KEYS,
    ),
    "softcap": (with_few_queries(64, softcap=3.0), "native", "torch's kernel cannot"),
    "float64": (problem(dtype=torch.float64), "fused", FULL),
    "weights": (problem(return_weights=True), "fused", "the matrix is asked for"),
}


@needs_kernels
@pytest.mark.parametrize("case", CASES_WITH_KERNELS)
def test_the_choice_with_native_kernels(case, monkeypatch):
    use_processor(monkeypatch, "avx2", mkl_uses_avx512=False)
    options, backend, because = CASES_WITH_KERNELS[case]
    choice = hw.explain(**options)
    assert choice.backend == backend
    assert choice.because.startswith(because)


@pytest.mark.parametrize(
    ("instructions", "mkl_uses_avx512", "expected"),
    [
        ("avx512", False, [32, 64, 1, 16]),
        ("avx512_bf16", False, [32, 64, 1, 16]),
        ("avx512_bf16", True, [128, 128, 128, 32]),
        ("avx512_bf16", None, [128, 128, 128, 32]),
        ("amx", True, [128, 128, 128, 32]),
        ("avx2", False, [128, 128, 128, 32]),
        ("neon", None, [128, 128, 128, 32]),
        ("neon_bf16", None, [128, 128, 128, 32]),
        ("portable", None, [128, 128, 128, 32]),
    ],
)
def test_the_fewest_queries_as_measured(monkeypatch, instructions, mkl_uses_avx512, expected):
    use_processor(monkeypatch, instructions, mkl_uses_avx512)
    problems = itertools.product((torch.float32, torch.bfloat16), (False, True))
    assert [backend_choice._fewest_native_queries(*each) for each in problems] == expected


@needs_kernels
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_subclasses_get_torchs_kernel():
    class Subclass(torch.Tensor):
        pass

    q = problem()["q"]
    torch.testing.assert_close(torch.func.vmap(lambda x: hw.attend(x, x, x))(q[None])[0], hw.attend(q, q, q))
    special = q.as_subclass(Subclass)
    assert hw.explain(special, special, special).backend == "fused"


def test_tensors_without_values_have_sizes():
    with FakeTensorMode():
        q = problem()["q"]
        assert hw.attend(q, q, q, mask=hw.window(64)).shape == q.shape


@needs_kernels
def test_an_exported_program_needs_torch_alone():
    class Attention(torch.nn.Module):
        def forward(self, q):
            return hw.attend(q, q, q, mask=hw.causal())

    program = torch.export.export(Attention(), (problem()["q"],))
    assert "headwise" not in str(program.graph)


CASES = {
    "full": (problem(), "fused", FULL),
    "causal": (problem(mask=hw.causal()), "fused", FULL),
    "window": (problem(mask=hw.window(64)), "blockwise", "it is expected to take 1/"),
    "chunks": (problem(mask=hw.chunked(128)), "blockwise", "it is expected to take 1/"),
    "half the heads": (problem(mask=hw.window([32] * 4 + [None] * 4)), "blockwise", "it is expected to take 1/"),
    "a matrix that hides much": (
        problem(mask=torch.eye(1024, dtype=torch.bool)),
        "blockwise",
        "it is expected to take 1/",
    ),
    "a matrix that hides little": (
        problem(mask=torch.rand(1024, 1024) < 0.9),
        "fused",
        "blocks are expected to take 1.3 times as long",
    ),
    "matrices": (
        problem(mask=torch.eye(1024, dtype=torch.bool).expand(1, 8, -1, -1)),
        "fused",
        "a matrix for each sequence or head would take long to read",
    ),
    "little": (problem(length=128, mask=hw.window(2)), "fused", "fewer than 1,048,576 scores are not worth a plan"),
    "bfloat16": (problem(dtype=torch.bfloat16), "blockwise", "it is expected to take 1/"),
    "bfloat16, with a bias": (
        problem(dtype=torch.bfloat16, bias=torch.zeros(1024, 1024)),
        "fused",
        FULL,
    ),
    "dropout": (problem(dropout=0.1), "blockwise", "it is expected to take 1/"),
    "softcap": (problem(softcap=3.0), "blockwise", "torch's kernel cannot"),
    "weights": (
        problem(mask=hw.window(64), return_weights=True),
        "fused",
        "the matrix is asked for, which every backend makes alike",
    ),
    "by name": (problem(mask=hw.window(64), backend="fused"), "fused", "it was asked for by name"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_choice_and_its_reason_without_native_kernels(case, without_kernels):
    options, backend, because = CASES[case]
    choice = hw.explain(**options)
    assert choice.backend == backend
    assert choice.because.startswith(because)


def test_fused_is_chosen_on_other_devices():
    q = torch.empty(1, 8, 1024, 16, device="meta")
    choice = hw.explain(q, q, q, mask=hw.window(64))
    # A tensor on meta has no values to plan with.
    assert (choice.backend, choice.because) == (
        "fused",
        "its blocks are planned from sizes and masks, which cannot be read here",
    )


def test_a_choice_prints_the_costs_compared(without_kernels):
    assert str(hw.explain(**problem(mask=hw.window(64)))) == (
        "native     there are none\n"
        "fused      8,388,608 scores, at a cost of 8,388,608\n"
        "blockwise  1,507,328 scores, at a cost of 3,067,085\n"
        "blockwise: it is expected to take 1/2.7 of the kernel's time"
    )


def test_attend_uses_the_explained_backend_and_plans_once(monkeypatch, without_kernels):
    plans = []
    plan_of = tiles.plan_of
    monkeypatch.setattr(blockwise, "plan_of", lambda *args: plans.append(args) or plan_of(*args))
    options = problem(mask=hw.window(64))
    out = hw.attend(**options)
    assert len(plans) == 1
    monkeypatch.undo()
    assert torch.equal(out, hw.attend(**options, backend="blockwise"))


def test_explain_refuses_what_attend_refuses():
    talking = (torch.eye(8), torch.eye(8))
    with pytest.raises(
        hw.InputError, match="backend: expected one that can do this, got native: .*; fused: .*; blockwise: "
    ):
        hw.explain(**problem(talking_heads=talking))
    with pytest.raises(hw.InputError, match="scale: expected a finite number, got inf"):
        hw.explain(**problem(scale=float("inf")))
