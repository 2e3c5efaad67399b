"""Peak memory of a function call, read from /proc/self on Linux, and calls in separate interpreters."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.regime import Regime

IS_SUPPORTED = os.access("/proc/self/clear_refs", os.W_OK)
"""True if this system reports peak memory."""
PAGE = 4096
"""Smallest amount of memory that shows, in bytes."""
UNSUPPORTED_REASON = "peak memory needs Linux's /proc/self/clear_refs, which does not exist"


def status_bytes(name: str) -> int:
    """Return an entry of /proc/self/status, such as VmRSS, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak(run: Callable[[], object], first: Callable[[], object] | None = None) -> int:
    """Return the peak memory of a call in bytes, minus the memory in use before it; at least one page.

    Args:
        run: the call whose memory is measured.
        first: runs before and is not measured; by default `run` itself.
    """
    (first or run)()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    run()
    return max(status_bytes("VmHWM") - before, PAGE)


CHILD = """
import importlib, json, sys
from benchmarks.regime import Regime
script = importlib.import_module(sys.argv[1])
print(json.dumps(script.peak_in_this_process(sys.argv[2], Regime(**json.loads(sys.argv[3])))))
"""


def measured(script: str, name: str, regime: Regime) -> dict[str, int]:
    """Call `peak_in_this_process(name, regime)` of a benchmark script in a separate interpreter that returns freed
    memory at once, and return its result: sizes in bytes by name.
    """
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
