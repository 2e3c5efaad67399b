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
from command_lines import files_in, printed_by, refusal
from headwise.cli import app as cli
from headwise.runs import checkpoint

DESCRIBED = tuple(command.__name__.replace("_", "-") for command in cli.COMMANDS[:-2])
"""Commands with three examples and a place on the page of the command line: all but `kernels` and `doctor`."""

TABLES = {
    **{"view": None, "profile": hw.Profile, "compare": None, "positions": hw.PositionCurves},
    **{"distances": hw.AttentionDistances, "norm-weighted": hw.NormWeighted, "rollout": hw.Rollout},
    **{"ablate": hw.Ablation, "importance": hw.Importance, "curve": hw.PruningCurve, "in-context": hw.InContextScores},
    **{"circuits": hw.CircuitScores, "patch": hw.Patching, "prune": None, "merge": None, "compress": None},
    **{"sinks": hw.SinkRate, "study": hw.Study},
}
"""Commands that run on the tiny decoder, with the class of the table that they save."""

WITH_OTHER_INPUTS = {"retrieval", "name-movers", "dependencies", "localize", "monitor"}
"""Commands that need another model, other words, a treebank or a monitored training, or write a file. Tests of their
own run them.
"""

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")


def in_new_process(*arguments, **options):
    """Run the command in a new process, and return the finished process."""
    command = [sys.executable, "-m", "headwise", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run(command, check=False, **options)


def command_line(name, folder, out):
    """Return the arguments that run a command on the tiny decoder."""
    model, data = ("--model", folder / "decoder"), ("--data", folder / "data.jsonl")
    own = {
        "view": ("w5 w6 w5 w7 w5", *model),
        "profile": ("--no-repeats",),
        "compare": (folder / "a", folder / "b"),
        "curve": ("--scores", folder / "scores", "--random", 2),
        "in-context": ("--early", 2, "--late", 5, "--window", 1, "--no-repeats", "--force"),
        "circuits": (*model, "--out", out, "--force"),
        "patch": (*model, "--pairs", folder / "pairs.jsonl", "--out", out, "--force"),
        "prune": ("--keep", 0.5, "--constraint", "groups", "--force"),
        "merge": ("--kv-heads", 1, "--force"),
        "compress": (folder / "recipe.toml", "--out", out),
        "study": (
            *("--data", out.parent / "text.txt", "--out", out, "--heads", "1,2", "--embed-dim", 16, "--layers", 1),
            *("--params", "20k", "--context", 16, "--vocabulary", 300, "--tokens", 500, "--trials", 1, "--seeds", 1),
        ),
    }.get(name, ())
    is_run = name not in ("view", "compare", "circuits", "patch", "compress", "study")
    return (name, *(*model, *data, "--out", out) * is_run, *own)


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


def test_every_command_is_run():
    assert {*DESCRIBED} == {*TABLES} | WITH_OTHER_INPUTS


@pytest.mark.parametrize(("command", "table"), TABLES.items(), ids=TABLES)
def test_json_and_csv_are_the_rows_of_the_saved_table_and_nothing_else(command, table, headwise, folder, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(tiny.texts(800)))
    arguments = command_line(command, folder, tmp_path / "out")
    status, out, err = headwise(*arguments, "--json")
    assert status == 0, err
    assert "--out" not in arguments or err.endswith(f"wrote {tmp_path / 'out'}\n")
    result = json.loads(out, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert set(result) == {"metadata", "rows"}
    status, text, err = headwise(*arguments, "--csv", "--quiet")
    assert (status, err) == (0, "")
    reader = csv.DictReader(io.StringIO(text))
    lines = list(reader)
    assert reader.fieldnames == list(result["rows"][0])
    assert len(lines) == len(result["rows"]) >= 1 + (command != "merge")
    for line, row in zip(lines, result["rows"], strict=True):
        for name, value in row.items():
            written = json.dumps(value) if isinstance(value, list) else "" if value is None else str(value)
            assert line[name] == written or (value is None and math.isinf(float(line[name])))
    if table is not None:
        saved = table.load(tmp_path / "out")
        assert {name: result["metadata"][name] for name in saved.metadata} == saved.metadata
        for row, expected in zip(result["rows"], saved.records(), strict=True):
            for name, value in expected.items():
                assert row[name] == (None if isinstance(value, float) and not math.isfinite(value) else value)


def test_quiet_prints_the_result_alone(headwise, folder, tmp_path):
    arguments = command_line("ablate", folder, tmp_path / "out")
    status, out, err = headwise(*arguments, "--quiet")
    assert (status, err) == (0, "")
    assert "wrote" not in out
    assert headwise(*arguments)[1] == f"{out}\nwrote {tmp_path / 'out'}\n"


def test_two_formats_are_refused(headwise):
    assert refusal(headwise("view", "hi", "--json", "--csv")) == "csv: expected one of --json and --csv, got both"


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("profile", "--data", "a", "--data", "b", "--out", "c"), "--data: expected once, got 2 times"),
        (("ablate", "--model", "a", "--model", "a"), "--model: expected once, got 2 times"),
        (("profile", "--repeats", "--no-repeats"), "--repeats: expected once, got 2 times"),
        (("profile", "--data", "a", "--out", ""), "Invalid value for '--out': expected a path, got ''"),
        (("study", "--data", "", "--out", "a"), "Invalid value for '--data': expected a path, got ''"),
        (("compare", "", "a"), "Invalid value for 'A': expected a path, got ''"),
        (("view",), "text: expected a text, --image or --audio, got none of them"),
        (("vieew", "hi"), "No such command 'vieew'"),
        (("view", "hi", "--layer", "x"), "Invalid value for '--layer': "),
        (("view", "hi", "-z"), "No such option: -z"),
        (("view", "hi", "--head", "5.x"), "Invalid value for '--head': expected a head such as 5.11 (layer 5, "),
        (("view", "hello", "you"), 'text: expected one, got 2; put quotes around a value with spaces: "hello you"'),
        (
            ("view", "a", "--layer", "1", "b", 'c"d'),
            'text: expected one, got 3; put quotes around a value with spaces: "a b c\\"d"',
        ),
        (("compare", "a", "b", "c"), 'b: expected one, got 2; put quotes around a value with spaces: "b c"'),
        (("profile", "my file"), "expected options alone, got 'my file'; put quotes around a value with spaces"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_explained(arguments, sentence, headwise):
    assert refusal(headwise(*arguments)).lower().startswith(sentence.lower())


OUTSIDE = "out: expected a folder outside of the data, which would be read as data, got "


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["profile", "ablate", "importance", "prune"])
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--data", "{here}/no"], "data: expected a file '{here}/no' that can be read, got No such file or directory"),
        (
            ["--context", "16"],
            "data: expected documents of at most 16 tokens, the context without special tokens, got 21 in line 1 of "
            "{folder}/data.jsonl; --documents cut, pack or truncate (documents=...) accepts longer ones",
        ),
        (["--data", "{here}/empty.txt"], "data: expected at least one document, got no text in {here}/empty.txt"),
        (["--data", "{here}/binary.txt"], "data: expected text in {here}/binary.txt, got a binary file"),
        (["--data", "{here}/latin.txt"], "data: expected UTF-8 in {here}/latin.txt, got another byte at offset 3"),
        (["--data", "{here}/none"], "data: expected a folder with files, got none in {here}/none"),
        (["--column", "title"], "column: expected one of line 1 of {folder}/data.jsonl, which has text, got 'title'"),
        (["--data", "{here}/data", "--out", "{here}/data/out"], OUTSIDE),
        (["--data", "{here}/data", "--out", "{here}/link"], OUTSIDE),
        (["--out", "{here}/empty.txt/out"], "out: expected a folder that can be created and written, got '{here}/emp"),
        (["--context", "129"], "context: expected at most 128 tokens, the model's limit, got 129"),
        (["--device", "meta"], "device: expected a device that torch can use, got 'meta', whose tensors have"),
        (["--device", "abacus"], "device: expected a device that torch can use, got 'abacus'; use --device cpu ("),
        (["--documents", "some"], "Invalid value for '--documents': expected one of whole, truncate, cut, pack, got"),
        (["--dtype", "int8"], "Invalid value for '--dtype': expected one of float32, float16, bfloat16, float64, got"),
        (["--revision", "v1"], "revision: expected a model on the hub, got 'v1' of '{folder}/decoder', which is local"),
    ],
)
def test_inputs_are_checked_before_the_weights_are_loaded(command, more, sentence, headwise, folder, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "data" / "text.txt").write_text("w5 w6")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    before = files_in(tmp_path)
    options = {"--data": folder / "data.jsonl", "--out": tmp_path / "out", "--context": "31"}
    options |= dict(zip(more[::2], (part.format(here=tmp_path, folder=folder) for part in more[1::2]), strict=True))
    flags = [part for option in options.items() for part in option]
    flags += ["--keep", "0.5"] if command == "prune" else []
    refused = refusal(headwise(command, "--model", folder / "decoder", *flags))
    assert refused.startswith(sentence.format(here=tmp_path, folder=folder))
    assert files_in(tmp_path) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("view", "hi", "--device", "meta"), "device: expected a device that torch can use, got 'meta'"),
        (("view", "hi", "--device", "cuda:97"), "device: expected a device that torch can use, got 'cuda:97': "),
        (("view", ""), "text: expected at least one word, got an empty text"),
        (("ablate", "--loss", "masked-token"), "loss: expected a tokenizer with a mask token, got one without"),
        (("ablate", "--units", "roles"), "roles: expected the folder of a profile if, and only if, --units is roles"),
        (("ablate", "--units", "roles", "--roles", "no"), "profile: expected a folder with a readable profile.parquet"),
        (("ablate", "--units", "head"), "Invalid value for '--units': expected one of heads, layers, groups, roles"),
        (("ablate", "--loss", "accuracy"), "Invalid value for '--loss': expected one of next-token, masked"),
        (("ablate", "--replacement", "random"), "Invalid value for '--replacement': expected one of zero, uniform"),
        (
            ("ablate", "--units", "layers", "--html", "page.html"),
            "html: expected --units heads, whose effects a page shows, got --units layers",
        ),
        (("importance", "--loss", "embedding", "--method", "gradient"), "loss: expected one with a slope at the"),
        (("importance", "--method", "square", "--steps", 3), "steps: expected no option with method='square', got 3"),
        (("importance", "--normalise", "--method", "hard_concrete"), "normalise: expected False for statistics that"),
        (("norm-weighted", "--by", "received"), "Invalid value for '--by': expected one of entropy, "),
        (("positions", "--edges", "4,x"), "Invalid value: expected numbers such as 1,2,4, got '4,x'"),
        (("distances", "--quantiles", "0.5,x"), "Invalid value: expected numbers such as 0.5,0.9, got '0.5,x'"),
        (("profile", "--statistic", "evenness"), "statistic: expected --html, whose page opens on it, got no --html"),
        (("in-context",), "dataset: expected sequences of at least 500 tokens, got 23 in the longest one"),
        *((("sinks", f"--epsilon={value}"), "epsilon: expected a ") for value in ("1", "nan")),
    ],
)
def test_options_are_checked(arguments, sentence, headwise, folder, tmp_path, request):
    if arguments[0] in ("view", "ablate", "importance"):
        request.getfixturevalue("no_weights")
    data = () if arguments[0] == "view" else ("--data", folder / "data.jsonl", "--out", tmp_path / "out", "--quiet")
    assert refusal(headwise(*arguments, "--model", folder / "decoder", *data)).startswith(sentence)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["ablate", "importance"])
