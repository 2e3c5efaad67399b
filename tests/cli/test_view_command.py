"""The command `headwise view`, its mistakes, and pages that commands write."""

import io
import json
import os
import re
import subprocess
import sys
import wave

import pytest

import multimodal
import tiny
from command_lines import printed_by, refusal
from headwise.attention.backends.native import installed
from headwise.cli import app as cli
from headwise.page.columns import sorted_by

QUESTION = "Which do you like better, coffee or tea?"


def in_new_process(*arguments, stdin=b"", **options):
    """Run the command in a new process, and return the finished process, whose output is bytes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-m", "headwise", *arguments], input=stdin, check=False, **options)


def contents_of(page):
    """Return the contents of a page."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="contents">(.*?)</script>', text, re.DOTALL)[1])


# -- sounds -----------------------------------------------------------------------------------------------------------


def test_a_sound_is_viewed_with_the_words_that_the_model_writes(tmp_path, headwise):
    case = multimodal.case("Whisper")
    case.model.save_pretrained(tmp_path / "model")
    case.processor.save_pretrained(tmp_path / "model")
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((8000 * case.picture((9000,))).astype("<i2").tobytes())
    options = ("--model", tmp_path / "model", "--generate", 2, "--html", tmp_path / "page.html")
    status, text, errors = headwise("view", "--audio", tmp_path / "sound.wav", *options, "--region", "0,0,50,100")
    assert (status, errors) == (0, "")
    assert "36 heads" in text
    sides = contents_of(tmp_path / "page.html")["passages"][0]["sides"]
    assert [side["name"] for side in sides] == ["sound", "decoder"]
    assert sides[0]["pictures"][0]["name"] == "sound"
    refused = headwise("view", "--lines", "--audio", tmp_path / "sound.wav", "a", "--model", tmp_path)
    assert refusal(refused) == "lines: expected no --audio, which belongs to one text, got --audio"


# -- texts ------------------------------------------------------------------------------------------------------------


def require_heads_of_the_question(status, text, errors):
    """Check that the command printed the heads of MiniLM on the question, and nothing else."""
    assert (status, errors) == (0, "")
    assert text.startswith(QUESTION)
    assert "all-MiniLM-L6-v2, 12 tokens, 72 heads" in text
    assert "\x1b" not in text


def test_view_prints_the_heads_of_a_question(headwise):
    require_heads_of_the_question(*headwise("view", QUESTION))


@pytest.mark.slow
def test_view_prints_the_heads_of_a_question_in_a_new_process():
    result = in_new_process("view", QUESTION)
    require_heads_of_the_question(result.returncode, result.stdout.decode(), result.stderr.decode())


@pytest.mark.slow
def test_smollm2_shows_all_its_heads():
    result = in_new_process("view", "-", "--model", "smollm2", stdin=QUESTION.encode())
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert "SmolLM2-135M-Instruct, 10 tokens, 270 heads" in text
    assert "sink on “Which”" in text


def test_the_text_can_come_from_standard_input(headwise, folder):
    out = printed_by(headwise("view", "-", "--layer", 0, "--model", folder / "decoder", stdin=b"w5 w6 w7"))
    assert out.startswith("w5 w6 w7\ndecoder, 3 tokens, 6 heads")


