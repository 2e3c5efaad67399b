"""All results together, and how tables are written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.claims.compared import Layer, Study, layers_of, layers_of_real

REAL, MAIN, FEW_DATA = "real-models", "text-64x2", "small-64x2"
"""Results by name: of the real models; the study whose models are looked into; that of little data."""

RANKED = (MAIN, "text-32x2", "lookup-64x2")
"""Studies whose ranks are shown; the others' are in their files."""


@dataclass(frozen=True)
class Results:
    """All that was measured."""

    studies: dict[str, Study]
    real: dict[str, Any]
    clock: list[dict[str, Any]]
    about: dict[str, dict[str, Any]]

    @property
    def settings(self) -> list[Study]:
        """Studies in which numbers of heads are compared for their own sake."""
        return [study for study in self.studies.values() if study.saved["is_setting"]]

    @property
    def layers(self) -> list[Layer]:
        """Of all models trained here."""
        return [layer for study in self.studies.values() for layer in layers_of(study)]

    @property
    def of_real(self) -> dict[str, list[Layer]]:
        """By title of the model."""
        return {saved["title"]: layers_of_real(saved) for saved in self.real.values()}

    @classmethod
    def load(cls, folder: Path) -> "Results":
        """From a folder."""
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
        about = {name: each["about"] for name, each in found.items()}
        real, clock = (found.pop(name)["measured"] for name in (REAL, "clock"))
        return cls({name: Study(name, saved) for name, saved in found.items()}, real, clock, about)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table, with an empty line after it."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [*(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def picture(name: str, words: str) -> list[str]:
    """A picture with an empty line after it."""
    return [f"![{words}](../pictures/claims-{name}.png)", ""]


def numbers(values: Sequence[int]) -> str:
    """One after the other."""
    return ", ".join(map(str, values))
