"""Judge the claims by the rules in rules.md, from the raw results. Imports nothing of headwise.

python research/claims/verdicts.py [FOLDER]    writes FOLDER/verdicts.json
"""

import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import statsmodels.formula.api as smf
from statsmodels.stats.multitest import multipletests
from statsmodels.tools.sm_exceptions import ConvergenceWarning

LEVEL = 0.05
DRAWS = 4000
FREE, ROUNDS = 1.1, 0.75
GOOD, MARGIN, LEAST = 8, 0.01, 0.01
ENTROPY_MISSED = 0.05
SOURCES = ("python", "bible", "lookup", "relations")
"""Tasks that count, one for each source of data."""

FEW, ROBUST = ("python-few", "bible-few"), ("python", "bible")
SCHEMES = ("none", "learned", "rotary", "spread")
EXPECTED = {
    **dict.fromkeys(SOURCES, SCHEMES),
    "relations": SCHEMES[1:],  # no model can solve it without positions
    "masked": ("learned", "spread"),
    **dict.fromkeys(FEW, ("learned", "spread")),
    "bible-large": ("rotary", "spread"),
}
"""Position schemes of every task that is judged. A verdict that a missing setting could change is not given."""

PUBLISHED = ("minilm", "smollm2")
SEEDS, SEEDS_OF_LARGE = 6, 4
ROUNDING = 1e-4
"""Largest accepted difference between a loss and the same loss computed from numbers with six digits."""

SAME = ("mean", "low", "high")
HOWS = ("half", "least")
SHAPES = {
    (True, True): "rises and falls",
    (True, False): "rises",
    (False, True): "falls",
    (False, False): "flat",
}
"""Shape of the shares against the number of heads, by whether one is significantly larger, and one smaller."""

HELD, NOT, DEPENDS, OPEN = "held", "did not hold", "depends", "not measured"


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


# -- comparisons ------------------------------------------------------------------------------------------------------


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


# -- the claims -------------------------------------------------------------------------------------------------------


def different(settings: Sequence[Setting], published: Mapping[str, Any]) -> dict[str, Any]:
    """Claim 1: distances between heads, beyond those of untrained heads of equal entropy."""
    rows, left_out, measured = [], 0, []
    for setting in settings:
        runs = [run for run in setting.cells.get(GOOD, {"runs": []})["runs"] if "distance" in run]
        measured += [setting.name] if runs else []
        for run in runs if GOOD in setting.heads else ():
            for layer, difference, missed in _layers(run):
                left_out += missed
                if not missed:
                    model = f"{setting.name}, {run['seed']}"
                    rows.append({"setting": setting.name, "model": model, "layer": layer, "difference": difference})
    table = pd.DataFrame(rows, columns=["setting", "model", "layer", "difference"])
    table = table[table.groupby("setting")["model"].transform("nunique") > 1]
    effects: dict[str, dict[str, Any]] = {
        str(setting): _effect_over_models(of_setting) for setting, of_setting in table.groupby("setting")
    }
    mixed = _mixed_effect(table) if len(effects) > 1 else None
    for saved in published.values():
        effect, missed_layers = _published_effect(saved)
        effects |= {} if effect is None else {saved["title"]: effect}
        measured.append(saved["title"])
        left_out += missed_layers
    for effect, corrected in zip(effects.values(), holm([row["p"] for row in effects.values()]), strict=True):
        effect["holm"] = corrected
        effect["sign"] = int(np.sign(effect["mean"])) if corrected < LEVEL else 0
    further = {setting.name for setting in settings if setting.task not in SOURCES}
    return {
        **_farther([effect["sign"] for effect in effects.values()]),
        "without further tasks": _farther([effect["sign"] for name, effect in effects.items() if name not in further]),
        "effects": effects,
        "mixed model": mixed,
        "layers left out": left_out,
        "not compared": [name for name in measured if name not in effects],
    }


def _farther(signs: Sequence[int]) -> dict[str, Any]:
    """Return the outcome of claim 1 and what it counts: effects above 0, below 0, and all."""
    farther, closer = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    outcome = OPEN if not signs else HELD if farther == len(signs) else NOT if farther == 0 else DEPENDS
    return {"outcome": outcome, "farther": farther, "closer": closer, "of": len(signs)}


def _layers(run: Mapping[str, Any]) -> list[tuple[int, float, bool]]:
    """Return layer, distance beyond the control, and whether the control missed the entropy."""
    trained, sharp = run["entropy"]["trained"], run["entropy"]["as sharp"]
    rows = []
    for number, layer in enumerate(run["distance"]["trained"]):
        missed = abs(sharp[number] / trained[number] - 1) > ENTROPY_MISSED
        rows.append((number, run["distance"]["trained"][layer] - run["distance"]["as sharp"][layer], missed))
    return rows