def test_a_loss_that_a_model_does_not_have_is_refused(command, headwise, folder, tmp_path):
    options = ("--model", folder / "encoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out", "--quiet")
    got = "next-token, the loss of a causal language model, which encoder is not"
    refused = refusal(headwise(command, *options, "--loss", "next-token"))
    assert refused == f"loss: expected a loss of this model: embedding, got {got}"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["in-context", "localize", "name-movers", "retrieval", "patch"])
def test_a_command_for_decoders_refuses_an_encoder_and_defaults_to_a_decoder(command, headwise, folder, tmp_path):
    data = ("--data", folder / "data.jsonl") if command in ("in-context", "localize") else ()
    more = ("--pairs", folder / "pairs.jsonl") if command == "patch" else ()
    refused = refusal(headwise(command, *data, *more, "--out", tmp_path / "out", "--model", folder / "encoder"))
    assert refused == "model: expected a causal language model (a decoder), such as smollm2, got 'encoder'"
    assert "[default: smollm2]" in headwise(command, "--help")[1]


ANOTHER = (
    "out: expected a folder of its own, or that of the run to resume, got another run{} in '{}'; "
    "--force (force=True) replaces it"
)


@pytest.mark.parametrize(
    ("command", "first", "changed", "difference"),
    [
        ("profile", ("--no-repeats",), ("--repeats",), "settings.repeats"),
        ("ablate", (), ("--replacement", "uniform"), "settings.replacement"),
        ("importance", (), ("--normalise",), "settings.normalise"),
        ("rollout", (), ("--residual", 0.25), "settings.residual"),
        ("distances", (), ("--limit", 2), "data.limit"),
        ("distances", (), ("--quantiles", "0.9"), "settings.quantiles"),
        ("distances", ("--quantiles", "0.9,0.5"), ("--first", 2), "settings.first"),
        ("positions", (), ("--batch", 1), "data.batch"),
        ("positions", (), ("--edges", "0,4,9"), "settings.edges"),
    ],
)
def test_a_finished_run_is_kept_and_another_is_refused_before_the_model_is_loaded(
    command, first, changed, difference, headwise, folder, tmp_path, request
):
    options = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path, "--quiet")
    out, saved = printed_by(headwise(command, *options, *first)), files_in(tmp_path)
    assert headwise(command, *options, *first) == (0, out, "")
    request.getfixturevalue("no_weights")
    more = changed if changed[0] == "--repeats" else (*first, *changed)
    refused = refusal(headwise(command, *options, *more))
    assert refused == ANOTHER.format(f" ({difference} differs)", str(tmp_path))
    assert files_in(tmp_path) == saved


