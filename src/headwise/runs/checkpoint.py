"""Checkpoints of long runs: partial results in the output folder, from which a stopped run resumes."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from headwise.checks import flag, folder_path
from headwise.errors import InputError
from headwise.runs.files import FORCE_REMEDY, locked_folder, replaced_file
from headwise.runs.table import Table, require_parquet, table_path

CHECKPOINT_SECONDS = 5.0
"""Least time between two checkpoints: a stopped run loses at most this much work, and the batch it was in."""

ANY = "[0-9]*"
"""Pattern of the rank of any process."""


STORABLE: list[Any] = []
"""Classes whose objects `torch.load` reads from a checkpoint with `weights_only=True`, as it reads tensors."""

ProgressT = TypeVar("ProgressT")
TableT = TypeVar("TableT", bound=Table[Any])


def storable(progress_type: type[ProgressT]) -> type[ProgressT]:
    """Decorate a class whose objects are partial results of a run, or parts of these, so that checkpoint files can
    contain its objects.
    """
    STORABLE.append(progress_type)
    return progress_type


class CheckpointedRun(Generic[ProgressT, TableT]):
    """Output folder of a run that can be stopped and resumed. During the run, the folder has one checkpoint file per
    process. At the end, the result table replaces the checkpoint files. `progress_type()` makes an empty partial
    result. A run is resumed only if its JSON-compatible `settings` are equal to those of the stopped run. If `folder`
    is None, nothing is written.
    """

    def __init__(
        self,
        progress_type: type[ProgressT],
        table_type: type[TableT],
        folder: str | Path | None,
        settings: Mapping[str, Any],
        rank: int = 0,
    ) -> None:
        self._progress_type, self._table_type = progress_type, table_type
        self.folder, self.settings, self.rank = None if folder is None else folder_path("out", folder), settings, rank
        self._last_checkpoint, self._seconds_to_write = time.monotonic(), 0.0

    @contextmanager
    def claimed(self, *, force: bool) -> Iterator[None]:
        """Create the run's output folder, and lock it while the context is open. Raise `InputError` if the folder
        contains a run with other settings. With `force`, delete the checkpoints and the result table of any run in the
        folder instead.
        """
        flag("force", force)
        if self.folder is None:
            yield
            return
        require_parquet(self._table_type.NAME)
        with locked_folder(self.folder) as folder:
            if force:
                table_path(folder, self._table_type.NAME).unlink(missing_ok=True)
                self._delete_checkpoints(folder)
            else:
                self._require_same_run(folder)
            yield

    def _require_same_run(self, folder: Path) -> None:
        checkpoints = sorted(folder.glob(self._checkpoint_name(ANY)))
        for path in checkpoints:
            self._read_checkpoint(path)
        if not checkpoints and table_path(folder, self._table_type.NAME).exists():
            settings = self._saved_settings()
            difference = first_difference(settings, self.settings) if settings else None
            if difference is not None or not settings:
                raise other_run_error(self.folder, difference)

    def finished_table(self) -> TableT | None:
        """Return the result table in the output folder if a run with the same settings has finished; otherwise None."""
        settings = self._saved_settings()
        if self.folder is None or not settings or first_difference(settings, self.settings) is not None:
            return None
        is_stopped = any(self.folder.glob(self._checkpoint_name(ANY)))
        return None if is_stopped else self._table_type.load(self.folder)

    def load_progress(self) -> ProgressT:
        """Return the partial result in this process's checkpoint; an empty one if there is no checkpoint."""
        path = None if self.folder is None else self.folder / self._checkpoint_name(self.rank)
        return self._progress_type() if path is None or not path.exists() else self._read_checkpoint(path)

    def save_progress(self, progress: ProgressT, *, now: bool = False) -> None:
        """Write a checkpoint of this process's partial result if 5 seconds have passed since the last checkpoint, or if
        `now` is True. If writing takes long, the interval is longer.
        """
        # A checkpoint that takes long to write is written less often, so that this takes a twentieth of the time.
        pause = CHECKPOINT_SECONDS * max(1.0, 4 * self._seconds_to_write)
        if self.folder is None or (not now and time.monotonic() - self._last_checkpoint < pause):
            return
        start = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)  # only rank 0 has created it, perhaps on another machine
        save_state(self.folder / self._checkpoint_name(self.rank), self.settings, {"state": progress})
        self._last_checkpoint = time.monotonic()
        self._seconds_to_write = self._last_checkpoint - start

    def finish(self, table: TableT) -> None:
        """Write the result table to the output folder, and delete the checkpoints of all processes there."""
        if self.folder is not None:
            table.save(self.folder, force=True)
            self._delete_checkpoints(self.folder)

    def different_data_error(self) -> InputError:
        """Return the `InputError` for a run that cannot be resumed, because its data differs from the data of the run
        in the output folder.
        """
        return other_run_error(self.folder, "data")

    def _checkpoint_name(self, rank: int | str) -> str:
        """Return the name of the checkpoint file of the process `rank`. If `rank` is the constant `ANY`, return a
        pattern that matches the files of all processes.
        """
        return f"unfinished-{self._table_type.NAME}-{rank}.pt"

    def _delete_checkpoints(self, folder: Path) -> None:
        """Delete the checkpoint files of all processes, including incomplete ones of killed processes."""
        for path in folder.glob(f"{self._checkpoint_name(ANY)}*"):
            path.unlink(missing_ok=True)

    def _saved_settings(self) -> dict[str, Any]:
        """Return the settings that are stored with the result table in the output folder, as far as this run has
        settings of the same names. A setting that the table lacks is None. Return an empty dictionary if there is no
        readable table.
        """
        if self.folder is None:
            return {}
        try:
            metadata = self._table_type.load_metadata(self.folder)
        except InputError:
            return {}
        return {name: metadata.get(name) for name in self.settings}

    def _read_checkpoint(self, path: Path) -> ProgressT:
        """Return the partial result in a checkpoint file. Raise `InputError` if the file is of a run with other
        settings, or cannot be read.
        """
        progress = load_state(path, self.settings)["state"]
        if not isinstance(progress, self._progress_type):
            raise other_run_error(path.parent, None)
        return progress


