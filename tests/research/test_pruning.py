"""The data, the resumption and the report of the pruning measurements."""

import json
import statistics

import pytest
import scipy.stats

import headwise as hw
import tiny
from research.pruning import __main__ as script
from research.pruning import data, merging, report
from research.pruning.measured_models import MeasuredModel

SHARE = 0.5


def test_no_document_is_in_two_parts():
    calibration, test, training = map(set, (data.calibration(), data.test(), data.training()))
    assert (len(calibration), len(test)) == (data.CALIBRATION, data.TEST)
    assert not calibration & test
    assert not calibration & training
    assert not test & training
    assert data.overlap() < 0.01


class Counted(hw.MagnitudeScores):
    """Scores by weights that count their calls."""

    calls = 0

    def of(self, units, removed):
        Counted.calls += 1
        return super().of(units, removed)


@pytest.fixture
def measured():
    """A tiny model in place of a real one."""
    tokenizer = tiny.tokenizer("decoder")
    batches = [dict(tokenizer(text, return_tensors="pt")) for text in tiny.texts(20, 15, 12, 30)]
    loss = hw.next_token_loss
    return MeasuredModel(
        "a tiny model", tiny.model("decoder", top="ForCausalLM"), batches, batches[:3], loss, loss, loss, "the loss"
    )


def test_an_interrupted_measurement_resumes_to_the_same_results(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SHARES", (SHARE,))
    monkeypatch.setattr(script, "MODELS", {"m": lambda: measured})
    for folder in ("whole", "stopped"):
        monkeypatch.setattr(script, "RESULTS", tmp_path / folder)
        if folder == "stopped":
            with monkeypatch.context() as patch:
                patch.setattr(script.hw, "prune", stopping_after(4))
                with pytest.raises(KeyboardInterrupt):
                    script.measure("m", "free")
        script.measure("m", "free")
    whole, stopped = (json.loads((tmp_path / name / "m-free.json").read_text()) for name in ("whole", "stopped"))
    assert whole["points"] == stopped["points"]
    assert len(whole["points"]) == 2 * len(script.SERIES)
    plan = hw.plan_pruning(hw.MagnitudeScores(measured.model, measured.calibration[0]), keep=SHARE, constraint="free")
    expected = measured.errors_of(hw.prune(measured.model, plan))
    assert whole["points"]["magnitude, one-shot, 50%, as it is"]["errors"] == pytest.approx(expected)


def stopping_after(calls):
    """Return `hw.prune` that is interrupted after some calls."""
    left, prune = [None] * calls, hw.prune

    def stopping(*arguments, **options):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return prune(*arguments, **options)

    return stopping


def test_scores_are_measured_once(measured, tmp_path):
    file = tmp_path / "scores.json"
    for _ in range(2):
        scores = script.RememberedScores(Counted(measured.model, measured.calibration[0]), file)
        plan = hw.plan_pruning(scores, keep=SHARE, constraint="free")
    assert Counted.calls == 1
    expected = hw.MagnitudeScores(measured.model, measured.calibration[0])
    assert plan.modules == hw.plan_pruning(expected, keep=SHARE, constraint="free").modules


def points(shifts):
    """Return a point of both compared series for each shift between them."""
    old = [1.0, 1.2, 0.9, 1.1]
    noise = [0.01, -0.01, 0.02, -0.02]
    series = ((report.BASE, [0.0] * 4, 0.0), *((report.COMPARED, noise, shift) for shift in shifts))
    return [
        report.Point(name, 0.1 + 0.1 * index, False, 0.1, [a + b + shift for a, b in zip(old, each, strict=True)])
        for index in range(len(shifts))
        for name, each, shift in (series[0], series[1 + index])
    ]


def test_the_comparison_is_paired_and_corrected_for_all_points():
    shifts = (-0.05, -0.2, 0.001)
    table, sentence = report.comparison(points(shifts))
    assert sentence.startswith("Least squares is better than magnitude at 2 of 3 points, at 2 beyond chance.")
    noise = [0.01, -0.01, 0.02, -0.02]
    for shift, line in zip(shifts, table[2:-1], strict=True):
        differences = [each + shift for each in noise]
        error = statistics.stdev(differences) / 2
        assert f"{statistics.fmean(differences):+.3f} ± {error:.3f}" in line
    values = [float(scipy.stats.ttest_1samp([each + shift for each in noise], 0).pvalue) for shift in shifts]
    assert values[0] > report.LEVEL / 3 or report._holm(values) == [True, True, False]


def test_least_squares_is_compared_with_each_other_choice():
    old, new = [1.0, 1.2, 0.9, 1.1], [1.1, 1.1, 0.8, 0.9]
    missing = report.Point(report.COMPARED, 0.5, True, 0.5, new)
    pair = [report.Point(key, 0.5, False, 0.5, own) for key, own in ((report.COMPARED, new), (report.BASE, old))]
    rows = report.against_others([*pair, missing])
    error = statistics.stdev([0.1, -0.1, -0.1, -0.2]) / 2
    assert rows[0] == "| other heads chosen by | 50%, as it is | 50%, fitted |"
    assert f"| magnitude, one-shot | -0.075 ± {error:.3f} |  |" in rows
    assert not [row for row in rows if row.startswith("| least squares")]


def test_holm_rejects_from_the_smallest_p_value_on():
    assert report._holm([0.04, 0.01, 0.03]) == [False, True, False]
    assert report._holm([0.01, 0.015, 0.03]) == [True, True, True]
    assert report._holm([0.5, 0.02]) == [False, True]


def test_merged_heads_are_measured_and_reported(measured, tmp_path, monkeypatch):
    file = tmp_path / "results" / "merging.json"
    monkeypatch.setattr(merging, "RESULTS", file)
    monkeypatch.setattr(merging, "MODELS", {"m": (lambda: measured, (1,))})
    monkeypatch.setattr(report, "MERGING", file)
    assert report.merging_section() == []
    merging.main()
    before = file.read_text()
    merging.main()
    assert file.read_text() == before
    saved = json.loads(before)["m"]
    merged = hw.merge_kv(measured.model, num_kv_heads=1, calibration=measured.calibration, method="procrustes")
    expected = measured.errors_of(merged)
    assert saved["points"]["1, procrustes, adjacent, fitted"]["errors"] == pytest.approx(expected, rel=1e-5)
    lines = report.merging_section()
    (row,) = [line for line in lines if line.startswith("| procrustes, adjacent |")]
    assert f"{statistics.fmean(expected):.3f} ± {statistics.stdev(expected) / len(expected) ** 0.5:.3f}" in row
    assert "### a tiny model, 2 key/value heads" in lines
