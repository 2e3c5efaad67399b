"""Run every benchmark in its own process, one after the other, and save the results of a full run.

    python -m benchmarks.all [--quick] [--rounds N] [--tiny] [--peers torch]

A full run saves the results of each script in `benchmarks/results/`, from which `benchmarks.report` writes the report.
The GPU benchmark runs only on a machine with a GPU; otherwise its saved results remain. The last line is JSON: for each
target its bound, the worst median ratio, and true if every regime reaches the bound.
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


def run(script: str, command_line: Sequence[str]) -> dict | None:
    """Run a benchmark script in its own process and print its output as it arrives. Return the results it printed as
    JSON, or None if it failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{script}", *command_line],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    last = ""
    for line in process.stdout:
        if not line.startswith("{"):
            print(line, end="", flush=True)
        last = line
    return json.loads(last) if process.wait() == 0 else None


def main(command_line: Sequence[str] | None = None) -> None:
    """Run all scripts, and print the table of targets and a line of JSON; exit with status 1 if a script failed."""
    command_line = sys.argv[1:] if command_line is None else command_line
    options = arguments(__doc__, command_line)
    require("tabulate")
    from tabulate import tabulate

    save = not (options.quick or options.tiny or options.only or options.peers != "all")
    all_results, failed = [], []
    for script in (*SCRIPTS, *(["gpu"] if torch.cuda.is_available() else [])):
        print(f"\n== {script}", flush=True)
        results = run(script, command_line)
        if results is None:
            failed.append(script)
            continue
        all_results.append(results)
        if save:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{script}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(tabulate(table(all_results), headers=HEADERS, tablefmt="github", disable_numparse=True))
    by_target = [
        {
            "target": target.description,
            "bound": target.bound,
            "worst": target.worst(rows).ratio.median if rows else None,
            "met": all(map(target.met, rows)) if rows else None,
        }
        for target, rows in rows_by_target(all_results)
    ]
    print(json.dumps({"benchmark": "all", "failed": failed, "targets": by_target}))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
