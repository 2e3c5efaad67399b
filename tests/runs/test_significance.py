"""Tests against zero, corrected for their number."""

import dataclasses
import math

import numpy
import pytest
from scipy import stats

import headwise as hw
import tiny
from headwise.runs.rows import MeanEstimate
from headwise.runs.significance import false_discovery_rates, one_sided_p_values, zero_tests


def adjusted(p):
    """Oracle: for each p-value the smallest rate at which the step-up rule of Benjamini and Hochberg rejects it."""
    known = sorted(value for value in p if not math.isnan(value))
    rates = [
        min(1.0, *(known[rank] * len(known) / (rank + 1) for rank in range(len(known)) if known[rank] >= value))
        if not math.isnan(value)
        else math.nan
        for value in p
    ]
    return rates


def test_means_are_tested_against_zero():
    rows = numpy.random.default_rng(4).normal(0.3, 1.0, (9, 12))
    tests = zero_tests("cost", [MeanEstimate.of(row.tolist()) for row in rows])
    expected = [stats.ttest_1samp(row, 0.0).pvalue for row in rows]
    assert tests["cost_p"] == pytest.approx(expected, rel=1e-10)
    assert tests["cost_q"] == pytest.approx(adjusted(expected), rel=1e-10)


def test_missing_p_values_do_not_count():
    p = [0.04, math.nan, 0.001, 0.04, 0.5, math.nan]
    assert false_discovery_rates(p) == pytest.approx(adjusted(p), rel=1e-12, nan_ok=True)
    assert false_discovery_rates([math.nan]) == pytest.approx([math.nan], nan_ok=True)


def test_a_mean_of_one_sample_has_no_test():
    tests = zero_tests("cost", [MeanEstimate(1.0, math.nan, 1, 0), MeanEstimate(0.0, 0.0, 5, 4)])
    assert tests["cost_p"] == pytest.approx([math.nan, 1.0], nan_ok=True)


def test_samples_without_variance_have_the_p_value_of_the_sign_test():
    values = [[1.0] * 5, [-0.1] * 3, [0.5] * 2, [0.1 + 0.2, 0.3, 0.3]]
    measured = [MeanEstimate.of(each) for each in values]
    two_sided = [stats.binomtest(len(each), len(each)).pvalue for each in values]
    assert zero_tests("cost", measured)["cost_p"] == pytest.approx(two_sided, rel=1e-12)
    assert one_sided_p_values(measured) == pytest.approx([1 / 32, 1.0, 1 / 4, 1 / 8], rel=1e-12)
    assert one_sided_p_values(measured, -1) == pytest.approx([1.0, 1 / 8, 1.0, 1.0], rel=1e-12)
    assert one_sided_p_values(measured, above=0.4) == pytest.approx([1 / 32, 1.0, 1 / 4, 1.0], rel=1e-12)


def test_discrete_values_from_few_documents_are_seldom_significant():
    generator = numpy.random.default_rng(0)
    documents = numpy.repeat(numpy.arange(2), 10)
    gains = [(generator.random(20) < 0.2) * 1.0 - (generator.random(20) < 0.2) for _ in range(500)]
    tests = zero_tests("gain", [MeanEstimate.of(each.tolist(), documents.tolist()) for each in gains])
    assert sum(p <= 0.05 for p in tests["gain_p"]) <= 0.08 * len(gains)
    assert not any(q <= 0.05 for q in tests["gain_q"])


def test_effects_are_tested_over_documents():
    texts = hw.Texts(tiny.texts(30, 14, 9, 26), tiny.tokenizer("decoder"), documents="cut", context=10)
    effects = hw.ablate(tiny.model("decoder", top="ForCausalLM"), texts, hw.next_token_loss)
    table = effects.table()
    costs = [row.statistics["cost"] for row in effects.rows]
    assert {cost.n for cost in costs} == {4}  # documents, of 3, 2, 1 and 3 sequences with a loss
    expected = [2.0 * stats.t.sf(abs(cost.value / cost.sem), 81 / 23 - 1) for cost in costs]
    assert table["cost_p"].tolist() == pytest.approx(expected)
    assert table["cost_q"].tolist() == pytest.approx(adjusted(expected))
    assert [record["cost_q"] for record in effects.records()] == table["cost_q"].tolist()


def test_distances_from_the_unchanged_model_are_not_tested():
    texts = hw.Texts(tiny.texts(8, 9, 7), tiny.tokenizer("encoder"))
    effects = hw.ablate(tiny.model("encoder"), texts, hw.EmbeddingDistance())
    assert effects.is_distance
    assert "cost_q" not in effects.table()

    def own_distance(model, batch):
        return (model(**batch).last_hidden_state - own_distance.reference).square().sum((1, 2))

    def prepare(model, batch):
        own_distance.reference = model(**batch).last_hidden_state

    own_distance.prepare = prepare
    assert hw.ablate(tiny.model("encoder"), texts, own_distance).is_distance


def test_differences_of_profiles_are_tested_by_welch():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    a, b = (
        hw.profile(model, hw.Texts(tiny.texts(*lengths), tokenizer), repeats=False)
        for lengths in ((9, 12, 15, 8), (21, 17, 30))
    )
    comparison = hw.compare(a, b)
    p = []
    for each in comparison.differences:
        pair = [head.statistics[each.statistic] for head in (each.a, each.b)]
        moments = [number for one in reversed(pair) for number in (one.value, one.sem * one.n**0.5, one.n)]
        with numpy.errstate(all="ignore"):
            test = stats.ttest_ind_from_stats(*moments, equal_var=False)
        p.append(float(test.pvalue) if any(one.sem for one in pair) else (1.0 if each.difference == 0.0 else 0.0))
    assert [each.p for each in comparison.differences] == pytest.approx(p, rel=1e-8, nan_ok=True)
    assert [each.q for each in comparison.differences] == pytest.approx(adjusted(p), rel=1e-8, nan_ok=True)
    assert dataclasses.asdict(comparison.differences[0])["q"] == comparison.table()["q"][0]
