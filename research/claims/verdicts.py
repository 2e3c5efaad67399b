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
FREE = 1.1
GOOD, MARGIN, LEAST = 8, 0.01, 0.01
ENTROPY_MISSED = 0.05
SOURCES = ("python", "bible", "lookup", "relations")
"""Tasks that count, one for each source of data."""

FEW, ROBUST = ("python-few", "bible-few"), ("python", "bible")
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
        self.diverged = [heads for heads in self.cells if None in self._raw(heads, "test")]
        self.heads = [heads for heads in self.cells if heads not in self.diverged]

    @property
    def name(self) -> str:
        """Task and scheme."""
        return f"{self.task}, {self.scheme}"

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
    """Return the p-value of each pair of numbers of heads by the Games-Howell test, in both orders."""
    names = list(groups)
    p_values = scipy.stats.tukey_hsd(*groups.values(), equal_var=False).pvalue
    return {(a, b): float(p_values[i, j]) for i, a in enumerate(names) for j, b in enumerate(names) if i != j}


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
    rows, left_out = [], 0
    for setting in settings:
        for run in setting.cells.get(GOOD, {"runs": []})["runs"]:
            for layer, difference, missed in _layers(run) if "distance" in run else ():
                left_out += missed
                if not missed:
                    model = f"{setting.name}, {run['seed']}"
                    rows.append({"setting": setting.name, "model": model, "layer": layer, "difference": difference})
    table = pd.DataFrame(rows, columns=["setting", "model", "layer", "difference"])
    effects = {str(setting): _effect_over_models(of_setting) for setting, of_setting in table.groupby("setting")}
    mixed = _mixed_effect(table) if len(effects) > 1 else None
    for saved in published.values():
        effects[saved["title"]], missed_layers = _published_effect(saved)
        left_out += missed_layers
    for effect, corrected in zip(effects.values(), holm([row["p"] for row in effects.values()]), strict=True):
        effect["holm"] = corrected
        effect["sign"] = int(np.sign(effect["mean"])) if corrected < LEVEL else 0
    signs = [effect["sign"] for effect in effects.values()]
    farther, closer = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    outcome = OPEN if not signs else HELD if farther == len(signs) else NOT if farther == 0 else DEPENDS
    return {
        "outcome": outcome,
        "effects": effects,
        "mixed model": mixed,
        "farther": farther,
        "closer": closer,
        "of": len(signs),
        "layers left out": left_out,
    }


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
        nested = {"model": "0 + C(model)"}
        fitted = smf.mixedlm("difference ~ 1", table, groups=table["setting"], re_formula="1", vc_formula=nested).fit(
            reml=True
        )
    low, high = fitted.conf_int().loc["Intercept"]
    return {
        "mean": float(fitted.params["Intercept"]),
        "error": float(fitted.bse["Intercept"]),
        "low": float(low),
        "high": float(high),
        "variance of settings": float(fitted.cov_re.iloc[0, 0]),
        "variance of models": float(fitted.vcomp[0]),
        "variance of layers": float(fitted.scale),
        "warnings": sorted({str(warning.message) for warning in caught}),
    }


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


