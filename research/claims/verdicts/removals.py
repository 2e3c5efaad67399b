"""Claim 5: many heads make a model robust."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.stats

from .comparisons import by_scheme, games_howell, holm
from .definitions import HOWS, LEVEL, ROBUST, SHAPES
from .losses import not_compared
from .settings import Setting


def robust(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 5: half of the heads costs a smaller share of the effect of all, the more heads there are."""
    judged = [setting for setting in settings if setting.task in ROBUST]
    compared = [setting for setting in judged if setting.compares(1, setting.most)]
    shares = {s.name: {how: {heads: _shares(s, heads, how) for heads in s.heads} for how in HOWS} for s in compared}
    unusable = [name for name, of in shares.items() if any(len(values) < 2 for values in of["half"].values())]
    compared = [setting for setting in compared if setting.name not in unusable]
    rows: dict[str, Any] = {s.name: {"task": s.task, "scheme": s.scheme} for s in compared}
    for how in HOWS:
        tested: dict[tuple[int, int], dict[str, float]] = {}
        for setting in compared:
            of_setting = shares[setting.name][how]
            rows[setting.name][how] = {n: [float(v.mean()), float(scipy.stats.sem(v))] for n, v in of_setting.items()}
            rows[setting.name][f"{how} steps"] = {}
            p_values = games_howell(of_setting)
            for pair in sorted({*pairwise(setting.heads), *((1, heads) for heads in setting.heads[1:])}):
                tested.setdefault(pair, {})[setting.name] = p_values[pair]
        for (a, b), by_setting in tested.items():
            for name, corrected in zip(by_setting, holm(list(by_setting.values())), strict=True):
                difference = rows[name][how][b][0] - rows[name][how][a][0]
                rows[name][f"{how} steps"][f"{a} to {b}"] = int(np.sign(difference)) if corrected < LEVEL else 0
    truths = {}
    for setting in compared:
        row, numbers = rows[setting.name], setting.heads
        for how in HOWS:
            signs = row[f"{how} steps"]
            against_one = [signs[f"1 to {heads}"] for heads in numbers[1:]]
            row[f"{how} shape"] = SHAPES[1 in signs.values(), -1 in signs.values()]
            row[f"{how} true"] = against_one[-1] < 0 and 1 not in against_one
        truths[setting.task, setting.scheme] = row["half true"]
    left_out = [name for name in not_compared(judged, compared) if name not in unusable]
    return {**by_scheme(truths), "settings": rows, "without effect": unusable, "not compared": left_out}


def _shares(setting: Setting, heads: int, how: str) -> np.ndarray:
    """Return the share of half of the heads in the effect of all, by seed; seeds in which all heads have none are left
    out.
    """
    shares = []
    for run in setting.cells[heads]["runs"]:
        removed = run["removed"]
        total = removed["all"] - removed["whole"]
        if total > 0:
            shares.append((np.mean(removed[how]) - removed["whole"]) / total)
    return np.array(shares)