def test_a_foreign_table_is_refused_and_force_replaces_a_run(headwise, folder, tmp_path):
    arguments = command_line("profile", folder, tmp_path)
    (tmp_path / "profile.parquet").write_text("mine")
    assert refusal(headwise(*arguments)) == ANOTHER.format("", str(tmp_path))
    assert (tmp_path / "profile.parquet").read_text() == "mine"
    file = tmp_path / "profile.parquet"
    expected = f"out: expected a folder that can be created and written, got '{file}'"
    assert refusal(headwise(*command_line("profile", folder, file))) == expected
    printed_by(headwise(*arguments, "--limit", 3, "--force"))
    assert hw.load_profile(tmp_path).metadata["measured"]["sequences"] == 3


def test_only_commands_that_resume_say_so(headwise):
    resuming = dict.fromkeys(("sinks", "rollout", "profile", "ablate", "retrieval"), True)
    for command, resumes in (resuming | dict.fromkeys(("circuits", "patch"), False)).items():
        assert ("An interrupted run" in " ".join(headwise(command, "--help")[1].split())) == resumes


def test_results_in_a_hidden_folder_of_the_data_are_not_data(headwise, folder, tmp_path):
    (tmp_path / "text.txt").write_text("w5 w6 w7")
    arguments = ("sinks", "--model", folder / "decoder", "--data", tmp_path, "--out", tmp_path / ".out")
    assert headwise(*arguments)[0] == headwise(*arguments)[0] == 0


