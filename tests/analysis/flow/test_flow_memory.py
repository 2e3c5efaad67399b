"""Norm-weighted attention and rollout of long sequences keep no matrix of the tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from pathlib import Path

import torch

import headwise as hw
import tiny

torch.set_num_threads(1)
model = tiny.model("decoder", max_position_embeddings=16384, num_hidden_layers=1, num_attention_heads=2)


def run(length):
    hw.{name}(model, [{{"input_ids": torch.arange(length)[None] % 97}}])
    status = Path("/proc/self/status").read_text().splitlines()  # ru_maxrss starts at the size of the parent process
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


before = run(256)
print(run({length}) - before, run(2 * {length}) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize(("name", "length"), [("norm_weighted", 8192), ("rollout", 2048)])
def test_memory_grows_with_the_length_and_not_with_its_square(name, length):
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(str(root / part) for part in ("src", ".", "tests"))
    command = [sys.executable, "-c", SCRIPT.format(name=name, length=length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": paths})
    shorter, longer = map(float, done.stdout.split())
    print(
        f"{name}: peak memory rises by {shorter:.0f} MiB at {length} tokens, and by {longer:.0f} MiB at twice as many"
    )
    of_matrix = 3 * 4 * length**2 / 2**20  # MiB by which one float32 matrix grows
    assert longer - shorter < max(of_matrix, 2 * shorter)  # a square adds three times as much, a line as much again
