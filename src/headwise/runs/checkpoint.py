"""What a long run has measured so far, in its output folder, so that another run goes on where it was stopped."""

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from headwise.errors import InputError
from headwise.runs.table import Table, files, require_parquet, writable_folder, write_atomically

CHECKPOINT_SECONDS = 5.0
"""How often what was measured is written: no more than this is lost."""

FORCE_REMEDY = "--force (force=True) replaces it"


@runtime_checkable
class Checkpointable(Protocol):
    """How far a process is with a run."""

    def to_dict(self) -> dict[str, Any]:
        """As plain containers and tensors, which are read without running code."""

    @classmethod
    def from_dict(cls, packed: dict[str, Any]) -> Any:
        """What was packed."""


ProgressT = TypeVar("ProgressT", bound=Checkpointable)
TableT = TypeVar("TableT", bound=Table[Any])


class CheckpointedRun(Generic[ProgressT, TableT]):
    """The folder of one run, of which each process keeps its own state.

    Args:
        state: what a state is, which begins as `state()`.
        table: what the run comes to.
        folder: where table and states are written; None keeps nothing.
        settings: of the run; it goes on only with the same.
        rank: the number of this process.
    """

    def __init__(
        self,
        state: type[ProgressT],
        table: type[TableT],
        folder: str | Path | None,
        settings: Mapping[str, Any],
        rank: int = 0,
    ) -> None:
        self._progress_type, self._table = state, table
        self.folder, self.settings, self.rank = None if folder is None else Path(folder), settings, rank
        self._written = time.monotonic()

    def claim_folder(self, *, force: bool) -> None:
        """Make the folder, and refuse one that holds another run; with `force`, remove that.

        Raises:
            InputError: a folder that cannot be written, or of another run.
            MissingExtra: pyarrow is not installed.
        """
        if self.folder is None:
            return
        require_parquet(self._table.NAME)
        self.folder = writable_folder(self.folder)
        states = sorted(self.folder.glob("unfinished-*.pt"))
        if force:
            for path in (*self.folder.glob("unfinished-*.pt*"), *files(self.folder, self._table.NAME)):
                path.unlink(missing_ok=True)
            return
        for path in states:
            self._read(path)
        if (
            not states
            and not self._is_finished()
            and any(path.exists() for path in files(self.folder, self._table.NAME))
        ):
            raise self._other(_difference(self._settings_there(), self.settings))

    def finished_table(self) -> TableT | None:
        """What this run came to, if it ended before."""
        return self._table.load(self.folder) if self.folder is not None and self._is_finished() else None

    def load_progress(self) -> ProgressT:
        """Where this process was stopped; at the beginning if it was not."""
        path = self._path
        return self._progress_type() if path is None or not path.exists() else self._read(path)

    def save_progress(self, state: ProgressT, *, now: bool = False) -> None:
        """Write how far this process is, if that was not done a moment ago."""
        if self._path is None or (not now and time.monotonic() - self._written < CHECKPOINT_SECONDS):
            return
        buffer = io.BytesIO()
        torch.save({"settings": json.dumps(self.settings), "state": state.to_dict()}, buffer)
        self._path.parent.mkdir(parents=True, exist_ok=True)  # of another machine, say
        write_atomically(self._path, buffer.getvalue())
        self._written = time.monotonic()

    def finish(self, table: TableT) -> None:
        """Write what the run came to; then the states are no longer needed."""
        if self.folder is None:
            return
        table.save(self.folder, force=True)
        for path in self.folder.glob("unfinished-*.pt*"):
            path.unlink()

    def different_data_error(self) -> InputError:
        """What is said where the data is not that of the run that is resumed."""
        return self._other("data")

    @property
    def _path(self) -> Path | None:
        return None if self.folder is None else self.folder / f"unfinished-{self.rank}.pt"

    def _is_finished(self) -> bool:
        there = self._settings_there()
        unfinished = self.folder is not None and any(self.folder.glob("unfinished-*.pt"))
        return not unfinished and bool(there) and _difference(there, self.settings) is None

    def _settings_there(self) -> dict[str, Any]:
        """Those of the table in the folder; empty where there is none that can be read."""
        try:
            metadata = (
                json.loads(files(self.folder, self._table.NAME)[1].read_text(encoding="utf-8")) if self.folder else {}
            )
        except (OSError, ValueError):
            return {}
        return {name: metadata.get(name) for name in self.settings} if isinstance(metadata, dict) else {}

    def _read(self, path: Path) -> ProgressT:
        try:
            kept = torch.load(path, weights_only=True)
            there, state = json.loads(kept["settings"]), kept["state"]
        except Exception as error:  # another's file may be anything
            raise self._other(None) from error
        differs = _difference(there, self.settings)
        if differs is not None:
            raise self._other(differs)
        unpacked: ProgressT = self._progress_type.from_dict(state)
        return unpacked

    def _other(self, differs: str | None) -> InputError:
        of = "" if differs is None else f" ({differs} differs)"
        return InputError(
            "out",
            expected="a folder of its own, or that of the run to go on with",
            got=f"another run{of} in {str(self.folder)!r}",
            remedy=FORCE_REMEDY,
        )


def _difference(there: Any, here: Any, name: str = "") -> str | None:
    """The name of the first setting that differs."""
    if isinstance(there, dict) and isinstance(here, Mapping):
        for key in [*here, *(key for key in there if key not in here)]:
            found = _difference(there.get(key), here.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    return None if there == here else name
