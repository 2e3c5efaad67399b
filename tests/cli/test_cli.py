"""The command `headwise view`, and mistakes on the command line."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import tiny
from headwise.cli import app as cli

QUESTION = "Which do you like better, coffee or tea?"


def headwise(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "headwise", *arguments], input=stdin, capture_output=True, check=False)


@pytest.fixture
def here(monkeypatch, capfdbinary, as_user):
    """The command line in this process: faster than a process of its own, with the same results."""

    def run(*arguments: str, stdin: bytes = b"") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["headwise", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = cli.run()
        sys.stdout.flush()
        printed = capfdbinary.readouterr()
        return SimpleNamespace(returncode=status, stdout=printed.out, stderr=printed.err)

    return run


def test_the_demo():
    result = headwise("view", QUESTION)
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    text = result.stdout.decode()
    assert text.startswith(QUESTION)
    assert "all-MiniLM-L6-v2, 12 tokens, 72 heads" in text
    assert "\x1b" not in text


def test_standard_input(here):
    result = here("view", "-", "--layer", "0", stdin=QUESTION.encode())
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert text.startswith(QUESTION)
    assert "all-MiniLM-L6-v2, 12 tokens, 12 heads" in text


@pytest.mark.slow
def test_smollm2_from_standard_input():
    result = headwise("view", "-", "--model", "smollm2", stdin=QUESTION.encode())
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert "SmolLM2-135M-Instruct, 10 tokens, 270 heads" in text
    assert "sink on Which" in text


def test_a_file_chosen_heads_and_a_page(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfcoffee or tea")  # with a byte-order mark
    page = tmp_path / "page.html"
    options = ("--layer", "0", "--layer", "3", "--head", "2", "--html", str(page))
    result = headwise("view", f"@{tmp_path / 'text.txt'}", *options)
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert "5 tokens, 2 heads" in text
    assert text.count("what each word attends to") == 2
    assert f"wrote {page}" in text
    assert "coffee" in page.read_text(encoding="utf-8")


def test_version():
    assert headwise("--version").stdout == b"headwise 0.1.0\n"


MISTAKES = pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["view", ""], b"", "text: expected at least one word, got an empty text"),
        (["view", "-"], b"", "text: expected at least one word, got an empty text"),
        (["view", "-"], b"caf\xe9", "text: expected UTF-8 in standard input, got a byte that is not UTF-8 at offset 3"),
        (["view", "@missing.txt"], b"", "text: expected a readable file 'missing.txt', got No such file or"),
        (["view", "@{folder}"], b"", "got Is a directory"),
        (
            ["view", "word " * 600],
            b"",
            "the model's limit, got 602; --truncate (truncate=True) cuts",
        ),
        (["view", "hi", "--layer", "6"], b"", "layer: expected 0 to 5, got 6"),
        (["view", "hi", "--head", "12"], b"", "head: expected 0 to 11, got 12"),
        (
            ["view", "hi", "--html", "{folder}/no/page.html"],
            b"",
            "html: expected a file in an existing, writable folder",
        ),
        (
            ["view", "hi", "--html", "{folder}"],
            b"",
            "html: expected a file in an existing, writable folder",
        ),
        (["view", "caf\udce9"], b"", "text: expected text that can be written as UTF-8, got bytes of another encoding"),
        (["view", "\u200b\u00a0"], b"", "text: expected at least one word, got an empty text"),
        (["view", "hi", "--html", "/proc/page.html"], b"", "/proc/page.html: No such file or directory"),
        (["view", "hi", "--model", "{folder}"], b"", "model: expected a folder with a config.json"),
        (["view", "hi", "--model", "not a/model/name"], b"", "a hub id that can be reached, got 'not a/model/name'"),
    ],
)


def is_one_sentence(result, sentence):
    assert result.returncode == 2
    error = result.stderr.decode()
    assert error.startswith("headwise: ")
    assert sentence in error
    assert error.count("\n") == 1


@MISTAKES
def test_a_mistake_is_one_sentence_and_status_2(here, arguments, stdin, sentence, tmp_path):
    is_one_sentence(here(*(argument.format(folder=tmp_path) for argument in arguments), stdin=stdin), sentence)


@pytest.mark.slow
@MISTAKES
def test_a_mistake_in_a_process_of_its_own(arguments, stdin, sentence, tmp_path):
    is_one_sentence(headwise(*(argument.format(folder=tmp_path) for argument in arguments), stdin=stdin), sentence)


def test_a_mistake_that_is_seen_once_the_model_is_loaded():
    is_one_sentence(headwise("view", "hi", "--layer", "6"), "layer: expected 0 to 5, got 6")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["view"], "missing argument 'text'"),
        (["vieew", "hi"], "no such command 'vieew'"),
        (["view", "hi", "--layer", "x"], "invalid value for '--layer': "),
        (["view", "hi", "-z"], "no such option: -z"),
        (["view", "hi", "there"], "got unexpected extra argument"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_sentence_and_status_2(arguments, sentence):
    result = headwise(*arguments)
    assert result.returncode == 2
    error = result.stderr.decode()
    assert error.lower().startswith(f"headwise: {sentence}")
    assert error.count("\n") == 1


def test_help():
    result = headwise()
    assert result.returncode == 0
    assert b"view" in result.stdout
    assert headwise("view", "--help").returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_arrows_still_shows_the_numbers(encoding):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "headwise", "view", QUESTION, "--layer", "0"]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    assert b"all-MiniLM-L6-v2, 12 tokens, 12 heads" in result.stdout


def test_an_output_that_is_full():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "headwise", "view", "hi"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 2
    assert result.stderr.decode().startswith("headwise: output: No space left on device")


def test_a_text_that_is_cut(here, tmp_path):
    tiny.model("encoder").save_pretrained(tmp_path)
    tiny.tokenizer("encoder").save_pretrained(tmp_path)
    result = here("view", tiny.texts(600)[0], "--truncate", "--layer", "0", "--model", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "128 tokens (the text was cut there), 6 heads" in result.stdout.decode()


@pytest.mark.slow
def test_a_text_that_is_cut_for_minilm():
    result = headwise("view", "word " * 600, "--truncate", "--layer", "0")
    assert result.returncode == 0, result.stderr
    assert "512 tokens (the text was cut there), 12 heads" in result.stdout.decode()
