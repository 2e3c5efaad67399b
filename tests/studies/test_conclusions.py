"""Conclusions from losses over seeds: significant differences, Pareto frontier, recommendation."""

import math
import re

import numpy as np
import pytest
import scipy.stats

import headwise as hw
from headwise.runs.rows import MeanEstimate
from headwise.studies.study_result import SettingRow, collect_results, dominates, significant_difference
from headwise.studies.trials import FinishedTrial, TrialKey

pytestmark = pytest.mark.usefixtures("as_user")

ONE, TWO, FOUR, SHARED = hw.Setting(1, 16, 1), hw.Setting(2, 8, 2), hw.Setting(4, 4, 4), hw.Setting(4, 4, 2)


def by_definition(table):
    """Smallest significant difference of Tukey's range test: rows are settings, columns are blocks."""
    table = np.asarray(table, dtype=np.float64)
    k, n = table.shape
    total = np.sum((table - table.mean()) ** 2)
    rows = n * np.sum((table.mean(1) - table.mean()) ** 2)
    columns = k * np.sum((table.mean(0) - table.mean()) ** 2)
    degrees = (k - 1) * (n - 1)
    error = (total - rows - columns) / degrees
    return scipy.stats.studentized_range.ppf(0.95, k, degrees) * math.sqrt(error / n)


def losses_of(table):
    return {setting: dict(enumerate(row, 1)) for setting, row in zip((ONE, TWO, FOUR, SHARED), table, strict=False)}


@pytest.mark.parametrize(("settings", "seeds"), [(2, 2), (3, 5), (4, 3)])
def test_the_significant_difference_is_that_of_tukeys_range_test(settings, seeds):
    table = np.random.default_rng(7).normal(3.0, 0.1, (settings, seeds))
    assert significant_difference(losses_of(table)) == pytest.approx(by_definition(table), rel=1e-7)


def test_the_significant_difference_of_a_table_calculated_by_hand():
    """All residuals are ±0.25: squares 0.25, 1 degree; for 2 groups, q is sqrt(2) times Student's t, 12.7062."""
    difference = significant_difference(losses_of([[1.0, 2.0], [1.5, 1.5]]))
    assert difference == pytest.approx(math.sqrt(2) * 12.706204736 * math.sqrt(0.25 / 2), rel=1e-6)


def test_effects_of_a_seed_on_all_settings_are_removed():
    table = np.random.default_rng(3).normal(3.0, 0.1, (3, 4))
    difference = significant_difference(losses_of(table))
    for other, factor in (
        (table + np.array([0.0, 10.0, -2.0, 0.5]), 1),
        (table + np.array([[1.0], [5.0], [-2.0]]), 1),
        (3 * table, 3),
    ):
        assert significant_difference(losses_of(other)) == pytest.approx(factor * difference, rel=1e-9)


def test_only_seeds_that_all_settings_have_are_compared():
    table = np.random.default_rng(3).normal(3.0, 0.1, (3, 4))
    losses = losses_of(table)
    del losses[TWO][2], losses[FOUR][2]
    for of_shared in (None, {}, {1: 3.0, 3: math.inf}):
        losses |= {} if of_shared is None else {SHARED: of_shared}
        assert significant_difference(losses) == pytest.approx(by_definition(table[:, [0, 2, 3]]), rel=1e-7)


@pytest.mark.parametrize(
    "losses",
    [
        {},
        {ONE: {1: 2.0, 2: 3.0}},
        {ONE: {1: 2.0}, TWO: {1: 3.0}},
        {ONE: {1: 2.0, 2: 3.0}, TWO: {3: 1.0, 1: 2.0}},
    ],
)
def test_with_fewer_than_two_settings_or_seeds_nothing_can_be_tested(losses):
    assert math.isnan(significant_difference(losses))


def test_identical_losses_have_a_significant_difference_of_0():
    assert significant_difference(losses_of([[1.0, 2.0], [1.0, 2.0]])) == 0.0


# -- the frontier -----------------------------------------------------------------------------------------------------


