"""What claims/ makes of measured numbers, and the data it measures on. Nothing is trained and nothing is timed here."""

import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from research.claims import clock, compared, corpora, looks, relations, sections, trainings
from research.claims import report as make_claims
from research.claims.claims_text import EXAMPLE, MIXES, TITLES
from research.claims.compared import Layer, Study
from research.claims.found import FEW_DATA, MAIN, RANKED, Results
from research.claims.sizes import SIZES
from research.claims.spread import Estimate, ratios, slope
from research.claims.verdicts import by_share, capacity, different, eight, parallel, regularises, robust, turning
from scipy.spatial.distance import jensenshannon
from torch import nn

import headwise as hw
from headwise.studies.model import Shape, Transformer

ROOT = Path(__file__).parent.parent.parent

HELD, NOT, UNDECIDED = "held", "did not hold", "undecided"
HEADS = (1, 2, 4, 8)

# -- means and their spread -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 5, 11])
def test_an_estimate_is_the_t_interval(number):
    values = np.random.default_rng(number).normal(0.3, 2.0, number)
    found = Estimate.of(values.tolist())
    low, high = scipy.stats.t.interval(0.95, number - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    wanted = (values.mean(), values.std(ddof=1) / number**0.5, low, high, number)
    assert (found.mean, found.error, found.low, found.high, found.number) == pytest.approx(wanted, rel=1e-12)


def test_an_estimate_worked_out_by_hand():
    """Squares 2.25, 0.25, 0.25, 2.25 over 3: variance 5/3, error sqrt(5/12); t of 3 degrees is 3.18245."""
    found = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.error) == pytest.approx((2.5, math.sqrt(5 / 12)))
    assert (found.low, found.high) == pytest.approx((2.5 - 2.054260, 2.5 + 2.054260), abs=1e-5)
    assert str(found) == "2.500 ± 0.645"


def test_of_one_value_nothing_can_be_told():
    found = Estimate.of([7.0])
    assert (found.mean, found.low, found.high, found.number) == (7.0, -math.inf, math.inf, 1)
    assert math.isnan(found.error)
    assert found.sign == 0
    assert not found.within(1e9)


@pytest.mark.parametrize(
    ("low", "high", "sign", "within"),
    [
        (0.1, 0.9, 1, True),
        (-0.9, -0.1, -1, True),
        (-0.9, 0.9, 0, True),
        (0.0, 0.9, 0, True),
        (-0.9, 0.0, 0, True),
        (-0.1, 1.0, 0, False),
        (-1.0, -0.1, -1, False),
        (1.5, 2.0, 1, False),
    ],
)
def test_the_sign_of_an_interval_and_whether_it_is_near_nothing(low, high, sign, within):
    found = Estimate((low + high) / 2, 0.1, low, high, 3)
    assert (found.sign, found.within(1.0)) == (sign, within)


@pytest.mark.parametrize("heads", [HEADS, (1, 4, 32), (2, 3, 16, 5)])
def test_the_slope_is_that_of_least_squares_over_doublings(heads):
    values = np.random.default_rng(7).normal(size=len(heads))
    wanted = np.polyfit(np.log2(heads), values, 1)[0]
    assert slope(dict(zip(heads, values.tolist(), strict=True))) == pytest.approx(wanted, rel=1e-10)


def test_slopes_are_of_the_seeds_that_all_have():
    lines = {1: 0.5, 2: -0.25, 4: 0.125}
    values = {heads: {seed: 3.0 + each * math.log2(heads) for seed, each in lines.items()} for heads in HEADS}
    values[4][9] = 100.0
    found = compared.slopes(values)
    assert (found.mean, found.number) == (pytest.approx(0.125), 3)
    assert found.error == pytest.approx(scipy.stats.sem([0.5, -0.25, 0.125]))


@pytest.mark.parametrize(
    ("over", "under", "wanted"),
    [
        ([5.0, 1.0, 3.0, 2.0, 4.0], [1.0] * 5, (2.0, 3.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0], [1.0] * 4, (1.75, 2.5, 3.25)),
        ([2.0, 9.0, 4.0], [1.0, 3.0, 1.0], (2.5, 3.0, 3.5)),
    ],
)
def test_quartiles_of_ratios_of_pairs(over, under, wanted):
    assert ratios(over, under) == pytest.approx(wanted)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_two_thirds_and_one_third_are_undecided_and_beyond_is_not():
    for number, of in itertools.combinations_with_replacement(range(100), 2):
        if not of:
            continue
        share = Fraction(number, of)
        wanted = HELD if share > Fraction(2, 3) else NOT if share < Fraction(1, 3) else UNDECIDED
        assert by_share(number, of) == wanted, (number, of)
    assert by_share(0, 0) == UNDECIDED


def study_of(losses, margin=0.1, **more):
    """By heads the losses of seeds 1, 2, ...; `more`: the same of other numbers."""
    runs = {
        str(heads): [
            {"seed": seed, "loss": loss, **{name: of[heads][seed - 1] for name, of in more.items()}}
            for seed, loss in enumerate(values, 1)
        ]
        for heads, values in losses.items()
    }
    saved = {"data": "text", "task": "next byte", "width": 64, "depth": 2, "margin": margin, "runs": runs}
    return Study("made up", saved)


