"""The command `headwise patch`."""

import csv
import io
import json

import pytest

import headwise as hw
import tiny
from headwise.cli.circuits import PairFlags

pytestmark = pytest.mark.usefixtures("as_user")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder, a tiny encoder, and a file of two pairs of prompts."""
    path = tmp_path_factory.mktemp("models")
    for kind, top in (("decoder", "ForCausalLM"), ("encoder", "ForMaskedLM")):
        tiny.save(path / kind, kind, top=top)
    pairs = [
        {"clean": "w13 w14 w5", "corrupted": "w6 w14 w5", "answer": " w7", "wrong": " w8"},
        {"clean": "w11 w12 w19 w13", "corrupted": "w11 w15 w19 w13", "answer": " w12", "wrong": " w8"},
    ]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def expected(function, folder, **options):
    """Return the table of a function for the pairs of the file."""
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    texts = {part: [pair[part] for pair in pairs] for part in ("clean", "corrupted", "answer", "wrong")}
    prompts = hw.patching_prompts(tiny.tokenizer("decoder"), **texts)
    return function(tiny.model("decoder", top="ForCausalLM").eval(), **prompts, **options)


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
def test_tables_equal_those_of_the_functions(folder, headwise, flags, function, options):
    arguments = ("patch", "--model", folder / "decoder", "--pairs", folder / "pairs.jsonl", *flags)
    status, out, err = headwise(*arguments, "--csv", "--quiet")
    assert (status, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    table = expected(function, folder, **options)
    assert len(rows) == len(table.rows) == 12
    for found, row in zip(rows, table.rows, strict=True):
        assert float(found["recovered"]) == pytest.approx(row.statistics["recovered"].value, rel=1e-4, abs=1e-6)


def test_a_pair_on_the_command_line_is_printed_and_saved(folder, headwise, tmp_path):
    texts = ("--clean", "w13 w14 w5", "--corrupted", "w6 w14 w5", "--answer", " w7", "--wrong", " w8")
    arguments = ("patch", "--model", folder / "decoder", *texts, "--out", tmp_path / "out", "--top", 3)
    status, out, err = headwise(*arguments, "--quiet")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "decoder: 1 prompt pair"
    saved = hw.Patching.load(tmp_path / "out")
    strongest = max(saved.rows, key=lambda row: abs(row.statistics["recovered"].value))
    assert [line.split()[0] for line in lines if line.startswith(strongest.name)] == [strongest.name]
    assert lines[-1] == "and 9 more"
    status, _, err = headwise(*arguments)
    assert status == 2
    assert err.startswith("headwise: out: expected a folder without patching.parquet, got ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "clean: expected --clean, --corrupted, --answer and --wrong, or --pairs FILE, got no --clean"),
        (("--pairs", "missing.jsonl", "--answer", " w7"), "pairs: expected a file or the texts of one pair, got both"),
        (
            ("--pairs", "bad.jsonl"),
            "pairs: expected a JSON object with the texts clean, corrupted, answer, wrong in line 1",
        ),
        (("--pairs", "latin.jsonl"), "data: expected UTF-8 in latin.jsonl, got another byte at offset "),
        (("--pairs", "half.jsonl"), "data: expected JSON in line 1 of half.jsonl, got "),
        (("--pairs", "empty.jsonl"), "pairs: expected at least one pair, got none in "),
        (("--pairs", "pairs.jsonl", "--steps", "2"), "steps: expected --method attribution, got --method activation"),
        (("--pairs", "pairs.jsonl", "--receiver", "1.2"), "receiver: expected --method path, got --method activation"),
        (
            ("--pairs", "pairs.jsonl", "--method", "path", "--receiver", "x"),
            "receiver: expected a layer and a head, such",
        ),
        (
            ("--pairs", "pairs.jsonl", "--model", "encoder"),
            "model: expected a causal language model (a decoder), such as smollm2, got ",
        ),
    ],
)
def test_mistakes_are_one_sentence(folder, headwise, monkeypatch, flags, message):
    monkeypatch.chdir(folder)
    (folder / "bad.jsonl").write_text('{"clean": "w1"}\n')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "latin.jsonl").write_bytes('{"clean": "é"}'.encode("latin-1"))
    (folder / "half.jsonl").write_text('{"clean": ')
    model = () if "--model" in flags else ("--model", "decoder")
    status, out, err = headwise("patch", *model, *flags)
    assert (status, out) == (2, "")
    assert err.startswith(f"headwise: {message}")
    assert err.count("\n") == 1


def test_lines_of_pairs_end_at_line_feeds_alone(tmp_path):
    pair = {"clean": "a\u2028b", "corrupted": "c\u0085b", "answer": " d", "wrong": " e"}
    text = json.dumps(pair, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"\ufeff{text}\r\n\n{text}\n", encoding="utf-8", newline="")
    assert PairFlags(pairs=tmp_path / "pairs.jsonl").texts() == {part: [value] * 2 for part, value in pair.items()}
