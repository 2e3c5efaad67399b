"""Behaviour that all commands share: help, output formats, repeated options, closed pipes, interruption."""

import csv
import fcntl
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import headwise as hw
import tiny
from headwise.cli import app as cli
from headwise.runs import checkpoint

COMMANDS = ("view", "profile", "compare", "ablate", "importance", "prune", "compress", "study")
DESCRIBED = tuple(command.__name__.replace("_", "-") for command in cli.COMMANDS[:-2])
"""Commands with three examples and a place on the page of the command line: all but `kernels` and `doctor`."""

RECIPE = """
model = "model"
[data]
path = "data.jsonl"
[verify]
path = "held-out.jsonl"
[prune]
keep = 0.5
constraint = "groups"
"""
PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder, two profiles of it, and texts."""
    path = tmp_path_factory.mktemp("commands")
    model = tiny.model("decoder", top="ForCausalLM")
    model.save_pretrained(path / "model")
    tiny.tokenizer("decoder").save_pretrained(path / "model")
    lines = [json.dumps({"text": text}) + "\n" for text in tiny.texts(11, 5, 23, 7, 12, 9)]
    (path / "data.jsonl").write_text("".join(lines[:4]))
    (path / "held-out.jsonl").write_text("".join(lines[4:]))
    (path / "recipe.toml").write_text(RECIPE)
    for name, number in (("a", 4), ("b", 3)):
        texts = hw.Texts(path / "data.jsonl", tiny.tokenizer("decoder"), limit=number)
        hw.profile(model.model, texts, repeats=False, out=path / name, title="model")
    return path


def in_new_process(*arguments, **options):
    """Run the command in a new process, and return the finished process."""
    command = [sys.executable, "-m", "headwise", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run(command, check=False, **options)


def command_line(name, folder, out):
    """Return the arguments that run a command on the tiny model."""
    model = ("--model", folder / "model")
    data = ("--data", folder / "data.jsonl", "--out", out)
    return {
        "view": ("view", "w5 w6 w5 w7 w5", *model),
        "profile": ("profile", *model, *data, "--no-repeats"),
        "compare": ("compare", folder / "a", folder / "b"),
        "ablate": ("ablate", *model, *data),
        "importance": ("importance", *model, *data),
        "prune": ("prune", *model, *data, "--keep", 0.5, "--constraint", "groups", "--force"),
        "compress": ("compress", folder / "recipe.toml", "--out", out),
        "study": (
            *("study", "--data", folder / "text.txt", "--out", out, "--heads", "1,2", "--embed-dim", 16, "--layers", 1),
            *("--params", "20k", "--context", 16, "--vocabulary", 300, "--tokens", 500, "--trials", 1, "--seeds", 1),
        ),
    }[name]


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", DESCRIBED)
def test_the_help_of_a_command_has_examples_that_can_be_parsed(command, headwise, monkeypatch):
    status, out, err = headwise(command, "-h")
    assert (status, err) == (0, "")
    assert headwise(command, "--help")[1] == out
    examples = re.findall(rf"^ {{4}}(?:.* \| )?headwise ({command} .*)$", out, re.MULTILINE)
    assert len(examples) == 3
    parsed = []
    for example in examples:
        arguments = shlex.split(example.partition(" > ")[0])
        group = cli.typer.main.get_command(cli.app)
        context = group.make_context("headwise", arguments)
        _, found, rest = group.resolve_command(context, arguments)
        parsed.append(found.make_context(command, rest, parent=context).params)
    assert all(parsed)


@pytest.mark.parametrize("command", DESCRIBED)
def test_the_page_describes_every_option_and_example(command, headwise):
    _, out, _ = headwise(command, "-h")
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", out.split("Examples:")[0])) - {"--help"}:
        assert f"`{option}" in PAGE, option
    for example in out.split("Examples:\n")[1].strip().splitlines():
        assert example.strip() in PAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_shown(shell, headwise, capsys, monkeypatch):
    monkeypatch.setenv("_HEADWISE_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit, match="^0$"):
        headwise()
    printed = capsys.readouterr()
    assert "_HEADWISE_COMPLETE" in printed.out
    assert printed.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_shown_by_a_new_process(shell):
    result = in_new_process(env=os.environ | {"_HEADWISE_COMPLETE": f"source_{shell}"})
    assert result.returncode == 0, result.stderr
    assert "_HEADWISE_COMPLETE" in result.stdout


@pytest.mark.slow
def test_options_and_their_choices_are_completed():
    def completions(line):
        environment = {"_HEADWISE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return in_new_process(env=os.environ | environment).stdout.split()

    assert completions("headwise abl") == ["ablate"]
    assert completions("headwise ablate --units ") == ["heads", "layers", "groups", "roles"]


WITHOUT_TORCH = """
import os, runpy, sys
from contextlib import suppress
lines = {lines}
for line in lines:
    sys.argv = line.split()
    with suppress(SystemExit):
        runpy.run_module("headwise", run_name="__main__")
    assert "torch" not in sys.modules, line
