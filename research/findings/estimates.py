"""Estimates and tests of the findings, by the rules in `rules.md`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

import headwise as hw
from headwise.runs.rows import MeanEstimate
from headwise.runs.significance import false_discovery_rates, in_errors, p_values

LEVEL = 0.05
DRAWS, SEED = 10_000, 0


class Controls(NamedTuple):
    """Effects of random sets of heads, next to that of the induction heads.

    Attributes:
        number: number of random sets.
        mean: mean of their effects.
        interval: 95 % interval of this mean, by a bootstrap over sets.
        middle: the middle 95 % of the effects.
        p: p-value of the induction heads: the share of sets with at least their effect, by the rule.
    """

    number: int
    mean: float
    interval: tuple[float, float]
    middle: tuple[float, float]
    p: float


def controls_of(table: hw.SetAblation, kind: str) -> Controls:
    """Return the effects of the random sets of one kind."""
    effects = {row.name: row.statistics["cost"].value for row in table.rows}
    values = np.array([value for name, value in effects.items() if name.startswith(kind)])
    drawn = np.random.default_rng(SEED).choice(values, (DRAWS, len(values))).mean(1)
    interval, middle = middle_of(drawn), middle_of(values)
    p = (1 + int((values >= effects["induction"]).sum())) / (1 + len(values))
    return Controls(len(values), float(values.mean()), interval, middle, p)


def spread_of_means(table: hw.SetAblation, kind: str, sets: int) -> tuple[float, float]:
    """Return the interval in which 95 % of the means of `sets` random sets of one kind lie."""
    values = [row.statistics["cost"].value for row in table.rows if row.name.startswith(kind)]
    drawn = np.random.default_rng(SEED).choice(values, (DRAWS, sets)).mean(1)
    return middle_of(drawn)


def middle_of(values: np.ndarray) -> tuple[float, float]:
    """Return both ends of the middle 95 % of values."""
    low, high = map(float, np.quantile(values, (0.025, 0.975)))
    return low, high


def wilcoxon_q(ablation: hw.Ablation) -> list[float]:
    """Return the q-value of each head by Wilcoxon's signed-rank test of its effects on documents."""
    assert ablation.by_document is not None
    p = [float(scipy.stats.wilcoxon(effects).pvalue) for effects in ablation.by_document.effects]
    return false_discovery_rates(p)


class Difference(NamedTuple):
    """Difference of the effect of a head from that of the head with the lowest effect, and its q-value."""

    name: str
    value: float
    difference: MeanEstimate
    q: float


def against_lowest(ablation: hw.Ablation) -> tuple[str, list[Difference]]:
    """Return the name of the head with the lowest effect, and the paired difference of every other head from it, in the
    order of their effects: clustered by document, with q-values over these heads.
    """
    by_document = ablation.by_document
    assert by_document is not None
    values = [row.statistics["cost"].value for row in ablation.rows]
    lowest, *others = sorted(range(len(values)), key=values.__getitem__)
    differences = [
        weighted_estimate(
            np.subtract(by_document.effects[other], by_document.effects[lowest]).tolist(), by_document.sequences
        )
        for other in others
    ]
    p = p_values([in_errors(each) for each in differences], [each.df for each in differences])
    names = [row.name for row in ablation.rows]
    found = [
        Difference(names[other], values[other], difference, q)
        for other, difference, q in zip(others, differences, false_discovery_rates(p), strict=True)
    ]
    return names[lowest], found


def weighted_estimate(of_documents: Sequence[float], sequences: Sequence[int]) -> MeanEstimate:
    """Return the mean over sequences with its standard error clustered by document, from the mean of each document and
    its number of sequences.
    """
    values = [value for value, count in zip(of_documents, sequences, strict=True) for _ in range(count)]
    documents = [number for number, count in enumerate(sequences) for _ in range(count)]
    return MeanEstimate.of(values, documents)
