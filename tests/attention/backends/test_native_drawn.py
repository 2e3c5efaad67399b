"""The native kernels on drawn problems, against plain attention in float64. `research.native_kernels` draws more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_checks import OTHER_INSTRUCTION_SETS

import headwise as hw
from headwise.attention.backends.native import library
from research.native_kernels import judge, results
from research.native_kernels.problems import draw_problem

NATIVE = pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))
MENDED = {
    "delta from a rounded output": (62, 187, 200, 274),
    "delta in another order than the gradients of the weights": (30, 51, 64, 199),
    "long sums of equal numbers in delta": (2031,),
    "slope of a softcap from a rounded score": (291,),
    "rows of several heads in one sum": (186, 236),
    "bias whose rows were normalized in other lanes": (234,),
}
"""Seeds of problems whose gradients exceeded the limits, by the reason."""


@NATIVE
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 90), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_of_drawn_problems_are_within_the_budget(dtype, seeds):
    for seed in seeds:
        verdict = judge.judge(draw_problem(seed), dtype)
        assert not verdict.beyond, verdict


@NATIVE
@pytest.mark.parametrize("reason", MENDED)
def test_gradients_that_exceeded_the_limits_are_within(reason):
    for seed in MENDED[reason]:
        for dtype in (torch.float32, torch.bfloat16):
            verdict = judge.judge(draw_problem(seed), dtype)
            assert not verdict.beyond, verdict


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_queries_that_see_one_key_have_gradient_0(dtype, dropout):
    """The gradient of a weight and its mean cancel exactly, also where the two are rounded."""
    q, k, v = (torch.randn(2, 3, 200, 37, dtype=dtype, requires_grad=True) for _ in range(3))
    out = hw.attend(q, k, v, mask=hw.window(1), dropout=dropout, backend="native")
    for gradient in torch.autograd.grad(out, (q, k), torch.randn_like(out)):
        assert not gradient.any()


@NATIVE
def test_the_rule_detects_a_wrong_number(monkeypatch):
    attend = hw.attend

    def wrong(*arguments, **options):
        out, lse = attend(*arguments, **options)
        return out * (1 + 1e-5), lse

    monkeypatch.setattr(results.hw, "attend", wrong)
    assert "out" in judge.judge(draw_problem(1), torch.float32).beyond


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_INSTRUCTION_SETS)
def test_drawn_problems_on_every_instruction_set(name, tmp_path):
    root = Path(hw.__file__).parents[2]
    command = ["-m", "research.native_kernels", "--problems=100", f"--instruction-sets={name}"]
    printed = subprocess.run(
        [sys.executable, *command, f"--out={tmp_path / 'results.json'}"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src"), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "problems, again, failures" in printed.stdout, printed.stderr
    for result in json.loads((tmp_path / "results.json").read_text())["results"].values():
        assert not result["failures"]