def _published_effect(saved: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """Return the effect of a published model, by Student's t over documents, and the number of layers left out."""
    sharp = np.mean(saved["entropy"]["as sharp"], 0)
    kept = np.abs(sharp / np.array(saved["entropy"]["trained"]) - 1) <= ENTROPY_MISSED
    trained = np.array([list(document.values()) for document in saved["trained"]])
    control = np.mean([[list(document.values()) for document in seed] for seed in saved["as sharp"]], 0)
    return _mean_effect((trained - control)[:, kept].mean(1)), int((~kept).sum())


def capacity(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 2: one head is worse than the best number of heads."""
    return _judged_by_loss(settings, lambda setting: (setting.heads[0], setting.best))


def more(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 6: the largest number of heads is worse than the best; penalties of position schemes are compared."""
    judged = _judged_by_loss(settings, lambda setting: (setting.heads[-1], setting.best))
    judged["between schemes"] = []
    for first, second in combinations([setting for setting in settings if setting.is_setting], 2):
        if first.task == second.task:
            penalties = [s.values(s.heads[-1]) - s.values(s.best).mean() for s in (first, second)]
            errors = [
                math.hypot(*(scipy.stats.sem(s.values(heads)) for heads in {s.heads[-1], s.best}))
                for s in (first, second)
            ]
            judged["between schemes"].append(
                {
                    "task": first.task,
                    "schemes": [first.scheme, second.scheme],
                    "difference": float(penalties[0].mean() - penalties[1].mean()),
                    "error": math.hypot(*errors),
                }
            )
    return judged


def _judged_by_loss(settings: Sequence[Setting], pair: Callable[[Setting], tuple[int, int]]) -> dict[str, Any]:
    counted = [setting for setting in settings if setting.task in SOURCES]
    compared = compare(counted, pair, "test")
    further = compare([s for s in settings if s.is_setting and s.task not in (*SOURCES, *FEW)], pair, "test")
    truths = {(row["task"], row["scheme"]): row["sign"] > 0 for row in compared.values()}
    return {**by_scheme(truths), "settings": compared, "further": further}


def parallel(timings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Claim 3: time of the layer with several heads over its time with one, by device."""
    if timings is None:
        return {"outcome": OPEN, "devices": {}}
    devices: dict[str, Any] = {}
    for regime in timings["measured"]:
        row = devices.setdefault(regime["device"], {"threads": timings["about"]["threads"], "cases": []})
        for name, seconds in regime["seconds"].items():
            what, kind, heads = name.split()
            if kind == "fused" and heads != "1":
                ratios = np.array(seconds) / np.array(regime["seconds"][f"{what} fused 1"])
                low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
                verdict = "free" if high <= FREE else "not free" if low > FREE else "open"
                about = {"batch": regime["batch"], "length": regime["length"], "pass": what, "heads": int(heads)}
                row["cases"].append({**about, "median": float(median), "verdict": verdict})
    for row in devices.values():
        found = [case["verdict"] for case in row["cases"]]
        row["counts"] = {verdict: found.count(verdict) for verdict in ("free", "not free", "open")}
        row["outcome"] = HELD if set(found) == {"free"} else DEPENDS if "free" in found else NOT
    outcomes = {row["outcome"] for row in devices.values()}
    return {"outcome": outcomes.pop() if len(outcomes) == 1 else DEPENDS, "devices": devices}


def regularises(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 4: a smaller gap than with one head, at a test loss that is not larger."""
    few = [setting for setting in settings if setting.task in FEW]
    others = sorted({heads for setting in few for heads in setting.heads[1:]})

    def one_against(heads: int, what: str) -> dict[str, Any]:
        return compare([s for s in few if heads in s.heads], lambda setting: (setting.heads[0], heads), what)

    gaps, losses = ({heads: one_against(heads, what) for heads in others} for what in ("gap", "test"))
    truths, numbers = {}, {}
    for setting in few:
        name, several = setting.name, setting.heads[1:]
        numbers[name] = [h for h in several if gaps[h][name]["sign"] > 0 and losses[h][name]["sign"] >= 0]
        truths[setting.task, setting.scheme] = bool(numbers[name])
    return {**by_scheme(truths), "numbers that regularise": numbers, "gaps": gaps, "losses": losses}


def robust(settings: Sequence[Setting]) -> dict[str, Any]:
    """Claim 5: half of the heads costs a smaller share of the effect of all, the more heads there are."""
    rows: dict[str, Any] = {}
    pairs: list[tuple[str, int, int, str]] = []
    p_values: list[float] = []
    unusable: list[str] = []
    for setting in (setting for setting in settings if setting.task in ROBUST):
        for how in ("half", "least"):
            shares = {heads: _shares(setting, heads, how) for heads in setting.heads}
            if any(len(values) < 2 for values in shares.values()):
                unusable.append(setting.name)
                continue
            tested, numbers = games_howell(shares), list(shares)
            row = rows.setdefault(setting.name, {"task": setting.task, "scheme": setting.scheme})
            row[how] = {heads: [float(v.mean()), float(scipy.stats.sem(v))] for heads, v in shares.items()}
            row[f"{how} steps"] = {}
            wanted = {(a, b) for a, b in pairwise(numbers)} | {(numbers[0], b) for b in numbers[1:]}
            for a, b in sorted(wanted):
                pairs.append((setting.name, a, b, how))
                p_values.append(tested[a, b])
    for (name, a, b, how), corrected in zip(pairs, holm(p_values), strict=True):
        if name in unusable:
            continue
        difference = rows[name][how][b][0] - rows[name][how][a][0]
        rows[name][f"{how} steps"][f"{a} to {b}"] = int(np.sign(difference)) if corrected < LEVEL else 0
    rows, truths = {name: row for name, row in rows.items() if name not in unusable}, {}
    for row in rows.values():
        for how in ("half", "least"):
            signs, numbers = row[f"{how} steps"], list(row[how])
            against_one = [signs[f"{numbers[0]} to {heads}"] for heads in numbers[1:]]
            steps = {signs[f"{a} to {b}"] for a, b in pairwise(numbers)} | set(against_one)
            row[f"{how} shape"] = {
                (True, True): "rises and falls",
                (True, False): "rises",
                (False, True): "falls",
                (False, False): "flat",
            }[1 in steps, -1 in steps]
            row[f"{how} true"] = against_one[-1] < 0 and 1 not in against_one
        truths[row["task"], row["scheme"]] = row["half true"]
    return {**by_scheme(truths), "settings": rows, "without effect": sorted(set(unusable))}


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
    for setting in (setting for setting in settings if setting.is_setting and setting.task not in FEW):
        best = setting.values(setting.best)
        margin, grades = max(MARGIN * best.mean(), LEAST), {}
        for heads in setting.heads:
            interval = welch(setting.values(heads), best)
            high, low = interval["high"], interval["low"]
            grade = "good" if heads == setting.best or high < margin else "bad" if low > margin else "open"
            grades[heads] = {**interval, "grade": grade}
        rows[setting.name] = {"task": setting.task, "scheme": setting.scheme, "best": setting.best, "heads": grades}
    counted = [row for row in rows.values() if row["task"] in SOURCES]
    truths = {(row["task"], row["scheme"]): row["heads"][GOOD]["grade"] == "good" for row in counted}
    counts = {
        heads: sum(row["heads"][heads]["grade"] == "good" for row in counted if heads in row["heads"])
        for heads in sorted({heads for row in counted for heads in row["heads"]})
    }
    return {**by_scheme(truths), "settings": rows, "settings in which a number is good": counts, "of": len(counted)}


# -- files ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    """Return the content of a JSON file, or None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def complete_settings(folder: Path) -> tuple[list[Setting], list[str]]:
    """Return the settings whose cells are all complete, and the names of the others."""
    cells = [read(path) for path in sorted((folder / "cells").glob("*.json"))]
    groups: dict[tuple[str, str], list[Any]] = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["scheme"]), []).append(cell)
    settings, missing = [], []
    for (task, scheme), group in groups.items():
        if all(cell["complete"] for cell in group) and {cell["heads"] for cell in group} == set(group[0]["compared"]):
            settings.append(Setting(group))
        else:
            missing.append(f"{task}, {scheme}")
    return settings, missing


def judge(folder: Path) -> dict[str, Any]:
    """Return the verdicts of all claims, and what they could not use."""
    settings, missing = complete_settings(folder)
    edges = [name for name in (cell_at_edge(path) for path in sorted((folder / "cells").glob("*.json"))) if name]
    return {
        "different": different(settings, (read(folder / "published.json") or {"measured": {}})["measured"]),
        "capacity": capacity(settings),
        "parallel": parallel(read(folder / "timings.json")),
        "regularises": regularises(settings),
        "robust": robust(settings),
        "more": more(settings),
        "eight": eight(settings),
        "incomplete settings": missing,
        "diverged": {setting.name: setting.diverged for setting in settings if setting.diverged},
        "rates at an edge": edges,
    }


def cell_at_edge(path: Path) -> str | None:
    """Return the name of a complete cell whose chosen learning rate is the lowest or the highest that was tried."""
    cell = read(path)
    means = {int(e): math.inf if None in tried else float(np.mean(tried)) for e, tried in cell["search"].items()}
    at_edge = cell["complete"] and min(means, key=lambda e: (means[e], e)) in (min(means), max(means))
    return path.stem if at_edge else None


def main() -> None:
    """Write the verdicts of a folder of results."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    (folder / "verdicts.json").write_text(json.dumps(judge(folder), indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
