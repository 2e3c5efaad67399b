"""Comparisons of numbers of heads: tests over seeds, intervals over seeds and documents, and outcomes by scheme."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from statsmodels.stats.multitest import multipletests

from .definitions import DEPENDS, DRAWS, HELD, LEAST, LEVEL, NOT, OPEN
from .settings import Setting


def games_howell(groups: Mapping[int, np.ndarray]) -> dict[tuple[int, int], float]:
    """Return the p-value of each pair of numbers of heads by the Games-Howell test, in both orders.

    Two groups without any variance have 1 if they are equal, otherwise 0.
    """
    names = list(groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        p_values = scipy.stats.tukey_hsd(*groups.values(), equal_var=False).pvalue
    found = {(a, b): float(p_values[i, j]) for i, a in enumerate(names) for j, b in enumerate(names) if i != j}
    for a, b in found:
        if np.ptp(groups[a]) == np.ptp(groups[b]) == 0:
            found[a, b] = float(groups[a][0] == groups[b][0])
    return found


def bootstrap(setting: Setting, worse: int, better: int, what: str) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of one number of heads minus that of another, from new draws of the seeds of
    each and of the test documents of both; None for generated data.
    """
    tables = [table for heads in (worse, better) if (table := setting.documents(heads, what)) is not None]
    if len(tables) < 2:
        return None
    drawn, weights = np.random.default_rng(0), setting.weights()
    means = []
    counts = drawn.multinomial(len(weights), np.full(len(weights), 1 / len(weights)), DRAWS) * weights
    counts = counts / counts.sum(1, keepdims=True)
    for table in tables:
        seeds = drawn.multinomial(len(table), np.full(len(table), 1 / len(table)), DRAWS) / len(table)
        means.append(np.einsum("rs,sd,rd->r", seeds, table, counts))
    low, high = np.quantile(means[0] - means[1], [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def welch(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Return the difference of two means with its 95 % interval, variances not assumed equal."""
    interval = scipy.stats.ttest_ind(first, second, equal_var=False).confidence_interval(1 - LEVEL)
    return {"mean": float(first.mean() - second.mean()), "low": float(interval.low), "high": float(interval.high)}


def compare(settings: Sequence[Setting], pair: Callable[[Setting], tuple[int, int]], what: str) -> dict[str, Any]:
    """Compare two numbers of heads in every setting, by both tests. `pair` returns the one expected to be larger first.

    Returns:
        By the name of a setting: heads, means, p-value before and after Holm, bootstrap interval, and `sign`: 1 if the
        first is significantly larger, -1 if it is smaller, otherwise 0.
    """
    compared: dict[str, Any] = {}
    for setting in settings:
        larger, smaller = pair(setting)
        groups = {heads: setting.values(heads, what) for heads in setting.heads}
        p = 1.0 if larger == smaller else games_howell(groups)[larger, smaller]
        compared[setting.name] = {
            "scheme": setting.scheme,
            "task": setting.task,
            "heads": [larger, smaller],
            "means": {heads: float(values.mean()) for heads, values in groups.items()},
            "difference": float(groups[larger].mean() - groups[smaller].mean()),
            "p": p,
            "bootstrap": None if larger == smaller else bootstrap(setting, larger, smaller, what),
        }
    for row, corrected in zip(compared.values(), holm([row["p"] for row in compared.values()]), strict=True):
        row["holm"] = corrected
        low, high = row["bootstrap"] or (row["difference"], row["difference"])
        matters = corrected < LEVEL and low * high > 0 and abs(row["difference"]) >= LEAST
        row["sign"] = int(np.sign(row["difference"])) if matters else 0
    return compared


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]] if p_values else []


def by_scheme(truths: Mapping[tuple[str, str], bool]) -> dict[str, Any]:
    """Return the outcome of each scheme and that of the claim, from the truth by task and scheme."""
    schemes: dict[str, Any] = {}
    for task, scheme in truths:
        schemes.setdefault(scheme, {"true in": [], "false in": []})
        schemes[scheme]["true in" if truths[task, scheme] else "false in"].append(task)
    for row in schemes.values():
        row["outcome"] = HELD if not row["false in"] else NOT if not row["true in"] else DEPENDS
    outcomes = {row["outcome"] for row in schemes.values()}
    return {"outcome": outcomes.pop() if len(outcomes) == 1 else DEPENDS if outcomes else OPEN, "schemes": schemes}