def row(setting=ONE, **values):
    """A row from means, or from pairs of mean and standard error."""
    pairs = {name: each if isinstance(each, tuple) else (each, 0.0) for name, each in values.items()}
    statistics = {name: MeanEstimate(*pair, 3, 2) for name, pair in pairs.items()}
    return SettingRow(**vars(setting), statistics=statistics)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"loss": 1.0, "step_ms": 5.0}, {"loss": 2.0, "step_ms": 5.0}, (True, False)),
        ({"loss": 1.0, "step_ms": 5.0}, {"loss": 1.0, "step_ms": 5.0}, (False, False)),
        ({"loss": 1.0, "step_ms": 5.0}, {"loss": 2.0, "step_ms": 4.0}, (False, False)),
        ({"loss": 1.0, "step_ms": 5.0}, {"loss": 1.0, "step_ms": 4.0}, (False, True)),
        ({"loss": 1.0, "decode_tokens_s": 50.0}, {"loss": 1.0, "decode_tokens_s": 40.0}, (True, False)),
        ({"loss": 1.0, "decode_tokens_s": 30.0}, {"loss": 0.5, "decode_tokens_s": 40.0}, (False, True)),
        ({"loss": 1.0, "cache_bytes": 64.0}, {"loss": 1.0, "cache_bytes": 128.0}, (True, False)),
        ({"loss": 1.0, "train_loss": 9.0, "rate": 1.0}, {"loss": 1.0, "train_loss": 1.0, "rate": 0.1}, (False, False)),
        # Times that differ by less than two standard errors, 2 sqrt(0.3^2 + 0.4^2), are equal.
        ({"loss": 1.0, "step_ms": (5.9, 0.3)}, {"loss": 2.0, "step_ms": (5.0, 0.4)}, (True, False)),
        ({"loss": 1.0, "step_ms": (6.1, 0.3)}, {"loss": 2.0, "step_ms": (5.0, 0.4)}, (False, False)),
        ({"loss": 1.0, "step_ms": (5.0, 0.3)}, {"loss": 1.0, "step_ms": (5.9, 0.4)}, (False, False)),
        ({"loss": 1.0, "step_ms": (5.0, 0.3)}, {"loss": 1.0, "step_ms": (6.1, 0.4)}, (True, False)),
        # Losses are not measured by the clock: any difference counts.
        ({"loss": (1.0, 0.5), "step_ms": 5.0}, {"loss": (1.1, 0.5), "step_ms": 5.0}, (True, False)),
        ({"loss": 1.0, "step_ms": (5.0, math.nan)}, {"loss": 1.0, "step_ms": 5.1}, (True, False)),
        ({"loss": 1.0, "step_ms": 5.0}, {"loss": math.inf, "step_ms": 5.0}, (True, False)),
    ],
)
def test_a_setting_dominates_if_it_is_as_good_in_all_and_better_in_one(one, other, expected):
    one, other = row(**one), row(**other)
    assert (dominates(one.statistics, other.statistics), dominates(other.statistics, one.statistics)) == expected


def test_the_frontier():
    """Lowest loss, shortest step and smallest cache are on the frontier; a dominated setting is not."""
    table = {
        ONE: {"loss": 3.0, "step_ms": 9.0, "decode_tokens_s": 200.0, "cache_bytes": 64.0},
        TWO: {"loss": 3.2, "step_ms": 8.0, "decode_tokens_s": 200.0, "cache_bytes": 64.0},
        FOUR: {"loss": 3.3, "step_ms": 8.0, "decode_tokens_s": 190.0, "cache_bytes": 64.0},
        SHARED: {"loss": 3.4, "step_ms": 9.5, "decode_tokens_s": 190.0, "cache_bytes": 32.0},
    }
    rows = tuple(row(setting, **values) for setting, values in table.items())
    assert hw.Study(rows, {"runs": [], "baseline": None}).frontier == (ONE, TWO, SHARED)


# -- recommendation --------------------------------------------------------------------------------------------------


def study_of(table, baseline=None, step_ms=None):
    """A study made from finished trials, as `hw.study` makes it, with a learning-rate trial per setting."""
    times = step_ms or {}
    trials = []
    for setting, losses in losses_of(table).items():
        trials.append(FinishedTrial(TrialKey(setting, False, 0), 3e-3, 9.0, False, {"seconds": 1.0}))
        for seed, loss in losses.items():
            if not math.isnan(loss):
                measured = {"train_loss": loss - 0.1, "step_ms": times.get(setting, 5.0), "seconds": 1.5}
                trials.append(FinishedTrial(TrialKey(setting, True, seed), 3e-3, loss, False, measured))
    settings = tuple(losses_of(table))
    sizes = {setting.name: 1000 + setting.num_heads for setting in settings}
    metadata = {"model": {"name": "text"}, "settings": {}, "steps": 20, "left_out": []}
    return collect_results(trials, settings, sizes, metadata, len(table[0]), baseline)


