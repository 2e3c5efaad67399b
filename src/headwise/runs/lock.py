"""Lock of an output folder, so that only one run at a time writes there."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from headwise.errors import InputError, require
from headwise.runs.secrets import without_passwords

LOCK_FILE, HOLDER_FILE = ".headwise.lock", ".headwise.lock.json"
"""Hidden files in a locked folder: the lock itself, and a description of the process that has it."""


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock an output folder while the context is open. If another run has locked it, raise `InputError` with the id,
    host, start and command of the process of that run.

    The operating system releases the lock of a process that ends in any way, so a killed run leaves no lock behind.

    Raises:
        InputError: another run has locked the folder, or the folder cannot be written.
        MissingExtra: filelock is not installed.
    """
    filelock = require("filelock", purpose="a run in a folder", extra="tables")
    lock, holder = filelock.FileLock(folder / LOCK_FILE), folder / HOLDER_FILE
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise _locked_error(folder) from None
    except OSError as error:
        raise _unwritable_error(folder, error) from None
    try:
        try:
            holder.write_text(json.dumps(_this_process()), encoding="utf-8")
        except OSError as error:
            raise _unwritable_error(folder, error) from None
        yield
    finally:
        for path in (holder, folder / LOCK_FILE):
            with suppress(OSError):  # systems that cannot delete an open file leave an empty lock file
                path.unlink()
        lock.release()


def _this_process() -> dict[str, str]:
    """Return the id, the host, the time and the command of this process, for the error message of another process that
    finds the folder locked.
    """
    return {
        "process": str(os.getpid()),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": without_passwords(shlex.join([_program(), *sys.argv[1:]])),
    }


def _program() -> str:
    """Return the name of the running program: that of its script, or of the package that `python -m` runs."""
    script = Path(sys.argv[0])
    return script.parent.name if script.name == "__main__.py" else script.name


def _unwritable_error(folder: Path, error: OSError) -> InputError:
    """Return the error for an output folder in which no file can be written."""
    got = f"{error.strerror} in {str(folder)!r}"
    return InputError("out", expected="a folder that can be created and written", got=got)


def _locked_error(folder: Path) -> InputError:
    """Return the error for an output folder that another run has locked; it describes the process of that run."""
    try:
        holder = json.loads((folder / HOLDER_FILE).read_text(encoding="utf-8"))
        by = "process {process} on {host} since {since}: {command}".format(**holder)
    except (OSError, ValueError, KeyError, TypeError):  # the other run has just begun or ended
        by = "another process"
    return InputError(
        "out",
        expected="a folder that no other run writes to",
        got=f"{str(folder)!r}, in use by {by}",
        remedy="wait for that run, or choose another folder",
    )
