"""Claim 1: different heads see different things."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import statsmodels.formula.api as smf
from statsmodels.tools.sm_exceptions import ConvergenceWarning

from .comparisons import holm
from .definitions import DEPENDS, ENTROPY_MISSED, GOOD, HELD, LEVEL, NOT, OPEN, SOURCES
from .settings import Setting


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
