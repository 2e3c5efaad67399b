"""Checkpoints of a healing in its output folder, and the trained weights at its end."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError
from headwise.runs.checkpoint import first_difference
from headwise.runs.files import FORCE_REMEDY, locked_folder, replaced_file, writable_folder

CHECKPOINT, FINISHED = "unfinished-heal.pt", "healed.pt"
"""Files in the folder: the latest checkpoint, and in its place the trained weights at the end."""


@dataclass
class TrainingState:
    """Everything that the next steps of a training depend on.

    Attributes:
        model: the model.
        optimizer: its optimizer.
        schedule: schedule of the learning rate.
        device: device of the model, whose random numbers count.
    """

    model: nn.Module
    optimizer: Any
    schedule: Any
    device: torch.device

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain containers and tensors."""
        is_cuda = self.device.type == "cuda"
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "random_on_device": torch.cuda.get_rng_state(self.device) if is_cuda else None,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the state to one that `to_dict` returned."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        torch.set_rng_state(saved["random"])
        if saved["random_on_device"] is not None:
            torch.cuda.set_rng_state(saved["random_on_device"], self.device)


class HealingFolder:
    """Output folder of a healing that can be stopped and resumed.

    Args:
        folder: the folder; None reads and writes nothing.
        settings: JSON-compatible settings of the run; a run resumes only from checkpoints with the same settings.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings

    @contextmanager
    def claimed(self, *, force: bool) -> Iterator[None]:
        """Create the folder, and lock it while the context is open.

        Args:
            force: delete the files of another run in the folder instead of checking them.

        Raises:
            InputError: the folder cannot be written, another process writes to it, or it contains another run.
            MissingExtra: filelock is not installed.
        """
        if self._folder is None:
            yield
            return
        self._folder = writable_folder(self._folder)
        with locked_folder(self._folder):
            for name in (CHECKPOINT, FINISHED):
                if force:
                    (self._folder / name).unlink(missing_ok=True)
                self._read(name, mmap=True)  # the settings alone
            yield

    def restore_finished(self, model: nn.Module) -> bool:
        """Set the weights of a model to those of the finished run in the folder, and return True; False if there is no
        such run.
        """
        saved = self._read(FINISHED)
        if saved is not None:
            model.load_state_dict(saved["model"])
        return saved is not None

    def restore(self, state: TrainingState) -> int:
        """Set the state to that of the checkpoint in the folder, and return the number of its steps; 0 without one."""
        saved = self._read(CHECKPOINT)
        if saved is None:
            return 0
        state.restore(saved["state"])
        return int(saved["step"])

    def save(self, state: TrainingState, step: int) -> None:
        """Write a checkpoint in place of the one before."""
        self._write(CHECKPOINT, {"step": step, "state": state.to_dict()})

    def finish(self, model: nn.Module) -> None:
        """Write the trained weights, and delete the checkpoint."""
        self._write(FINISHED, {"model": model.state_dict()})
        if self._folder is not None:
            (Path(self._folder) / CHECKPOINT).unlink(missing_ok=True)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file, with the settings."""
        if self._folder is None:
            return
        with replaced_file(Path(self._folder) / name) as file:
            torch.save({"settings": json.dumps(self._settings), **content}, file)

    def _read(self, name: str, *, mmap: bool = False) -> Any:
        """Return the content of a file of the run with these settings; None if there is no such file."""
        if self._folder is None or not (path := Path(self._folder) / name).exists():
            return None
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            difference = first_difference(json.loads(saved["settings"]), self._settings)
        except Exception as error:  # a file that headwise did not write can fail in any way
            raise self._other_run_error("unreadable") from error
        if difference is not None:
            raise self._other_run_error(f"{difference} differs")
        return saved

    def _other_run_error(self, reason: str) -> InputError:
        """Return the error for a folder with another run."""
        return InputError(
            "out",
            expected="a folder of its own, or that of the run to resume",
            got=f"another run ({reason}) in {str(self._folder)!r}",
            remedy=FORCE_REMEDY,
        )
