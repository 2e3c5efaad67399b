"""Runs of a model under `hw.watch`, with everything that they report."""

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import headwise as hw
from headwise.intercept.plans import Following, PlanKey
from research.census.training import floating, is_close

TIMES = 3
"""Number of runs of which the last one follows a plan, if there can be one: two traced calls of one kind make it."""


@dataclass(frozen=True)
class Watched:
    """Result of a run under `hw.watch`.

    Attributes:
        rows: one dict for each head; empty if watch refused.
        warned: text of the warnings of headwise.
        refused: message of the `InputError`, or "".
        output: what the run returned.
        followed: number of calls of the model that followed a plan to their end.
        planned: number of calls that made or confirmed a plan.
    """

    rows: list[dict[str, Any]]
    warned: str
    refused: str
    output: Any
    followed: int
    planned: int

    def differences(self, other: "Watched", tolerance: float) -> list[str]:
        """Return how another run of the same function differs in what it reports, as sentences."""
        if (self.warned, self.refused) != (other.warned, other.refused):
            return [f"a second run warns of something else: {other.warned or other.refused or 'nothing'}"[:300]]
        outputs = zip(floating(self.output), floating(other.output), strict=True)
        if not all(is_close(one, again, tolerance) for one, again in outputs):
            return ["a second run has another output"]
        if [row.keys() for row in self.rows] != [row.keys() for row in other.rows]:
            return ["a second run has other heads or statistics"]
        return [
            f"a second run has another {name}: {value} and {again[name]}"
            for row, again in zip(self.rows, other.rows, strict=True)
            for name, value in row.items()
            if not (value == again[name] or _is_close(value, again[name], tolerance))
        ][:3]


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two values of a row are equal up to rounding, or both NaN."""
    if not isinstance(one, float) or not isinstance(other, float):
        return False
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(one) and math.isnan(other))


def watch(model: nn.Module, run: Callable[[], Any], special: Collection[int] = ()) -> Watched:
    """Run a function under `hw.watch`."""
    output, rows, refused = None, [], ""
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(Following, "is_complete", autospec=True, side_effect=Following.is_complete) as followed,
        patch.object(PlanKey, "store", autospec=True, side_effect=PlanKey.store) as planned,
    ):
        warnings.simplefilter("always")
        try:
            with torch.no_grad(), hw.watch(model, special=special) as heads:
                output = run()
            rows = heads.rows()
        except hw.InputError as error:
            refused = str(error)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    counts = followed.call_count, planned.call_count
    return Watched(rows, "\n".join(text for text in texts if text), refused, output, *counts)


def repeated(model: nn.Module, run: Callable[[], Any], special: Collection[int] = ()) -> list[Watched]:
    """Run a function twice under `hw.watch`, and once more if these runs have made a plan, which the last one then
    follows.
    """
    results = [watch(model, run, special) for _ in range(TIMES - 1)]
    return [*results, watch(model, run, special)] if results[-1].planned else results
