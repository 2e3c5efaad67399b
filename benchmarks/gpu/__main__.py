"""Check headwise on a GPU, then time attention, layers and statistics in every regime, in less than nine minutes.

    python -m benchmarks.gpu [--minutes 8.5] [--only NAME] [--tiny]

Parts, in this order: correctness against float64 (every backend of `hw.attend` on drawn problems, passes that must not
wait for the device, decoding in CUDA graphs, statistics), statistics, layers, attention. Checks that fail are listed by
name, and the exit status is then 1; the later parts run all the same. What no longer fits into the time is left out,
and listed by name. Needs one GPU, torch and Triton. The results are saved in benchmarks/results/gpu.json, and the page
docs/reports/gpu.md is written from them; not so with --only and --tiny. The last line is JSON.

Without a GPU the script exits with a message; with --tiny it then runs all its code on the CPU.
"""

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from itertools import zip_longest
from typing import Any

import torch

from benchmarks.gpu import report, targets
from benchmarks.gpu.attend_checks import attend_checks
from benchmarks.gpu.attention import time_attention
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.checks import Check, run_checks
from benchmarks.gpu.layer import time_layers
from benchmarks.gpu.observing import time_observing
from benchmarks.gpu.pass_checks import pass_checks
from benchmarks.gpu.statistics_checks import statistics_checks

SHARES = {"checks": 0.38, targets.OBSERVING: 0.5, targets.LAYER: 0.6, targets.ATTENTION: 0.97}
"""Share of all seconds at which each part ends."""


def all_checks(device: str, *, tiny: bool) -> Iterator[Check]:
    """Yield every check: first those of statistics, which are few, then those of passes and of `hw.attend` in turn, so
    that some of both run if kernels take long to compile.
    """
    yield from statistics_checks(device, length=50 if tiny else 500)
    of_passes = pass_checks(device, length=40 if tiny else 600)
    of_attend = attend_checks(device, largest=40 if tiny else 300)
    for pair in zip_longest(of_attend, of_passes):
        yield from (check for check in pair if check is not None)


def run(device: str, budget: Budget, *, tiny: bool, only: str) -> dict:
    """Run all parts, and return the results."""
    torch.manual_seed(0)
    checks = (check for check in all_checks(device, tiny=tiny) if only in check.name)
    outcome = run_checks(checks, budget, SHARES["checks"])
    failed, rows = dict(outcome.failed), {}
    options = {"tiny": tiny, "only": only}
    rows[targets.OBSERVING] = _attempt(
        targets.OBSERVING, failed, lambda: time_observing(device, budget, SHARES[targets.OBSERVING], **options)
    )
    for part, measure in ((targets.LAYER, time_layers), (targets.ATTENTION, time_attention)):
        share = SHARES[part]
        rows[part], wrong = _attempt(part, failed, lambda m=measure, s=share: m(device, budget, s, **options)) or (
            [],
            {},
        )
        failed |= wrong
    return {
        "benchmark": "gpu",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "versions": versions(),
        "seconds": budget.used,
        "checks": {"passed": outcome.passed, "skipped": outcome.skipped, "failed": failed},
        "rows": {part: [_rounded(asdict(row)) for row in rows[part]] for part in rows},
        "left_out": budget.left_out,
    }


def _attempt(part: str, failed: dict[str, str], measure: Callable[[], Any]) -> Any:
    """Return the result of a part. If it raises an error, note that it failed, and return an empty list."""
    try:
        return measure()
    except Exception as error:  # the other parts are still worth the time of the machine
        failed[part] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        print(f"FAILED  {part}: {failed[part]}", flush=True)
        return []


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and Triton, as far as they are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found


def _rounded(value: object) -> object:
    """Return a value with its floats rounded to four significant digits, inside nested dictionaries too."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results. Return the exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything; what is left is left out")
    parser.add_argument("--only", default="", help="part of the names of the checks and regimes to run")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to test the code; on the CPU if need be")
    options = parser.parse_args(command_line)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("gpu: no GPU is available; nothing was measured")
    results = run(device, Budget(60 * options.minutes), tiny=options.tiny, only=options.only)
    for line in targets.lines(report.rows_by_part(results)):
        print(" | ".join(line), flush=True)
    for name, reason in results["left_out"].items():
        print(f"LEFT OUT  {name}: {reason}", flush=True)
    for name, reason in results["checks"]["failed"].items():
        print(f"FAILED  {name}: {reason}", flush=True)
    if not (options.tiny or options.only):
        report.RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        report.main()
    print(json.dumps(results))
    return 1 if results["checks"]["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
