"""Files of results: one JSON file for each cell, and one each for corpora, published models, timings and verdicts."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Results:
    """All results of a folder.

    Attributes:
        settings: complete cells by number of heads, for each pair of task and position scheme.
        corpora: descriptions of the real texts.
        published: distances between the heads of published models.
        timings: times of layers; None if they were not measured.
        verdicts: what `research.claims.verdicts` wrote.
        false_positives: what `research.claims.verdicts.false_positives` wrote.
    """

    settings: dict[tuple[str, str], dict[int, Any]]
    corpora: dict[str, Any]
    published: dict[str, Any]
    timings: dict[str, Any] | None
    verdicts: dict[str, Any]
    false_positives: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Results":
        """Read the files of a folder. Settings of which a cell is missing are left out."""
        settings: dict[tuple[str, str], dict[int, Any]] = {}
        for path in sorted((folder / "cells").glob("*.json")):
            cell = read_json(path)
            if cell["complete"]:
                settings.setdefault((cell["task"], cell["scheme"]), {})[cell["heads"]] = cell
        whole = {
            name: dict(sorted(cells.items()))
            for name, cells in settings.items()
            if set(cells) == set(next(iter(cells.values()))["compared"])
        }
        timings = folder / "timings.json"
        return cls(
            whole,
            read_json(folder / "corpora.json"),
            read_json(folder / "published.json"),
            read_json(timings) if timings.exists() else None,
            read_json(folder / "verdicts.json"),
            read_json(folder / "false_positives.json"),
        )


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a value as JSON, its floats rounded to six digits. The file appears complete or not at all.

    Infinite and NaN floats become null. Several processes may write the same file at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(_rounded(value), indent=indent) + "\n", encoding="utf-8")
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
