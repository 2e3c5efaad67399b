"""Output folders, and files that are replaced atomically."""

import os
from pathlib import Path

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


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to the file `path`, which may exist. After a crash at any moment, the file has either its old
    content or the complete new one.

    The data goes into a temporary file in the same folder, which then replaces the target.

    Raises:
        InputError: the file cannot be written, for example because the disk is full.
    """
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":
            _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("out", expected=f"a file {str(path)!r} that can be written", got=reason) from error


def _sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that the replacement of a file in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
