"""Output folders, and files that are replaced atomically."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from headwise.checks import folder_path
from headwise.errors import InputError


def writable_folder(folder: str | Path) -> Path:
    """Create a folder if it does not exist, and return its path; raise `InputError` if the folder cannot be created or
    written.

    Raises:
        InputError: the folder cannot be created or written.
    """
    try:
        path = folder_path("out", folder)
        path.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(path, os.W_OK)
    except (OSError, ValueError):  # the second: a null character, no path at all, or an empty one
        is_writable = False
    if not is_writable:
        raise InputError("out", expected="a folder that can be created and written", got=repr(str(folder)))
    return path


def require_writable(folder: str | Path) -> None:
    """Raise `InputError` if an output folder cannot be created or written. Nothing is created.

    Raises:
        InputError: the folder, or else the nearest existing folder above it, is a file or cannot be written.
    """
    path = folder_path("out", folder).absolute()
    try:
        existing = next(candidate for candidate in (path, *path.parents) if candidate.exists())
        is_writable = existing.is_dir() and os.access(existing, os.W_OK)
    except (OSError, ValueError):  # too long a path, or a null character
        is_writable = False
    if not is_writable:
        raise InputError("out", expected="a folder that can be created and written", got=repr(str(folder)))


def require_outside_data(out: str | Path, source: str | Path) -> None:
    """Raise `InputError` if the output folder `out` is the folder `source` of a data set or in it, because the next run
    would read the results as data. A hidden folder, whose name starts with a dot, may be in it.
    """
    try:
        folder, data = Path(out).resolve(), Path(source).resolve()
        is_folder = data.is_dir()
    except (OSError, ValueError):  # too long a path, or a null character: reported where the path is used
        return
    if not is_folder or not folder.is_relative_to(data):
        return
    if not any(part.startswith(".") for part in folder.relative_to(data).parts):
        raise InputError(
            "out",
            expected="a folder outside of the data, which would be read as data",
            got=f"{str(out)!r} in {str(source)!r}",
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to the file `path`, which may exist. After a crash at any moment, the file has either its old
    content or the complete new one.

    Raises:
        InputError: the file cannot be written, for example because the disk is full.
    """
    with replaced_file(path) as file:
        file.write(data)


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to, which replaces the file `path` when the context ends without an error. After a crash at
    any moment, the file `path` has either its old content or the complete new one.

    The data goes into a temporary file in the same folder, which then replaces the target.

    Raises:
        InputError: the file cannot be written, for example because the disk is full.
    """
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":
            sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch's, while it handles another
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause)
        raise InputError("out", expected=f"a file {str(path)!r} that can be written", got=reason) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that the replacement of a file in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
