"""The commands that measure attention over data, and those that measure the loss without heads."""

import pytest

import headwise as hw
from command_lines import printed_by, refusal


def arguments(command, folder, out, *options, model="decoder"):
    """Return the arguments of a command with the files of a folder."""
    return (command, "--model", folder / model, "--data", folder / "data.jsonl", "--out", out, "--quiet", *options)


def found(table, name):
    """Return the sentence about the heads that differ from zero."""
    pairs = [(row.statistics[name].value, q) for row, q in zip(table.rows, table.tests()[f"{name}_q"], strict=True)]
    above, below = (sum(q <= 0.05 and sign * value > 0 for value, q in pairs) for sign in (1, -1))
    return f"{name}: {above} of {len(pairs)} heads above 0, {below} below, at a false discovery rate of 5%"


def test_norms_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "special", "--top", 3)
    out = printed_by(headwise(*arguments("norm-weighted", folder, tmp_path / "out", *options, model="encoder")))
    table = hw.NormWeighted.load(tmp_path / "out")
    lines = out.splitlines()
    assert lines[2].split() == ["moved", "norm_preference", "norm_special", "special_change"]
    moved = sorted(table.rows, key=lambda row: -row.statistics["moved"].value)[:3]
    assert [line.split()[0] for line in lines[3:6]] == [row.name for row in moved]
    assert [float(line.split()[1]) for line in lines[3:6]] == pytest.approx(
        [row.statistics["moved"].value for row in moved], abs=1e-4
    )
    assert lines[6] == "and 9 more"
    assert found(table, "special_change") in lines
    assert found(table, "norm_preference") in lines


def test_rollout_is_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "self", "--top", 2, "--residual", 0.25)
    out = printed_by(headwise(*arguments("rollout", folder, tmp_path / "out", *options, model="encoder")))
    result = hw.Rollout.load(tmp_path / "out")
    assert result.metadata["settings"]["residual"] == 0.25
    lines = out.splitlines()
    assert lines[2].split() == ["layer", "first", "self", "special", "distance", "entropy"]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1"]
    assert float(lines[4].split()[4]) == pytest.approx(result.layers.rows[1].statistics["self"].value, abs=1e-4)
    assert lines[6].split() == ["rolled_self", "self_change"]
    largest = sorted(result.rows, key=lambda row: -abs(row.statistics["self_change"].value))[:2]
    assert [line.split()[0] for line in lines[7:9]] == [row.name for row in largest]
    assert found(result, "self_change") in lines


def test_positions_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "distance", "--top", 3, "--edges", "0,4,16,64")
    out = printed_by(headwise(*arguments("positions", folder, tmp_path / "out", *options)))
    curves = hw.PositionCurves.load(tmp_path / "out")
    lines = out.splitlines()
    assert lines[3].split() == ["slope", "q", "0-3", "4-15", "16-63"]
    slopes = {row.name: row.statistics["distance_slope"].value for row in curves.slopes.rows}
    steepest = sorted(slopes, key=lambda name: -abs(slopes[name]))[:3]
    assert [line.split()[0] for line in lines[4:7]] == steepest
    assert [float(line.split()[1]) for line in lines[4:7]] == pytest.approx([slopes[n] for n in steepest], abs=1e-3)
    assert lines[7] == "and 9 more"


def test_distances_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--quantiles", "0.25,0.9", "--first", 2, "--top", 2)
    out = printed_by(headwise(*arguments("distances", folder, tmp_path / "out", *options)))
    distances = hw.AttentionDistances.load(tmp_path / "out")
    names = ["distance_25", "distance_90", "distance_25_with_first", "distance_90_with_first"]
    assert list(distances.statistics) == names
    lines = out.splitlines()
    assert lines[3].split() == names
    furthest = max(distances.rows, key=lambda row: row.statistics["distance_90"].value)
    assert lines[4].split()[0] == furthest.name


def test_in_context_is_printed_and_saved(folder, tmp_path, headwise, monkeypatch):
    options = ("--early", 5, "--late", 19, "--window", 3, "--top", 2, "--replacement", "both")
    out = printed_by(headwise(*arguments("in-context", folder, tmp_path / "out", *options)))
    scores = hw.InContextScores.load(tmp_path / "out")
    assert list(scores.statistics) == ["change_zero", "change_mean", "induction_random"]
    assert scores.metadata["measured"]["sequences"] == 3
    score = scores.score
    assert f"in-context learning score {score.value:.4f} ± {score.sem:.2g}: loss " in out
    assert "at token 5, means over the 3 tokens up to each" in out
    refused = refusal(headwise(*arguments("in-context", folder, tmp_path / "out")))
    assert refused.startswith("out: expected a folder without in_context.parquet, got ")
    (tmp_path / "out" / "in_context.parquet").unlink()  # as in an interrupted run
    assert headwise(*arguments("in-context", folder, tmp_path / "out", *options))[0] == 0
    (tmp_path / "out" / "in_context.parquet").unlink()
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)
    refused = refusal(headwise(*arguments("in-context", folder, tmp_path / "out", "--early", 4, *options[2:])))
    assert "got another run (settings.loss differs) in " in refused


def test_a_curve_is_printed_and_saved(folder, tmp_path, headwise):
    scores = str(folder / "scores")
    options = ("--scores", scores, "--random", 2)
    out = printed_by(headwise(*arguments("curve", folder, tmp_path / "out", *options)))
    curve = hw.PruningCurve.load(tmp_path / "out")
    rows = [line.split() for line in out.splitlines()[-len(curve.curve(scores)) :]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
    losses = [point.statistics["loss"].value for point in curve.curve(scores)]
    assert [float(row[2]) for row in rows] == pytest.approx(losses, abs=1e-4)
    assert len(curve.rows) == 30


def test_a_folder_without_scores_is_one_sentence(folder, tmp_path, headwise):
    refused = refusal(headwise(*arguments("curve", folder, tmp_path / "out", "--scores", tmp_path)))
    assert refused.startswith("scores: expected a folder with importance.parquet or ablation.parquet, got ")