NOISE = np.array([[0.0, 0.01, -0.01], [0.01, -0.01, 0.0], [-0.01, 0.0, 0.01]])
"""Noise with mean 0 over seeds and over settings, so that it equals the residuals."""

MARGIN = by_definition(NOISE)


def losses(*means):
    return (np.array(means)[:, None] + NOISE[: len(means)]).tolist()


def test_the_rows_are_means_over_seeds():
    result = study_of([[3.0, 3.2, 3.4], [2.0, 2.0, 2.0]])
    first, second = result.rows
    assert first.statistics["loss"] == pytest.approx((3.2, 0.2 / math.sqrt(3), 3, 2))
    assert first.statistics["train_loss"] == pytest.approx((3.1, 0.2 / math.sqrt(3), 3, 2))
    assert second.statistics["loss"] == (2.0, 0.0, 3, 2.0)
    assert first.statistics["parameters"] == (1001.0, 0.0, 3, 0.0)
    assert first.statistics["rate"].value == 3e-3
    assert result.losses == {ONE: {1: 3.0, 2: 3.2, 3: 3.4}, TWO: {1: 2.0, 2: 2.0, 3: 2.0}}
    assert result.metadata["search"][0] == {"setting": "1x16", "rate": 3e-3, "loss": 9.0, "pruned": False}
    assert "seconds" not in first.statistics
    assert result.row(TWO) is second
    with pytest.raises(hw.InputError, match=r"^setting: expected one of 1x16, 2x8, got 4x4$"):
        result.row(FOUR)


SIGNIFICANT = f"differences above {MARGIN:.4f} are significant"
NOTHING = "nothing to compare: fewer than two settings were trained to the end"
ONE_SEED = "undecided: one seed shows no variation; use two or more (--seeds, seeds=)"
NO_DIFFERENCE = f"no significant difference at this budget: mean losses differ by up to 0.0020; {SIGNIFICANT}"
BETTER = f"2x8: the next, 4x4, is 0.5000 worse than the best; {SIGNIFICANT}"
FASTEST = (
    "2x8, the fastest to train of {}, which do not differ significantly: the next, 4x4, is {} worse than the best; "
)
KEPT = f"no significant difference at this budget between 2x8, the baseline, and 1x16; {SIGNIFICANT}"
ALONE = "keep 1x16: every other setting is significantly worse at this budget"
NOT_FINITE = "undecided: the loss of 2x8 was not finite, and fewer than two settings are left"

DIVERGED = losses(3.0, 3.001, 3.5)
DIVERGED[2][1] = math.inf
OF_THE_OTHERS = f"differences above {by_definition(np.array(DIVERGED[:2])):.4f} are significant"

CONCLUSIONS = {
    "one setting": (study_of([[3.0, 3.1]]), None, (ONE,), NOTHING),
    "one trained setting": (study_of([[math.nan, math.nan], [3.0, 3.1]]), None, (TWO,), NOTHING),
    "no trained setting": (study_of([[math.nan], [math.nan]]), None, (), NOTHING),
    "one seed": (study_of([[3.0], [2.0], [9.0]]), None, (TWO, ONE, FOUR), ONE_SEED),
    "no difference": (study_of(losses(3.002, 3.001, 3.0)), None, (FOUR, TWO, ONE), NO_DIFFERENCE),
    "of the baseline": (study_of(losses(3.002, 3.001, 3.0), TWO), None, (FOUR, TWO, ONE), NO_DIFFERENCE),
    "a better setting": (study_of(losses(4.0, 3.0, 3.5)), TWO, (TWO,), BETTER),
    "a worse baseline": (study_of(losses(4.0, 3.0, 3.5), ONE), TWO, (TWO,), BETTER),
    "the fastest": (
        study_of(losses(3.0, 3.001, 3.5), step_ms={ONE: 7.0, TWO: 6.0, FOUR: 1.0}),
        *(TWO, (ONE, TWO), FASTEST.format("1x16, 2x8", "0.5000") + SIGNIFICANT),
    ),
    "as fast, with a lower loss": (
        study_of(losses(3.001, 3.0, 3.5)),
        *(TWO, (TWO, ONE), FASTEST.format("2x8, 1x16", "0.5000") + SIGNIFICANT),
    ),
    "the baseline": (study_of(losses(3.0, 3.001, 3.5), TWO, {ONE: 1.0, TWO: 6.0}), None, (ONE, TWO), KEPT),
    "the baseline alone": (study_of(losses(3.0, 3.3, 3.5), ONE), None, (ONE,), ALONE),
    "one diverged": (
        study_of(DIVERGED, step_ms={FOUR: 0.1, TWO: 4.0}),
        *(TWO, (ONE, TWO), FASTEST.format("1x16, 2x8", "inf") + OF_THE_OTHERS),
    ),
    "one converged": (study_of([[3.0, 3.1], [math.inf, 3.0]]), None, (ONE, TWO), NOT_FINITE),
}
"""Studies, each with the recommended setting, the settings equivalent to the best, and the sentence."""


