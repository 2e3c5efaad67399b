"""Runs of the passes in `device_passes.py` that read nothing, for the tests of attention and of the layers."""

import subprocess
import sys
from pathlib import Path

import torch

from device_passes import move_nothing, passes
from headwise import checks
from headwise.attention.backends.native import backend as native
from pretend_device import NoReads
from shape_checks import shapes_unchecked

SCRIPT = Path(__file__).parent / "device_passes.py"


def on_pretended_device(*arguments: str) -> list[str]:
    """Return the lines that the script of passes prints, one for each failed pass, without the last line, which must
    state the number of passes.
    """
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, cwd=SCRIPT.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *failed, count = done.stdout.splitlines()
    assert int(count.split()[0]) >= 20
    return failed


def as_on_a_gpu(monkeypatch) -> None:
    """Make headwise treat tensors on the CPU as unreadable, and choose no kernels for the CPU."""
    monkeypatch.setattr(checks, "has_values", lambda tensor: False)
    monkeypatch.setattr(native, "why_not", lambda problem: "it is for the CPU")


def passes_that_read(kind: str, monkeypatch) -> dict[str, str]:
    """Return the error of each pass that reads a value, or has another result, where tensors on the CPU count as
    unreadable.
    """
    errors = {}
    for name, run in passes(kind).items():
        torch.manual_seed(0)
        with shapes_unchecked():
            expected = run(move_nothing, lambda module: module)
            torch.manual_seed(0)
            try:
                with monkeypatch.context() as patch, NoReads():
                    as_on_a_gpu(patch)
                    got = run(move_nothing, lambda module: module)
                if "dropout" not in name:
                    for ours, theirs in zip(got, expected, strict=True):
                        tolerance = 1e-4 if theirs.dtype == torch.float32 else 5e-2
                        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
    return errors
