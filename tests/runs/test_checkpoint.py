"""Interrupted runs resume to the same bits, and folders of other runs are not overwritten."""

import os
from contextlib import suppress

import pytest
import torch

import headwise as hw
import tiny
from headwise.runs import checkpoint
from headwise.runs import files as files_module
from profile_runs import TEXTS, Interrupted, contents, interrupt_after, run, texts

pytestmark = pytest.mark.usefixtures("as_user")  # shapes are checked where `watch` is tested


@pytest.fixture
def checkpoint_each_batch(monkeypatch):
    """Write a checkpoint after every batch."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The files that a run leaves which was not interrupted."""
    out = tmp_path_factory.mktemp("uninterrupted")
    run(tiny.model("decoder"), out)
    return contents(out)


@pytest.fixture
def finished(uninterrupted, tmp_path):
    """A folder with a finished run."""
    out = tmp_path / "finished"
    out.mkdir()
    for name, data in uninterrupted.items():
        (out / name).write_bytes(data)
    return out


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batches", [0, 3, 6, *(pytest.param(batches, marks=pytest.mark.slow) for batches in (1, 2, 4, 5))]
)
@pytest.mark.usefixtures("checkpoint_each_batch")
def test_a_run_resumes_to_the_same_bits(batches, uninterrupted, tmp_path):
    model = tiny.model("decoder")
    hook, _ = interrupt_after(model, batches)
    with pytest.raises(Interrupted):
        run(model, tmp_path)
    hook.remove()
    assert all(name.startswith("unfinished-profile-0.pt") for name in contents(tmp_path))
    hook, begun = interrupt_after(model, 100)
    run(model, tmp_path)
    assert len(begun) == 6 - batches + 1  # the remaining batches, and the random tokens
    assert contents(tmp_path) == uninterrupted


@pytest.mark.usefixtures("checkpoint_each_batch")
def test_runs_of_two_kinds_share_a_folder(uninterrupted, tmp_path):
    model = tiny.model("decoder")
    interrupt_after(model, 3)
    with pytest.raises(Interrupted):
        run(model, tmp_path)
    data = hw.Texts(tiny.texts(12, 9), tiny.tokenizer("decoder"))
    hw.ablate(tiny.model("decoder", top="ForCausalLM"), data, hw.next_token_loss, units="layers", out=tmp_path)
    assert set(contents(tmp_path)) >= {"ablation.parquet", "unfinished-profile-0.pt"}
    run(tiny.model("decoder"), tmp_path)
    assert contents(tmp_path)["profile.parquet"] == uninterrupted["profile.parquet"]
    assert set(contents(tmp_path)) == {"ablation.parquet", "profile.parquet"}


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    "count", [1, 4, 9, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3, 5, 6, 7, 8))]
)
@pytest.mark.usefixtures("checkpoint_each_batch")
def test_a_run_interrupted_while_it_writes_resumes_to_the_same_bits(
    function, count, uninterrupted, tmp_path, monkeypatch
):
    model, calls = tiny.model("decoder"), []
    original = getattr(os, function)

    def interrupting(*args):
        calls.append(None)
        if len(calls) == count:
            raise Interrupted
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, function, interrupting)
        with suppress(Interrupted):  # the run ends before the last of these calls
            run(model, tmp_path)
    run(model, tmp_path)
    assert contents(tmp_path) == uninterrupted


def test_a_finished_run_is_repeated_with_force(finished, uninterrupted):
    model = tiny.model("decoder")
    _, begun = interrupt_after(model, 100)
    run(model, finished, force=True)
    assert len(begun) == 7
    assert contents(finished) == uninterrupted


# -- folders of other runs --------------------------------------------------------------------------------------------

OTHER_RUNS = {
    "data.context": {"dataset": texts(context=64)},
    "model.weights": {"model": tiny.model("decoder", seed=1)},
    "settings.special": {"special": [7]},
    "settings.repeats": {"repeats": False},
    "data": {"dataset": hw.Texts([*TEXTS[1:], "w5 w6"], tiny.tokenizer("decoder"), batch=2)},
}
"""Arguments of another run, by the name of the setting that the error names."""


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("setting", OTHER_RUNS)
@pytest.mark.usefixtures("checkpoint_each_batch")
def test_the_folder_of_another_run_is_refused(setting, is_interrupted, finished, tmp_path):
    out = finished
    if is_interrupted:
        out, model = tmp_path / "interrupted", tiny.model("decoder")
        interrupt_after(model, 2)
        with pytest.raises(Interrupted):
            run(model, out)
    before = contents(out)
    with pytest.raises(hw.InputError) as refused:
        run(**{"model": tiny.model("decoder"), "out": out} | OTHER_RUNS[setting])
    assert str(refused.value) == (
        "out: expected a folder of its own, or that of the run to resume, "
        f"got another run ({setting} differs) in {str(out)!r}; --force (force=True) replaces it"
    )
    assert contents(out) == before


def test_files_that_headwise_did_not_write_are_replaced_with_force(tmp_path):
    for name in ("unfinished-profile-0.pt", "unfinished-profile-1.pt", "profile.parquet"):
        (tmp_path / name).write_bytes(b"mine")
    run(tiny.model("decoder"), tmp_path, force=True)
    assert list(contents(tmp_path)) == ["profile.parquet"]


def test_a_folder_of_an_older_version_is_refused(finished):
    from pyarrow import parquet

    path = finished / "profile.parquet"
    parquet.write_table(parquet.read_table(path).replace_schema_metadata(None), path)
    (finished / "profile.json").write_text('{"format": 1}')
    before = contents(finished)
    with pytest.raises(hw.InputError, match="^out: expected a folder of its own, .*, got another run in"):
        run(tiny.model("decoder"), finished)
    assert contents(finished) == before


@pytest.mark.usefixtures("checkpoint_each_batch")
def test_a_checkpoint_of_an_older_version_is_refused(tmp_path):
    """Older versions wrote partial results as dictionaries."""
    model = tiny.model("decoder")
    interrupt_after(model, 3)
    with pytest.raises(Interrupted):
        run(model, tmp_path)
    path = tmp_path / "unfinished-profile-0.pt"
    with torch.serialization.safe_globals(checkpoint.STORABLE):
        content = torch.load(path, weights_only=True)
    torch.save(content | {"state": {"batches": 3, "records": []}}, path)
    with pytest.raises(hw.InputError, match="^out: expected a folder of its own, .*, got another run in"):
        run(tiny.model("decoder"), tmp_path)


@pytest.mark.usefixtures("checkpoint_each_batch")
def test_fewer_batches_than_before_are_other_data(tmp_path):
    model, batches = tiny.model("decoder"), list(texts())
    interrupt_after(model, 3)
    with pytest.raises(Interrupted):
        run(model, tmp_path, batches)
    with pytest.raises(hw.InputError, match="another run .data differs. in"):
        run(tiny.model("decoder"), tmp_path, batches[:2])
    assert run(tiny.model("decoder"), tmp_path, batches).metadata["measured"]["sequences"] == 7
