"""The commands `headwise circuits` and `headwise patch`."""

import csv
import io
import json

import pytest

import headwise as hw
import tiny
from command_lines import printed_by, refusal
from headwise.cli.circuits import PairFlags

PARTS = ("clean", "corrupted", "answer", "wrong")


# -- circuits ---------------------------------------------------------------------------------------------------------


def test_circuits_are_printed_and_saved(folder, headwise, tmp_path):
    options = ("--model", folder / "decoder", "--out", tmp_path / "out")
    status, out, err = headwise("circuits", *options, "--top", 3, "--distance", 2)
    assert (status, err) == (0, "")
    circuits = hw.circuits(tiny.model("decoder", top="ForCausalLM"))
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
    refused = refusal(headwise("circuits", *options))
    assert refused.startswith("out: expected a folder without circuits.parquet, got ")
    result = json.loads(printed_by(headwise("circuits", *options, "--force", "--composition", "none", "--json")))
    assert (len(result["rows"]), result["metadata"]["model"]["name"]) == (12, "decoder")


def test_an_encoder_has_norms_of_matrices_alone(folder, headwise):
    status, out, err = headwise("circuits", "--model", folder / "masked")
    assert status == 0
    assert "heads by ov_norm" in out
    assert "random matrices" not in out
    assert "headwise: warning: the scores copying, matching are left out: the model has heads of bert" in err
    assert "headwise: warning: the composition scores q, k, v are left out: the model has heads of bert" in err


def test_mistakes_about_circuits_are_one_sentence(folder, headwise):
    assert refusal(headwise("circuits", "--model", folder / "none")).startswith("model: ")
    refused = refusal(headwise("circuits", "--model", folder / "decoder", "--composition", "x"))
    assert "expected one of q, k, v, none, got 'x'" in refused


# -- patching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "function", "options"),
    [
        ((), hw.activation_patching, {}),
        (("--direction", "noise"), hw.activation_patching, {"direction": "noise"}),
        (("--method", "attribution", "--steps", 2), hw.attribution_patching, {"steps": 2}),
        (("--method", "path"), hw.path_patching, {}),
        (
            ("--method", "path", "--receiver", "1.4", "--receiver", "1.0", "--input", "q", "--mlps", "recompute"),
            hw.path_patching,
            {"receivers": [(1, 4), (1, 0)], "input": "q", "mlps": "recompute"},
        ),
    ],
)
def test_tables_of_patching_equal_those_of_the_functions(folder, headwise, flags, function, options):
    arguments = ("patch", "--model", folder / "decoder", "--pairs", folder / "pairs.jsonl", *flags)
    rows = list(csv.DictReader(io.StringIO(printed_by(headwise(*arguments, "--csv", "--quiet")))))
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    texts = {part: [pair[part] for pair in pairs] for part in PARTS}
    prompts = hw.patching_prompts(tiny.tokenizer("decoder"), **texts)
    table = function(tiny.model("decoder", top="ForCausalLM").eval(), **prompts, **options)
    assert len(rows) == len(table.rows) == 12
    for found, row in zip(rows, table.rows, strict=True):
        assert float(found["recovered"]) == pytest.approx(row.statistics["recovered"].value, rel=1e-4, abs=1e-6)


def test_a_pair_on_the_command_line_is_printed_and_saved(folder, headwise, tmp_path):
    texts = ("--clean", "w13 w14 w5", "--corrupted", "w6 w14 w5", "--answer", " w7", "--wrong", " w8")
    arguments = ("patch", "--model", folder / "decoder", *texts, "--out", tmp_path / "out", "--top", 3, "--quiet")
    lines = printed_by(headwise(*arguments)).splitlines()
    assert lines[0] == "decoder: 1 prompt pair"
    saved = hw.Patching.load(tmp_path / "out")
    strongest = max(saved.rows, key=lambda row: abs(row.statistics["recovered"].value))
    assert [line.split()[0] for line in lines if line.startswith(strongest.name)] == [strongest.name]
    assert lines[-1] == "and 9 more"
    assert refusal(headwise(*arguments)).startswith("out: expected a folder without patching.parquet, got ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "clean: expected --clean, --corrupted, --answer and --wrong, or --pairs FILE, got no --clean"),
        (("--pairs", "no.jsonl", "--answer", " w7"), "pairs: expected a file or the texts of one pair, got both"),
        (("--pairs", "bad.jsonl"), "pairs: expected a JSON object with the texts clean, corrupted, answer, wrong in l"),
        (("--pairs", "latin.jsonl"), "data: expected UTF-8 in latin.jsonl, got another byte at offset "),
        (("--pairs", "half.jsonl"), "data: expected JSON in line 1 of half.jsonl, got "),
        (("--pairs", "empty.jsonl"), "pairs: expected at least one pair, got none in "),
        (("--pairs", "pairs", "--steps", "2"), "steps: expected --method attribution, got --method activation"),
        (("--pairs", "pairs", "--receiver", "1.2"), "receiver: expected --method path, got --method activation"),
        (("--pairs", "pairs", "--method", "path", "--receiver", "x"), "receiver: expected a layer and a head, such"),
    ],
)
def test_mistakes_about_patching_are_one_sentence(folder, headwise, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"clean": "w1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes('{"clean": "é"}'.encode("latin-1"))
    (tmp_path / "half.jsonl").write_text('{"clean": ')
    flags = [folder / "pairs.jsonl" if flag == "pairs" else flag for flag in flags]
    assert refusal(headwise("patch", "--model", folder / "decoder", *flags)).startswith(message)


def test_lines_of_pairs_end_at_line_feeds_alone(tmp_path):
    pair = dict(zip(PARTS, ("a\u2028b", "c\u0085b", " d", " e"), strict=True))
    text = json.dumps(pair, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"\ufeff{text}\r\n\n{text}\n", encoding="utf-8", newline="")
    assert PairFlags(pairs=tmp_path / "pairs.jsonl").texts() == {part: [value] * 2 for part, value in pair.items()}
