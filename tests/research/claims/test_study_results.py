"""Numbers computed from the saved results of studies, layers and timings."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import scipy.stats
from claims_examples import ALIKE, ASTRIDE, HEADS, WORSE, regime_of, study_of

from research.claims import (
    study_results,
)
from research.claims.estimates import Estimate


def test_slopes_use_the_seeds_that_every_number_of_heads_has():
    lines = {1: 0.5, 2: -0.25, 4: 0.125}
    values = {heads: {seed: 3.0 + each * math.log2(heads) for seed, each in lines.items()} for heads in HEADS}
    values[4][9] = 100.0
    found = study_results.slopes(values)
    assert (found.mean, found.number) == (pytest.approx(0.125), 3)
    assert found.error == pytest.approx(scipy.stats.sem([0.5, -0.25, 0.125]))


def test_not_worse_lists_the_numbers_of_heads_within_the_margin_of_the_best():
    study = study_of(WORSE, 0.125)
    assert (study.best, study.not_worse) == (2, [2, 4])
    assert study_of(ALIKE, 0.125).not_worse == list(HEADS)
    assert study_of(WORSE, None).not_worse == list(HEADS)
    assert study_of({8: [1.0], 16: [1.0], 2: [1.0]}).heads == [2, 8, 16]


def is_good_by_definition(losses, heads, without=None):
    """Return whether the mean loss with this number of heads is at most the best mean plus its standard error,
    optionally without one seed.
    """
    means, errors = {}, {}
    for number, values in losses.items():
        included_losses = [each for seed, each in enumerate(values, 1) if seed != without]
        means[number], errors[number] = np.mean(included_losses), scipy.stats.sem(included_losses)
    best = min(means, key=means.get)
    return means[heads] <= means[best] + errors[best]


@pytest.mark.parametrize(
    ("losses", "good"),
    [
        ({4: [1.0, 3.0], 8: [3.0, 3.0]}, True),  # exactly one standard error, which is 1
        ({4: [1.0, 3.0], 8: [3.0, 3.0 + 1e-9]}, False),
        ({4: [2.0, 2.0], 8: [1.0, 5.0]}, False),  # the error is the best's
        ({4: [2.0, 2.0], 8: [1.0, 2.0]}, True),
        ({4: [2.0, 2.0], 8: [2.0, 2.0]}, True),
        ({2: [0.0, 0.0], 4: [1.0, 3.0], 8: [3.0, 3.0]}, False),
    ],
)
def test_good_means_within_one_standard_error_of_the_best(losses, good):
    assert study_results.is_good(study_of(losses), 8) == good == is_good_by_definition(losses, 8)


def test_good_agrees_with_its_definition_on_random_losses():
    draw = np.random.default_rng(5)
    found = Counter()
    for _ in range(20):
        losses = {heads: draw.normal(3.0, 0.1, 4).tolist() for heads in HEADS}
        for heads, without in itertools.product(HEADS, (None, 1, 3)):
            expected = is_good_by_definition(losses, heads, without)
            assert study_results.is_good(study_of(losses), heads, without) == expected
            found[bool(expected)] += 1
    assert min(found[True], found[False]) > 40
    assert not study_results.is_good(study_of({4: [1.0, 2.0]}), 8)


def test_good_in_pairs_removes_the_effect_of_the_seed():
    """The differences 0.4, 0.5, 0.6 have an error of 0.06, while the losses of the seeds have an error of 1.2."""
    losses = {4: [1.0, 3.0, 5.0], 8: [1.4, 3.5, 5.6]}
    assert study_results.is_good(study_of(losses), 8)
    assert not study_results.is_good_in_pairs(study_of(losses), 8)
    assert study_results.is_good_in_pairs(study_of(losses), 4)
    assert study_results.is_good_in_pairs(study_of({4: [1.0, 3.0, 5.0], 8: [1.5, 2.5, 5.1]}), 8)
    assert not study_results.is_good_in_pairs(study_of({4: [1.0, 2.0]}), 8)


def test_time_ratios_cover_forward_and_training_of_every_regime():
    found = study_results.time_ratios([regime_of([1.0, 2.0, 3.0, 4.0, 5.0, ASTRIDE])], "fused {n}", "fused 1")
    medians = [1.0, 1.0, 2.0, 3.0, 1.0, 4.0, 5.0, 1.1]
    assert [(each.what, each.heads) for each in found] == list(itertools.product(("forward", "training"), HEADS))
    assert [each.median for each in found] == pytest.approx(medians)
    assert (found[-1].low, found[-1].high) == pytest.approx((1.05, 1.2))
    assert {each.regime for each in found} == {"cpu, batch 2, length 16"}


def test_layers_are_compared_seed_by_seed():
    draw = np.random.default_rng(3)
    kinds = ("trained", "untrained", "as sharp")
    values = {kind: draw.uniform(size=(2, 3)) for kind in kinds}
    of = [{kind: dict(zip("01", map(float, values[kind][:, s]), strict=True)) for kind in kinds} for s in range(3)]
    study = study_of({8: [1.0] * 3, 16: [1.0] * 3}, distance={8: of, 16: of})
    del study.runs[16][0]["distance"]
    found = study_results.layers_of(study)
    assert [(each.heads, each.layer) for each in found] == [(8, 0), (8, 1)]
    for each, *rows in zip(found, *(values[kind] for kind in kinds), strict=True):
        assert (each.trained.mean, each.untrained.mean, each.as_sharp.mean) == pytest.approx(np.mean(rows, 1))
        assert each.over_untrained.mean == pytest.approx(np.mean(rows[0] - rows[1]))
        assert each.over_untrained.error == pytest.approx(scipy.stats.sem(rows[0] - rows[1]))
        assert each.over_as_sharp.error == pytest.approx(scipy.stats.sem(rows[0] - rows[2]))


def test_layers_of_a_real_model_are_compared_by_sequence_with_the_mean_of_untrained_models():
    saved = {
        "title": "a model",
        "trained": [{"3": 0.5}, {"3": 0.75}],
        "untrained": [[{"3": 0.125}, {"3": 0.25}], [{"3": 0.375}, {"3": 0.5}]],
        "as sharp": [[{"3": 0.5}, {"3": 1.0}], [{"3": 1.0}, {"3": 1.0}]],
    }
    (found,) = study_results.layers_of_real(saved)
    assert (found.layer, found.trained.mean, found.untrained.mean, found.as_sharp.mean) == (3, 0.625, 0.3125, 0.875)
    differences = ([0.5 - 0.25, 0.75 - 0.375], [0.5 - 0.75, 0.75 - 1.0])
    assert (found.over_untrained, found.over_as_sharp) == tuple(map(Estimate.of, differences))
