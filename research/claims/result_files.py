"""Files of results: one JSON file for each study, one for the real models and one for the timings."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.claims.study_results import Layer, Study, layers_of, layers_of_real

REAL, MAIN, FEW_DATA = "real-models", "text-64x2", "small-64x2"
"""Names of results: the real models, the study whose trained models are measured, and the study on little data."""

RANKED = (MAIN, "text-32x2", "lookup-64x2")
"""Studies whose ranks of scores are shown in the report. The other ranks are in the files."""


@dataclass(frozen=True)
class Results:
    """All results of a folder.

    Attributes:
        studies: by name.
        real: results of the real models, by name.
        clock: results of the timings, one for each device, batch and length.
        about: date, machine and versions of each file, by name.
    """

    studies: dict[str, Study]
    real: dict[str, Any]
    clock: list[dict[str, Any]]
    about: dict[str, dict[str, Any]]

    @property
    def settings(self) -> list[Study]:
        """Studies that compare numbers of heads for their own sake, not only for the argument about one head."""
        return [study for study in self.studies.values() if study.saved["is_setting"]]

    @property
    def layers(self) -> list[Layer]:
        """Layers of all models that were trained here."""
        return [layer for study in self.studies.values() for layer in layers_of(study)]

    @property
    def layers_by_real_model(self) -> dict[str, list[Layer]]:
        """Layers of the real models, by the title of the model."""
        return {saved["title"]: layers_of_real(saved) for saved in self.real.values()}

    @classmethod
    def load(cls, folder: Path) -> "Results":
        """Read all JSON files of a folder."""
        files = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
        about = {name: saved["about"] for name, saved in files.items()}
        real, clock = (files.pop(name)["measured"] for name in (REAL, "clock"))
        return cls({name: Study(name, saved) for name, saved in files.items()}, real, clock, about)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, its floats rounded to six digits. The file appears complete or not at all.

    Infinite and NaN floats become null. Several processes may write the same file at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(_rounded(value), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def work_folder(out: Path) -> Path:
    """Return the folder for databases and intermediate results, ignored by git; create it if needed."""
    folder = out / ".work"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder
