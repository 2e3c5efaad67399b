"""Norm-weighted attention and rollout of long sequences keep no matrix of the tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOKENS = 8192
MATRIX = TOKENS**2 * 4 / 2**20
"""Size in MiB of one matrix of the tokens in float32."""

SCRIPT = """
import resource

import torch

import headwise as hw
import tiny

torch.set_num_threads(1)
model = tiny.model("decoder", max_position_embeddings={tokens})


def run(length):
    hw.{name}(model, [{{"input_ids": torch.arange(length)[None] % 97}}])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


before = run(256)
print(run({tokens}) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("norm_weighted", 0.5), ("rollout", 0.75)])
def test_no_matrix_is_kept_of_8192_tokens(name, limit):
    """The peak memory rises by less than a part of one matrix. Rollout keeps columns of 64 MiB, and makes copies."""
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(str(root / part) for part in ("src", ".", "tests"))
    script = SCRIPT.format(tokens=TOKENS, name=name)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": paths})
    print(f"{name}: peak memory rises by {float(done.stdout):.0f} MiB; one matrix has {MATRIX:.0f} MiB")
    assert float(done.stdout) < limit * MATRIX
