"""Measure claims about multi-head attention; `research.claims.report` writes the document from the results.

    python -m research.claims [--full | --tiny] [--only text-64x2 ...] [--out FOLDER]

A run that was stopped goes on where it was. On 2 cores the default takes about half an hour: first the clock, alone;
then the real models; then the trainings, one process a core.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from research.claims.clock import clocked
from research.claims.kept import about, cores, scratch, write
from research.claims.real_models import real_models
from research.claims.sizes import SIZES, Size
from research.claims.trainings import run, tasks

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"
ALONE: dict[str, Callable[[Size], Any]] = {"clock": clocked, "real-models": real_models}
"""What one process measures with all cores."""


def main() -> None:
    """All, or those that are asked for."""
    given = _arguments()
    size = SIZES[given.size]
    out = (given.out or RESULTS).resolve()
    wanted = given.only or [*ALONE, *tasks(size)]
    if given.worker is not None:
        work(wanted, size, out, given.worker)
        return
    for name in wanted:
        if given.force:
            (out / f"{name}.json").unlink(missing_ok=True)
            shutil.rmtree(scratch(out) / name, ignore_errors=True)
    start = time.monotonic()
    for name in (name for name in ALONE if name in wanted and not (out / f"{name}.json").exists()):
        write(out / f"{name}.json", {"about": about(size.name), "measured": ALONE[name](size)})
        print(f"{name}: done after {time.monotonic() - start:.0f} s", flush=True)
    studies = [name for name in tasks(size) if name in wanted and not (out / f"{name}.json").exists()]
    if studies:
        together(studies, size, out)
    print(f"all done after {time.monotonic() - start:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", dest="size", action="store_const", const="full", help="larger models, longer; hours")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="to try the code; a minute")
    parser.set_defaults(size="default")
    parser.add_argument("--only", choices=[*ALONE, *tasks(SIZES["full"])], nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, help="another folder for the results")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def together(studies: list[str], size: Size, out: Path) -> None:
    """Run studies in one process a core, each with one thread, which share the work."""
    command = [sys.executable, "-m", "research.claims", f"--{size.name}", "--out", str(out), "--only", *studies]
    command = [part for part in command if part != "--default"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that what was started ends too
    workers = [
        subprocess.Popen([*command, "--worker", str(number)], cwd=ROOT, env=environment) for number in range(cores())
    ]
    try:
        failed = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.terminate()
    if any(failed):
        raise SystemExit("a process failed; what is done is kept: run it again")


def work(studies: list[str], size: Size, out: Path, number: int) -> None:
    """One of these processes: it begins at another study than the others, and goes round."""
    torch.set_num_threads(1)
    first = number * len(studies) // cores()
    for name in studies[first:] + studies[:first]:
        start = time.monotonic()
        run(tasks(size)[name], size, out)
        print(f"{name}: process {number} leaves it after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