@pytest.mark.parametrize("case", CONCLUSIONS)
def test_recommendations(case):
    study, *expected = CONCLUSIONS[case]
    recommendation = study.recommendation
    assert [recommendation.setting, recommendation.equivalent, recommendation.sentence] == expected
    assert recommendation.margin == study.margin or (math.isnan(recommendation.margin) and math.isnan(study.margin))


def test_conclusions_have_numbers_too():
    assert MARGIN > 0.002
    assert CONCLUSIONS["no difference"][0].recommendation.margin == pytest.approx(MARGIN)
    assert math.isnan(CONCLUSIONS["one seed"][0].margin)
    assert CONCLUSIONS["one diverged"][0].row(FOUR).statistics["loss"].value == math.inf


def test_a_setting_without_final_trainings_has_an_empty_row(tmp_path):
    """It is neither on the frontier nor compared; the table can be saved and drawn."""
    study_of([*losses(4.0, 3.0), [math.nan] * 3]).save(tmp_path)
    again = hw.Study.load(tmp_path)
    assert again.row(FOUR).statistics["loss"].n == 0
    assert math.isnan(again.row(FOUR).statistics["step_ms"].value)
    assert again.frontier == (TWO,)
    assert again.recommendation.setting == TWO
    assert {text.get_text() for text in again.plot(kind="time").texts} == {"1x16", "2x8"}


def test_means_are_over_the_seeds_that_all_settings_have():
    """A setting without the worst seed has no advantage from that."""
    result = study_of([[3.0, 3.01, 9.0], [3.5, 3.51, math.nan]])
    assert result.row(TWO).statistics["loss"].value < result.row(ONE).statistics["loss"].value
    assert result.recommendation.setting == ONE


@pytest.mark.parametrize("baseline", [None, TWO])
def test_saved_and_loaded(baseline, tmp_path):
    table = losses(4.0, 3.0, 3.5)
    table[2][1] = math.inf
    result = study_of(table, baseline)
    result.save(tmp_path)
    again = hw.Study.load(tmp_path)
    assert [each.identifiers for each in again.rows] == [each.identifiers for each in result.rows]
    for each, other in zip(again.rows, result.rows, strict=True):
        assert list(each.statistics) == list(other.statistics)
        for name, measured in each.statistics.items():
            assert measured == pytest.approx(other.statistics[name], nan_ok=True)
    assert (again.losses, again.margin, again.frontier) == (result.losses, result.margin, result.frontier)
    assert again.recommendation == result.recommendation
    assert again.baseline == baseline
    assert again.metadata == result.metadata
    sentence = f"out: expected a folder without study.parquet, got {str(tmp_path)!r}; --force (force=True) replaces it"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        result.save(tmp_path)


def test_the_plot_has_every_seed_and_setting():
    study = study_of(losses(4.0, 3.0, 3.5))
    by_heads, by_time = study.plot(), study.plot(kind="time")
    points = [tuple(point) for line in by_heads.lines if line.get_marker() == "." for point in line.get_xydata()]
    assert len(points) == 9
    assert (2.0, pytest.approx(2.99)) in points
    assert {text.get_text() for text in by_time.texts} == {"1x16", "2x8", "4x4"}