def save_state(path: Path, settings: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write the state of a run and its settings to the file `path`, in place of an earlier file. `content` is the
    state; it may contain containers, tensors and objects of the classes in `STORABLE`.
    """
    with replaced_file(path) as file:
        torch.save({"settings": json.dumps(settings), **content}, file)


def load_state(path: Path, settings: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return the state of a run that `save_state` wrote to a file. Raise `InputError` if the run's settings in the file
    differ from `settings`, or if the file cannot be read. `options` are passed to `torch.load`.
    """
    try:
        with torch.serialization.safe_globals(STORABLE):
            saved: dict[str, Any] = torch.load(path, weights_only=True, **options)
        difference = first_difference(json.loads(saved["settings"]), settings)
    except Exception as error:  # a file that headwise did not write can fail in any way
        raise other_run_error(path.parent, None) from error
    if difference is not None:
        raise other_run_error(path.parent, difference)
    return saved


def other_run_error(folder: Path | None, difference: str | None) -> InputError:
    """Return the `InputError` for an output folder that contains another run. `difference` is the name of a setting
    that differs, or None if unknown.
    """
    expected = "a folder of its own, or that of the run to resume"
    got = f"another run{'' if difference is None else f' ({difference} differs)'} in {str(folder)!r}"
    return InputError("out", expected=expected, got=got, remedy=FORCE_REMEDY)


def require_same_run(
    folder: str | Path, table_type: type[Table[Any]], known: Mapping[str, Any], *, force: bool
) -> None:
    """Raise `InputError` if a folder contains a finished or stopped run with other settings than a new run. `known` has
    the settings of the new run that are known before its model is loaded, such as {"data": {"limit": 8}}. Only these
    settings are compared. With `force`, do nothing.
    """
    run: CheckpointedRun[Any, Any] = CheckpointedRun(dict, table_type, folder, known)
    if force or run.folder is None:
        return
    saved = run._saved_settings()
    for path in sorted(run.folder.glob(run._checkpoint_name(ANY)))[:1]:
        try:
            with torch.serialization.safe_globals(STORABLE):
                saved = json.loads(torch.load(path, weights_only=True, mmap=True)["settings"])
        except Exception:  # `claimed` reports a checkpoint that cannot be read
            return
    difference = first_difference(_among(saved, known), _among(known, saved))
    if difference is not None:
        raise other_run_error(run.folder, difference)


def _among(settings: Any, others: Any) -> Any:
    """Return only those entries of a dictionary of settings whose names also occur in `others`, a second dictionary.
    Nested dictionaries are reduced in the same way.
    """
    if not (isinstance(settings, Mapping) and isinstance(others, Mapping)):
        return settings
    return {name: _among(value, others[name]) for name, value in settings.items() if name in others}


def has_checkpoints(folder: Path) -> bool:
    """Return True if a folder contains checkpoint files, which means that a run in it was stopped or has not finished
    yet.
    """
    return any(folder.glob("unfinished-*.pt"))


def first_difference(saved: Any, current: Any, name: str = "") -> str | None:
    """Return the dotted name, such as "data.limit", of the first setting that differs between two nested dictionaries
    of settings, or None if all are equal. `name` is the name of the dictionaries themselves.
    """
    if isinstance(saved, dict) and isinstance(current, Mapping):
        for key in [*current, *(key for key in saved if key not in current)]:
            difference = first_difference(saved.get(key), current.get(key), f"{name}.{key}" if name else key)
            if difference is not None:
                return difference
        return None
    return None if saved == current else name
