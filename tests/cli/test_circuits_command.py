"""The command `headwise circuits`."""

import csv
import io
import json

import pytest

import headwise as hw
import tiny

pytestmark = pytest.mark.usefixtures("as_user")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder with a tiny decoder and a tiny encoder."""
    path = tmp_path_factory.mktemp("models")
    for kind, top in (("decoder", "ForCausalLM"), ("encoder", "ForMaskedLM")):
        tiny.save(path / kind, kind, top=top)
    return path


def test_the_tables_are_printed_and_saved(folders, headwise, tmp_path):
    model = tiny.model("decoder", top="ForCausalLM")
    status, out, err = headwise(
        "circuits", "--model", folders / "decoder", "--out", tmp_path / "out", "--top", 3, "--distance", 2
    )
    assert (status, err) == (0, "")
    circuits = hw.circuits(model)
    scores, composition = circuits.scores(distance=2), circuits.composition(distance=2)
    lines = out.splitlines()
    assert lines[0] == "decoder: 12 heads"
    best = max(scores.rows, key=lambda row: row.statistics["copying"].value)
    assert [best.name, f"{best.statistics['copying'].value:.4f}"] == lines[4].split()[:2]
    (pair,) = composition.largest("k", 1)
    (line,) = [line for line in lines if line.startswith(pair.name)]
    k = pair.statistics["k"].value
    assert line.split() == [pair.name, f"{k:.4f}", f"{k / composition.expected:.1f}"]
    assert "0.1443 for random matrices" in out
    saved = hw.CircuitScores.load(tmp_path / "out"), hw.Composition.load(tmp_path / "out")
    for table, expected in zip(saved, (scores, composition), strict=True):
        assert [row.statistics for row in table.rows[:3]] == [
            {name: pytest.approx(value, nan_ok=True) for name, value in row.statistics.items()}
            for row in expected.rows[:3]
        ]
    status, _, err = headwise("circuits", "--model", folders / "decoder", "--out", tmp_path / "out")
    assert status == 2
    assert err.startswith("headwise: out: expected a folder without circuits.parquet, got ")
    assert headwise("circuits", "--model", folders / "decoder", "--out", tmp_path / "out", "--force", "--quiet")[0] == 0


def test_rows_are_printed_for_programs(folders, headwise):
    status, out, err = headwise("circuits", "--model", folders / "decoder", "--json", "--composition", "none")
    assert (status, err) == (0, "")
    printed = json.loads(out)
    assert len(printed["rows"]) == 12
    assert printed["metadata"]["model"]["name"] == "decoder"
    _, out, _ = headwise("circuits", "--model", folders / "decoder", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [float(row["copying"]) for row in rows] == [row["copying"] for row in printed["rows"]]


def test_an_encoder_has_norms_of_matrices_alone(folders, headwise):
    status, out, err = headwise("circuits", "--model", folders / "encoder")
    assert status == 0
    assert "heads by ov_norm" in out
    assert "random matrices" not in out
    assert "headwise: warning: the scores copying, matching are left out: the model has heads of bert" in err
    assert "headwise: warning: the composition scores q, k, v are left out: the model has heads of bert" in err


def test_mistakes_are_one_sentence(folders, headwise):
    assert headwise("circuits", "--model", folders / "none")[0] == 2
    status, _, err = headwise("circuits", "--model", folders / "decoder", "--composition", "x")
    assert (status, "expected one of q, k, v, none, got 'x'" in err) == (2, True)