@pytest.mark.parametrize("size", [0, 1, 11, 1000, -1, -8, -100, -1000, None])
def test_a_missing_or_truncated_profile_is_refused(size, headwise, folder, tmp_path):
    expected = "a folder with a readable profile.parquet, got No such file or directory:"
    if size is not None:
        (tmp_path / "profile.parquet").write_bytes((folder / "a" / "profile.parquet").read_bytes()[:size])
        expected = "a profile.parquet as headwise writes it, got unreadable content in"
    refused = refusal(headwise("compare", folder / "a", tmp_path))
    assert refused == f"profile: expected {expected} {str(tmp_path / 'profile.parquet')!r}"


def test_roles_of_another_model_are_refused(headwise, folder, tmp_path):
    """The other model has heads of the same sizes, and a folder of the same name."""
    shutil.copytree(folder / "other", tmp_path / "decoder")
    roles = ("--units", "roles", "--roles", folder / "a", "--quiet")
    data = ("--data", folder / "data.jsonl", "--out", tmp_path / "out")
    refused = refusal(headwise("ablate", "--model", tmp_path / "decoder", *data, *roles))
    assert refused == (
        "roles: expected a profile of the model 'decoder', got one of 'decoder', whose attention weights differ"
    )
    shutil.copytree(folder / "decoder", tmp_path / "renamed")
    rows = json.loads(printed_by(headwise("ablate", "--model", tmp_path / "renamed", *data, *roles, "--json")))["rows"]
    assert {row["name"]: len(row["heads"]) for row in rows} == {
        role: len(heads) for role, heads in hw.load_profile(folder / "a").roles().items()
    }


@pytest.mark.parametrize("name", ["~nobody", "caf\udce9", "ünï 😀"])
def test_unusual_names_of_folders_are_names(name, headwise, folder, tmp_path, monkeypatch):
    """`~` is not expanded, as the shell does that; the second name is not UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    shutil.copy(folder / "data.jsonl", tmp_path / name)
    options = ("--model", folder / "decoder", "--data", f"{name}/data.jsonl", "--no-repeats", "--quiet", "--json")
    status, out, err = headwise("profile", *options, "--out", f"{name}/out")
    assert (status, err) == (0, "")
    assert headwise("profile", *options, "--out", f"{name}/out") == (0, out, "")
    assert headwise("compare", f"{name}/out", f"{name}/out", "--json")[0] == 0


def test_memory_that_runs_out_is_one_sentence(headwise, folder, tmp_path, monkeypatch):
    def out_of_memory(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

    monkeypatch.setattr("headwise.profile", out_of_memory)
    refused = refusal(headwise(*command_line("profile", folder, tmp_path / "out"), "--quiet"))
    assert refused == "device: expected enough memory, got less; a smaller --batch or --context needs less"


# -- streams and signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "-h"),
        pytest.param(("compare", "a", "b"), marks=pytest.mark.slow),
        pytest.param(("compare", "a", "b", "--json"), marks=pytest.mark.slow),
        pytest.param(("compare", "a", "b", "--csv"), marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_closes_the_output_gets_no_traceback(arguments, folder):
    read, write = os.pipe()
    os.close(read)
    result = in_new_process(*arguments, cwd=folder, capture_output=False, stdout=write, stderr=subprocess.PIPE)
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
    command = [sys.executable, "-m", "headwise", "view", f"@{tmp_path / 'text'}", "--model", str(folder / "decoder")]
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