SIGNED = {1: [0.2, 0.21, 0.19], 0: [0.2, -0.2, 0.01], -1: [-0.2, -0.21, -0.19]}


def layer_of(untrained, sharp):
    nothing = Estimate.of([0.0, 0.0])
    return Layer("m", 8, 0, nothing, nothing, nothing, *(Estimate.of(SIGNED[each]) for each in (untrained, sharp)))


@pytest.mark.parametrize(
    ("signs", "outcome"),
    [
        ([1, 1, 1], HELD),
        ([1, 1, 1, 0], HELD),
        ([1, 1, 0], UNDECIDED),
        ([1, -1, 0], UNDECIDED),
        ([1, 0, 0, -1], NOT),
        ([-1, -1, -1], NOT),
    ],
)
def test_heads_differ_by_the_share_of_layers_above_untrained(signs, outcome):
    for sharp in SIGNED:
        found = different([layer_of(sign, sharp) for sign in signs])
        assert found.outcome == outcome
        assert found.figure.startswith(f"{signs.count(1)} of {len(signs)} layers above untrained")
        assert f"; {len(signs) * (sharp < 0)} below" in found.figure
        assert found.sentence.startswith(f"{outcome}: ")


WORSE = {1: [2.0, 2.0], 2: [1.0, 1.0], 4: [1.0625, 1.0625], 8: [1.25, 1.25]}
"""One head and eight are worse than two, by more than 0.125; four are not."""
ALIKE = {heads: [1.125, 1.125] if heads != 2 else [1.0, 1.0] for heads in WORSE}
"""By 0.125, which is not more."""


def test_what_is_told_from_the_best():
    study = study_of(WORSE, 0.125)
    assert (study.best, study.alike) == (2, [2, 4])
    assert study_of(ALIKE, 0.125).alike == list(HEADS)
    assert study_of(WORSE, None).alike == list(HEADS)
    assert study_of({8: [1.0], 16: [1.0], 2: [1.0]}).heads == [2, 8, 16]


@pytest.mark.parametrize(("worse", "of", "outcome"), [(3, 4, HELD), (2, 3, UNDECIDED), (1, 3, UNDECIDED), (1, 4, NOT)])
def test_capacity_is_the_share_of_settings_in_which_one_head_is_worse(worse, of, outcome):
    found = capacity([study_of(WORSE if each < worse else ALIKE, 0.125) for each in range(of)])
    assert found.outcome == outcome
    assert f"{worse} of {of} settings" in found.figure
    assert "by 0.125 to 1.000 nats" in found.sentence


@pytest.mark.parametrize(("worse", "outcome"), [(0, NOT), (1, UNDECIDED), (2, HELD), (5, HELD)])
def test_more_is_worse_in_two_settings_at_least(worse, outcome):
    found = turning([study_of(WORSE if each < worse else ALIKE, 0.125) for each in range(5)])
    assert found.outcome == outcome
    assert f"{worse} of 5 settings" in found.figure
    assert "at 2 to 2 heads, the median 2" in found.sentence


def is_good_by_definition(losses, heads, without=None):
    means, errors = {}, {}
    for number, values in losses.items():
        kept = [each for seed, each in enumerate(values, 1) if seed != without]
        means[number], errors[number] = np.mean(kept), scipy.stats.sem(kept)
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
def test_good_is_within_the_standard_error_of_the_best(losses, good):
    assert compared.is_good(study_of(losses), 8) == good == is_good_by_definition(losses, 8)


def test_good_on_random_losses():
    draw = np.random.default_rng(5)
    found = Counter()
    for _ in range(20):
        losses = {heads: draw.normal(3.0, 0.1, 4).tolist() for heads in HEADS}
        for heads, without in itertools.product(HEADS, (None, 1, 3)):
            wanted = is_good_by_definition(losses, heads, without)
            assert compared.is_good(study_of(losses), heads, without) == wanted
            found[bool(wanted)] += 1
    assert min(found[True], found[False]) > 40
    assert not compared.is_good(study_of({4: [1.0, 2.0]}), 8)


def test_good_in_pairs_takes_out_what_a_seed_does_to_all():
    """Differences 0.4, 0.5, 0.6 with an error of 0.06, where the seeds themselves are an error of 1.2 apart."""
    losses = {4: [1.0, 3.0, 5.0], 8: [1.4, 3.5, 5.6]}
    assert compared.is_good(study_of(losses), 8)
    assert not compared.is_good_in_pairs(study_of(losses), 8)
    assert compared.is_good_in_pairs(study_of(losses), 4)
    assert compared.is_good_in_pairs(study_of({4: [1.0, 3.0, 5.0], 8: [1.5, 2.5, 5.1]}), 8)
    assert not compared.is_good_in_pairs(study_of({4: [1.0, 2.0]}), 8)


BEST = {4: [1.1, 1.1, 1.2, 1.2], 8: [1.0, 1.0, 1.1, 1.1]}
FAR = {4: [1.0, 1.0, 1.1, 1.1], 8: [2.0, 2.0, 2.1, 2.1]}
SWINGS = {4: [1.0, 1.0, 1.0, 1.2], 8: [1.09] * 4}
"""Good by the error of 0.05 that the last seed makes; without it 4 heads are sure, and better."""


