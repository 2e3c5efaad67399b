"""The results of one task under one position scheme."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .definitions import EXPECTED


class Setting:
    """The results of one task under one position scheme, by number of heads.

    Args:
        cells: contents of the files of results, complete ones alone.
    """

    def __init__(self, cells: Sequence[Mapping[str, Any]]) -> None:
        self.cells = {cell["heads"]: cell for cell in sorted(cells, key=lambda cell: cell["heads"])}
        first = cells[0]
        self.task, self.scheme, self.is_setting = first["task"], first["scheme"], first["is_setting"]
        losses = ("test", "validation", "training")
        self.diverged = [heads for heads in self.cells if any(None in self._raw(heads, what) for what in losses)]
        self.heads = [heads for heads in self.cells if heads not in self.diverged]

    @property
    def name(self) -> str:
        """Task and scheme."""
        return f"{self.task}, {self.scheme}"

    @property
    def most(self) -> int:
        """The largest number of heads, whether its trainings diverged or not."""
        return max(self.cells)

    def compares(self, *numbers: int) -> bool:
        """Return whether no training with these numbers of heads diverged, nor all with other numbers."""
        return set(numbers) <= set(self.heads) and len(self.heads) > 1

    def _raw(self, heads: int, what: str) -> list[float | None]:
        return [run[what] for run in self.cells[heads]["runs"]]

    def values(self, heads: int, what: str = "test") -> np.ndarray:
        """Return a measured value of each seed, such as "test", "validation", "training" or "gap"."""
        if what == "gap":
            return self.values(heads, "test") - self.values(heads, "training")
        return np.array(self._raw(heads, what), dtype=float)

    @property
    def best(self) -> int:
        """Number of heads with the lowest mean validation loss."""
        return min(self.heads, key=lambda heads: self.values(heads, "validation").mean())

    def documents(self, heads: int, what: str) -> np.ndarray | None:
        """Return losses by seed and document; None for generated data. The gap subtracts the training loss."""
        if not self.cells[heads]["rows of documents"]:
            return None
        table = np.array([run["documents"] for run in self.cells[heads]["runs"]])
        return table - self.values(heads, "training")[:, None] if what == "gap" else table

    def weights(self) -> np.ndarray:
        """Return the number of rows of each test document."""
        return np.array(self.cells[self.heads[0]]["rows of documents"], dtype=float)


def complete_settings(cells: Sequence[Mapping[str, Any]]) -> tuple[list[Setting], list[str]]:
    """Return the settings whose cells are all complete, and the names of the others; settings without any file too.

    Raises:
        ValueError: cells of a setting differ in their numbers of parameters, test documents, seeds or compared heads.
    """
    groups: dict[tuple[str, str], list[Any]] = {(task, s): [] for task, schemes in EXPECTED.items() for s in schemes}
    for cell in cells:
        groups.setdefault((cell["task"], cell["scheme"]), []).append(cell)
    settings, missing = [], []
    for (task, scheme), group in groups.items():
        whole = [cell for cell in group if cell["complete"]]
        if not whole or {cell["heads"] for cell in whole} != set(whole[0]["compared"]):
            missing.append(f"{task}, {scheme}")
            continue
        for what in ("parameters", "rows of documents", "compared", "is_setting"):
            if any(cell[what] != whole[0][what] for cell in whole):
                raise ValueError(f"{task}, {scheme}: numbers of heads differ in {what}")
        if len({tuple(run["seed"] for run in cell["runs"]) for cell in whole}) > 1:
            raise ValueError(f"{task}, {scheme}: numbers of heads differ in their seeds")
        settings.append(Setting(whole))
    return settings, missing
