"""Folders that appear complete or not at all, such as those of saved models."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.checks import flag, folder_path
from headwise.errors import InputError
from headwise.runs.checkpoint import FORCE_REMEDY
from headwise.runs.files import sync_folder, writable_folder
from headwise.runs.lock import locked_folder

MODEL_FILE = "config.json"
"""File that every folder of a saved model has; a folder without it is never replaced."""


def require_new_folder(folder: str | Path, *, force: bool = False) -> Path:
    """Return the absolute path at which `new_folder` can put a folder. Nothing is written.

    Args:
        folder: a path at which there is nothing, or an empty folder.
        force: allow the folder of a saved model in addition.

    Raises:
        InputError: there is something else.
    """
    flag("force", force)
    path = folder_path("out", folder)
    try:
        path = path.resolve()
        exists = path.exists()
        entries = list(path.iterdir()) if exists else []
    except (OSError, RuntimeError) as error:  # a file, too long a path, or links in a circle
        got = getattr(error, "strerror", None) or str(error)
        raise InputError("out", expected=f"a folder {str(folder)!r} that can be written", got=got) from None
    if not path.name:
        raise InputError("out", expected="the path of a new folder", got=repr(str(folder)))
    if not entries:
        return path
    if not force:
        expected = "a new or empty folder"
        raise InputError("out", expected=expected, got=f"files in {str(folder)!r}", remedy=FORCE_REMEDY)
    if not (path / MODEL_FILE).is_file() or any(entry.is_dir() for entry in entries):
        expected = f"the folder of a saved model, with a {MODEL_FILE} and without folders, to replace"
        raise InputError("out", expected=expected, got=repr(str(folder)))
    return path


@contextmanager
def new_folder(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder to be filled, and put it in place of `folder` when the context ends without an error. At
    any moment, also after a crash, there is a complete folder at `folder` or none.

    The files are written to a hidden folder next to `folder`, which is removed at the end and after errors; after a
    crash, the next call with the same `folder` removes it.

    Args:
        folder: a path at which there is nothing, or an empty folder.
        force: replace the folder of a saved model.

    Raises:
        InputError: `folder` cannot be used, another process writes to it, or a file cannot be written, for example
            because the disk is full.
        MissingExtra: filelock is not installed.
    """
    target = require_new_folder(folder, force=force)
    created = [parent for parent in target.parents if not parent.exists()]
    work = writable_folder(target.with_name(f".{target.name}.part"))
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
                _sync_files(new)
                if target.exists() and any(target.iterdir()):
                    target.rename(old)
                new.rename(target)
                sync_folder(target.parent)
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


def _sync_files(folder: Path) -> None:
    """Flush all files of a folder to disk, so that its renaming cannot survive a crash that they do not."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
