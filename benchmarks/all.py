"""Every benchmark, one after the other, each in an interpreter of its own; what a full run finds is kept.

    python -m benchmarks.all [--quick] [--rounds N] [--tiny] [--peers torch]

A full run leaves each script's results in `benchmarks/results/`, from which `benchmarks/report.py` writes the
document. The one of the GPU is run where there is one, and its last results stay. The last line is one of JSON: each
claim, its target, the worst median and whether it is met.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command_line import arguments, require
from benchmarks.targets import HEADERS, judged, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPTS = ("layer", "windows", "padding", "grouped", "decoding", "memory", "watching", "ablating")


def run(script: str, given: Sequence[str]) -> dict | None:
    """What a script found, its output shown as it comes; None where it failed."""
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
    """All scripts, the table of claims, and a line of JSON last; status 1 if a script failed."""
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
    claims = [
        {
            "claim": claim.says,
            "target": claim.target,
            "worst": claim.worst(rows).ratio.median if rows else None,
            "met": all(map(claim.met, rows)) if rows else None,
        }
        for claim, rows in judged(found)
    ]
    print(json.dumps({"benchmark": "all", "failed": failed, "claims": claims}))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
