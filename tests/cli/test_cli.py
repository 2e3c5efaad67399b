"""The command `headwise view`: its output, and one-sentence errors with status 2."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import tiny
from headwise.attention.backends.native import installed
from headwise.cli import app as cli

QUESTION = "Which do you like better, coffee or tea?"


def headwise(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """Run the command in a new process and return its status and output, as bytes."""
    return subprocess.run([sys.executable, "-m", "headwise", *arguments], input=stdin, capture_output=True, check=False)


@pytest.fixture
def in_process(monkeypatch, capfdbinary, as_user):
    """Function that runs the command in this process, which is faster; returns its status and output, as bytes."""

    def run(*arguments: str, stdin: bytes = b"") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["headwise", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = cli.run()
        sys.stdout.flush()
        printed = capfdbinary.readouterr()
        return SimpleNamespace(returncode=status, stdout=printed.out, stderr=printed.err)

    return run


def test_view_prints_the_heads_of_a_question():
    result = headwise("view", QUESTION)
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    text = result.stdout.decode()
    assert text.startswith(QUESTION)
    assert "all-MiniLM-L6-v2, 12 tokens, 72 heads" in text
    assert "\x1b" not in text


def test_the_text_can_come_from_standard_input(in_process):
    result = in_process("view", "-", "--layer", "0", stdin=QUESTION.encode())
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert text.startswith(QUESTION)
    assert "all-MiniLM-L6-v2, 12 tokens, 12 heads" in text


@pytest.mark.slow
def test_smollm2_shows_all_its_heads():
    result = headwise("view", "-", "--model", "smollm2", stdin=QUESTION.encode())
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert "SmolLM2-135M-Instruct, 10 tokens, 270 heads" in text
    assert "sink on “Which”" in text


def test_a_file_with_chosen_heads_is_written_to_a_page(in_process, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfcoffee or tea")  # with a byte-order mark
    page = tmp_path / "page.html"
    options = ("--layer", "0", "--layer", "3", "--head", "2", "--html", str(page))
    result = in_process("view", f"@{tmp_path / 'text.txt'}", *options)
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    assert "5 tokens, 2 heads" in text
    assert text.count("what each word attends to") == 2
    assert f"wrote {page}" in text
    assert "coffee" in page.read_text(encoding="utf-8")


def test_the_version_is_printed(in_process):
    result = in_process("--version")
    kernels = installed.state()
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, f"headwise 0.1.0\n{kernels}\n", b"")


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
        (
            ["view", "hi", "--html", "/proc/page.html"],
            b"",
            "path: expected a file in an existing, writable folder",
        ),
        (["view", "hi", "--model", "{folder}"], b"", "model: expected a folder with a config.json"),
        (["view", "hi", "--model", "not a/model/name"], b"", "got 'not a/model/name', and there is no such folder"),
    ],
)


def assert_one_sentence(result, sentence):
    """Check that a command ended with status 2 and one line of error that contains `sentence`."""
    assert result.returncode == 2
    error = result.stderr.decode()
    assert error.startswith("headwise: ")
    assert sentence in error
    assert error.count("\n") == 1


@MISTAKES
def test_a_mistake_is_one_sentence_and_status_2(in_process, arguments, stdin, sentence, tmp_path):
    assert_one_sentence(
        in_process(*(argument.format(folder=tmp_path) for argument in arguments), stdin=stdin), sentence
    )


@pytest.mark.slow
@pytest.mark.parametrize(MISTAKES.args[0], MISTAKES.args[1][2::4])
def test_a_mistake_in_a_new_process_is_one_sentence_and_status_2(arguments, stdin, sentence, tmp_path):
    assert_one_sentence(headwise(*(argument.format(folder=tmp_path) for argument in arguments), stdin=stdin), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["view"], "missing argument 'text'"),
        (["vieew", "hi"], "no such command 'vieew'"),
        (["view", "hi", "--layer", "x"], "invalid value for '--layer': "),
        (["view", "hi", "-z"], "no such option: -z"),
        (["view", "hi", "there"], "text: expected one, got 2; put quotes around"),
    ],
)
def test_an_unparsable_command_line_is_one_sentence_and_status_2(in_process, arguments, sentence):
    result = in_process(*arguments)
    assert result.returncode == 2
    error = result.stderr.decode()
    assert error.lower().startswith(f"headwise: {sentence}")
    assert error.count("\n") == 1


def test_help_is_printed_with_status_0(in_process):
    result = in_process()
    assert result.returncode == 0
    assert b"view" in result.stdout
    result = in_process("view", "--help")
    assert result.returncode == 0
    assert b"--truncate" in result.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_numbers_are_printed_in_encodings_without_arrows(encoding, monkeypatch, as_user):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["headwise", "view", QUESTION, "--layer", "0"])
    assert cli.run() == 0
    assert b"all-MiniLM-L6-v2, 12 tokens, 12 heads" in output.buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_numbers_are_printed_by_a_new_process_in_encodings_without_arrows(encoding):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "headwise", "view", QUESTION, "--layer", "0"]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    assert b"all-MiniLM-L6-v2, 12 tokens, 12 heads" in result.stdout


def test_a_full_output_device_is_one_sentence_and_status_2(monkeypatch, capsys, as_user):
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "argv", ["headwise", "view", "hi"])
    status = cli.run()
    with pytest.raises(OSError, match="No space left on device"):
        full.close()
    assert (status, capsys.readouterr().err) == (2, "headwise: output: No space left on device\n")


@pytest.mark.slow
def test_a_full_output_device_of_a_new_process_is_one_sentence_and_status_2():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "headwise", "view", "hi"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert_one_sentence(result, "headwise: output: No space left on device")


def test_a_truncated_text_is_reported(in_process, tmp_path):
    tiny.save(tmp_path, "encoder")
    result = in_process("view", tiny.texts(600)[0], "--truncate", "--layer", "0", "--model", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "128 tokens (the text was cut there), 6 heads" in result.stdout.decode()


@pytest.mark.slow
def test_a_text_truncated_for_minilm_is_reported():
    result = headwise("view", "word " * 600, "--truncate", "--layer", "0")
    assert result.returncode == 0, result.stderr
    assert "512 tokens (the text was cut there), 12 heads" in result.stdout.decode()