@pytest.mark.parametrize(
    ("settings", "outcome", "counts"),
    [
        ([BEST], HELD, "1 to 1"),
        ([FAR], NOT, "0 to 0"),
        ([BEST, BEST, FAR], UNDECIDED, "2 to 2"),
        ([SWINGS], UNDECIDED, "0 to 1"),
        ([BEST, BEST, SWINGS], UNDECIDED, "2 to 3"),
        ([BEST] * 3 + [SWINGS], HELD, "3 to 4"),
        ([FAR] * 2 + [SWINGS], UNDECIDED, "0 to 1"),
        ([FAR] * 3 + [SWINGS], NOT, "0 to 1"),
    ],
)
def test_eight_is_undecided_where_one_seed_would_change_it(settings, outcome, counts):
    found = eight([study_of(losses) for losses in settings])
    assert found.outcome == outcome
    assert found.figure.endswith(f"in {len(settings) - settings.count(FAR)} of {len(settings)} settings")
    assert f"in {counts} where one seed is left out" in found.sentence


def lines_of(at_one, slopes):
    """By heads, of each seed: a straight line over doublings."""
    return {heads: [at_one + each * math.log2(heads) for each in slopes] for heads in HEADS}


@pytest.mark.parametrize(
    ("gap", "loss", "outcome"),
    [
        ((-0.1, -0.11, -0.09), (0.01, -0.01, 0.0), HELD),
        ((-0.1, -0.11, -0.09), (-0.1, -0.11, -0.09), HELD),
        ((0.1, 0.11, 0.09), (0.01, -0.01, 0.0), NOT),
        ((-0.1, -0.11, -0.09), (0.1, 0.11, 0.09), NOT),
        ((0.002, -0.001, 0.0), (0.01, -0.01, 0.0), NOT),
        ((-0.001, -0.0011, -0.0009), (0.01, -0.01, 0.0), NOT),
        ((-0.3, 0.3, -0.05), (0.01, -0.01, 0.0), UNDECIDED),
        ((-0.3, 0.3, -0.05), (0.1, 0.11, 0.09), UNDECIDED),
    ],
)
def test_heads_regularise_where_the_gap_falls_and_the_loss_does_not_rise(gap, loss, outcome):
    held, gaps = lines_of(3.0, loss), lines_of(1.0, gap)
    train = {heads: [a - b for a, b in zip(held[heads], gaps[heads], strict=True)] for heads in HEADS}
    study = study_of(held, train_loss=train)
    of_seeds = {heads: dict(enumerate(values, 1)) for heads, values in gaps.items()}
    assert compared.gaps(study) == {heads: pytest.approx(values) for heads, values in of_seeds.items()}
    found = regularises(study)
    assert found.outcome == outcome
    assert f"{np.mean(gap):+.3f} ± {scipy.stats.sem(gap):.3f} nats" in found.figure


FALLS, NEITHER, RISES = (-0.1, -0.11, -0.09), (-0.3, 0.3, 0.1), (0.1, 0.11, 0.09)


@pytest.mark.parametrize(
    ("random", "least", "outcome"),
    [
        (FALLS, FALLS, HELD),
        (FALLS, NEITHER, UNDECIDED),
        (NEITHER, FALLS, UNDECIDED),
        (RISES, FALLS, NOT),
    ],
)
def test_robust_is_the_part_that_half_of_the_heads_have_in_what_all_cost(random, least, outcome):
    """In two layers; the draws are 0.25 around the line; all heads are worth 2 with one head, and less with more."""
    at_random, at_least, worth = lines_of(1.0, random), lines_of(1.0, least), lines_of(2.0, (-0.4, -0.4, -0.4))
    removed = {
        heads: [
            {
                "heads": 2 * heads,
                "whole": 3.0,
                "random": {str(heads): [3.0 + (a - 0.25) * c, 3.0 + (a + 0.25) * c], "other": [9.0, 9.0]},
                "least": {str(heads): 3.0 + b * c, str(2 * heads): 3.0 + c, "other": 9.0},
            }
            for a, b, c in zip(at_random[heads], at_least[heads], worth[heads], strict=True)
        ]
        for heads in HEADS
    }
    study = study_of(lines_of(3.0, FALLS), removed=removed)
    for how, wanted in (("random", at_random), ("least", at_least)):
        of_half, part = compared.cost_of_half(study, how), compared.share_of_half(study, how)
        for heads in HEADS:
            assert list(part[heads].values()) == pytest.approx(wanted[heads])
            costs = [a * c for a, c in zip(wanted[heads], worth[heads], strict=True)]
            assert list(of_half[heads].values()) == pytest.approx(costs)
    assert {n: list(each.values()) for n, each in compared.cost_of_all(study).items()} == {
        n: pytest.approx(each) for n, each in worth.items()
    }
    found = robust(study)
    assert found.outcome == outcome
    means = [np.mean(at_random[heads]) for heads in (1, 8)]
    assert found.figure == (
        f"half of the heads at random cost {means[0]:.0%} of what all do with 1 head, {means[1]:.0%} with 8"
    )


def regime_of(times):
    """Five rounds in which a list takes three times as long; `times` of 2, 4 and 8 heads, forward then training."""
    seconds = {}
    for what, given in (("forward", times[:3]), ("training", times[3:])):
        for heads, each in zip(HEADS, (1.0, *given), strict=True):
            rounds = each if isinstance(each, list) else [each] * 5
            seconds |= {f"{what} fused {heads}": rounds, f"{what} list {heads}": [3 * one for one in rounds]}
    return {"device": "cpu", "batch": 2, "length": 16, "width": 64, "seconds": seconds}


