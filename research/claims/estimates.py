"""Means over seeds with their standard errors, as the report shows them."""

import math
import statistics
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error; NaN for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return `mean ± standard error`."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def of_runs(cell: dict, name: str) -> list[float]:
    """Return a measured value of each run of a cell; "gap" is the test loss minus the training loss."""
    if name == "gap":
        return [run["test"] - run["training"] for run in cell["runs"]]
    return [math.inf if run[name] is None else run[name] for run in cell["runs"]]
