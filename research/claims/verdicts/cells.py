"""Files of results, and checks of their content."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .definitions import HOWS, ROBUST, ROUNDING

RESULTS = Path(__file__).parent.parent / "results"
"""Folder of the results that the report describes."""


def read(path: Path) -> Any:
    """Return the content of a JSON file, or None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def cells_of(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of all files of cells.

    Raises:
        ValueError: a file is malformed or contradicts itself; the message names it.
    """
    cells = []
    for path in sorted((folder / "cells").glob("*.json")):
        try:
            cell = read(path)
            if path.stem != cell_name(cell):
                raise ValueError("task, scheme and heads are not those of its name")
            if cell["complete"]:
                check_search(cell)
                check_runs(cell)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: {type(error).__name__}: {error}") from error
        cells.append(cell)
    return cells


def check_search(cell: Mapping[str, Any]) -> None:
    """Raise ValueError unless a complete cell has the rate that the search of its learning rate found."""
    means = _means_of_rates(cell)
    if sorted(means) != list(range(min(means), max(means) + 1)):
        raise ValueError(f"the grid of learning rates has gaps: {sorted(means)}")
    if len({len(losses) for losses in cell["search"].values()}) > 1:
        raise ValueError("learning rates were tried with different numbers of seeds")
    if not math.isclose(cell["rate"], 1e-3 * 2.0 ** _best_rate(means), rel_tol=ROUNDING):
        raise ValueError(f"the learning rate {cell['rate']} is not the best of those tried")


def check_runs(cell: Mapping[str, Any]) -> None:
    """Raise ValueError unless the reported models of a complete cell have different seeds, losses that are numbers or
    null, and losses of documents that agree with their mean.
    """
    runs, rows = cell["runs"], cell["rows of documents"]
    seeds = [run["seed"] for run in runs]
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise ValueError(f"the seeds {seeds} are fewer than two or repeat")
    for run in runs:
        losses = [run[what] for what in ("test", "validation", "training")]
        if not all(loss is None or math.isfinite(loss) for loss in losses):
            raise ValueError(f"a loss of seed {run['seed']} is not finite; null stands for it")
        if rows and None not in losses:
            if len(run["documents"]) != len(rows):
                raise ValueError(f"seed {run['seed']} has {len(run['documents'])} documents of {len(rows)}")
            mean = np.average(run["documents"], weights=rows)
            if abs(mean - run["test"]) > ROUNDING * max(1.0, abs(mean)):
                raise ValueError(f"the test loss of seed {run['seed']} is not the mean of its documents")
        if cell["task"] in ROBUST and None not in losses and not {*HOWS, "all", "whole"} <= set(run["removed"]):
            raise ValueError(f"seed {run['seed']} lacks a loss without heads")


def at_edge(cell: Mapping[str, Any]) -> bool:
    """Return whether the best learning rate of a cell is the lowest or the highest that was tried."""
    means = _means_of_rates(cell)
    return _best_rate(means) in (min(means), max(means))


def cell_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['task']}-{cell['scheme']}-{cell['heads']}"


def _means_of_rates(cell: Mapping[str, Any]) -> dict[int, float]:
    """Return the mean validation loss of each learning rate that was tried, by its exponent."""
    return {int(e): math.inf if None in tried else float(np.mean(tried)) for e, tried in cell["search"].items()}


def _best_rate(means: Mapping[int, float]) -> int:
    return min(means, key=lambda exponent: (means[exponent], exponent))
