"""Runs of a model under `hw.watch`, with everything that they report."""

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import headwise as hw


@dataclass(frozen=True)
class Watched:
    """Result of a run under `hw.watch`.

    Attributes:
        rows: one dict for each head; empty if watch refused.
        warned: text of the warnings of headwise.
        refused: message of the `InputError`, or "".
        output: what the run returned.
    """

    rows: list[dict[str, Any]]
    warned: str
    refused: str
    output: Any

    def differences(self, other: "Watched", tolerance: float) -> list[str]:
        """Return how another run of the same function differs in what it reports, as sentences."""
        if (self.warned, self.refused) != (other.warned, other.refused):
            return [f"a second run warns of something else: {other.warned or other.refused or 'nothing'}"[:300]]
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.no_grad(), hw.watch(model, special=special) as heads:
                output = run()
            rows = heads.rows()
        except hw.InputError as error:
            refused = str(error)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return Watched(rows, "\n".join(text for text in texts if text), refused, output)
