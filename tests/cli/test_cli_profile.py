"""The commands `headwise profile` and `headwise compare`: output, files, resuming, errors, several processes."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import headwise as hw
import tiny
from command_lines import replacing
from headwise.cli import app as cli
from headwise.data.models import ModelSource
from headwise.runs import checkpoint

SENTENCES = [
    "Which do you like better, coffee or tea?",
    "The cat sat on the mat and looked at the bird.",
    "It rained all day, so we stayed at home.",
    "She reads a book about the history of trains.",
    "Where did you put the keys to the car?",
    "The bread is still warm from the oven.",
    "He said that he would call back in the evening.",
    "A small boat crossed the river at night.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny encoder, its tokenizer, and texts as JSON lines."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.save(path / "model", "encoder")
    lines = [json.dumps({"text": text, "body": text}) + "\n" for text in tiny.texts(11, 5, 23, 7, 11, 2, 11, 61)]
    (path / "data.jsonl").write_text("".join(lines))
    return path


def test_the_profile_of_minilm_has_the_known_roles(headwise, tmp_path):
    (tmp_path / "sentences.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    status, out, err = headwise("profile", "--data", tmp_path / "sentences.jsonl", "--out", tmp_path / "out")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("all-MiniLM-L6-v2 on ")
    assert lines[0].endswith("sentences.jsonl: 8 sequences, 98 tokens, 72 heads")
    assert lines[-1] == f"wrote {tmp_path / 'out'}"
    assert "98/98 tokens" in err
    profile = hw.load_profile(tmp_path / "out")
    roles = profile.roles()
    assert roles["previous token"] == [(0, 2)]
    assert (1, 8) in roles["next token"]
    assert len(roles["sink on the first token"]) > 20
    assert profile.head(0, 2).statistics["entropy"].value < 0.02


@pytest.mark.slow
def test_the_profile_of_smollm2_finds_its_induction_heads(headwise, smollm2, tmp_path, monkeypatch):
    """On repeated random tokens they are far above the median head, and this decides their role."""
    (tmp_path / "text.txt").write_text(SENTENCES[0])
    monkeypatch.setattr(ModelSource, "tokenizer", lambda _source: smollm2.tokenizer)
    monkeypatch.setattr(ModelSource, "model", lambda _source, *_options: smollm2.model)
    data = ("--data", tmp_path / "text.txt")
    status, _, err = headwise("profile", "--model", "smollm2", *data, "--out", tmp_path / "out")
    assert status == 0, err
    profile = hw.load_profile(tmp_path / "out")
    shares = {(head.layer, head.head): head.statistics["induction_random"].value for head in profile.heads}
    cluster = {head for head, share in shares.items() if share >= 0.5}
    assert {(17, 3), (17, 4), (17, 5), (18, 6), (18, 7), (20, 6), (23, 7)} <= cluster
    assert len(cluster) < 15
    assert sorted(shares.values())[135] < 0.02
    assert set(profile.roles()["induction"]) == cluster


OPTIONS = ("--model", "{folder}/model", "--data", "{folder}/data.jsonl", "--context", "64")


def arguments(folder, *more):
    """Return the arguments that profile the tiny model on its texts, and `more`, which may replace some of them."""
    return [part.format(folder=folder) for part in replacing(OPTIONS, more)]


def test_two_checkpoints_are_compared(headwise, folder, tmp_path):
    tiny.save(tmp_path / "other", "encoder", seed=1)
    assert headwise("profile", *arguments(folder), "--out", tmp_path / "a")[0] == 0
    more = ("--model", tmp_path / "other", "--out", tmp_path / "b")
    assert headwise("profile", *arguments(folder, *more))[0] == 0
    status, out, err = headwise("compare", tmp_path / "a", tmp_path / "b", "--statistic", "previous", "--top", "3")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("A  model on ")
    assert lines[1].startswith("B  other on ")
    assert lines[3].split() == ["head", "statistic", "A", "B", "difference", "in", "standard", "errors", "role"]
    a, b = hw.load_profile(tmp_path / "a"), hw.load_profile(tmp_path / "b")
    changed = [(one, two) for one, two in zip(a.heads, b.heads, strict=True) if one.role != two.role]
    assert len(changed) == 1
    index = lines.index("1 of 12 heads has a different role")
    assert lines[index + 1 :] == [f"{one.name}  {one.role} → {two.role}" for one, two in changed]
    largest = hw.compare(a, b).largest(["previous"])[0]
    assert lines[4].split()[:2] == [largest.a.name, "previous"]
    assert lines[4].split()[5] == f"{largest.errors:+.1f}"
    status, _, err = headwise("compare", tmp_path / "a", tmp_path / "b", "--statistic", "no")
    assert (status, err.startswith("headwise: statistic: expected one of entropy, ")) == (2, True)


def files(tmp_path):
    """Create files and folders that `headwise profile` must refuse as data or as output folder."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "profile.parquet").write_text("mine")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--data", "{here}/empty.txt"], "data: expected at least one document, got no text in {here}/empty.txt"),
        (["--data", "{here}/binary.txt"], "data: expected text in {here}/binary.txt, got a binary file"),
        (["--data", "{here}/latin.txt"], "data: expected UTF-8 in {here}/latin.txt, got another byte at offset 3"),
        (["--data", "{here}/folder"], "data: expected a folder with files, got none in {here}/folder"),
        (
            ["--data", "{here}/no"],
            "data: expected a file '{here}/no' that can be read, got No such file or directory",
        ),
        (
            ["--column", "title"],
            "column: expected one of line 1 of {folder}/data.jsonl, which has text, body, got 'title'",
        ),
        (
            ["--context", "16"],
            "data: expected documents of at most 14 tokens, the context without special tokens, "
            "got 23 in line 3 of {folder}/data.jsonl; "
            "--documents cut, pack or truncate (documents=...) accepts longer ones",
        ),
        (["--context", "129"], "context: expected at most 128 tokens, the model's limit, got 129"),
        (
            ["--documents", "some"],
            "Invalid value for '--documents': expected one of whole, truncate, cut, pack, got 'some'",
        ),
        (
            ["--device", "abacus"],
            "device: expected a device that torch can use, got 'abacus'; use --device cpu (device='cpu')",
        ),
        (["--out", "{here}/file"], "out: expected a folder that can be created and written, got '{here}/file'"),
        (
            ["--out", "{here}/other"],
            "out: expected a folder of its own, or that of the run to resume, got another run "
            "in '{here}/other'; --force (force=True) replaces it",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(more, sentence, headwise, folder, tmp_path):
    files(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    more = [part.format(here=tmp_path, folder=folder) for part in more]
    options = replacing(arguments(folder, "--out", tmp_path / "out"), more)
    status, out, err = headwise("profile", *options)
    assert (status, out) == (2, "")
    assert err == f"headwise: {sentence.format(here=tmp_path, folder=folder)}\n"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_comparing_a_folder_without_a_profile_is_one_sentence_and_status_2(headwise, tmp_path):
    status, out, err = headwise("compare", tmp_path, tmp_path)
    assert (status, out) == (2, "")
    assert err == (
        "headwise: profile: expected a folder with a readable profile.parquet, "
        f"got No such file or directory: {str(tmp_path / 'profile.parquet')!r}\n"
    )


def test_a_finished_run_is_kept_and_another_needs_force(headwise, folder, tmp_path):
    out = ("--out", tmp_path / "out")
    assert headwise("profile", *arguments(folder), *out)[0] == 0
    before = (tmp_path / "out" / "profile.parquet").read_bytes()
    assert headwise("profile", *arguments(folder), *out)[0] == 0
    status, _, err = headwise("profile", *arguments(folder), *out, "--limit", "3")
    assert status == 2
    assert "got another run (data.limit differs) in" in err
    assert (tmp_path / "out" / "profile.parquet").read_bytes() == before
    assert headwise("profile", *arguments(folder), *out, "--limit", "3", "--force")[0] == 0
    assert hw.load_profile(tmp_path / "out").metadata["measured"]["sequences"] == 3


def _run_slowly(rank, arguments, store):
    """Run the command as one of two processes, with slow forward passes and a checkpoint after each batch."""
    join = functools.partial(torch.distributed.init_process_group, init_method=store, rank=rank, world_size=2)
    torch.distributed.init_process_group = join
    os.environ.update(WORLD_SIZE="2", LOCAL_RANK=str(rank))
    checkpoint.CHECKPOINT_SECONDS = 0.0
    forward = torch.nn.Embedding.forward
    torch.nn.Embedding.forward = lambda *args: time.sleep(0.1) or forward(*args)
    sys.argv = ["headwise", *map(str, arguments)]
    cli.run()


@pytest.mark.slow
def test_two_processes_that_were_killed_resume_and_agree_with_one(headwise, folder, tmp_path):
    """The first two are forks of this process, which are ready at once; torchrun starts those that resume."""
    assert headwise("profile", *arguments(folder), "--out", tmp_path / "one")[0] == 0
    options = ("profile", *arguments(folder), "--out", tmp_path / "two")
    fork, store = multiprocessing.get_context("fork").Process, f"file://{tmp_path}/store"
    processes = [fork(target=_run_slowly, args=(rank, options, store)) for rank in range(2)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "two").glob("unfinished-profile-?.pt"))) < 2 and time.monotonic() < deadline:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.02)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "two" / "profile.parquet").exists()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "headwise"]
    resumed = subprocess.run(
        [*command, *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("wrote ") == 1
    one, two = hw.load_profile(tmp_path / "one"), hw.load_profile(tmp_path / "two")
    assert two.metadata["settings"]["processes"] == 2
    assert two.metadata["measured"] == one.metadata["measured"]
    for head, other in zip(one.heads, two.heads, strict=True):
        assert head.identifiers == other.identifiers
        for name, measured in head.statistics.items():
            assert other.statistics[name] == pytest.approx(measured, rel=1e-9, abs=1e-12, nan_ok=True), name
