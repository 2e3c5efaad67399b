"""The benchmark of the GPU, run on the CPU with small sizes: it finds errors, and leaves out what takes too long."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from benchmark_examples import ROOT

import headwise as hw
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import (
    attend_checks,
    attention,
    layer,
    observing,
    pass_checks,
    problems,
    regimes,
    report,
    statistics_checks,
    targets,
)
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.checks import Check, CheckError, run_checks
from benchmarks.measure import Ratio, Row
from benchmarks.regime import Regime
from headwise.attention import attend as attend_module
from shape_checks import shapes_unchecked

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def failures(checks) -> dict[str, str]:
    """Return the errors of the checks that fail, by name."""
    with shapes_unchecked():
        return run_checks(checks, Budget(1e6), 1.0).failed


def break_answers(monkeypatch, change) -> None:
    """Change every result of `hw.attend` by a function of the `Answer`."""
    run_contained = attend_module.run_contained
    monkeypatch.setattr(attend_module, "run_contained", lambda problem, run: change(run_contained(problem, run)))


def test_everything_runs_and_the_last_line_is_json(capsys):
    with shapes_unchecked():
        status = gpu.main(["--tiny"])
    *_, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)
    assert (status, results["checks"]["failed"]) == (0, {})
    assert results["checks"]["passed"] > 200
    rows = report.rows_by_part(results)
    assert {part: len(of_part) > 0 for part, of_part in rows.items()} == dict.fromkeys(
        gpu.SHARES.keys() - {"checks"}, True
    )
    assert {row.regime.mask for row in rows[targets.ATTENTION]} == set(regimes.MASKS)
    # FlexAttention has no backward pass on a CPU.
    assert all(name.startswith("FlexAttention") and "training" in name for name in results["left_out"])
    page = report.document(results)
    assert all(f"## {title}" in page for title in ("Targets", "Checks", "Attention", "The layer", "Statistics"))


def test_without_a_gpu_nothing_runs():
    with pytest.raises(SystemExit, match="gpu: no GPU is available; nothing was measured"):
        gpu.main([])


def test_a_wrong_output_is_reported_by_name_and_later_parts_run(monkeypatch, capsys):
    break_answers(monkeypatch, lambda answer: answer._replace(out=answer.out * 1.05))
    with shapes_unchecked():
        status = gpu.main(["--tiny"])
    *lines, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)
    assert status == 1
    failed = results["checks"]["failed"]
    for name in ("attend, fused: causal", "attend, chosen by default: documents", "attention: (2, 96", "layer: (2, 24"):
        assert any(each.startswith(name) for each in failed), name
        assert any(line.startswith(f"FAILED  {name}") for line in lines), name
    assert results["rows"][targets.OBSERVING]


def wrong_gradient(answer):
    """Return an answer whose output has a gradient that is 5 % too large."""
    return answer._replace(out=answer.out + 0.05 * (answer.out - answer.out.detach()))


def wrong_lse(answer):
    """Return an answer whose log-sum-exp is too large by 0.1."""
    return answer if answer.lse is None else answer._replace(lse=answer.lse + 0.1)


def wrong_row(answer):
    """Return an answer in which one row is too large by a half."""
    factor = torch.ones_like(answer.out)
    factor[-1, -1, -1] = 1.5
    return answer._replace(out=answer.out * factor)


@pytest.mark.parametrize(
    ("change", "message"),
    [(wrong_gradient, "gradient of "), (wrong_lse, "lse: an error of 0.1"), (wrong_row, "out: an error of ")],
)
def test_wrong_gradients_log_sum_exps_and_single_rows_are_found(change, message, monkeypatch):
    assert failures(attend_checks.attend_checks("cpu", largest=40)) == {}
    break_answers(monkeypatch, change)
    failed = failures(attend_checks.attend_checks("cpu", largest=40))
    assert failed
    assert all(error.startswith(message) for error in failed.values())


def test_an_ignored_mask_is_found(monkeypatch):
    attend = attend_module.attend
    monkeypatch.setattr(attend_module, "attend", lambda *args, **options: attend(*args, **(options | {"mask": None})))
    failed = failures(attend_checks.attend_checks("cpu", largest=40))
    for kind in problems.MASKS:
        assert any(f": {kind}, " in name for name in failed) == (kind != "no mask"), kind


def test_every_mask_is_drawn_in_every_dtype_and_with_every_extra():
    drawn = list(problems.drawn_problems(largest=40))
    assert {(each.name.split(",")[0], each.dtype) for each in drawn} == {
        (kind, dtype) for kind in problems.MASKS for dtype in problems.DTYPES
    }
    assert {each.name.split(", ")[1] for each in drawn} == set(problems.EXTRAS)
    assert any((~each.allowed.any(-1)).any() for each in drawn)  # rows without keys
    again = list(problems.drawn_problems(largest=40))
    assert all(torch.equal(a.tensors["q"], b.tensors["q"]) for a, b in zip(drawn, again, strict=True))


def test_every_backend_is_checked_or_states_a_reason():
    outcome = run_checks(attend_checks.attend_checks("cpu", largest=8), Budget(1e6), 1.0)
    assert {name.split(",")[1].split(":")[0].strip() for name in outcome.skipped} <= {*attend_module.BACKENDS}
    assert all(outcome.skipped.values())


def test_wrong_statistics_are_found(monkeypatch):
    checks = list(statistics_checks.statistics_checks("cpu", length=50))
    assert failures(checks) == {}
    original, calls = statistics_checks.statistics_of, []

    def wrong(*arguments):
        calls.append(arguments)
        factor = 1.1 if len(calls) % 3 == 1 else 1.0  # each check calls it for the device first
        return {key: factor * values for key, values in original(*arguments).items()}

    monkeypatch.setattr(statistics_checks, "statistics_of", wrong)
    failed = failures(checks)
    assert failed.keys() == {check.name for check in checks}
    assert all(" of layer 0: an error of " in error for error in failed.values())


def test_a_wrong_step_of_a_graph_is_found(monkeypatch):
    monkeypatch.setattr(pass_checks, "captured", lambda step, undo, device: lambda: step() * 1.1)
    failed = failures(pass_checks.pass_checks("cpu", length=40))
    assert failed.keys() == {f"decoding in a CUDA graph: {name}" for name in pass_checks.layers("cpu")}
    assert all(error.startswith("step 0 of the replayed graph differs by ") for error in failed.values())


def test_a_pass_that_waits_is_found(monkeypatch):
    def refuse(device):
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(pass_checks, "refusing_to_wait", refuse)
    failed = failures(pass_checks.pass_checks("cpu", length=40))
    assert len(failed) == len(pass_checks.passes("cpu", 40))
    assert all("RuntimeError: called a synchronizing CUDA operation" in error for error in failed.values())


def test_a_wrong_contestant_is_left_out_by_name(monkeypatch):
    sdpa = attention._sdpa
    monkeypatch.setattr(attention, "_sdpa", lambda *args: sdpa(*args) * 1.1)
    budget = Budget(1e6)
    regime = next(iter(regimes.attention_regimes(tiny=True)))
    with shapes_unchecked():
        rows = attention.compare(regime, "cpu", budget)
    assert [row.against for row in rows] == ["FlexAttention"]
    assert budget.left_out[f"SDPA, {regime.name}"].startswith("CheckError: out: an error of ")


def test_a_wrong_layer_is_found(monkeypatch):
    original = hw.fuse_projections
    monkeypatch.setattr(hw, "fuse_projections", lambda made: original(made).apply(shift))
    with shapes_unchecked(), pytest.raises(CheckError, match="out: an error of .* that of torch's layer is"):
        layer.compare(layer.layer_regimes(tiny=True)[0], "cpu")


def shift(module):
    """Change the weights of a linear layer."""
    if isinstance(module, torch.nn.Linear):
        with torch.no_grad():
            module.weight += 0.05


def test_what_takes_too_long_is_left_out_by_name():
    ticks = iter(range(1000))
    budget = Budget(10.0, clock=lambda: float(next(ticks)))
    checks = [Check(f"number {number}", lambda: None) for number in range(8)]
    outcome = run_checks(checks, budget, 0.5)
    assert outcome.passed == 5
    assert budget.left_out == {f"check: number {number}": "no time was left" for number in (5, 6, 7)}
    with shapes_unchecked():
        results = gpu.run("cpu", Budget(0.0), tiny=True, only="")
    names = results["left_out"]
    assert results["rows"] == {targets.OBSERVING: [], targets.LAYER: [], targets.ATTENTION: []}
    for start in ("check: waits for nothing", "check: attend, fused", "observing: ", "layer: ", "attention: "):
        assert any(name.startswith(start) for name in names), start


def test_a_part_that_raises_an_error_fails_and_the_next_one_runs(monkeypatch):
    monkeypatch.setattr(observing, "one_call", lambda regime, device: 1 / 0)
    with shapes_unchecked():
        results = gpu.run("cpu", Budget(1e6), tiny=True, only="causal bfloat16")
    assert results["checks"]["failed"] == {targets.OBSERVING: "ZeroDivisionError: division by zero"}
    assert results["rows"][targets.LAYER]


def row(median, against, mask="causal"):
    """Return a row with this median ratio."""
    return Row(
        Regime(1, 1024, 2048, 16, mask, "bfloat16"), against, Ratio(median, median - 0.1, median + 0.1), 1.0, 1.0
    )


def test_each_target_is_met_by_every_regime_or_missed():
    rows = {
        targets.ATTENTION: [row(0.98, "FlexAttention"), row(1.3, "SDPA, flash"), row(0.96, "SDPA, cuDNN", "dense")],
        targets.LAYER: [row(0.97, layer.TORCH)],
        targets.OBSERVING: [row(1.6, observing.CALL), row(1.1, observing.PLAIN), row(0.0, observing.MEMORY)],
    }
    lines = targets.lines(rows)
    assert [line[1] for line in lines] == ["at least 0.97", "at least 0.97", "at most 1.5", "at most 1.15", "at most 1"]
    assert [line[-2:] for line in lines] == [
        ("2 of 3", "**missed**"),
        ("1 of 1", "met"),
        ("0 of 1", "**missed**"),
        ("1 of 1", "met"),
        ("1 of 1", "met"),
    ]
    assert lines[0][4] == "(1, 1024, 2048, 16) dense bfloat16 forward, SDPA, cuDNN"
    assert {line[-1] for line in targets.lines({})} == {"not yet run"}


def test_page_states_the_device_failures_and_what_was_left_out():
    results = {
        "date": "2026-01-02",
        "device": "a GPU",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "seconds": 471.2,
        "checks": {"passed": 7, "skipped": {"a": "no softcap"}, "failed": {"attend, flex: causal": "out: wrong"}},
        "rows": {targets.ATTENTION: [asdict(row(1.25, "SDPA, flash"))]},
        "left_out": {"attention: the last": "no time was left"},
    }
    page = report.document(results)
    assert "2026-01-02, a GPU; torch 2.11.0, triton 3.6.0; 471 seconds." in page
    assert "7 checks passed, 1 failed, and 1 had nothing to check." in page
    assert "- attend, flex: causal: out: wrong" in page
    assert "- attention: the last: no time was left" in page
    assert "| SDPA, flash | 1.25 (1.15 to 1.35) |" in page


def test_page_in_docs_is_written_from_the_saved_results():
    assert (ROOT / "docs" / "reports" / "gpu.md").read_text(encoding="utf-8") == report.document(report.load())


def test_the_command_needs_no_package_but_torch(tmp_path):
    """The packages of the development environment are replaced by ones that cannot be imported."""
    for package in (
        "pytest",
        "pandas",
        "hypothesis",
        "tabulate",
        "transformers",
        "rich",
        "typer",
        "jaxtyping",
        "scipy",
    ):
        (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError(__name__)")
    path = os.pathsep.join((str(tmp_path), str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--only", "causal"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["checks"]["passed"] > 10
