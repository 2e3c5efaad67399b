"""Interleaved timing, ratios of pairs, the matrix-multiplication rate of the machine, and the output of a script."""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

from benchmarks.command_line import Options
from benchmarks.regime import Regime

LEAST = 0.02
"""Shortest sample in seconds. A faster call is repeated within the sample."""
SHORT = 0.3
"""Seconds below which a call is run once more ahead of its sample."""
PEERS = ("torch", "transformers", "x-transformers", "jax", "equinox", "flax", "bertviz", "transformer-lens")
SIDE = 1024
"""Of the square matrices whose product is the machine's rate."""


# -- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call to be timed.

    Attributes:
        run: is timed.
        prepare: returns the argument of one run and is not timed; None if `run` takes no argument.
    """

    run: Callable[..., object]
    prepare: Callable[[], object] | None = None

    def seconds(self, times: int, clock: Callable[[], float]) -> float:
        """Return the mean seconds of one run, over `times` runs."""
        if self.prepare is None:
            start = clock()
            for _ in range(times):
                self.run()
            return (clock() - start) / times
        total = 0.0
        for _ in range(times):
            prepared = self.prepare()
            start = clock()
            self.run(prepared)
            total += clock() - start
        return total / times


def interleaved(
    calls: dict[str, Call], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of one run of each call, a sample a round, every round in another order, so that none follows always the
    same.

    Each has run when it was checked; another run, not counted, says how many make a sample of 20 ms. What takes less
    than `SHORT` runs once, not counted, ahead of each sample: none pays for the caches, the freed memory and the
    threads that the one before it left.
    """
    once = {name: max(call.seconds(1, clock), 1e-9) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            if once[name] < SHORT:
                calls[name].seconds(1, clock)
            taken[name].append(calls[name].seconds(math.ceil(LEAST / once[name]), clock))
    return taken


@dataclass(frozen=True)
class Ratio:
    """Median, smallest and largest of the ratios of pairs that were measured in the same round."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> "Ratio":
        """Return the ratio `over / under`, pair by pair."""
        ratios = [a / b for a, b in zip(over, under, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))


def gemm(dtype: torch.dtype) -> Call:
    """Return the call of a product of square matrices; its rate is `gemm_flops` divided by its seconds."""
    a, b, into = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(3))
    return Call(lambda: torch.mm(a, b, out=into))


def gemm_flops() -> int:
    """Return the number of floating-point operations of one product of `gemm`."""
    return 2 * SIDE**3


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One figure: `against` whom or what, the ratio, and the seconds (bytes, FLOP/s) of both, medians."""

    regime: Regime
    against: str
    ratio: Ratio
    ours: float
    theirs: float
    note: str = ""

    @classmethod
    def read(cls, row: dict) -> "Row":
        """Return the row that `asdict` turned into a dictionary."""
        return cls(**{**row, "regime": Regime(**row["regime"]), "ratio": Ratio(**row["ratio"])})


def machine() -> dict[str, object]:
    """Return the CPU, its cores and capability, the number of threads, and the GPU of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, headwise and the installed peers."""
    found = {"python": platform.python_version()}
    for package in ("headwise", *PEERS):
        if importlib.util.find_spec(package.replace("-", "_")) is not None:
            found[package] = importlib.metadata.version(package)
    return found


def show(row: Row) -> None:
    """Print a row of results."""
    spread = f"({row.ratio.lowest:.2f} to {row.ratio.highest:.2f})"
    print(f"{row.ratio.median:7.2f} {spread:18} {row.regime.name}, against {row.against} {row.note}", flush=True)


def report(benchmark: str, rows: Sequence[Row], options: Options, left_out: dict[str, str] | None = None) -> dict:
    """Print the results as one line of JSON, and return them."""
    results = {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "rounds": options.rounds,
        "quick": options.quick,
        "only": options.only,
        "machine": machine(),
        "versions": versions(),
        "rows": [_rounded(asdict(row)) for row in rows],
        "left_out": left_out or {},
    }
    print(json.dumps(results))
    return results


def _rounded(value: object) -> object:
    """Return a value with its floats rounded to four significant digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