def test_a_file_with_chosen_heads_is_written_to_a_page(headwise, folder, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfw5 w6 w7")  # with a byte-order mark
    page = tmp_path / "page.html"
    options = ("--layer", 0, "--layer", 1, "--head", 2, "--html", page, "--model", folder / "encoder")
    out = printed_by(headwise("view", f"@{tmp_path / 'text.txt'}", *options))
    assert out.startswith("w5 w6 w7\nencoder, 5 tokens, 2 heads")
    assert out.count("what each word attends to") == 2
    assert f"wrote {page}" in out
    assert len(contents_of(page)["models"][0]["heads"]) == 2


def test_a_head_is_chosen_by_its_name(headwise, folder):
    command = ("view", "w5 w6 w7", "--model", folder / "decoder", "--json")
    everything = [(layer, head) for layer in range(2) for head in range(6)]
    for options, expected in (
        ((), everything),
        (("--head", "1.5"), [(1, 5)]),
        (("--head", "1.5", "--head", 0), [place for place in everything if place[1] == 0 or place == (1, 5)]),
        (("--head", "0.1", "--layer", 0), [(0, 1)]),
    ):
        rows = json.loads(printed_by(headwise(*command, *options)))["rows"]
        assert [(row["layer"], row["head"]) for row in rows] == expected


def test_lines_are_texts_and_foci_are_ranked(headwise, folder, tmp_path):
    (tmp_path / "lines.txt").write_text("w5 w6 w7\n\n   \nw7 w5 w8 w9\n")
    view = ["view", f"@{tmp_path / 'lines.txt'}", "--model", folder / "decoder", "--lines"]
    out = printed_by(headwise(*view, "--focus", "fives=w5", "--focus", "w5,w7", "--focus-kind", "received"))
    assert "decoder, 2 texts, 12 heads" in out
    assert re.search(r"^fives · attention received$", out, re.MULTILINE)
    assert re.search(r"^w5, w7 · attention received$", out, re.MULTILINE)
    assert " ".join(out.split()).count("2 texts are fewer than 5") == 2
    result = json.loads(printed_by(headwise(*view, "--focus", "fives=w5", "--json")))
    assert len(result["rows"]) == 12
    assert {"entropy", "entropy_sem", "entropy_n", "role"} <= set(result["rows"][0])
    assert [text["text"] for text in result["metadata"]["texts"]] == ["w5 w6 w7", "w7 w5 w8 w9"]
    (focus,) = result["metadata"]["foci"]
    assert (focus["name"], len(focus["heads"])) == ("fives", 12)
    excesses = [head["excess"] for head in focus["heads"]]
    assert excesses == sorted(excesses, reverse=True)


def test_generated_text_is_viewed(headwise, folder):
    out = printed_by(headwise("view", "w5 w6", "--model", folder / "decoder", "--generate", 4, "--json"))
    (text,) = json.loads(out)["metadata"]["texts"]
    assert text["parts"][0]["first_generated"] == 2
    assert len(text["parts"][0]["words"]) == 6


def test_a_truncated_text_is_reported(headwise, folder):
    options = ("--truncate", "--layer", 0, "--model", folder / "encoder")
    assert "128 tokens (the text was cut there), 6 heads" in printed_by(headwise("view", tiny.texts(600)[0], *options))


def test_a_very_long_word_is_cut(headwise, folder, tmp_path):
    (tmp_path / "long.txt").write_text("w5 " + "x" * 200_000 + " w6")
    for form in ((), ("--json",), ("--csv",), ("--head", "0.0")):
        out = printed_by(headwise("view", f"@{tmp_path / 'long.txt'}", "--model", folder / "decoder", *form))
        assert max(map(len, out.splitlines())) < 5000


# -- mistakes ---------------------------------------------------------------------------------------------------------

NO_PAGE = "html: expected a file in an existing, writable folder"
MISTAKES = pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["-"], b"", "text: expected at least one word, got an empty text"),
        (["-"], b"caf\xe9", "text: expected UTF-8 in standard input, got a byte that is not UTF-8 at offset 3"),
        (["@missing.txt"], b"", "text: expected a readable file 'missing.txt', got No such file or"),
        (["@{folder}"], b"", "text: expected a readable file '{folder}', got Is a directory"),
        (["caf\udce9"], b"", "text: expected text that can be written as UTF-8, got bytes of another encoding"),
        (["w5 " * 600], b"", "the model's limit, got 600; --truncate (truncate=True) cuts"),
        (["hi", "--head", "12"], b"", "head: expected 0 to 5, got 12"),
        (["hi", "--head", "0.97"], b"", "expected a (layer, head) of this view, got (0, 97)"),
        (["hi", "--head", "1.0", "--layer", "0"], b"", "expected a head of the layers [0], got 1.0"),
        (["hi", "--html", "{folder}/no/page.html"], b"", NO_PAGE),
        (["hi", "--html", "{folder}"], b"", NO_PAGE),
        (["hi", "--html", "/proc/page.html"], b"", "path: expected a file in an existing, writable folder"),
        (["hi", "--model", "not a/model/name"], b"", "got 'not a/model/name', and there is no such folder"),
        (["hi", "--focus", ","], b"", "focus: expected words between commas, such as coffee,tea, got ','"),
        (
            ["hi", "--focus-kind", "exchanged"],
            b"",
            "focus-kind: expected --focus, whose words receive or exchange attention, got no --focus",
        ),
        (["hi", "--generate", "1000"], b"", "generate: expected at most 128 tokens, the model's limit"),
        (["hi", "--against", "no"], b"", "against: expected --html, whose page compares both models, got no --html"),
    ],
)


