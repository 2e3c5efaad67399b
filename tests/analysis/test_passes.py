"""Properties of all passes over data: they resume to the same bits, and processes share their batches."""

import multiprocessing
import os
import signal

import pytest
import torch

import headwise as hw
import tiny
import toy_analysis
from headwise.runs import checkpoint
from profile_runs import Interrupted, contents, interrupt_after, results_of_two_processes, texts

pytestmark = pytest.mark.usefixtures("as_user")  # shapes are checked where each analysis is tested

PASSES = {
    "profile": hw.profile,
    "norm_weighted": hw.norm_weighted,
    "attention_distances": hw.attention_distances,
    "position_curves": hw.position_curves,
    "rollout": hw.rollout,
    "sink_rate": hw.sink_rate,
    "toy_analysis": toy_analysis.mean_reach,
}
"""Analyses that run a model once over each batch, `(model, dataset, out=None)`."""

BATCHES = 6
"""Number of batches of `texts()`."""


@pytest.fixture(scope="module", params=PASSES)
def analysis(request):
    """An analysis."""
    return PASSES[request.param]


@pytest.fixture(scope="module")
def uninterrupted(analysis, tmp_path_factory):
    """The files that a run leaves which was not interrupted, and its table."""
    out = tmp_path_factory.mktemp("uninterrupted")
    table = analysis(tiny.model("decoder"), texts(), out=out)
    return contents(out), table


@pytest.fixture
def checkpoint_each_batch(monkeypatch):
    """Write a checkpoint after every batch."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)


def run_until_killed(analysis, out, batches):
    """Run an analysis, and kill this process in the middle of a batch."""
    checkpoint.CHECKPOINT_SECONDS = 0.0
    model, begun = tiny.model("decoder"), []

    def kill(*_):
        begun.append(None)
        if len(begun) > batches:
            os.kill(os.getpid(), signal.SIGKILL)

    model.layers[1].register_forward_pre_hook(kill)
    analysis(model, texts(), out=out)


@pytest.mark.parametrize("batches", [1, 4])
def test_a_killed_process_resumes_to_the_same_bits(batches, analysis, uninterrupted, tmp_path):
    arguments = analysis, tmp_path, batches
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    (checkpoint_file,) = tmp_path.glob("unfinished-*-0.pt")
    assert torch.load(checkpoint_file, weights_only=True)["state"]["batches"] == batches
    model = tiny.model("decoder")
    _, begun = interrupt_after(model, 100)
    analysis(model, texts(), out=tmp_path)
    assert len(begun) == BATCHES - batches + (analysis is hw.profile)  # which also runs on random tokens
    assert contents(tmp_path) == uninterrupted[0]


def test_a_finished_run_is_read_and_not_repeated(analysis, uninterrupted, tmp_path):
    files, table = uninterrupted
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    model = tiny.model("decoder")
    _, begun = interrupt_after(model, 0)
    assert repr(analysis(model, texts(), out=tmp_path).records()) == repr(table.records())
    assert begun == []


@pytest.mark.usefixtures("checkpoint_each_batch")
def test_a_run_with_other_data_is_refused(analysis, tmp_path):
    model = tiny.model("decoder")
    interrupt_after(model, 3)
    with pytest.raises(Interrupted):
        analysis(model, texts(), out=tmp_path)
    with pytest.raises(hw.InputError, match=r"^out: expected a folder of its own, .* \(data.batch differs\) in "):
        analysis(tiny.model("decoder"), texts(batch=3), out=tmp_path)
    with pytest.raises(hw.InputError, match=r"^dataset: expected at least one batch, got none$"):
        analysis(tiny.model("decoder"), [])


def test_two_processes_agree_with_one(analysis, uninterrupted, tmp_path):
    def records(_rank):
        return analysis(tiny.model("decoder"), texts(), out=tmp_path / "out").records()

    first, second = results_of_two_processes(records, tmp_path)
    assert repr(first) == repr(second)
    for row, expected in zip(first, uninterrupted[1].records(), strict=True):
        assert list(row) == list(expected)
        for name, value in expected.items():
            tolerance = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}
            assert row[name] == (value if isinstance(value, str) else pytest.approx(value, **tolerance)), name
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(uninterrupted[0])
