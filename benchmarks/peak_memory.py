"""Peak memory of a run, read from /proc/self on Linux, and runs in separate interpreters."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.regime import Regime

TOLD = os.access("/proc/self/clear_refs", os.W_OK)
"""Whether this system reports peak memory."""
UNTOLD = "the peak is read from Linux's /proc/self/clear_refs, which is not there"


def kept(name: str) -> int:
    """Return a value of /proc/self/status, such as VmRSS, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak(run: Callable[[], object], first: Callable[[], object] | None = None) -> int:
    """Return the peak memory of a run in bytes, minus the memory in use before it.

    Args:
        run: is measured.
        first: runs before and is not measured; by default `run` itself.
    """
    (first or run)()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = kept("VmRSS")
    run()
    return max(kept("VmHWM") - before, 4096)  # a page: what is smaller is not seen


CHILD = """
import importlib, json, sys
from benchmarks.regime import Regime
script = importlib.import_module(sys.argv[1])
print(json.dumps(script.child(sys.argv[2], Regime(**json.loads(sys.argv[3])))))
"""


def measured(script: str, name: str, regime: Regime) -> dict[str, int]:
    """Call `child` of a script in a separate interpreter that returns freed memory at once, and return its result."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, f"benchmarks.{script}", name, json.dumps(asdict(regime))],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {regime.name}: {(done.stderr.strip() or 'ended').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