def _effect_over_models(table: pd.DataFrame) -> dict[str, float]:
    """Return the mean effect of a setting by Student's t over its models; the layers of a model are averaged first."""
    return _mean_effect(table.groupby("model")["difference"].mean().to_numpy())


def _mixed_effect(table: pd.DataFrame) -> dict[str, Any]:
    """Return the effect over all settings by a linear mixed model: random intercepts for the setting, and for the model
    within it; the layers of a model are its repeated measurements.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        nested = {"model": "0 + C(model)"}
        fitted = smf.mixedlm("difference ~ 1", table, groups=table["setting"], re_formula="1", vc_formula=nested).fit(
            reml=True
        )
    low, high = fitted.conf_int().loc["Intercept"]
    found = {
        "mean": float(fitted.params["Intercept"]),
        "error": float(fitted.bse["Intercept"]),
        "low": float(low),
        "high": float(high),
        "variance of settings": float(fitted.cov_re.iloc[0, 0]),
        "variance of models": float(fitted.vcomp[0]),
        "variance of layers": float(fitted.scale),
    }
    finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
    return {**finite, "warnings": sorted({str(warning.message) for warning in caught})}


def _mean_effect(values: np.ndarray) -> dict[str, float]:
    test = scipy.stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(1 - LEVEL)
    return {
        "mean": float(values.mean()),
        "error": float(values.std(ddof=1) / math.sqrt(len(values))),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(test.pvalue),
    }


def _published_effect(saved: Mapping[str, Any]) -> tuple[dict[str, float] | None, int]:
    """Return the effect of a published model, by Student's t over documents, and the number of layers left out. The
    effect is None if all are.
    """
    sharp = np.mean(saved["entropy"]["as sharp"], 0)
    kept = np.abs(sharp / np.array(saved["entropy"]["trained"]) - 1) <= ENTROPY_MISSED
    trained = np.array([list(document.values()) for document in saved["trained"]])
    control = np.mean([[list(document.values()) for document in seed] for seed in saved["as sharp"]], 0)
    effect = _mean_effect((trained - control)[:, kept].mean(1)) if kept.any() else None
    return effect, int((~kept).sum())


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


def _judged_by_loss(settings: Sequence[Setting], pair: Callable[[Setting], tuple[int, int]]) -> dict[str, Any]:
    judged = [setting for setting in settings if setting.is_setting and setting.task not in FEW]
    comparable = [s for s in judged if len(s.heads) > 1 and s.compares(*pair(s))]
    compared = compare([s for s in comparable if s.task in SOURCES], pair, "test")
    further = compare([s for s in comparable if s.task not in SOURCES], pair, "test")
    truths = {(row["task"], row["scheme"]): row["sign"] > 0 for row in compared.values()}
    return {**by_scheme(truths), "settings": compared, "further": further, "not compared": _others(judged, comparable)}


def _others(judged: Sequence[Setting], comparable: Sequence[Setting]) -> list[str]:
    """Return the names of settings that are not compared."""
    return [setting.name for setting in judged if setting not in comparable]


def parallel(timings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Claim 3: time of the layer with several heads over its time with one, by device."""
    if timings is None:
        return {"outcome": OPEN, "devices": {}}
    devices: dict[str, Any] = {}
    for regime in timings["measured"]:
        about = timings["about"]
        row = devices.setdefault(regime["device"], {"threads": about["threads"], "gpu": about.get("gpu"), "cases": []})
        for name, seconds in regime["seconds"].items():
            what, kind, heads = name.split()
            if kind == "fused" and heads != "1":
                ratios = np.array(seconds) / np.array(regime["seconds"][f"{what} fused 1"])
                share = float(np.mean(ratios <= FREE))
                verdict = "free" if share >= ROUNDS else "not free" if 1 - share >= ROUNDS else "open"
                case = {"batch": regime["batch"], "length": regime["length"], "pass": what, "heads": int(heads)}
                row["cases"].append({**case, "median": float(np.median(ratios)), "verdict": verdict})
    for row in devices.values():
        found = [case["verdict"] for case in row["cases"]]
        row["counts"] = {verdict: found.count(verdict) for verdict in ("free", "not free", "open")}
        row["outcome"] = OPEN if not found else HELD if set(found) == {"free"} else DEPENDS if "free" in found else NOT
    outcomes = {row["outcome"] for row in devices.values()}
    return {"outcome": outcomes.pop() if len(outcomes) == 1 else DEPENDS if outcomes else OPEN, "devices": devices}


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
    return {**by_scheme(truths), **found, "not compared": _others(judged, few)}


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
    others = [name for name in _others(judged, compared) if name not in unusable]
    return {**by_scheme(truths), "settings": rows, "without effect": unusable, "not compared": others}


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


