"""Unknown numbers, names of heads, and files without documents, on the command line and in Python."""

import json

import pytest
import torch

import headwise as hw
import tiny
from command_lines import printed_by, refusal
from headwise.checks import head_pair
from headwise.runs.rows import MeanEstimate
from headwise.wording import UNKNOWN, number, quotient


def test_a_text_names_a_head_in_python():
    model = tiny.model("decoder", top="ForCausalLM").eval()
    with torch.no_grad():
        plain, outputs = model(tiny.TOKENS).logits, []
        for key in ((1, 5), "1.5"):
            with hw.gate(model, {key: 0.0}):
                outputs.append(model(tiny.TOKENS).logits)
    assert torch.equal(*outputs)
    assert not torch.allclose(plain, outputs[0])
    sets = ({"a": [(1, 5), (0, 2)]}, {"a": ["1.5", "0.2"]})
    costs = [hw.ablate(model, [{"input_ids": tiny.TOKENS}], hw.next_token_loss, units=units) for units in sets]
    assert costs[0].rows[0] == costs[1].rows[0]
    seen = hw.view(model, tiny.tokenizer("decoder"), "w5 w6 w7")
    assert [head.name for head in seen.select(heads=["1.5", (0, 2)]).heads] == ["0.2", "1.5"]
    for value in ("1.5.0", "1,5", "1", "x.y", 1.5):
        with pytest.raises(hw.InputError, match=f"^heads: expected heads, got {value!r}$"):
            head_pair("heads", value, of="heads")


def test_unknown_numbers_are_printed_as_a_dash(headwise, folder, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": tiny.texts(9)[0]}))
    options = ("--model", folder / "decoder", "--data", tmp_path / "one.jsonl")
    for command, more in (("sinks", ()), ("rollout", ()), ("ablate", ()), ("profile", ("--no-repeats",))):
        out = printed_by(headwise(command, *options, "--out", tmp_path / command, *more))
        assert "nan" not in out.split("profile")[0]
        assert "inf" not in out
    out = printed_by(headwise("compare", tmp_path / "profile", tmp_path / "profile"))
    assert ("nan" in out, "inf" in out, UNKNOWN in out) == (False, False, True)
    nan, inf = float("nan"), float("inf")
    assert [number(value) for value in (None, nan, -0.0, 1.23456)] == [UNKNOWN, UNKNOWN, "0.0000", "1.2346"]
    assert [quotient(value, "+.1f") for value in (nan, inf, -inf, 2.0)] == [UNKNOWN, UNKNOWN, UNKNOWN, "+2.0"]
    assert [MeanEstimate(1.0, sem, 3, 2).text("z.2f") for sem in (nan, 0.0123, 1234.5)] == [
        *("1.00", "1.00 ± 0.012", "1.00 ± 1,234"),
    ]
    assert MeanEstimate(nan, nan, 0, 0).text() == UNKNOWN


def test_a_csv_file_has_a_document_in_each_row(headwise, folder, tmp_path):
    tokenizer, texts = tiny.tokenizer("decoder"), tiny.texts(11, 5, 23)
    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(texts))
    (tmp_path / "data.csv").write_text(f"id,body\n{rows}")
    (tmp_path / "data.tsv").write_text("text\tid\n" + "".join(f"{text}\t7\n" for text in texts))
    expected = [ids.tolist() for ids in hw.Texts(texts, tokenizer).sequences]
    for file, column in (("data.csv", "body"), ("data.tsv", "text")):
        found = hw.Texts(tmp_path / file, tokenizer, column=column).sequences
        assert [ids.tolist() for ids in found] == expected
    options = ("--model", folder / "decoder", "--data", tmp_path / "data.csv", "--out", tmp_path / "out")
    sentence = f"column: expected a column of {tmp_path / 'data.csv'}, whose first row is id,body, got 'text'"
    assert refusal(headwise("profile", *options)) == f"{sentence}; --column (column=) names the one with the text"
    (tmp_path / "short.csv").write_text("text,id\nw5\n")
    with pytest.raises(hw.InputError, match=r"data: expected 2 columns in line 2 of .*short.csv, got 1"):
        hw.Texts(tmp_path / "short.csv", tokenizer).sequences  # noqa: B018


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("no.jsonl", "data: expected a file 'no.jsonl' that can be read, got No such file or directory"),
        ([], "source: expected at least one document, got none"),
        (iter(()), "source: expected at least one document, got none"),
        ("empty.txt", "data: expected at least one document, got no text in empty.txt"),
        ("folder", "data: expected a folder with files, got none in folder"),
    ],
)
def test_texts_without_documents_are_refused_when_they_are_made(source, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(hw.InputError) as caught:
        hw.Texts(source, tiny.tokenizer("decoder"))
    assert str(caught.value) == sentence
