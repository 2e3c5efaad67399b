"""The commands `headwise positions`, `headwise distances` and `headwise in-context`."""

import csv
import io
import json

import pytest

import headwise as hw
import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder and texts."""
    path = tmp_path_factory.mktemp("curves")
    tiny.model("decoder", top="ForCausalLM").save_pretrained(path / "model")
    tiny.tokenizer("decoder").save_pretrained(path / "model")
    lines = [json.dumps({"text": text}) + "\n" for text in tiny.texts(21, 19, 23, 7)]
    (path / "data.jsonl").write_text("".join(lines))
    return path


def arguments(command, folder, out, *options):
    """Return the arguments of a command with the files of a folder."""
    return (command, "--model", folder / "model", "--data", folder / "data.jsonl", "--out", out, *options)


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
