"""The history of a monitored training in a run folder survives the end of the process, and resumes."""

import multiprocessing
import os
import signal
import time

import pyarrow
import pytest
from pyarrow import parquet
from trained_models import decoder, token_batches, train

import headwise as hw
import histories
from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.callbacks import step_scalars
from headwise.monitoring.history import History
from headwise.monitoring.monitor import monitor


def test_a_run_folder_has_the_history(tmp_path):
    _, run = train(decoder(), token_batches(4), every=2, out=tmp_path / "run")
    loaded = History.load(tmp_path / "run")
    assert loaded.steps == [0, 2]
    assert loaded.rows() == run.history.rows()
    assert loaded.table().equals(run.history.table())
    assert loaded.statistics == ("entropy", "first", "max_logit", "output_norm")
    assert repr(loaded) == "History(2 steps, the last is 2, 12 heads)"


def test_a_resumed_training_continues_the_history(tmp_path):
    model = decoder()
    train(model, token_batches(4), every=2, out=tmp_path)
    with pytest.raises(hw.InputError, match=r"^start: expected the number of the step at which the training resumes"):
        train(model, token_batches(1), every=2, out=tmp_path)
    _, run = train(model, token_batches(5), every=2, out=tmp_path, start=2)  # from a checkpoint before the last step
    assert run.history.steps == [0, 2, 4, 6]
    assert History.load(tmp_path).rows() == run.history.rows()


def test_steps_that_a_resumed_training_makes_again_are_left_out_at_once(tmp_path):
    _, run = train(decoder(), token_batches(7), every=2, out=tmp_path)
    step_6 = run.history.rows(6)
    _, resumed = train(decoder(), token_batches(1), every=2, out=tmp_path, start=2)
    assert resumed.history.steps == History.load(tmp_path).steps == [0, 2]
    assert [file.name for file in sorted((tmp_path / "abandoned").iterdir())] == [
        f"{step:012d}.parquet" for step in (2, 4, 6)
    ]
    file = tmp_path / "abandoned" / "000000000006.parquet"
    assert parquet.read_table(file).to_pylist()[0]["entropy"] == step_6[0]["entropy"]


def test_the_folder_of_another_run_is_refused(tmp_path):
    train(decoder(), token_batches(1), every=1, out=tmp_path)
    message = r"^out: expected an empty folder, or one of the same run, got a run with another statistics"
    with pytest.raises(hw.InputError, match=message):
        train(decoder(), token_batches(1), every=1, out=tmp_path, statistics=["entropy"], start=1)
    with (
        monitor(decoder(), out=tmp_path, start=1),
        pytest.raises(hw.InputError, match="^out: expected a folder that no other run writes to"),
    ):
        monitor(decoder(), out=tmp_path, start=1).__enter__()


def test_a_folder_without_a_history_is_refused(tmp_path):
    for content in (None, "[]"):
        if content is not None:
            (tmp_path / "monitor.json").write_text(content)
        with pytest.raises(hw.InputError, match="^folder: expected a run folder of monitor, got "):
            History.load(tmp_path)


def test_changes_are_those_of_the_same_module():
    """The layer of a module may have another number in a step in which other modules ran."""
    history = History({})
    row = {"head": 0, "kind": "self", "sequences": 1, "nonfinite_rows": 0}
    history.append(0, [{**row, "layer": 0, "module": "text", "entropy": 1.0}])
    rows = [("image", 0, 5.0), ("text", 1, 1.25)]
    history.append(1, [{**row, "layer": layer, "module": name, "entropy": value} for name, layer, value in rows])
    assert history.changes("entropy") == [(1, 0, 0.25)]
    assert list(history.series("entropy")) == [((1, 0), [0, 1], [1.0, 1.25]), ((0, 0), [1], [5.0])]
    assert step_scalars(history, 1, [], 4).items() >= {"heads/1.0/entropy": 1.25}.items()
    assert "heads/0.0/entropy" not in step_scalars(history, 1, [], 4)


def test_damaged_bytes_change_no_number(tmp_path):
    written = histories.history(1, 2, [0, 10], lambda layer, head, step: 1.0 + step + head, folder=tmp_path)
    path = tmp_path / "steps" / "000000000010.parquet"
    data, numbers = path.read_bytes(), [[*row.values()] for row in written.rows()]
    refused = 0
    for index in range(0, len(data), 7):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0x5A]) + data[index + 1 :])
        try:
            # Checksums are those of the numbers, not of the names of columns.
            assert [[*row.values()] for row in History.load(tmp_path).rows()] == numbers
        except hw.InputError:
            refused += 1
    assert refused > 20


