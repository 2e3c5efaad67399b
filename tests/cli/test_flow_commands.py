"""The commands `headwise norm-weighted` and `headwise rollout`."""

import csv
import io
import json

import pytest

import headwise as hw
import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny encoder and texts."""
    path = tmp_path_factory.mktemp("flow")
    tiny.model("encoder").save_pretrained(path / "model")
    tiny.tokenizer("encoder").save_pretrained(path / "model")
    lines = [json.dumps({"text": text}) + "\n" for text in tiny.texts(21, 19, 23, 7)]
    (path / "data.jsonl").write_text("".join(lines))
    return path


def arguments(command, folder, out, *options):
    """Return the arguments of a command with the files of a folder."""
    return (command, "--model", folder / "model", "--data", folder / "data.jsonl", "--out", out, *options)


def found(table, name):
    """Return the sentence about the heads that differ from zero."""
    pairs = [(row.statistics[name].value, q) for row, q in zip(table.rows, table.tests()[f"{name}_q"], strict=True)]
    above, below = (sum(q <= 0.05 and sign * value > 0 for value, q in pairs) for sign in (1, -1))
    return f"{name}: {above} of {len(pairs)} heads above 0, {below} below, at a false discovery rate of 5%"


def test_norms_are_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "special", "--top", 3, "--quiet")
    status, out, err = headwise(*arguments("norm-weighted", folder, tmp_path / "out", *options))
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
    again = headwise(*arguments("norm-weighted", folder, tmp_path / "out", "--csv", "--quiet"))
    rows = list(csv.DictReader(io.StringIO(again[1])))
    assert [float(row["norm_entropy"]) for row in rows] == [row.statistics["norm_entropy"].value for row in table.rows]


def test_rollout_is_printed_and_saved(folder, tmp_path, headwise):
    options = ("--by", "self", "--top", 2, "--residual", 0.25, "--quiet")
    status, out, err = headwise(*arguments("rollout", folder, tmp_path / "out", *options))
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
    status, _, err = headwise(*arguments("rollout", folder, tmp_path / "out"))
    assert status == 2
    expected = "a folder of its own, or that of the run to resume, got another run (settings.residual differs)"
    assert err.startswith(f"headwise: out: expected {expected} in ")


def test_mistakes_are_one_sentence(folder, tmp_path, headwise):
    status, _, err = headwise(*arguments("rollout", folder, tmp_path / "other", "--residual", "1", "--quiet"))
    assert (status, err) == (2, "headwise: residual: expected a share of at least 0 and below 1, got 1.0\n")
    assert headwise(*arguments("norm-weighted", folder, tmp_path / "other", "--by", "received"))[0] == 2