os.environ["_HEADWISE_COMPLETE"] = "complete_bash"
for line in {completed}:
    os.environ.update(COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
    with suppress(SystemExit):
        runpy.run_module("headwise", run_name="__main__")
    assert "torch" not in sys.modules, line
"""


def test_help_mistakes_and_completion_do_not_import_torch():
    lines = ["headwise", "headwise --help", "headwise --version", "headwise viw", "headwise view --hlep"]
    lines += ["headwise profile", "headwise ablate --units none", "headwise view hi --json --csv"]
    lines += [f"headwise {command} -h" for command in DESCRIBED]
    completed = ["headwise ", "headwise vi", "headwise ablate --un", "headwise ablate --units ", "headwise patch --"]
    code = WITHOUT_TORCH.format(lines=lines, completed=completed)
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Examples:") == len(DESCRIBED)
    assert "--units" in result.stdout.split("ablate\n")[-1]
    assert "json and --csv, got both" in result.stderr


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_json_and_csv_are_the_same_table_and_nothing_else(command, headwise, folder, tmp_path):
    (folder / "text.txt").write_text(" ".join(tiny.texts(800)))
    arguments = command_line(command, folder, tmp_path / "out")
    status, out, err = headwise(*arguments, "--json")
    assert status == 0, err
    result = json.loads(out, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert set(result) == {"metadata", "rows"}
    status, table, err = headwise(*arguments, "--csv", "--quiet")
    assert (status, err) == (0, "")
    reader = csv.DictReader(io.StringIO(table))
    lines = list(reader)
    assert reader.fieldnames == list(result["rows"][0])
    assert len(lines) == len(result["rows"]) > 1
    for line, row in zip(lines, result["rows"], strict=True):
        for name, value in row.items():
            written = json.dumps(value) if isinstance(value, list) else "" if value is None else str(value)
            assert line[name] == written or (value is None and math.isinf(float(line[name])))


@pytest.mark.parametrize(("command", "table"), [("profile", hw.Profile), ("ablate", hw.Ablation)])
def test_the_rows_are_those_of_the_saved_table(command, table, headwise, folder, tmp_path):
    status, out, err = headwise(*command_line(command, folder, tmp_path / "out"), "--json")
    assert status == 0, err
    assert err.endswith(f"wrote {tmp_path / 'out'}\n")
    saved = table.load(tmp_path / "out")
    result = json.loads(out)
    assert result["metadata"] == saved.metadata
    for row, head in zip(result["rows"], saved.heads, strict=True):
        assert {name: row[name] for name in head.identifiers} == head.identifiers
        for name, estimate in head.statistics.items():
            expected = {column: None if math.isnan(part) else part for column, part in estimate.columns(name).items()}
            assert {column: row[column] for column in expected} == expected


def test_quiet_prints_the_result_alone(headwise, folder, tmp_path):
    arguments = command_line("ablate", folder, tmp_path / "out")
    status, out, err = headwise(*arguments, "--quiet")
    assert (status, err) == (0, "")
    assert "wrote" not in out
    assert headwise(*arguments)[1] == f"{out}\nwrote {tmp_path / 'out'}\n"


def test_two_formats_are_refused(headwise):
    assert headwise("view", "hi", "--json", "--csv") == (
        2,
        "",
        "headwise: csv: expected one of --json and --csv, got both\n",
    )


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("profile", "--data", "a", "--data", "b", "--out", "c"), "--data: expected once, got 2 times"),
        (
            ("ablate", "--model", "a", "--model", "a"),
            "--model: expected once, got 2 times",
        ),
        (
            ("profile", "--repeats", "--no-repeats"),
            "--repeats: expected once, got 2 times",
        ),
        (("profile", "--data", "a", "--out", ""), "Invalid value for '--out': expected a path, got ''"),
        (("study", "--data", "", "--out", "a"), "Invalid value for '--data': expected a path, got ''"),
        (("compare", "", "a"), "Invalid value for 'A': expected a path, got ''"),
    ],
)
def test_an_ambiguous_command_line_is_refused(arguments, sentence, headwise):
    assert headwise(*arguments) == (2, "", f"headwise: {sentence}\n")


@pytest.fixture
def no_weights(monkeypatch):
    """Make loading the weights of any model an error of the test."""
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["profile", "ablate", "importance", "prune"])
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--data", "{here}/no.txt"],
            "data: expected a file '{here}/no.txt' that can be read, got No such file",
        ),
        (["--data", "{here}/long.txt"], "data: expected documents of at most 31 tokens, the context without special"),
        (["--data", "{here}/empty.txt"], "data: expected at least one document, got no text in {here}/empty.txt"),
        (
            ["--data", "{here}/data", "--out", "{here}/data/out"],
            "out: expected a folder outside of the data, which wou",
        ),
        (["--data", "{here}/data", "--out", "{here}/link"], "out: expected a folder outside of the data, which would"),
        (["--out", "{here}/empty.txt/out"], "out: expected a folder that can be created and written, got '{here}/emp"),
        (["--context", "129"], "context: expected at most 128 tokens, the model's limit, got 129"),
        (
            ["--device", "meta"],
            "device: expected a device that torch can use, got 'meta', whose tensors",
        ),
        (["--device", "abacus"], "device: expected a device that torch can use, got 'abacus'"),
        (
            ["--documents", "some"],
            "Invalid value for '--documents': expected one of whole, truncate, cut, pack, got",
        ),
        (["--dtype", "int8"], "Invalid value for '--dtype': expected one of float32, float16, bfloat16, float64, got"),
        (["--revision", "v1"], "revision: expected a model on the hub, got 'v1' of '{folder}/model', which is local"),
    ],
)
def test_inputs_are_checked_before_the_weights_are_loaded(command, more, sentence, headwise, folder, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("w5 w6")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "long.txt").write_text(tiny.texts(61)[0])
    options = {"--data": folder / "data.jsonl", "--out": tmp_path / "out", "--context": "31"}
    options |= dict(zip(more[::2], (part.format(here=tmp_path, folder=folder) for part in more[1::2]), strict=True))
    flags = [part for option in options.items() for part in option]
    flags += ["--keep", "0.5"] if command == "prune" else []
    status, out, err = headwise(command, "--model", folder / "model", *flags)
    assert (status, out) == (2, "")
    assert err.startswith(f"headwise: {sentence.format(here=tmp_path, folder=folder)}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("view", "hi", "--device", "meta"), "device: expected a device that torch can use, got 'meta'"),
        (("view", ""), "text: expected at least one word, got an empty text"),
        (("ablate", "--loss", "masked-token"), "loss: expected a tokenizer with a mask token, got one without"),
        (("ablate", "--units", "roles"), "roles: expected the folder of a profile if, and only if, --units is roles"),
        (("ablate", "--units", "roles", "--roles", "no"), "profile: expected a folder with a readable profile.parquet"),
        (("ablate", "--loss", "accuracy"), "Invalid value for '--loss': expected one of next-token, masked"),
        (("ablate", "--replacement", "random"), "Invalid value for '--replacement': expected one of zero, uniform"),
        (
            ("ablate", "--units", "head"),
            "Invalid value for '--units': expected one of heads, layers, groups, roles",
        ),
        (
            ("importance", "--loss", "embedding", "--method", "gradient"),
            "loss: expected one with a slope at the",
        ),
        (("importance", "--method", "square", "--steps", 3), "steps: expected no option with method='square', got 3"),
        (("importance", "--normalise", "--method", "hard_concrete"), "normalise: expected False for statistics that"),
    ],
)
def test_options_are_checked_before_the_weights_are_loaded(arguments, sentence, headwise, folder, tmp_path):
    data = () if arguments[0] == "view" else ("--data", folder / "data.jsonl", "--out", tmp_path / "out")
    status, _, err = headwise(*arguments, "--model", folder / "model", *data)
    assert status == 2
    assert err.startswith(f"headwise: {sentence}")
    assert err.count("\n") == 1


def test_results_in_a_hidden_folder_of_the_data_are_not_data(headwise, folder, tmp_path):
    (tmp_path / "text.txt").write_text("w5 w6 w7")
    arguments = ("profile", "--model", folder / "model", "--data", tmp_path, "--out", tmp_path / ".out", "--no-repeats")
    assert headwise(*arguments)[0] == headwise(*arguments)[0] == 0


@pytest.mark.parametrize("size", [0, 1, 11, 1000, -1, -8, -100, -1000])
def test_a_truncated_profile_is_refused(size, headwise, folder, tmp_path):
    data = (folder / "a" / "profile.parquet").read_bytes()
    (tmp_path / "profile.parquet").write_bytes(data[:size])
    status, out, err = headwise("compare", folder / "a", tmp_path)
    assert (status, out) == (2, "")
    path = str(tmp_path / "profile.parquet")
    assert (
        err
        == f"headwise: profile: expected a profile.parquet as headwise writes it, got unreadable content in {path!r}\n"
    )


def test_roles_of_another_model_are_refused(headwise, folder, tmp_path):
    """The other model has heads of the same sizes, and a folder of the same name."""
    tiny.save(tmp_path / "model", "decoder", seed=1, top="ForCausalLM")
    roles = ("--units", "roles", "--roles", folder / "a")
    data = ("--data", folder / "data.jsonl", "--out", tmp_path / "out")
    status, _, err = headwise("ablate", "--model", tmp_path / "model", *data, *roles)
    sentence = "roles: expected a profile of the model 'model', got one of 'model', whose attention weights differ"
    assert (status, err.splitlines()[-1]) == (2, f"headwise: {sentence}")
    renamed = tmp_path / "renamed"
    shutil.copytree(folder / "model", renamed)
    status, out, err = headwise("ablate", "--model", renamed, *data, *roles, "--json")
    assert status == 0, err
    assert {row["name"]: len(row["heads"]) for row in json.loads(out)["rows"]} == {
        role: len(heads) for role, heads in hw.load_profile(folder / "a").roles().items()
    }


@pytest.mark.parametrize("name", ["~nobody", "caf\udce9", "ünï 😀"])
def test_unusual_names_of_folders_are_names(name, headwise, folder, tmp_path, monkeypatch):
    """`~` is not expanded, as the shell does that; the second name is not UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    shutil.copy(folder / "data.jsonl", tmp_path / name)
    options = ("--model", folder / "model", "--data", f"{name}/data.jsonl", "--no-repeats", "--quiet", "--json")
    status, out, err = headwise("profile", *options, "--out", f"{name}/out")
    assert (status, err) == (0, "")
    assert headwise("profile", *options, "--out", f"{name}/out") == (0, out, "")
    assert headwise("compare", f"{name}/out", f"{name}/out", "--json")[0] == 0


def test_memory_that_runs_out_is_one_sentence(headwise, folder, tmp_path, monkeypatch):
    def out_of_memory(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

    monkeypatch.setattr("headwise.profile", out_of_memory)
    status, _, err = headwise(*command_line("profile", folder, tmp_path / "out"))
    expected = "device: expected enough memory, got less; a smaller --batch or --context needs less"
    assert (status, err.splitlines()[-1]) == (2, f"headwise: {expected}")


# -- streams and signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--json",), marks=pytest.mark.slow), pytest.param(("--csv",), marks=pytest.mark.slow)]
)
def test_a_reader_that_closes_the_output_gets_no_traceback(more, folder):
    read, write = os.pipe()
    os.close(read)
    result = in_new_process(
        *("compare", folder / "a", folder / "b", *more), capture_output=False, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_closed_standard_output_is_no_error(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["headwise", "compare", str(folder / "a"), str(folder / "b")])
    assert cli.run() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_closed_standard_output_of_a_new_process_is_no_error(folder):
    command = f"exec {shlex.quote(sys.executable)} -m headwise compare {folder / 'a'} {folder / 'b'} >&-"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("batches", [0, 2])
def test_an_interrupted_run_says_how_to_resume(batches, headwise, folder, tmp_path, monkeypatch):
    """Without a checkpoint there is nothing to resume."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    forward, calls = torch.nn.Embedding.forward, []

    def interrupt(*arguments):
        calls.append(None)
        if len(calls) > batches:
            raise KeyboardInterrupt
        return forward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Embedding, "forward", interrupt)
        status, out, err = headwise(*command_line("profile", folder, tmp_path / "out"), "--batch", 1)
    again = "; run the same command again to resume" if batches else ""
    assert (status, out, err.splitlines()[-1]) == (130, "", f"headwise: interrupted{again}")
    status, out, _ = headwise(*command_line("profile", folder, tmp_path / "out"), "--batch", 1)
    assert status == 0
    assert hw.load_profile(tmp_path / "out").metadata["measured"]["sequences"] == 4


def test_ctrl_c_in_a_new_process_ends_it_with_status_130(folder, tmp_path):
    os.mkfifo(tmp_path / "text")
    command = [sys.executable, "-m", "headwise", "view", f"@{tmp_path / 'text'}", "--model", str(folder / "model")]
    # Shells let processes in the background ignore Ctrl-C, which a child would inherit.
    accept = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, preexec_fn=accept, **pipes) as process:  # noqa: PLW1509
        with (tmp_path / "text").open("wb", buffering=0) as text:
            text.write(b"w5")
            while int.from_bytes(fcntl.ioctl(text, termios.FIONREAD, bytes(4)), sys.byteorder):
                time.sleep(0.01)  # until the command has read this, and waits for more
            while process.poll() is None:  # Python misses a signal just before it waits for more input
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        assert process.returncode == 130
        assert process.stderr.read() == b""


def test_a_warning_is_one_sentence(headwise, monkeypatch):
    monkeypatch.setattr("headwise.load_profile", lambda _path: __import__("warnings").warn("careful\nnow"))
    _, _, err = headwise("compare", "a", "b")
    assert err.splitlines()[0] == "headwise: warning: careful now"