@MISTAKES
def test_a_mistake_is_one_sentence_and_status_2(arguments, stdin, sentence, headwise, folder, tmp_path):
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    model = () if "--model" in arguments else ("--model", folder / "decoder")
    assert sentence.format(folder=tmp_path) in refusal(headwise("view", *arguments, *model, stdin=stdin))


@pytest.mark.slow
@pytest.mark.parametrize(MISTAKES.args[0], MISTAKES.args[1][2:5])
def test_a_mistake_in_a_new_process_is_one_sentence_and_status_2(arguments, stdin, sentence, tmp_path):
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    result = in_new_process("view", *arguments, stdin=stdin)
    refused = refusal((result.returncode, result.stdout.decode(), result.stderr.decode()))
    assert sentence.format(folder=tmp_path) in refused


# -- streams ----------------------------------------------------------------------------------------------------------


def test_help_and_the_version_are_printed_with_status_0(headwise):
    assert "view" in printed_by(headwise())
    assert "--truncate" in printed_by(headwise("view", "--help"))
    assert headwise("--version") == (0, f"headwise 0.1.0\n{installed.state()}\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_numbers_are_printed_in_encodings_without_arrows(encoding, folder, monkeypatch, as_user):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["headwise", "view", "w5 w6 w7 w8", "--model", str(folder / "decoder")])
    assert cli.run() == 0
    assert b"decoder, 4 tokens, 12 heads" in output.buffer.getvalue()
    assert b"?" in output.buffer.getvalue()  # in place of an arrow


@pytest.mark.slow
def test_numbers_are_printed_by_a_new_process_without_arrows(folder):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = in_new_process("view", "w5 w6 w7 w8", "--model", str(folder / "decoder"), env=environment)
    assert result.returncode == 0, result.stderr
    assert b"decoder, 4 tokens, 12 heads" in result.stdout


FULL = "output: No space left on device"


def test_a_full_output_device_is_one_sentence_and_status_2(folder, monkeypatch, capsys, as_user):
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "argv", ["headwise", "view", "hi", "--model", str(folder / "decoder")])
    status = cli.run()
    with pytest.raises(OSError, match="No space left on device"):
        full.close()
    assert refusal((status, *capsys.readouterr())) == FULL


@pytest.mark.slow
def test_a_full_output_device_of_a_new_process_is_one_sentence_and_status_2(folder):
    with open("/dev/full", "wb") as full:
        result = in_new_process("view", "hi", "--model", str(folder / "decoder"), stdout=full)
    assert refusal((result.returncode, "", result.stderr.decode())) == FULL


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "source"),
    [
        ("profile", ["--no-repeats", "--statistic", "evenness"], "profile"),
        ("ablate", [], "ablation"),
        ("importance", ["--method", "gradient"], "importance"),
    ],
)
def test_tables_are_written_with_the_attention_on_some_texts(headwise, folder, tmp_path, command, options, source):
    data = ["--data", folder / "data.jsonl", "--out", tmp_path / "out", "--html", tmp_path / "page.html"]
    printed_by(headwise(command, "--model", folder / "decoder", *data, *options))
    contents = contents_of(tmp_path / "page.html")
    statistics = [(statistic["source"], statistic["name"]) for statistic in contents["statistics"]]
    assert {name for name, _ in statistics} == {"4 texts", source}
    assert len(contents["models"][0]["heads"]) == 12
    assert sorted(len(passage["sides"][0]["words"]) for passage in contents["passages"]) == [7, 19, 21, 23]
    if "--statistic" in options:
        assert contents["opening"] == sorted_by(statistics.index(("profile", "evenness")))


@pytest.mark.parametrize("command", ["compare", "view"])
def test_two_models_are_compared_on_a_page(command, headwise, folder, tmp_path):
    page = tmp_path / "page.html"
    own = {
        "compare": (folder / "a", folder / "of-other"),
        "view": ("w5 w6 w7", "--model", folder / "decoder", "--against", folder / "other"),
    }[command]
    assert f"wrote {page}" in printed_by(headwise(command, *own, "--html", page))
    assert [model["name"] for model in contents_of(page)["models"]] == ["decoder", "other"]