ASTRIDE = [1.0, 1.05, 1.1, 1.2, 1.3]
"""A quarter of the rounds below the border, a quarter above."""


@pytest.mark.parametrize(
    ("times", "outcome", "free", "dear"),
    [
        ([1.1] * 6, HELD, 6, 0),
        ([1.0] * 5 + [2.0], HELD, 5, 1),
        ([1.0] * 4 + [2.0] * 2, UNDECIDED, 4, 2),
        ([1.0] * 3 + [2.0] * 3, NOT, 3, 3),
        ([ASTRIDE] * 6, UNDECIDED, 0, 0),
        ([1.0] * 5 + [ASTRIDE], HELD, 5, 0),
        ([1.0] * 4 + [ASTRIDE] * 2, UNDECIDED, 4, 0),
        ([1.11] * 6, NOT, 0, 6),
    ],
)
def test_heads_are_free_or_dear_by_three_quarters_of_the_rounds(times, outcome, free, dear):
    found = parallel([regime_of(times)])
    assert found.outcome == outcome
    assert f"in {free} of 6 cases" in found.sentence
    assert f"in {dear} they take more" in found.sentence
    assert "as many heads 3.00 to 3.00" in found.sentence


def test_costs_are_of_every_regime_and_both_ways():
    found = compared.costs([regime_of([1.0, 2.0, 3.0, 4.0, 5.0, ASTRIDE])], "fused {n}", "fused 1")
    medians = [1.0, 1.0, 2.0, 3.0, 1.0, 4.0, 5.0, 1.1]
    assert [(each.what, each.heads) for each in found] == list(itertools.product(("forward", "training"), HEADS))
    assert [each.median for each in found] == pytest.approx(medians)
    assert (found[-1].low, found[-1].high) == pytest.approx((1.05, 1.2))
    assert {each.regime for each in found} == {"cpu, batch 2, length 16"}


# -- layers -----------------------------------------------------------------------------------------------------------


def test_layers_are_compared_seed_by_seed():
    draw = np.random.default_rng(3)
    kinds = ("trained", "untrained", "as sharp")
    values = {kind: draw.uniform(size=(2, 3)) for kind in kinds}
    of = [{kind: dict(zip("01", map(float, values[kind][:, s]), strict=True)) for kind in kinds} for s in range(3)]
    study = study_of({8: [1.0] * 3, 16: [1.0] * 3}, distance={8: of, 16: of})
    del study.runs[16][0]["distance"]
    found = compared.layers_of(study)
    assert [(each.heads, each.layer) for each in found] == [(8, 0), (8, 1)]
    for each, *rows in zip(found, *(values[kind] for kind in kinds), strict=True):
        assert (each.trained.mean, each.untrained.mean, each.as_sharp.mean) == pytest.approx(np.mean(rows, 1))
        assert each.over_untrained.mean == pytest.approx(np.mean(rows[0] - rows[1]))
        assert each.over_untrained.error == pytest.approx(scipy.stats.sem(rows[0] - rows[1]))
        assert each.over_as_sharp.error == pytest.approx(scipy.stats.sem(rows[0] - rows[2]))


def test_layers_of_a_real_model_are_compared_sequence_by_sequence_with_the_mean_of_the_untrained():
    saved = {
        "title": "a model",
        "trained": [{"3": 0.5}, {"3": 0.75}],
        "untrained": [[{"3": 0.125}, {"3": 0.25}], [{"3": 0.375}, {"3": 0.5}]],
        "as sharp": [[{"3": 0.5}, {"3": 1.0}], [{"3": 1.0}, {"3": 1.0}]],
    }
    (found,) = compared.layers_of_real(saved)
    assert (found.layer, found.trained.mean, found.untrained.mean, found.as_sharp.mean) == (3, 0.625, 0.3125, 0.875)
    differences = ([0.5 - 0.25, 0.75 - 0.375], [0.5 - 0.75, 0.75 - 1.0])
    assert (found.over_untrained, found.over_as_sharp) == tuple(map(Estimate.of, differences))


# -- data -------------------------------------------------------------------------------------------------------------


def rows_of(batches):
    return Counter(tuple(row) for batch in batches for row in batch["input_ids"].tolist())


