"""Measure claims about multi-head attention; `research.claims.report` writes the document from the results.

    python -m research.claims [--full | --tiny] [--only text-64x2 ...] [--out FOLDER]

You can stop a run and start it again: finished work is not repeated. On 2 cores the default takes about half an hour.
First the timings run alone, then the real models, then the trainings with one process for each core.
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

from research.claims.environment import available_cores, describe_environment
from research.claims.layer_timing import time_layers
from research.claims.real_models import real_models
from research.claims.result_files import work_folder, write_json
from research.claims.sizes import SIZES, Size
from research.claims.training_tasks import run, tasks

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"
ALONE: dict[str, Callable[[Size], Any]] = {"clock": time_layers, "real-models": real_models}
"""Measurements that one process does with all cores."""


def main() -> None:
    """Measure everything, or what `--only` names."""
    options = _parse_options()
    size = SIZES[options.size]
    out = (options.out or RESULTS).resolve()
    wanted = options.only or [*ALONE, *tasks(size)]
    if options.worker is not None:
        work(wanted, size, out, options.worker)
        return
    for name in wanted:
        if options.force:
            (out / f"{name}.json").unlink(missing_ok=True)
            shutil.rmtree(work_folder(out) / name, ignore_errors=True)
    start = time.monotonic()
    for name in (name for name in ALONE if name in wanted and not (out / f"{name}.json").exists()):
        write_json(out / f"{name}.json", {"about": describe_environment(size.name), "measured": ALONE[name](size)})
        print(f"{name}: done after {time.monotonic() - start:.0f} s", flush=True)
    studies = [name for name in tasks(size) if name in wanted and not (out / f"{name}.json").exists()]
    if studies:
        run_in_processes(studies, size, out)
    print(f"all done after {time.monotonic() - start:.0f} s", flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", dest="size", action="store_const", const="full", help="larger models; takes hours")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="test of the code; a minute")
    parser.set_defaults(size="default")
    parser.add_argument(
        "--only", choices=[*ALONE, *tasks(SIZES["full"])], nargs="+", metavar="NAME", help="measure only these"
    )
    parser.add_argument("--out", type=Path, help="folder for the results; research/claims/results by default")
    parser.add_argument("--force", action="store_true", help="measure again what has results already")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_in_processes(studies: list[str], size: Size, out: Path) -> None:
    """Run studies in one process for each core, with one thread each; the processes share the trainings."""
    command = [sys.executable, "-m", "research.claims", f"--{size.name}", "--out", str(out), "--only", *studies]
    command = [part for part in command if part != "--default"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # runs the finally clause, which ends the workers
    workers = [
        subprocess.Popen([*command, "--worker", str(number)], cwd=ROOT, env=environment)
        for number in range(available_cores())
    ]
    try:
        exit_codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.terminate()
    if any(exit_codes):
        raise SystemExit("a process failed; finished trainings are saved: run the command again")


def work(studies: list[str], size: Size, out: Path, number: int) -> None:
    """Run all studies in this worker process. Each worker starts at another study, so that they rarely wait.

    Args:
        studies: names of the studies.
        size: how much is measured.
        out: folder for the results.
        number: of this worker, from 0.
    """
    torch.set_num_threads(1)
    first = number * len(studies) // available_cores()
    for name in studies[first:] + studies[:first]:
        start = time.monotonic()
        run(tasks(size)[name], size, out)
        print(f"{name}: process {number} is done with it after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
