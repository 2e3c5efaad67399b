"""The commands `headwise profile` and `headwise compare`: output, and several processes that are killed."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import headwise as hw
import tiny
from command_lines import printed_by
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


def test_two_profiles_are_compared(headwise, folder, tmp_path):
    other = hw.load_profile(folder / "of-other")
    role = "broad" if other.rows[0].role == "mixed" else "mixed"
    replace(other, rows=(replace(other.rows[0], role=role), *other.rows[1:])).save(tmp_path)
    command = ("compare", folder / "a", tmp_path)
    lines = printed_by(headwise(*command, "--statistic", "previous", "--top", "3")).splitlines()
    assert lines[0].startswith("A  decoder on ")
    assert lines[1].startswith("B  other on ")
    assert lines[3].split() == ["head", "statistic", "A", "B", "difference", "in", "standard", "errors", "role"]
    a, b = hw.load_profile(folder / "a"), hw.load_profile(tmp_path)
    changed = [(one, two) for one, two in zip(a.heads, b.heads, strict=True) if one.role != two.role]
    index = lines.index(f"{len(changed)} of 12 heads {'has' if len(changed) == 1 else 'have'} a different role")
    assert lines[index + 1 :] == [f"{one.name}  {one.role} → {two.role}" for one, two in changed] != []
    largest = hw.compare(a, b).largest(["previous"])[0]
    assert lines[4].split()[:2] == [largest.a.name, "previous"]
    assert lines[4].split()[5] == f"{largest.errors:+.1f}"
    status, _, err = headwise(*command, "--statistic", "no")
    assert (status, err.startswith("headwise: statistic: expected one of entropy, ")) == (2, True)


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
    tiny.write_texts(tmp_path / "data.jsonl", 11, 5, 23, 7, 11, 2, 11, 61)
    arguments = ("profile", "--model", folder / "encoder", "--data", tmp_path / "data.jsonl", "--context", 64)
    printed_by(headwise(*arguments, "--out", tmp_path / "one"))
    options = (*arguments, "--out", tmp_path / "two")
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
