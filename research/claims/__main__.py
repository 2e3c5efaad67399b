"""Measure claims about multi-head attention; `research.claims.verdicts` judges them by the rules in rules.md.

    python -m research.claims [--only python bible ...] [--tiny] [--out FOLDER]

First the published models are measured, then the models are trained, in one process for each core. Each cell (task,
position scheme, number of heads) has a file of results, which is written again after each training: a run can be
stopped at any time and started again. On 2 cores everything takes about 5 hours. `--timings` times layers with
different numbers of heads instead, for which nothing else may run.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from research.claims.corpora import CORPORA
from research.claims.environment import available_cores, describe_environment
from research.claims.layer_timing import time_layers
from research.claims.published_models import measure_published
from research.claims.result_files import work_folder, write_json
from research.claims.tasks import Task, all_tasks, cells, tiny
from research.claims.trainings import measure_cell

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure everything, or what the options name."""
    options = _parse_options()
    out, tasks = options.out.resolve(), _chosen(options)
    if options.worker:
        work(tasks, out)
    elif options.timings:
        write_json(out / "timings.json", {"about": describe_environment(), "measured": time_layers()})
    else:
        if not options.only:
            _measure_once(out, published=not options.tiny)
        run_workers(out)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [task.name for task in all_tasks()]
    parser.add_argument("--only", choices=names, nargs="+", metavar="TASK", help="train for these tasks alone")
    parser.add_argument("--tiny", action="store_true", help="a test of the code, which takes minutes")
    parser.add_argument("--timings", action="store_true", help="time layers, and nothing else")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Task]:
    tasks = [task for task in all_tasks() if not options.only or task.name in options.only]
    return [tiny(task) for task in tasks] if options.tiny else tasks


def _measure_once(out: Path, *, published: bool) -> None:
    """Describe the corpora and measure the published models, unless the results are there."""
    if not (out / "corpora.json").exists():
        write_json(out / "corpora.json", {name: corpus().description() for name, corpus in CORPORA.items()})
    if published and not (out / "published.json").exists():
        measured = measure_published()
        write_json(out / "published.json", {"about": describe_environment(), "measured": measured})


def run_workers(out: Path) -> None:
    """Train in one process for each core, with one thread each. A signal to this process ends them all."""
    command = [sys.executable, "-m", "research.claims", "--worker", *sys.argv[1:], "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # runs the finally clause, which ends the workers
    workers = [subprocess.Popen(command, cwd=ROOT, env=environment) for _ in range(available_cores())]
    try:
        exit_codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.terminate()
    if any(exit_codes):
        raise SystemExit("a process failed; finished trainings are saved: run the command again")


def work(tasks: list[Task], out: Path) -> None:
    """Measure all cells that no other process is measuring, in this process."""
    torch.set_num_threads(1)
    locks = work_folder(out)
    for cell in cells(tasks):
        start = time.monotonic()
        try:
            with FileLock(locks / f"{cell.name}.lock", timeout=0):
                measure_cell(cell, out)
        except Timeout:
            continue
        if time.monotonic() - start > 1:
            print(f"{cell.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