def test_the_text_is_cut_into_rows_that_are_learned_from_or_judged_by():
    """Every row of the text is dealt once at most: rows that occur twice may be dealt twice."""
    training, held_out = corpora.next_bytes(3)
    assert {tuple(batch["input_ids"].shape) for batch in training + held_out} == {(8, 64)}
    number = {byte: place for place, byte in enumerate(sorted(set(corpora.text())))}
    ids = [number[byte] for byte in corpora.text()]
    all_rows = Counter(tuple(ids[start : start + 64]) for start in range(0, len(ids) // 64 * 64, 64))
    dealt = rows_of(training) + rows_of(held_out)
    assert len(held_out) == 3
    assert dealt <= all_rows
    assert all_rows.total() - dealt.total() < 8
    assert max(number.values()) < corpora.MASK == corpora.VOCABULARY - 1


def test_the_text_is_the_same_each_time_and_held_out_for_any_number():
    training, held_out = corpora.next_bytes(3)
    few, again = corpora.next_bytes(3, 5)
    assert len(few) == 5
    for one, other in ((few, training[:5]), (again, held_out)):
        assert [each["input_ids"].tolist() for each in one] == [each["input_ids"].tolist() for each in other]
    few[0]["input_ids"].zero_()
    assert corpora.next_bytes(3, 1)[0][0]["input_ids"].tolist() == training[0]["input_ids"].tolist()
    starts = [row[0] for row in rows_of(training[:4])]
    assert starts != sorted(starts)


def test_a_lookup_can_be_answered_by_the_first_half_and_not_without():
    batches = corpora.lookups(3, 7)
    values = {}
    changed = 0
    for row in torch.cat([batch["input_ids"] for batch in batches]).tolist():
        pairs = list(zip(row[::2], row[1::2], strict=True))
        first, second = pairs[:6], pairs[6:]
        assert len(row) == 24
        assert sorted(first) == sorted(second)
        assert len({key for key, _ in second}) == 6
        assert all(0 <= key < 16 <= value < 32 for key, value in pairs)
        changed += first != second
        for key, value in first:
            values.setdefault(key, set()).add(value)
    assert changed > 90
    assert len(values) == 16
    assert min(map(len, values.values())) > 8  # a key does not tell its value
    assert [each["input_ids"].tolist() for each in corpora.lookups(3, 7)] == [b["input_ids"].tolist() for b in batches]
    assert corpora.lookups(1, 8)[0]["input_ids"].tolist() != batches[0]["input_ids"].tolist()


class Given(nn.Module):
    """A model that gives these logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids):
        return self.logits


def test_the_loss_of_lookups_is_that_of_the_values_of_the_second_half():
    batch = {"input_ids": corpora.lookups(1, 3)[0]["input_ids"][:5]}
    logits = torch.randn(5, 24, 32, dtype=torch.float64)
    found = trainings.lookup_loss(Given(logits), batch)
    for row, each, ids in zip(logits, found, batch["input_ids"], strict=True):
        wanted = [-row[place].log_softmax(-1)[ids[place + 1]] for place in range(12, 24, 2)]
        torch.testing.assert_close(each, torch.stack(wanted).mean(), rtol=1e-12, atol=0)


def test_symbols_are_drawn_from_a_seed():
    one, again, other = (corpora.symbols(2, seed) for seed in (1, 1, 2))
    assert [each["input_ids"].tolist() for each in one] == [each["input_ids"].tolist() for each in again]
    assert one[0]["input_ids"].tolist() != other[0]["input_ids"].tolist() != one[1]["input_ids"].tolist()
    assert one[0]["input_ids"].shape == (64, 16)
    assert set(one[0]["input_ids"].flatten().tolist()) == set(range(16))


# -- several relations ------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_the_tokens_before():
    ids = torch.arange(3 * 11).view(3, 11)
    found = relations.answers(ids)
    assert found.shape == (3, 7, 4)
    for row, place, slot in itertools.product(range(3), range(4, 11), range(4)):
        assert found[row, place - 4, slot] == ids[row, place - (slot + 1)]


def test_the_loss_of_relations_and_the_share_that_is_right():
    batch = {"input_ids": torch.randint(16, (5, 11))}
    logits = torch.randn(5, 11, 4, 16, dtype=torch.float64)
    logits[:, :, 2] = -1.0
    logits[:, :, 2, 6] = 0.0  # always says 6
    losses, right = torch.zeros(5, 7, 4, dtype=torch.float64), torch.zeros(5, 7, 4)
    for row, place, slot in itertools.product(range(5), range(4, 11), range(4)):
        asked = batch["input_ids"][row, place - slot - 1]
        losses[row, place - 4, slot] = -logits[row, place, slot].log_softmax(-1)[asked]
        right[row, place - 4, slot] = logits[row, place, slot].argmax() == asked
    found = relations.relations_loss(Given(logits), batch)
    torch.testing.assert_close(found, losses.mean((1, 2)), rtol=1e-12, atol=0)
    assert relations.accuracy(Given(logits), [batch, batch]) == pytest.approx(right.double().mean((0, 1)).tolist())


def test_of_chance():
    batch = corpora.symbols(1, 3)[0]
    nothing = Given(torch.zeros(64, 16, 4, 16))
    found = relations.relations_loss(nothing, batch)
    torch.testing.assert_close(found, torch.full((64,), math.log(16)))
    assert relations.accuracy(nothing, [batch]) == pytest.approx([1 / 16] * 4, abs=0.03)


def built(kind):
    """Four heads of which each looks 1, 2, 3 or 4 back, by a query turned as far back as the key that it meets.

    Symbols are unit vectors in the first 16 axes; axis 16 is in every token, and the place alone where it decides.
    """
    model = relations.Relations(hw.Setting(4, 16, 4), kind)
    attention = model.self_attn
    eye = torch.eye(16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed_tokens.weight[:, :16] = eye
        model.embed_tokens.weight[:, 16] = 1.0
        if model.place is not None:
            model.place[16] = 1.0
        for head in range(4):
            ones = torch.full((1, 1, 1, 16), 12.0)
            part = slice(16 * head, 16 * head + 16)
            attention.q_proj.weight[part, 16] = ones.flatten()
            attention.k_proj.weight[part, 16] = attention.rotary.rotate(ones, torch.tensor([[head + 1]])).flatten()
            attention.v_proj.weight[part, :16] = eye
            attention.out_proj.weight[part, part] = eye
            model.slots.weight[part, part] = 20 * eye
    return model


@pytest.mark.parametrize("kind", relations.KINDS)
def test_four_heads_made_by_hand_serve_four_slots(kind):
    batches, model = corpora.symbols(2, 3), built(kind)
    assert relations.accuracy(model, batches) == [1.0] * 4
    assert relations.relations_loss(model, batches[0]).max() < 1e-4
    torch.testing.assert_close(
        torch.tensor(relations.weights(model, batches[0]["input_ids"])), torch.eye(4), rtol=0, atol=1e-4
    )


def test_weights_by_place_alone_do_not_depend_on_the_symbols():
    one, other = (batch["input_ids"] for batch in corpora.symbols(2, 3))
    for kind in ("places", "tokens"):
        model = relations.Relations(hw.Setting(2, 32, 2), kind)
        same = np.allclose(relations.weights(model, one), relations.weights(model, other), atol=1e-7)
        assert same == (kind == "places")


# -- the argument -----------------------------------------------------------------------------------------------------

WORDS = np.array(list(itertools.product(range(5), repeat=4)))
"""Everything that can stand on four places, of five symbols: there is always one that does not occur."""


def answered(factors):
    """Of each word and slot, whether the slot names its own place; `factors` of the symbol on each place, by slot."""
    logits = np.einsum("jk,nks->njs", factors, np.eye(5)[WORDS])
    own = np.eye(5, dtype=bool)[WORDS]
    return np.where(own, logits, np.inf).min(-1) > np.where(own, -np.inf, logits).max(-1) + 1e-9


def test_one_head_serves_one_slot_at_most():
    """Read out alike under renaming: p for the symbol that stands there, q for others, tried over a grid."""
    served = Counter()
    for weights in itertools.product((0.05, 0.1, 0.25, 0.6, 0.8), repeat=4):
        if sum(weights) > 1 + 1e-9:
            continue
        for p, q in ((1.0, 0.0), (0.0, 1.0), (-1.0, -2.0), (3.0, 3.0)):
            logits = np.einsum("k,nks->ns", np.array(weights), np.where(np.eye(5, dtype=bool)[WORDS], p, q))
            slots = 0
            for slot in range(4):
                own = np.eye(5, dtype=bool)[WORDS[:, slot]]
                others = np.where(own, -np.inf, logits).max(1)
                slots += bool((logits[own] > others + 1e-9).all())
            served[slots] += 1
    assert set(served) == {0, 1}
    assert min(served.values()) > 20


def test_two_heads_serve_all_slots_where_what_is_asked_for_stands_there_once():
    right = answered(np.array(MIXES) @ np.array(EXAMPLE))
    once = (WORDS[:, :, None] == WORDS[:, None]).sum(-1) == 1
    assert right[once].all()
    assert all(abs(sum(head) - 1) < 1e-9 and min(head) >= 0 for head in EXAMPLE)


def test_two_heads_serve_two_slots_whatever_repeats():
    """Always right is a matrix whose diagonal outweighs the rest of each row: of full rank, one head for each slot."""
    assert answered(np.array(MIXES) @ np.array(EXAMPLE)).all(0).tolist() == [False, True, True, False]
    assert answered(np.eye(4)).all()
    draw = np.random.default_rng(0)
    found = Counter()
    for _ in range(300):
        factors = draw.dirichlet([0.3] * 4, 2)
        for mixes in (draw.normal(size=(4, 2)), np.linalg.pinv(factors).clip(-1, 1)):
            served = answered(mixes @ factors).all(0)
            if served.any():
                rows = (mixes @ factors)[served][:, served]
                others = np.abs(rows).sum(1) - np.abs(np.diag(rows))
                assert (np.diag(rows) > others).all()
            found[served.sum()] += 1
    assert set(found) == {0, 1, 2}


def test_the_page_checks_its_example(monkeypatch):
    assert "(0.18, 0.52, 0.30, 0.00) and (0.00, 0.30, 0.52, 0.18)" in sections.example()
    monkeypatch.setattr(sections, "SYMBOLS", 5)
    assert sections.right_of_all() == pytest.approx(answered(np.array(MIXES) @ np.array(EXAMPLE)).mean(0).tolist())
    monkeypatch.setattr(sections, "MIXES", (*MIXES[:2], (0.2, 1.0), MIXES[3]))
    assert sections.right_of_all()[2] < 0.9


# -- without heads, and other looks -----------------------------------------------------------------------------------


def made(heads, seed):
    """Two layers of so many heads, whose weights are far from even."""
    torch.manual_seed(seed)
    model = Transformer(Shape(13, 16, 2, 6000), hw.Setting(heads, 16 // heads, heads)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return model


def batches_of(number):
    return [{"input_ids": torch.randint(13, (3, 7))} for _ in range(number)]


EVERY = list(itertools.product(range(2), range(2)))
"""The heads of two layers of two."""


def plain(model, batches, heads=()):
    with torch.no_grad(), hw.gate(model, dict.fromkeys(heads, 0.0)):
        return torch.cat([hw.next_token_loss(model, batch) for batch in batches]).double().mean().item()


def least_first(model, batches):
    """By the mean over examples of the absolute derivative in a gate, an example at a time."""
    found = torch.zeros(2, 2)
    for row in torch.cat([batch["input_ids"] for batch in batches]):
        gates = [torch.ones(2, requires_grad=True) for _ in range(2)]
        with hw.gate(model, dict(enumerate(gates))):
            loss = hw.next_token_loss(model, {"input_ids": row[None]}).sum()
        found += torch.stack(torch.autograd.grad(loss, gates)).abs()
    return sorted(EVERY, key=lambda head: found[head].item())


def test_heads_are_removed_at_random_and_the_least_important_first():
    model, training, held_out = made(2, 3), batches_of(1), batches_of(1)
    found = looks.removals(model, training, held_out, hw.next_token_loss, 5)
    order = least_first(model, training)
    without = {some: plain(model, held_out, some) for n in range(5) for some in itertools.combinations(EVERY, n)}
    assert len({f"{loss:.3f}" for loss in without.values()}) == 16
    assert (found["heads"], found["whole"]) == (4, pytest.approx(without[()], rel=1e-5))
    assert found["least"] == {n: pytest.approx(without[tuple(sorted(order[:n]))], rel=1e-5) for n in (1, 2, 3, 4)}
    assert {number: len(each) for number, each in found["random"].items()} == {1: 5, 2: 5, 3: 5}
    for number, losses in found["random"].items():
        sets = [loss for some, loss in without.items() if len(some) == number]
        assert all(min(abs(loss - each) for each in sets) < 1e-5 for loss in losses)
        assert len({f"{loss:.3f}" for loss in losses}) > 1


def test_to_remove_heads_that_give_nothing_costs_nothing():
    model = made(2, 3)
    with torch.no_grad():
        model.layers[0].self_attn.out_proj.weight[:, 8:] = 0.0
        model.layers[1].self_attn.out_proj.weight[:, :8] = 0.0
    found = looks.removals(model, batches_of(1), batches_of(1), hw.next_token_loss, 1)
    assert found["least"][1] == found["least"][2] == pytest.approx(found["whole"], abs=1e-6)
    assert abs(found["least"][4] - found["whole"]) > 0.01


def test_an_untrained_model_is_made_as_sharp():
    model, untrained, batches = made(2, 3), made(2, 4), batches_of(1)
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.mul_(3.0)
        model.layers[1].self_attn.q_proj.weight.mul_(0.2)
    before = {name: each.clone() for name, each in untrained.state_dict().items()}
    goal, first = looks.entropies(model, batches), looks.entropies(untrained, batches)
    changed = looks.sharpened(untrained, goal, batches)
    for name, each in looks.entropies(changed, batches).items():
        assert abs(each - goal[name]) < 0.03 < abs(first[name] - goal[name])
    for name, each in changed.state_dict().items():
        assert torch.equal(before[name], untrained.state_dict()[name])
        assert torch.equal(each, before[name]) == ("q_proj" not in name)


def inputs_of(model, batch):
    """What each layer that attends is given, and the layers."""
    layers = [module for module in model.modules() if isinstance(module, hw.MultiHeadAttention)]
    given = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: given.append(args[0])) for layer in layers]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return zip(layers, given, strict=True)


@torch.no_grad()
def test_distances_are_means_over_pairs_of_a_layer():
    """The Jensen-Shannon distance by scipy, row by row; layers of one head have none."""
    model, batches = made(4, 3), batches_of(2)
    found = {0: [], 1: []}
    for batch in batches:
        for number, (layer, given) in enumerate(inputs_of(model, batch)):
            weights = layer(given, return_weights=True)[1].double().numpy()
            for a, b in itertools.combinations(range(4), 2):
                found[number].append(jensenshannon(weights[:, a], weights[:, b], axis=-1).mean())
    wanted = {number: np.mean(each) for number, each in found.items()}
    assert looks.distances(model, batches) == pytest.approx(wanted, rel=1e-4)
    assert looks.distances(made(1, 3), batches) == {}


@torch.no_grad()
def test_the_rank_of_scores_is_head_dim():
    model, (batch,) = made(4, 3), batches_of(1)
    found = looks.ranks(model, batch["input_ids"])
    ranks = {"of the scores": [], "of the weights": []}
    for layer, given in inputs_of(model, batch):
        q, k = (
            layer.rotary.rotate(each(given).double().unflatten(-1, (4, 4)).transpose(1, 2), torch.arange(7)[None])
            for each in (layer.q_proj, layer.k_proj)
        )
        for name, matrices in zip(ranks, (q @ k.mT, layer(given, return_weights=True)[1].double()), strict=True):
            for values in np.linalg.svd(matrices.numpy().reshape(-1, 7, 7), compute_uv=False):
                ranks[name].append(next(n for n in range(8) if sum(values[:n] ** 2) >= 0.99 * sum(values**2)))
    assert found == {"rank": 4.0, **{name: pytest.approx(np.mean(each)) for name, each in ranks.items()}}


# -- the clock --------------------------------------------------------------------------------------------------------


def test_a_list_of_heads_is_the_layer():
    layer = hw.MultiHeadAttention(15, 3, bias=False, mask=hw.causal()).double()
    apart = clock.ListOfHeads(layer)
    x, upstream = torch.randn(2, 7, 15, dtype=torch.float64), torch.randn(2, 7, 15, dtype=torch.float64)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    given, wanted = apart(other), layer(one)
    torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)
    wanted.backward(upstream)
    given.backward(upstream)
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        together = torch.cat([head[place].weight.grad for head in apart.heads])
        torch.testing.assert_close(together, getattr(layer, name).weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(apart.projection.weight.grad, layer.out_proj.weight.grad, rtol=1e-12, atol=1e-12)


def test_seconds_are_of_one_run_by_a_clock_that_is_made_up(monkeypatch):
    now = [0.0]
    ran = Counter()

    def run(name, seconds):
        ran[name] += 1
        now[0] += seconds

    def wait():
        now[0] += 100.0 * (ran.total() == 0)

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    costs = {"quick": 0.004, "slow": 1.0}
    found = clock.interleaved({name: lambda n=name, s=s: run(n, s) for name, s in costs.items()}, 3, wait)
    assert found == {name: pytest.approx([seconds] * 3) for name, seconds in costs.items()}
    assert ran == {"quick": 2 + 3 * (1 + 5), "slow": 2 + 3 * (1 + 1)}


SIZE = replace(SIZES["tiny"], heads=(1, 2, 4), rounds=2, width=16, lengths=((2, 5),))


def test_the_clock_runs_and_refuses_lists_that_are_not_the_layer(monkeypatch):
    monkeypatch.setattr(clock, "LEAST", 0.0)
    monkeypatch.setattr(clock.torch.cuda, "is_available", lambda: False)
    (found,) = clock.clocked(SIZE)
    names = {f"{a} {b} {n}" for a in ("forward", "training") for b in ("fused", "list") for n in (1, 2, 4)}
    assert set(found["seconds"]) == names
    assert all(len(each) == 2 and min(each) > 0 for each in found["seconds"].values())
    monkeypatch.setattr(clock, "NEAR", -1.0)
    with pytest.raises(ValueError, match="a list of 1 heads is"):
        clock.clocked(SIZE)


# -- the document -----------------------------------------------------------------------------------------------------


def saved_study(name, **more):
    """A study as it is saved, with everything that may be looked at, three seeds."""
    runs = {}
    for heads in HEADS:
        runs[str(heads)] = [
            {
                "seed": seed,
                "rate": 1e-3,
                "loss": 2.0 + seed / 100 - math.log2(heads) / 10,
                "train_loss": 1.5,
                "ranks": {"rank": 4.0, "of the scores": 2.0, "of the weights": 3.0},
                "distance": {kind: {"0": 0.25 * seed} for kind in ("trained", "untrained", "as sharp")},
                "removed": {
                    "heads": 2 * heads,
                    "whole": 2.0,
                    "least": {str(heads): 2.5, str(2 * heads): 4.0},
                    "random": {str(heads): [2.5, 3.5]},
                },
            }
            for seed in (1, 2, 3)
        ]
    saved = {"data": name, "task": "next byte", "width": 64, "depth": 2, "margin": 0.05, "is_setting": True}
    saved |= {"steps": 12, "trials": 1, "parameters": {"1": 1000.0}, "held out": 64, "runs": runs}
    return saved | {"training": {"batches": 4, "tokens a batch": 512}} | more


@pytest.fixture
def results():
    studies = {name: saved_study(name) for name in (MAIN, FEW_DATA, *RANKED)}
    studies["relations-places"] = saved_study("generated", task="several relations, by place", is_setting=False)
    for heads, runs in studies["relations-places"]["runs"].items():
        for run in runs:
            run |= {"accuracy": [1.0, 0.5, 0.25, 0.125], "weights": [[0.25] * 4] * int(heads)}
    kinds = {"untrained": [[{"0": 0.5}, {"0": 0.25}]] * 2, "as sharp": [[{"0": 0.5}, {"0": 0.25}]] * 2}
    real = {"m": {"title": "a model", "sequences": 2, "tokens": 7, "trained": [{"0": 0.5}, {"0": 0.75}], **kinds}}
    metadata = {"date": "2001-02-03", "cpu": "a cpu", "cores": 2, "gpu": None, "processes": 2, "threads": 1}
    metadata |= {"size": "tiny", "versions": {"torch": "1.2.3"}}
    made = {name: Study(name, saved) for name, saved in studies.items()}
    return Results(made, real, [regime_of([1.0] * 6)], dict.fromkeys((MAIN, "clock"), metadata))


def test_the_document_holds_every_claim_its_verdict_and_tables_that_are_whole(results):
    text = make_claims.document(results)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [*TITLES.values(), "How it was measured"]
    wanted = {"capacity": HELD, "parallel": HELD, "regularises": HELD, "more": NOT, "eight": HELD, "robust": UNDECIDED}
    for name, outcome in wanted.items():
        assert f"| {TITLES[name]} | {outcome} | " in text
        section = text.split(f"## {TITLES[name]}\n")[1].split("\n## ")[0]
        assert re.search(rf"\n\*\*{outcome.capitalize()}: [^*]*\.\*\*\n", section), name
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert all(len(line) <= 120 for line in text.splitlines() if line[:1] not in {"|", "!"})
    assert "| 1.920 ± 0.006 |" in text  # two heads: 2.01, 2.02 and 2.03, less 0.1; 0.01 / sqrt(3)
    assert not re.search(r"\bnan\b|\binf\b", text)
