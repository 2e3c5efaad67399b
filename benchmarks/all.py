"""Run every benchmark in its own process, one after the other, and save the results of a full run.

    python -m benchmarks.all [--quick] [--rounds N] [--tiny] [--peers torch]

A full run saves the results of each script in `benchmarks/results/`, from which `benchmarks.report` writes the report.
The GPU benchmark runs only on a machine with a GPU; elsewhere its last results stay. The last line is JSON: each
target with its bound, the worst median and whether it is met.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command_line import arguments, require
from benchmarks.targets import HEADERS, rows_by_target, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPTS = ("layer", "windows", "padding", "grouped", "decoding", "memory", "watching", "ablating")


def run(script: str, given: Sequence[str]) -> dict | None:
    """Run a script, show its output as it comes, and return its results; None if it failed."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{script}", *given], cwd=HERE.parent, stdout=subprocess.PIPE, text=True
    )
    last = ""
    for line in process.stdout:
        if not line.startswith("{"):
            print(line, end="", flush=True)
        last = line
    return json.loads(last) if process.wait() == 0 else None


def main(given: Sequence[str] | None = None) -> None:
    """Run all scripts, and print the table of targets and a line of JSON; exit with status 1 if a script failed."""
    given = sys.argv[1:] if given is None else given
    options = arguments(__doc__, given)
    require("tabulate")
    from tabulate import tabulate

    kept = not (options.quick or options.tiny or options.only or options.peers != "all")
    found, failed = [], []
    for script in (*SCRIPTS, *(["gpu"] if torch.cuda.is_available() else [])):
        print(f"\n== {script}", flush=True)
        results = run(script, given)
        if results is None:
            failed.append(script)
            continue
        found.append(results)
        if kept:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{script}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(tabulate(table(found), headers=HEADERS, tablefmt="github", disable_numparse=True))
    by_target = [
        {
            "target": target.description,
            "bound": target.bound,
            "worst": target.worst(rows).ratio.median if rows else None,
            "met": all(map(target.met, rows)) if rows else None,
        }
        for target, rows in rows_by_target(found)
    ]
    print(json.dumps({"benchmark": "all", "failed": failed, "targets": by_target}))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
