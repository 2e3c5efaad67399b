"""The commands that measure attention over data, and those that measure the loss without heads."""

import csv
import io

import pytest

import headwise as hw
import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder, a tiny encoder, texts, and importance scores of the decoder on other texts."""
    path = tmp_path_factory.mktemp("models")
    tiny.save(path / "decoder", "decoder", top="ForCausalLM")
    tiny.save(path / "encoder", "encoder")
    tiny.write_texts(path / "data.jsonl", 21, 19, 23, 7)
    tiny.write_texts(path / "validation.jsonl", 11, 9, 23)
    texts = hw.Texts(path / "validation.jsonl", tiny.tokenizer("decoder"))
    hw.importance(tiny.model("decoder", top="ForCausalLM"), texts, hw.next_token_loss, out=path / "scores")
    return path


def arguments(command, folder, out, *options, model="decoder"):
    """Return the arguments of a command with the files of a folder."""
    return (command, "--model", folder / model, "--data", folder / "data.jsonl", "--out", out, *options)


def found(table, name):
    """Return the sentence about the heads that differ from zero."""
    pairs = [(row.statistics[name].value, q) for row, q in zip(table.rows, table.tests()[f"{name}_q"], strict=True)]
    above, below = (sum(q <= 0.05 and sign * value > 0 for value, q in pairs) for sign in (1, -1))
    return f"{name}: {above} of {len(pairs)} heads above 0, {below} below, at a false discovery rate of 5%"


def test_norms_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "special", "--top", 3, "--quiet")
    status, out, err = headwise(*arguments("norm-weighted", folder, tmp_path / "out", *options, model="encoder"))
    assert (status, err) == (0, "")
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
    again = headwise(*arguments("norm-weighted", folder, tmp_path / "out", "--csv", "--quiet", model="encoder"))
    rows = list(csv.DictReader(io.StringIO(again[1])))
    assert [float(row["norm_entropy"]) for row in rows] == [row.statistics["norm_entropy"].value for row in table.rows]


def test_rollout_is_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "self", "--top", 2, "--residual", 0.25, "--quiet")
    status, out, err = headwise(*arguments("rollout", folder, tmp_path / "out", *options, model="encoder"))
    assert (status, err) == (0, "")
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
    status, _, err = headwise(*arguments("rollout", folder, tmp_path / "out", model="encoder"))
    assert status == 2
    expected = "a folder of its own, or that of the run to resume, got another run (settings.residual differs)"
    assert err.startswith(f"headwise: out: expected {expected} in ")


def test_mistakes_about_flow_are_one_sentence(folder, tmp_path, headwise):
    status, _, err = headwise(
        *arguments("rollout", folder, tmp_path / "other", "--residual", "1", "--quiet", model="encoder")
    )
    assert (status, err) == (2, "headwise: residual: expected a share of at least 0 and below 1, got 1.0\n")
    assert (
        headwise(*arguments("norm-weighted", folder, tmp_path / "other", "--by", "received", model="encoder"))[0] == 2
    )


def test_positions_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "distance", "--top", 3, "--edges", "0,4,16,64", "--quiet")
    status, out, err = headwise(*arguments("positions", folder, tmp_path / "out", *options))
    assert (status, err) == (0, "")
    curves = hw.PositionCurves.load(tmp_path / "out")
    lines = out.splitlines()
    assert lines[3].split() == ["slope", "q", "0-3", "4-15", "16-63"]
    slopes = {row.name: row.statistics["distance_slope"].value for row in curves.slopes.rows}
    steepest = sorted(slopes, key=lambda name: -abs(slopes[name]))[:3]
    assert [line.split()[0] for line in lines[4:7]] == steepest
    assert [float(line.split()[1]) for line in lines[4:7]] == pytest.approx([slopes[n] for n in steepest], abs=1e-3)
    assert lines[7] == "and 9 more"
    again = headwise(*arguments("positions", folder, tmp_path / "out", "--edges", "0,4,16,64", "--csv", "--quiet"))
    rows = list(csv.DictReader(io.StringIO(again[1])))
    assert [float(row["entropy"]) for row in rows] == [row.statistics["entropy"].value for row in curves.rows]


def test_distances_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--quantiles", "0.25,0.9", "--first", 2, "--top", 2, "--quiet")
    status, out, err = headwise(*arguments("distances", folder, tmp_path / "out", *options))
    assert (status, err) == (0, "")
    distances = hw.AttentionDistances.load(tmp_path / "out")
    names = ["distance_25", "distance_90", "distance_25_with_first", "distance_90_with_first"]
    assert list(distances.statistics) == names
    lines = out.splitlines()
    assert lines[3].split() == names
    furthest = max(distances.rows, key=lambda row: row.statistics["distance_90"].value)
    assert lines[4].split()[0] == furthest.name


def test_in_context_is_printed_and_saved(folder, tmp_path, headwise, monkeypatch):
    options = ("--early", 5, "--late", 19, "--window", 3, "--top", 2, "--replacement", "both", "--quiet")
    status, out, err = headwise(*arguments("in-context", folder, tmp_path / "out", *options))
    assert (status, err) == (0, "")
    scores = hw.InContextScores.load(tmp_path / "out")
    assert list(scores.statistics) == ["change_zero", "change_mean", "induction_random"]
    assert scores.metadata["measured"]["sequences"] == 3
    score = scores.score
    assert f"in-context learning score {score.value:.4f} ± {score.sem:.2g}: loss " in out
    assert "at token 5, means over the 3 tokens up to each" in out
    status, _, err = headwise(*arguments("in-context", folder, tmp_path / "out"))
    assert status == 2
    assert err.startswith("headwise: out: expected a folder without in_context.parquet, got ")
    (tmp_path / "out" / "in_context.parquet").unlink()  # as in an interrupted run
    assert headwise(*arguments("in-context", folder, tmp_path / "out", *options))[0] == 0
    (tmp_path / "out" / "in_context.parquet").unlink()
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)
    status, _, err = headwise(*arguments("in-context", folder, tmp_path / "out", "--early", 4, *options[2:]))
    assert status == 2
    assert "got another run (settings.loss differs) in " in err


def test_mistakes_are_one_sentence(folder, tmp_path, headwise):
    assert headwise(*arguments("positions", folder, tmp_path / "out", "--edges", "4,4"))[0] == 2
    status, _, err = headwise(*arguments("distances", folder, tmp_path / "out", "--quantiles", "0.5,x"))
    assert (status, err.count("\n")) == (2, 1)
    status, _, err = headwise(*arguments("in-context", folder, tmp_path / "out"))
    assert err.startswith("headwise: dataset: expected sequences of at least 500 tokens, got 23 in the longest one")


def test_a_curve_is_printed_and_saved(folder, tmp_path, headwise):
    scores = str(folder / "scores")
    options = ("--scores", scores, "--random", 2, "--quiet")
    status, out, err = headwise(*arguments("curve", folder, tmp_path / "out", *options))
    assert (status, err) == (0, "")
    curve = hw.PruningCurve.load(tmp_path / "out")
    rows = [line.split() for line in out.splitlines()[-len(curve.curve(scores)) :]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 5, 6, 7, 8, 10, 11, 12]
    losses = [point.statistics["loss"].value for point in curve.curve(scores)]
    assert [float(row[2]) for row in rows] == pytest.approx(losses, abs=1e-4)
    assert len(curve.rows) == 30


def test_a_folder_without_scores_is_one_sentence(folder, tmp_path, headwise):
    status, _, err = headwise(*arguments("curve", folder, tmp_path / "out", "--scores", tmp_path))
    assert status == 2
    assert err.startswith("headwise: scores: expected a folder with importance.parquet or ablation.parquet, got ")