def eight(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 7: the loss with 8 heads is at most 1 % above that of the best number."""
    rows: dict[str, Any] = {}
    judged = [setting for setting in settings if setting.is_setting and setting.task not in FEW]
    comparable = [setting for setting in judged if setting.compares(GOOD)]
    for setting in comparable:
        best = setting.values(setting.best)
        margin, grades = max(MARGIN * best.mean(), LEAST), {}
        for heads in setting.heads:
            interval = welch(setting.values(heads), best) if heads != setting.best else dict.fromkeys(SAME, 0.0)
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
    return {**by_scheme(truths), **found, "not compared": _others(judged, comparable)}


# -- files ------------------------------------------------------------------------------------------------------------


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
            if path.stem != _name(cell):
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


def _means_of_rates(cell: Mapping[str, Any]) -> dict[int, float]:
    """Return the mean validation loss of each learning rate that was tried, by its exponent."""
    return {int(e): math.inf if None in tried else float(np.mean(tried)) for e, tried in cell["search"].items()}


def _best_rate(means: Mapping[int, float]) -> int:
    return min(means, key=lambda exponent: (means[exponent], exponent))


def at_edge(cell: Mapping[str, Any]) -> bool:
    """Return whether the best learning rate of a cell is the lowest or the highest that was tried."""
    means = _means_of_rates(cell)
    return _best_rate(means) in (min(means), max(means))


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


def withheld(verdict: dict[str, Any], missing: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """Return a verdict without the outcomes that a missing setting could change: they become "not measured"."""
    lacking = [(task, scheme) for task in tasks for scheme in EXPECTED[task] if f"{task}, {scheme}" in missing]
    for task, scheme in lacking:
        row = verdict["schemes"].setdefault(scheme, {"true in": [], "false in": [], "outcome": OPEN})
        row.setdefault("missing", []).append(task)
        row["outcome"] = DEPENDS if row["outcome"] == DEPENDS else OPEN
    outcomes = {row["outcome"] for row in verdict["schemes"].values()}
    if lacking:
        verdict["outcome"] = DEPENDS if DEPENDS in outcomes or {HELD, NOT} <= outcomes else OPEN
    return verdict


def judge(folder: Path) -> dict[str, Any]:
    """Return the verdicts of all claims, and what they could not use.

    Raises:
        ValueError: a file of results is malformed.
    """
    cells = cells_of(folder)
    settings, missing = complete_settings(cells)
    published = (read(folder / "published.json") or {"measured": {}})["measured"]
    verdicts = {
        "different": different(settings, published),
        "capacity": withheld(capacity(settings), missing, SOURCES),
        "parallel": parallel(read(folder / "timings.json")),
        "regularises": withheld(regularises(settings), missing, FEW),
        "robust": withheld(robust(settings), missing, ROBUST),
        "more": withheld(more(settings), missing, SOURCES),
        "eight": withheld(eight(settings), missing, SOURCES),
    }
    lacking = [name for name in PUBLISHED if name not in published]
    lacking += [name for name in missing if name.split(",")[0] in ROBUST]
    if lacking and verdicts["different"]["outcome"] != DEPENDS:
        verdicts["different"]["outcome"] = OPEN
    seeds = {setting.name: len(setting.values(next(iter(setting.cells)))) for setting in settings}
    return {
        **verdicts,
        "incomplete settings": missing + [name for name in PUBLISHED if name not in published],
        "fewer seeds": [n for n, number in seeds.items() if number < (SEEDS_OF_LARGE if "large" in n else SEEDS)],
        "diverged": {setting.name: setting.diverged for setting in settings if setting.diverged},
        "rates at an edge": [_name(cell) for cell in cells if cell["complete"] and at_edge(cell)],
        "rates": sum(cell["complete"] for cell in cells),
    }


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['task']}-{cell['scheme']}-{cell['heads']}"


def main() -> None:
    """Write the verdicts of a folder of results."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    if not (folder / "cells").is_dir():
        raise SystemExit(f"{folder} has no folder of cells")
    (folder / "verdicts.json").write_text(json.dumps(judge(folder), indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
