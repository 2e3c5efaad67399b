"""Conclusions from the losses of a study: significant differences, Pareto frontier and recommendation."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from headwise.errors import require
from headwise.runs.rows import MeanEstimate
from headwise.studies.space import Setting

CONFIDENCE = 0.95
"""Probability that no two settings with equal expected losses are found to be significantly different."""

LOWER_IS_BETTER = ("loss", "step_ms", "cache_bytes")
HIGHER_IS_BETTER = ("decode_tokens_s",)
"""Statistics that decide which settings are on the Pareto frontier."""

TIMINGS = ("step_ms", "decode_tokens_s")
"""Statistics measured by the clock: they count as equal if they differ by less than two standard errors."""

Losses = Mapping[Setting, Mapping[int, float]]
"""Held-out loss of each final training, by setting and seed."""


@dataclass(frozen=True)
class Recommendation:
    """Conclusion of a study: the recommended head setting, or None, with the reason in a sentence; the head settings
    whose mean held-out loss does not differ significantly from the lowest; and the smallest significant difference
    between two mean losses.

    Attributes:
        setting: recommended setting; None if no setting is significantly better than the alternatives.
        equivalent: settings whose loss does not differ significantly from the lowest loss, lowest first.
        margin: smallest significant difference between two mean losses, in nats; NaN with fewer than two seeds.
        sentence: the recommendation and its reason in one sentence.
    """

    setting: Setting | None
    equivalent: tuple[Setting, ...]
    margin: float
    sentence: str


def comparable(losses: Losses) -> dict[Setting, list[float]]:
    """Return the held-out losses of each setting as a list in the order of the seeds, for settings with at least one
    loss and only finite ones. A seed is left out for all settings if any of these settings has no loss for it.
    """
    finite = {setting: runs for setting, runs in losses.items() if runs and all(map(math.isfinite, runs.values()))}
    seeds = sorted(set.intersection(*(set(runs) for runs in finite.values()))) if finite else []
    return {setting: [runs[seed] for seed in seeds] for setting, runs in finite.items()}


def significant_difference(losses: Losses) -> float:
    """Return the smallest difference between the mean losses of two settings that is significant (at 95 %), by Tukey's
    range test with seeds as blocks. It is NaN with fewer than two settings or fewer than two seeds.

    All settings of a seed are trained on the same batches in the same order, so the effect that a seed has on all
    settings is removed. The difference is `q sqrt(MSE / seeds)`, with q of the studentized range for k settings and
    (k - 1)(seeds - 1) degrees of freedom, and MSE the mean square of the residuals of setting and seed (Tukey 1949).
    """
    table = list(comparable(losses).values())
    k, n = len(table), len(table[0]) if table else 0
    if k < 2 or n < 2:
        return math.nan
    setting_means = [sum(row) / n for row in table]
    seed_means = [sum(column) / k for column in zip(*table, strict=True)]
    grand_mean = sum(setting_means) / k
    squares = sum(
        (table[i][j] - setting_means[i] - seed_means[j] + grand_mean) ** 2 for i in range(k) for j in range(n)
    )
    degrees = (k - 1) * (n - 1)
    stats = require("scipy.stats", purpose="a study", extra="study")
    q = float(stats.studentized_range.ppf(CONFIDENCE, k, degrees))
    return q * math.sqrt(squares / degrees / n)


def dominates(one: Mapping[str, MeanEstimate], other: Mapping[str, MeanEstimate]) -> bool:
    """Return True if a setting with the statistics `one` is at least as good as a setting with the statistics `other`
    in loss, time per step, decoding speed and cache size, and better in one of them. Times and speeds count as equal if
    they differ by at most two standard errors of their difference; a statistic that one of the settings lacks is
    ignored.
    """
    better = False
    for name in (*LOWER_IS_BETTER, *HIGHER_IS_BETTER):
        if name not in one or name not in other:
            continue
        a, b = one[name], other[name]
        gain = (b.value - a.value) * (1 if name in LOWER_IS_BETTER else -1)
        errors = [0.0 if math.isnan(measured.sem) else measured.sem for measured in (a, b)]
        tolerance = 2 * math.hypot(*errors) if name in TIMINGS else 0.0
        if gain < -tolerance:
            return False
        better = better or gain > tolerance
    return better


def recommend(losses: Losses, step_ms: Mapping[Setting, float], baseline: Setting | None) -> Recommendation:
    """Return the recommendation of a study. Candidates are the head settings whose mean loss is not significantly
    higher than the lowest; the candidate with the shortest training step is recommended. No setting is recommended if
    every setting is a candidate, if the setting in use (`baseline`) is a candidate, or if the losses do not allow a
    significance test.

    Args:
        losses: held-out losses by setting and seed.
        step_ms: milliseconds per training step, by setting.
        baseline: the setting in use, if there is one.
    """
    compared, trained = comparable(losses), [setting for setting, runs in losses.items() if runs]
    # A setting that diverged once is worse than every other.
    mean = {setting: statistics.fmean(compared[setting]) if compared.get(setting) else math.inf for setting in trained}
    settings, margin = tuple(sorted(mean, key=mean.__getitem__)), significant_difference(losses)
    if math.isnan(margin):
        sentence = "undecided: one seed shows no variation; use two or more (--seeds, seeds=)"
        if len(trained) < 2:
            sentence = "nothing to compare: fewer than two settings were trained to the end"
        elif len(compared) < 2:
            names = ", ".join(setting.name for setting in trained if setting not in compared)
            sentence = f"undecided: the loss of {names} was not finite, and fewer than two settings are left"
        return Recommendation(None, settings, margin, sentence)
    equivalent = tuple(setting for setting in settings if mean[setting] - mean[settings[0]] <= margin)
    others = ", ".join(setting.name for setting in equivalent if setting != baseline)
    significant = f"differences above {margin:.4f} are significant"
    if equivalent == settings:
        spread = mean[settings[-1]] - mean[settings[0]]
        sentence = f"no significant difference at this budget: mean losses differ by up to {spread:.4f}; {significant}"
    elif baseline in equivalent and not others:
        sentence = f"keep {baseline}: every other setting is significantly worse at this budget"
    elif baseline in equivalent:
        sentence = f"no significant difference at this budget between {baseline}, the baseline, and {others}"
        sentence += f"; {significant}"
    else:
        chosen = min(equivalent, key=lambda setting: (step_ms[setting], mean[setting]))
        among = f", the fastest to train of {others}, which do not differ significantly" if equivalent[1:] else ""
        following = settings[len(equivalent)]
        behind = f"the next, {following}, is {mean[following] - mean[settings[0]]:.4f} worse than the best"
        return Recommendation(chosen, equivalent, margin, f"{chosen}{among}: {behind}; {significant}")
    return Recommendation(None, equivalent, margin, sentence)
