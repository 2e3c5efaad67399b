"""An output folder belongs to one run at a time, and the message says who has it."""

import errno
import multiprocessing
import os
import re
import signal
import socket
import sys
import time

import pytest

import headwise as hw
import tiny
from headwise.runs.files import LOCK_FILE, locked_folder
from headwise.wording import without_passwords, without_passwords_of
from profile_runs import contents, run, texts

pytestmark = pytest.mark.usefixtures("as_user")

COMMANDS = {
    "profile": lambda model, dataset, out: hw.profile(model, dataset, repeats=False, out=out),
    "ablate": lambda model, dataset, out: hw.ablate(model, dataset, hw.next_token_loss, out=out),
    "importance": lambda model, dataset, out: hw.importance(model, dataset, hw.next_token_loss, out=out),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_run_in_the_same_folder_is_refused(command, tmp_path):
    """The second run, with other settings, starts while the first runs its model."""
    measure, errors = COMMANDS[command], []

    def second(*_):
        if not errors:
            with pytest.raises(hw.InputError) as caught:
                measure(tiny.model("decoder", seed=1, top="ForCausalLM"), texts(limit=2), tmp_path)
            errors.append(str(caught.value))

    model = tiny.model("decoder", top="ForCausalLM")
    model.model.layers[1].register_forward_pre_hook(second)
    first = measure(model, texts(limit=3), tmp_path)
    expected = (
        rf"out: expected a folder that no other run writes to, got '{re.escape(str(tmp_path))}', "
        rf"in use by process {os.getpid()} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
        r"[+-]\d\d:\d\d: .+; wait for that run, or choose another folder"
    )
    assert re.fullmatch(expected, errors[0])
    saved = type(first).load(tmp_path)
    assert saved.metadata == first.metadata
    assert [path.name for path in tmp_path.iterdir()] == [f"{first.NAME}.parquet"]


def _hold(folder):
    """Lock a folder until this process is killed."""
    with locked_folder(folder):
        time.sleep(600)


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 60
    while len(contents(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(hw.InputError, match=rf"in use by process {process.pid} on .*; wait for that run"):
        run(tiny.model("decoder"), tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    run(tiny.model("decoder"), tmp_path)
    assert list(contents(tmp_path)) == ["profile.parquet"]


def test_an_unreadable_description_is_another_process(tmp_path):
    with locked_folder(tmp_path):
        (tmp_path / f"{LOCK_FILE}.json").write_text("{")
        with pytest.raises(hw.InputError, match="in use by another process; wait"), locked_folder(tmp_path):
            pass


def test_a_full_disk_is_one_sentence_and_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(hw.InputError, match=r"^out: .* written, got No space left on device in '.*'$"):
        run(tiny.model("decoder"), tmp_path)
    assert contents(tmp_path) == {}


def test_the_description_has_no_password(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/headwise", "study", "--storage", "postgresql://me:se@cret@host/db"])
    with locked_folder(tmp_path), pytest.raises(hw.InputError) as caught, locked_folder(tmp_path):
        pass
    assert ": headwise study --storage postgresql://me:***@host/db; wait" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("'mysql://:a@b:c@host:1/db' and x@y", "'mysql://:***@host:1/db' and x@y"),
        ("postgresql://host/db?user=me&password=secret&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
    ],
)
def test_passwords_are_hidden(text, shown):
    assert without_passwords(text) == shown


def test_passwords_in_the_reason_of_an_error_are_hidden():
    reason = "could not connect to me at cret@host with password se@cret"
    assert without_passwords_of("x://me:se@cret@host/db", reason) == (
        "could not connect to me at ***@host with password ***"
    )
