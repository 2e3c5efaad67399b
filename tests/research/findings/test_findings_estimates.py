"""Estimates and tests of the findings, against independent computations."""

import numpy as np
import pytest
import scipy.stats
import torch

import headwise as hw
from headwise.analysis.ablation_result import DocumentEffects, HeadSet
from headwise.runs.rows import HeadRow, MeanEstimate
from jackknife import jackknife
from research.findings.estimates import against_lowest, controls_of, spread_of_means, wilcoxon_q
from research.findings.raw_results import plain_cka


def heads_of(effects, sequences):
    """Return a table of heads with these effects on documents."""
    rows = []
    for head, row in enumerate(effects):
        values = np.repeat(row, sequences).tolist()
        statistics = {"cost": MeanEstimate.of(values, np.repeat(range(len(row)), sequences).tolist())}
        rows.append(HeadRow(layer=0, head=head, kv_head=head, module="m", kind="self", statistics=statistics))
    shared = tuple(range(len(sequences))), tuple(sequences), (0.0,) * len(sequences)
    return hw.Ablation(tuple(rows), {}, DocumentEffects(*shared, tuple(map(tuple, effects))))


def sets_of(induction, anywhere):
    """Return a table with the effect of the induction heads and of random sets."""
    effects = {"induction": induction, **{f"anywhere {n}": value for n, value in enumerate(anywhere)}, "same 0": 9.0}
    rows = (
        HeadSet(name=name, heads=["0.0"], statistics={"cost": MeanEstimate(value, 0.1, 7, 6.0)})
        for name, value in effects.items()
    )
    return hw.SetAblation(tuple(rows), {})


def test_random_sets_have_an_interval_and_a_p_value():
    values = np.random.default_rng(1).lognormal(size=60)
    found = controls_of(sets_of(float(np.sort(values)[-3]), values), "anywhere")
    assert found.number == 60
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.p == 4 / 61
    half = 1.96 * values.std() / 60**0.5
    assert found.interval == pytest.approx((values.mean() - half, values.mean() + half), rel=0.1)
    assert found.middle == pytest.approx(tuple(np.quantile(values, (0.025, 0.975))))
    low, high = spread_of_means(sets_of(0.0, values), "anywhere", 20)
    assert high - low == pytest.approx(3.92 * values.std() / 20**0.5, rel=0.1)


def test_heads_that_cannot_be_distinguished_from_the_lowest():
    generator = np.random.default_rng(0)
    common = generator.normal(size=20)
    effects = [common + shift + 0.1 * generator.normal(size=20) for shift in (0.0, -1.0, -0.9, 2.0)]
    effects[2] += np.where(np.arange(20) < 10, 1.0, -1.0)
    lowest, found = against_lowest(heads_of(effects, [1] * 20))
    assert lowest == "0.1"
    assert [each.name for each in found] == ["0.2", "0.0", "0.3"]
    p = [scipy.stats.ttest_rel(effects[n], effects[1]).pvalue for n in (2, 0, 3)]
    assert [each.q for each in found] == pytest.approx(scipy.stats.false_discovery_control(p).tolist(), rel=1e-9)
    assert found[0].q > 0.05 > found[1].q


def test_differences_are_clustered_by_document():
    effects = np.random.default_rng(0).normal(size=(2, 7)) + np.array([[0.0], [5.0]])
    sequences = [1, 4, 2, 3, 1, 1, 2]
    _, (found,) = against_lowest(heads_of(effects, sequences))
    differences = effects[1] - effects[0]
    expected = jackknife(differences.repeat(sequences), np.arange(7).repeat(sequences))
    assert found.difference == pytest.approx(expected, rel=1e-12)


def test_wilcoxons_test_ignores_the_size_of_an_outlier():
    effects = np.random.default_rng(3).normal(0.5, 1.0, size=(3, 24))
    changed = effects.copy()
    changed[0, effects[0].argmax()] = 1000.0
    assert wilcoxon_q(heads_of(effects, [1] * 24)) == wilcoxon_q(heads_of(changed, [1] * 24))
    p = [scipy.stats.wilcoxon(row).pvalue for row in effects]
    assert wilcoxon_q(heads_of(effects, [1] * 24)) == pytest.approx(scipy.stats.false_discovery_control(p).tolist())


def test_plain_cka_equals_its_definition_by_kernels():
    x, y = torch.randn(31, 5, dtype=torch.float64), torch.randn(31, 3, dtype=torch.float64)
    centred = torch.eye(31) - 1 / 31
    k, other = (centred.double() @ each @ each.mT @ centred.double() for each in (x, y))
    expected = (k * other).sum() / (k.norm() * other.norm())
    assert plain_cka(x - x.mean(0), y - y.mean(0)) == pytest.approx(float(expected), abs=1e-12)
