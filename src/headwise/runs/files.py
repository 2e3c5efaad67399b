"""Output folders: a lock, and files and folders that appear at once, complete or not at all."""

import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from headwise.checks import flag, folder_path
from headwise.errors import InputError, require
from headwise.wording import without_passwords

FORCE_REMEDY = "--force (force=True) replaces it"

LOCK_FILE, HOLDER_FILE = ".headwise.lock", ".headwise.lock.json"
"""Hidden files in a locked folder: the lock itself, and a description of the process that has it."""

MODEL_FILE = "config.json"
"""File that every folder of a saved model has; a folder without it is never replaced."""


def writable_folder(folder: str | Path) -> Path:
    """Create an output folder if it does not exist, and return its path. Raise `InputError` if it cannot be created or
    written.
    """
    with suppress(OSError, ValueError):  # the second: a null character, no path at all, or an empty one
        path = folder_path("out", folder)
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    raise _unwritable(repr(str(folder)))


def require_writable(folder: str | Path) -> None:
    """Raise `InputError` if an output folder could not be created or written. Nothing is created or changed."""
    path = folder_path("out", folder).absolute()
    with suppress(OSError, ValueError):  # too long a path, or a null character
        existing = next(candidate for candidate in (path, *path.parents) if candidate.exists())
        if existing.is_dir() and os.access(existing, os.W_OK):
            return
    raise _unwritable(repr(str(folder)))


def _unwritable(got: str) -> InputError:
    """Return the `InputError` for an output folder that cannot be created or written; `got` describes the folder."""
    return InputError("out", expected="a folder that can be created and written", got=got)


def require_outside_data(out: str | Path, source: str | Path) -> None:
    """Raise `InputError` if the output folder `out` is the folder `source` of a data set, or inside it, because the
    next run would read the results as data. A path inside `source` is allowed if one of its folders has a name that
    starts with a dot, because hidden files are not read.
    """
    try:
        folder, data = Path(out).resolve(), Path(source).resolve()
        is_inside = data.is_dir() and folder.is_relative_to(data)
    except (OSError, ValueError):  # too long a path, or a null character: reported where the path is used
        return
    if is_inside and not any(part.startswith(".") for part in folder.relative_to(data).parts):
        expected = "a folder outside of the data, which would be read as data"
        raise InputError("out", expected=expected, got=f"{str(out)!r} in {str(source)!r}")


@contextmanager
def locked_folder(folder: str | Path) -> Iterator[Path]:
    """Create an output folder if it does not exist, lock it while the context is open, and yield its path. If another
    process has locked it, raise `InputError` with that process's id, host, start time and command. The operating system
    releases the lock when a process ends, even if it is killed.
    """
    filelock = require("filelock", purpose="a run in a folder", extra="tables")
    folder = writable_folder(folder)
    lock, holder = filelock.FileLock(folder / LOCK_FILE), folder / HOLDER_FILE
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        try:
            process = json.loads(holder.read_text(encoding="utf-8"))
            by = "process {process} on {host} since {since}: {command}".format(**process)
        except (OSError, ValueError, KeyError, TypeError):  # the other run has just begun or ended
            by = "another process"
        got, remedy = f"{str(folder)!r}, in use by {by}", "wait for that run, or choose another folder"
        raise InputError("out", expected="a folder that no other run writes to", got=got, remedy=remedy) from None
    except OSError as error:
        raise _unwritable(f"{error.strerror} in {str(folder)!r}") from None
    script = Path(sys.argv[0])
    program = script.parent.name if script.name == "__main__.py" else script.name  # the first is run by `python -m`
    process = {
        "process": str(os.getpid()),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": without_passwords(shlex.join([program, *sys.argv[1:]])),
    }
    try:
        try:
            holder.write_text(json.dumps(process), encoding="utf-8")
        except OSError as error:
            raise _unwritable(f"{error.strerror} in {str(folder)!r}") from None
        yield folder
    finally:
        for path in (holder, folder / LOCK_FILE):
            with suppress(OSError):  # systems that cannot delete an open file leave an empty lock file
                path.unlink()
        lock.release()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to the file `path`, so that after a crash the file has either its old content or all of `data`."""
    with replaced_file(path) as file:
        file.write(data)


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to. When the context ends without an error, the written file replaces the file `path`. The
    data is first written to a temporary file in the same folder. Thus after a crash at any moment, `path` has either
    its old content or the complete new one.
    """
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":
            _sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch's, while it handles another
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause)
        raise InputError("out", expected=f"a file {str(path)!r} that can be written", got=reason) from error


def _sync(path: Path) -> None:
    """Write a file, or the list of entries of a folder, from memory to disk. If this is done for a folder after a file
    in it was renamed, the file still has its new name after a crash of the system.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_new_folder(folder: str | Path, *, force: bool = False) -> Path:
    """Return the absolute path of `folder` if `new_folder` may put a folder there. Allowed are a path at which nothing
    exists, an empty folder and, with `force`, the folder of a saved model; anything else raises `InputError`. Nothing
    is written.
    """
    flag("force", force)
    path = folder_path("out", folder)
    try:
        path = path.resolve()
        entries = list(path.iterdir()) if path.exists() else []
    except (OSError, RuntimeError) as error:  # a file, too long a path, or links in a circle
        got = getattr(error, "strerror", None) or str(error)
        raise InputError("out", expected=f"a folder {str(folder)!r} that can be written", got=got) from None
    if not path.name:
        raise InputError("out", expected="the path of a new folder", got=repr(str(folder)))
    if entries and not force:
        expected = "a new or empty folder"
        raise InputError("out", expected=expected, got=f"files in {str(folder)!r}", remedy=FORCE_REMEDY)
    if entries and (not (path / MODEL_FILE).is_file() or any(entry.is_dir() for entry in entries)):
        expected = f"the folder of a saved model, with a {MODEL_FILE} and without folders, to replace"
        raise InputError("out", expected=expected, got=repr(str(folder)))
    return path


@contextmanager
def new_folder(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill. When the context ends without an error, the filled folder is moved to `folder`.
    `require_new_folder` states when an existing folder may be replaced. Even after a crash, `folder` is complete or
    does not exist. Until it is moved, the filled folder is inside a hidden folder next to `folder`. The hidden folder
    is removed at the end or, after a crash, by the next call.
    """
    target = require_new_folder(folder, force=force)
    created = [parent for parent in target.parents if not parent.exists()]
    work = target.with_name(f".{target.name}.part")
    old, new = work / "old", work / "new"
    try:
        with locked_folder(work):
            if old.exists() and not target.exists():  # a crash between the two renamings of a replacement
                old.rename(target)
                require_new_folder(target, force=force)
            for leftover in (old, new):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                new.mkdir()
                yield new
                for path in (*new.rglob("*"), new):  # a crash after the renaming must not lose their content
                    _sync(path)
                if target.exists() and any(target.iterdir()):
                    target.rename(old)
                new.rename(target)
                _sync(target.parent)
            except OSError as error:
                reason = error.strerror or str(error)
                raise InputError("out", expected=f"a folder {str(folder)!r} that can be written", got=reason) from error
            finally:
                if old.exists() and not target.exists():
                    old.rename(target)
                for leftover in (old, new):
                    shutil.rmtree(leftover, ignore_errors=True)
    finally:
        for path in (work, *([] if target.exists() else created)):
            with suppress(OSError):  # another process uses it
                path.rmdir()
