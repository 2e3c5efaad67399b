"""Claims 2, 4, 6 and 7, which compare losses: capacity, regularisation, more heads, and 8 heads."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import scipy.stats

from .comparisons import by_scheme, compare, welch
from .definitions import FEW, GOOD, LEAST, MARGIN, SOURCES
from .settings import Setting


def capacity(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 2: one head is worse than the best number of heads."""
    return _judged_by_loss(settings, lambda setting: (1, setting.best))


def more(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 6: the largest number of heads is worse than the best; penalties of position schemes are compared."""
    judged = _judged_by_loss(settings, lambda setting: (setting.most, setting.best))
    judged["between schemes"] = []
    compared = [setting for setting in settings if setting.is_setting and setting.compares(setting.most)]
    for first, second in combinations(compared, 2):
        if first.task == second.task:
            (one, error), (other, other_error) = _penalty(first), _penalty(second)
            judged["between schemes"].append(
                {
                    "task": first.task,
                    "schemes": [first.scheme, second.scheme],
                    "difference": one - other,
                    "error": math.hypot(error, other_error),
                }
            )
    return judged


def _penalty(setting: Setting) -> tuple[float, float]:
    """Return the mean loss of the largest number of heads minus that of the best, and its standard error over seeds.
    Both are 0 if the largest number is the best.
    """
    if setting.best == setting.most:
        return 0.0, 0.0
    largest, best = setting.values(setting.most), setting.values(setting.best)
    return float(largest.mean() - best.mean()), math.hypot(scipy.stats.sem(largest), scipy.stats.sem(best))


def regularises(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 4: a smaller gap than with one head, at a test loss that is not larger."""
    judged = [setting for setting in settings if setting.task in FEW]
    few = [setting for setting in judged if setting.compares(1)]
    others = sorted({heads for setting in few for heads in setting.heads[1:]})

    def one_against(heads: int, what: str) -> dict[str, Any]:
        return compare([s for s in few if heads in s.heads], lambda _: (1, heads), what)

    gaps, losses = ({heads: one_against(heads, what) for heads in others} for what in ("gap", "test"))
    truths, numbers = {}, {}
    for setting in few:
        name, several = setting.name, setting.heads[1:]
        numbers[name] = [h for h in several if gaps[h][name]["sign"] > 0 and losses[h][name]["sign"] >= 0]
        truths[setting.task, setting.scheme] = bool(numbers[name])
    found = {"numbers that regularise": numbers, "gaps": gaps, "losses": losses}
    return {**by_scheme(truths), **found, "not compared": not_compared(judged, few)}


def eight(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 7: the loss with 8 heads is at most 1 % above that of the best number."""
    rows: dict[str, Any] = {}
    judged = [setting for setting in settings if setting.is_setting and setting.task not in FEW]
    comparable = [setting for setting in judged if setting.compares(GOOD)]
    for setting in comparable:
        best = setting.values(setting.best)
        margin, grades = max(MARGIN * best.mean(), LEAST), {}
        for heads in setting.heads:
            interval = (
                welch(setting.values(heads), best)
                if heads != setting.best
                else dict.fromkeys(("mean", "low", "high"), 0.0)
            )
            high, low = interval["high"], interval["low"]
            grade = "good" if high < margin else "bad" if low > margin else "open"
            grades[heads] = {**interval, "grade": grade}
        rows[setting.name] = {"task": setting.task, "scheme": setting.scheme, "best": setting.best, "heads": grades}
    counted = [row for row in rows.values() if row["task"] in SOURCES]
    truths = {(row["task"], row["scheme"]): row["heads"][GOOD]["grade"] == "good" for row in counted}
    numbers = sorted({heads for row in counted for heads in row["heads"]})
    counts = {
        grade: {h: sum(row["heads"][h]["grade"] == grade for row in counted if h in row["heads"]) for h in numbers}
        for grade in ("good", "bad", "open")
    }
    found = {"settings": rows, "settings by grade": counts, "of": len(counted)}
    return {**by_scheme(truths), **found, "not compared": not_compared(judged, comparable)}


def _judged_by_loss(settings: Sequence[Setting], pair: Callable[[Setting], tuple[int, int]]) -> dict[str, Any]:
    judged = [setting for setting in settings if setting.is_setting and setting.task not in FEW]
    comparable = [s for s in judged if len(s.heads) > 1 and s.compares(*pair(s))]
    compared = compare([s for s in comparable if s.task in SOURCES], pair, "test")
    further = compare([s for s in comparable if s.task not in SOURCES], pair, "test")
    truths = {(row["task"], row["scheme"]): row["sign"] > 0 for row in compared.values()}
    return {
        **by_scheme(truths),
        "settings": compared,
        "further": further,
        "not compared": not_compared(judged, comparable),
    }


def not_compared(judged: Sequence[Setting], comparable: Sequence[Setting]) -> list[str]:
    """Return the names of settings that are not compared."""
    return [setting.name for setting in judged if setting not in comparable]
