"""Copies of GGUF files in Hugging Face format, which load in a fraction of the time, in headwise's cache folder."""

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from headwise.errors import HeadwiseError, require

CACHE_VARIABLE = "HEADWISE_CACHE"
"""Environment variable with the path of the cache folder."""

MANIFEST = "headwise.json"
"""File of a copy with the size, time and hash of each other file; it is written last."""

FORMAT = 1
"""Version of the copies that this module writes. Increase it when a change of headwise changes their content."""


def cache_folder() -> Path:
    """Return the path of headwise's cache folder: the value of the environment variable HEADWISE_CACHE, or by default a
    subfolder of the operating system's cache folder for the user. It may not exist yet, and it is always safe to
    delete.
    """
    stated = os.environ.get(CACHE_VARIABLE)
    if stated:
        return Path(stated).expanduser()
    platformdirs = require("platformdirs", purpose="the cache of converted models", extra="gguf")
    return Path(platformdirs.user_cache_dir("headwise", appauthor=False))


def converted_folder(file: Path, save: Callable[[Path], None]) -> Path | None:
    """Return the cached folder that contains the model of a GGUF file in Hugging Face format. If there is no intact
    folder for the file's content and the installed package versions, call `save` to write a new one. If several
    processes need the same folder, one writes it and the others wait. If the cache cannot be written, warn and return
    None.
    """
    filelock = require("filelock", purpose="the cache of converted models", extra="gguf")
    versions = [FORMAT, version("transformers"), version("gguf")]
    key = hashlib.sha256(json.dumps([_hash(file), *versions]).encode()).hexdigest()[:16]
    cache = cache_folder()
    folder = cache / "models" / f"{file.stem}-{key}"
    try:
        if _is_intact(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
            if not _is_intact(folder):
                _write(folder, file, save)
        return folder
    except HeadwiseError:
        raise
    except Exception as error:  # a full disk is an OSError here, and an error of their own in safetensors
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        remedy = f"{CACHE_VARIABLE} can name another folder"
        message = (
            f"{file.name} is read slowly at each start, since {str(cache)!r} cannot be written ({reason}); {remedy}"
        )
        warnings.warn(message, stacklevel=2)
        return None


def _write(folder: Path, file: Path, save: Callable[[Path], None]) -> None:
    """Convert a GGUF file to Hugging Face format in the folder `folder`. `save` writes the files to a temporary folder,
    which is renamed to `folder` at the end. Thus `folder` never exists with only part of its content.
    """
    print(f"headwise: converting {file.name}, once, to {folder}", file=sys.stderr)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        save(partial)
        files = {path.name: _state(path) | {"sha256": _hash(path)} for path in partial.iterdir()}
        (partial / MANIFEST).write_text(json.dumps({"source": str(file), "files": files}, indent=2), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    """Return True if a converted folder is complete: every file has its recorded size, and its recorded modification
    time. If only the time differs, as after the folder was copied, the file must have its recorded hash.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, recorded in files.items():
            state = _state(folder / name)
            if state["size"] != recorded["size"]:
                return False
            if state["mtime_ns"] != recorded["mtime_ns"] and _hash(folder / name) != recorded["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(files)


def _state(path: Path) -> dict[str, int | str]:
    """Return the size of a file in bytes, and the time of its last change in nanoseconds."""
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
