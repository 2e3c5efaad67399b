"""Mistakes that several commands refuse, or mend, in one sentence."""

import json

import pytest
import torch

import headwise as hw
import tiny
from headwise.checks import head_pair
from headwise.runs.rows import MeanEstimate
from headwise.wording import UNKNOWN, number, quotient


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder, a tiny encoder, and texts in several formats."""
    path = tmp_path_factory.mktemp("mistakes")
    for kind, top in (("decoder", "ForCausalLM"), ("encoder", "")):
        tiny.save(path / kind, kind, top=top)
    texts = tiny.texts(11, 5, 23)
    (path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (path / "data.csv").write_text("id,body\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(texts)))
    (path / "data.tsv").write_text("text\tid\n" + "".join(f"{text}\t7\n" for text in texts))
    return path


@pytest.fixture
def no_weights(monkeypatch):
    """Make loading the weights of any model an error of the test."""
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("view", "hello", "world"), 'text: expected one, got 2; put quotes around a value with spaces: "hello world"'),
        (("view", "a", "--layer", "1", "b", 'c"d'), 'got 3; put quotes around a value with spaces: "a b c\\"d"'),
        (("compare", "a", "b", "c"), 'b: expected one, got 2; put quotes around a value with spaces: "b c"'),
        (
            ("profile", "my file.txt"),
            "expected options alone, got 'my file.txt'; put quotes around a value with spaces",
        ),
        (("view", "hi", "--head", "5.x"), "expected a head such as 5.11 (layer 5, head 11) or 11, got '5.x'"),
    ],
)
def test_arguments_that_cannot_be_used_are_explained(arguments, sentence, headwise):
    status, out, err = headwise(*arguments)
    assert (status, out) == (2, "")
    assert err.endswith(f"{sentence}\n")
    assert err.count("\n") == 1


def test_a_head_is_chosen_by_its_name(headwise, folder):
    command = ("view", "w5 w6 w7", "--model", folder / "decoder", "--json")
    names = [(row["layer"], row["head"]) for row in json.loads(headwise(*command)[1])["rows"]]
    (layer, head) = names[-1]
    for options, expected in (
        (("--head", f"{layer}.{head}"), [(layer, head)]),
        (("--head", f"{layer}.{head}", "--head", 0), [name for name in names if name[1] == 0 or name == (layer, head)]),
        (("--head", "0.1", "--layer", 0), [(0, 1)]),
    ):
        rows = json.loads(headwise(*command, *options)[1])["rows"]
        assert [(row["layer"], row["head"]) for row in rows] == expected
    assert "expected a head of the layers [0], got 1.0" in headwise(*command, "--layer", 0, "--head", "1.0")[2]
    assert "expected a (layer, head) of this view, got (0, 97)" in headwise(*command, "--head", "0.97")[2]


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


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["in-context", "localize", "name-movers", "retrieval", "patch"])
def test_a_command_for_decoders_refuses_an_encoder_and_defaults_to_a_decoder(command, headwise, folder, tmp_path):
    data = ("--data", folder / "data.jsonl") if command in ("in-context", "localize") else ()
    out = ("--out", tmp_path / "out")
    prompts = [part for name in ("clean", "corrupted", "answer", "wrong") for part in (f"--{name}", "a")]
    more = prompts if command == "patch" else ()
    status, _, err = headwise(command, *data, *out, *more, "--model", folder / "encoder")
    sentence = "headwise: model: expected a causal language model (a decoder), such as smollm2, got 'encoder'"
    assert (status, err) == (2, f"{sentence}\n")
    assert "[default: smollm2]" in headwise(command, "--help")[1]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["ablate", "importance"])
def test_a_loss_that_a_model_does_not_have_is_refused(command, headwise, folder, tmp_path):
    options = ("--model", folder / "encoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
    status, _, err = headwise(command, *options, "--loss", "next-token")
    got = "next-token, the loss of a causal language model, which encoder is not"
    assert (status, err) == (2, f"headwise: loss: expected a loss of this model: embedding, got {got}\n")


@pytest.mark.parametrize("epsilon", ["3", "1", "0", "-0.1", "nan"])
def test_a_threshold_of_sinks_that_no_head_can_cross_is_refused(epsilon, headwise, folder, tmp_path):
    options = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
    status, _, err = headwise("sinks", *options, f"--epsilon={epsilon}")
    assert status == 2
    assert err.startswith("headwise: epsilon: expected a ")


def test_unknown_numbers_are_printed_as_a_dash(headwise, folder, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": tiny.texts(9)[0]}))
    options = ("--model", folder / "decoder", "--data", tmp_path / "one.jsonl")
    for command, more in (("sinks", ()), ("rollout", ()), ("ablate", ()), ("profile", ("--no-repeats",))):
        status, out, err = headwise(command, *options, "--out", tmp_path / command, *more)
        assert status == 0, err
        assert "nan" not in out.split("profile")[0]
        assert "inf" not in out
    status, out, err = headwise("compare", tmp_path / "profile", tmp_path / "profile")
    assert (status, "nan" in out, "inf" in out, UNKNOWN in out) == (0, False, False, True)
    nan, inf = float("nan"), float("inf")
    assert [number(value) for value in (None, nan, -0.0, 1.23456)] == [UNKNOWN, UNKNOWN, "0.0000", "1.2346"]
    assert [quotient(value, "+.1f") for value in (nan, inf, -inf, 2.0)] == [UNKNOWN, UNKNOWN, UNKNOWN, "+2.0"]
    assert [MeanEstimate(1.0, sem, 3, 2).text("z.2f") for sem in (nan, 0.0123, 1234.5)] == [
        *("1.00", "1.00 ± 0.012", "1.00 ± 1,234"),
    ]
    assert MeanEstimate(nan, nan, 0, 0).text() == UNKNOWN


def test_a_csv_file_has_a_document_in_each_row(headwise, folder, tmp_path):
    tokenizer = tiny.tokenizer("decoder")
    expected = hw.Texts(folder / "data.jsonl", tokenizer).sequences
    for file, column in (("data.csv", "body"), ("data.tsv", "text")):
        found = hw.Texts(folder / file, tokenizer, column=column).sequences
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    options = ("--model", folder / "decoder", "--data", folder / "data.csv", "--out", tmp_path / "out")
    status, _, err = headwise("profile", *options)
    sentence = f"column: expected a column of {folder / 'data.csv'}, whose first row is id,body, got 'text'"
    assert (status, err) == (2, f"headwise: {sentence}; --column (column=) names the one with the text\n")
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


@pytest.mark.parametrize(
    ("command", "first", "changed", "difference"),
    [
        ("profile", ("--no-repeats",), ("--repeats",), "settings.repeats"),
        ("ablate", (), ("--replacement", "uniform"), "settings.replacement"),
        ("importance", (), ("--normalise",), "settings.normalise"),
        ("distances", (), ("--limit", 2), "data.limit"),
        ("distances", (), ("--quantiles", "0.9"), "settings.quantiles"),
        ("distances", ("--quantiles", "0.9,0.5"), ("--first", 2), "settings.first"),
        ("positions", (), ("--batch", 1), "data.batch"),
        ("positions", (), ("--edges", "0,4,9"), "settings.edges"),
    ],
)
def test_another_run_in_the_folder_is_refused_before_the_model_is_loaded(
    command, first, changed, difference, headwise, folder, tmp_path, monkeypatch
):
    options = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path)
    status, _, err = headwise(command, *options, *first)
    assert status == 0, err
    assert headwise(command, *options, *first)[0] == 0
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)
    status, _, err = headwise(command, *options, *(changed if changed[0] == "--repeats" else (*first, *changed)))
    assert status == 2
    assert f"got another run ({difference} differs) in {str(tmp_path)!r}; " in err


def test_only_commands_that_resume_say_so(headwise):
    resuming = dict.fromkeys(("sinks", "rollout", "profile", "ablate", "retrieval"), True)
    for command, resumes in (resuming | dict.fromkeys(("circuits", "patch"), False)).items():
        assert ("An interrupted run" in " ".join(headwise(command, "--help")[1].split())) == resumes


def test_a_very_long_word_is_cut(headwise, folder, tmp_path):
    (tmp_path / "long.txt").write_text("w5 " + "x" * 200_000 + " w6")
    for form in ((), ("--json",), ("--csv",), ("--head", "0.0")):
        status, out, err = headwise("view", f"@{tmp_path / 'long.txt'}", "--model", folder / "decoder", *form)
        assert status == 0, err
        assert max(map(len, out.splitlines())) < 5000


def test_a_device_that_torch_lacks_has_a_reason(headwise):
    _, _, err = headwise("view", "hi", "--device", "cuda:97")
    assert "device: expected a device that torch can use, got 'cuda:97': " in err
    assert "; use --device cpu" in err
