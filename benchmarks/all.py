"""Run every benchmark, or the named ones, each in its own process, one after the other, and save their results.

    python -m benchmarks.all [script ...] [--quick] [--rounds N] [--tiny] [--peers fast]

The results of each script are saved in `benchmarks/results/`, from which `benchmarks.report` writes the report. Those
of `--quick`, `--tiny`, `--only` and `--peers torch` are not saved.
The benchmarks on a GPU have a command of their own, `python -m benchmarks.gpu`. The last line is JSON: for each
target its bound, the worst median ratio, and true if every regime reaches the bound.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import checked_options, option_parser, require
from benchmarks.targets import HEADERS, rows_by_target, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPTS = (
    *("attention", "layer", "windows", "padding", "grouped", "decoding", "memory", "layer_memory"),
    *("watching", "accelerating", "models", "accelerated_steps", "ablating", "pruned_attention", "monitoring"),
    "calls",
)


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
    parser = option_parser(__doc__)
    parser.add_argument("scripts", nargs="*", help=f"any of {', '.join(SCRIPTS)}; all by default")
    chosen = parser.parse_args(command_line)
    if unknown := sorted(set(chosen.scripts) - set(SCRIPTS)):
        parser.error(f"scripts: expected any of {', '.join(SCRIPTS)}, got {', '.join(unknown)}")
    options = checked_options(parser, chosen)
    require("tabulate")
    from tabulate import tabulate

    save = not (options.quick or options.tiny or options.only or options.peers == "torch")
    all_results, failed = [], []
    for script in chosen.scripts or SCRIPTS:
        print(f"\n== {script}", flush=True)
        results = run(script, options.command_line)
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
