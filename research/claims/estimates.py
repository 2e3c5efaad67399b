"""Means over seeds with their standard errors, as the report shows them."""

import math
import statistics
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error; NaN for a single value and for infinite values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return `mean ± standard error`, or "infinite" if a value is."""
    mean, error = mean_and_error(values)
    if not math.isfinite(mean):
        return "infinite"
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def of_runs(cell: dict, name: str) -> list[float]:
    """Return a measured value of each run of a cell; "gap" is the test loss minus the training loss."""
    if name == "gap":
        pairs = zip(of_runs(cell, "test"), of_runs(cell, "training"), strict=True)
        return [test - training if math.isfinite(test + training) else math.inf for test, training in pairs]
    return [math.inf if run[name] is None else run[name] for run in cell["runs"]]