OTHER_CONTENT = {
    "no table": None,
    "no rows": [],
    "another table": [{"a": 1}],
    "another step": [{"step": 11, **histories.rows(1, 1, lambda layer, head: {"entropy": 1.0})[0]}],
    "text": [{"step": 10, **histories.rows(1, 1, lambda layer, head: {"entropy": "high"})[0]}],
}


@pytest.mark.parametrize("content", OTHER_CONTENT)
def test_files_with_another_content_are_named(content, tmp_path):
    histories.history(1, 1, [0], lambda layer, head, step: 1.0, folder=tmp_path)
    path = tmp_path / "steps" / "000000000010.parquet"
    if OTHER_CONTENT[content] is None:
        path.write_bytes(b"PAR1")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(OTHER_CONTENT[content]), path)
    with pytest.raises(hw.InputError, match=r"^folder: expected readable steps, got a damaged file .*10.parquet'$"):
        History.load(tmp_path)


def _train_for_long(folder):
    train(decoder(), token_batches(10_000), every=1, out=folder)


def test_a_killed_training_loses_no_complete_step(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_train_for_long, args=(tmp_path,))
    process.start()
    steps = tmp_path / "steps"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(steps.glob("*.parquet"))) < 5:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    history = History.load(tmp_path)
    assert len(history.steps) >= 5
    assert history.steps == list(range(len(history.steps)))
    assert all(len(history.rows(step)) == 12 for step in history.steps)
    start = history.steps[-1] + 1
    _, run = train(decoder(), token_batches(1), every=1, out=tmp_path, start=start)
    assert run.history.steps == [*history.steps, start]


def test_heads_that_changed_most_come_first():
    history = History({})
    row = {"layer": 0, "kv_head": 0, "module": "", "kind": "self", "sequences": 1, "nonfinite_rows": 0}
    history.append(0, [{**row, "head": head, "entropy": value} for head, value in enumerate((1.0, 2.0, float("nan")))])
    history.append(7, [{**row, "head": head, "entropy": value} for head, value in enumerate((1.5, 1.0, 3.0))])
    assert history.changes("entropy") == [(0, 1, -1.0), (0, 0, 0.5)]
    assert [values for _, _, values in history.series("entropy")][:2] == [[1.0, 1.5], [2.0, 1.0]]
    with pytest.raises(hw.InputError, match=r"^statistic: expected one of entropy, got 'first'$"):
        history.changes("first")
    with pytest.raises(hw.InputError, match=r"^step: expected one of 2 observed steps, got 3; history.steps"):
        history.rows(3)
    one = History({})
    one.append(0, [{**row, "head": 0, "entropy": 1.0}])
    with pytest.raises(hw.InputError, match=r"^history: expected at least 2 observed steps, got 1$"):
        one.changes("entropy")


def test_statistics_that_some_heads_lack_are_read_as_written(tmp_path):
    """Only the second layer has a softcap."""
    written = histories.history(2, 3, (), None, folder=tmp_path)
    numbers = [{"max_logit": 3.0}, {"max_logit": 3.0, "max_logit_uncapped": 7.0}]
    written.append(4, histories.rows(2, 3, lambda layer, head: numbers[layer]))
    loaded = History.load(tmp_path)
    assert loaded.rows() == written.rows()
    assert loaded.statistics == ("max_logit", "max_logit_uncapped")
    assert [head for head, _, _ in loaded.series("max_logit_uncapped")] == [(1, 0), (1, 1), (1, 2)]
    limits = AlarmLimits(max_logit=5.0)
    assert [(alarm.layer, alarm.head) for alarm in limits.alarms(loaded.rows(4))] == [(1, 0), (1, 1), (1, 2)]


def test_the_step_that_is_being_written_is_not_read(tmp_path):
    histories.history(1, 2, (0, 5), lambda *_: 1.0, folder=tmp_path)
    (tmp_path / "steps" / "000000000010.parquet.part").write_bytes(b"PAR1")
    assert History.load(tmp_path).steps == [0, 5]
