"""Interleaved timing, ratios of paired samples, the machine's matrix-multiplication rate, and a script's output."""

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
from headwise.attention.backends.native import library

LEAST = 0.02
"""Shortest sample in seconds. A faster call is repeated within the sample."""
SHORT = 0.3
"""Duration in seconds below which a call is warmed up by one extra run before each sample."""
GEMM = "GEMM rate"
"""Name in `Row.against` of rows with the share of the machine's rate."""
PEERS = (
    *("torch", "transformers", "x-transformers", "jax", "equinox", "flax", "bertviz", "transformer-lens"),
    *("onnxruntime", "openvino"),
)
SIDE = 1024
"""Side length of the square matrices whose product defines the machine's rate."""


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
        """Return the mean seconds of one run over `times` runs, measured by `clock`. Time spent in `prepare` is not
        counted.
        """
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
    """Measure each call once per round, in a different random order each round. Return, by name, the seconds of one run
    in every round.

    Each call must have run before. One uncounted run determines how many runs make a sample of at least 20 ms. A call
    that takes less than `SHORT` seconds also runs once, uncounted, before each sample, so that no call pays for the
    caches, freed memory and threads of its predecessor.
    """
    first_seconds = {name: max(call.seconds(1, clock), 1e-9) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffler = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            if first_seconds[name] < SHORT:
                calls[name].seconds(1, clock)
            samples[name].append(calls[name].seconds(math.ceil(LEAST / first_seconds[name]), clock))
    return samples


@dataclass(frozen=True)
class Ratio:
    """Median, smallest and largest of ratios of two measurements from the same round."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> "Ratio":
        """Return the median, smallest and largest of `over[i] / under[i]` over all rounds i."""
        ratios = [a / b for a, b in zip(over, under, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))


def gemm(dtype: torch.dtype) -> Call:
    """Return a call that multiplies two square matrices of the dtype. The machine's rate is `gemm_flops()` divided by
    its seconds.
    """
    a, b, into = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(3))
    return Call(lambda: torch.mm(a, b, out=into))


def gemm_flops() -> int:
    """Return the number of floating-point operations in one matrix product of `gemm`."""
    return 2 * SIDE**3


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One result: a ratio between headwise and something else in a regime.

    Attributes:
        regime: sizes, mask and dtype.
        against: name of the peer or quantity headwise is compared with.
        ratio: median, lowest and highest ratio over the rounds.
        ours: median for headwise, in seconds, bytes or FLOP/s.
        theirs: median for the other, in the same unit.
        note: additional text for the report.
    """

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


def compared(regime: Regime, samples: dict[str, list[float]], ours: str, theirs: str, note: str = "") -> Row:
    """Return the row for the seconds of the call named `theirs` divided by those of the call named `ours`."""
    medians = statistics.median(samples[ours]), statistics.median(samples[theirs])
    return Row(regime, theirs, Ratio.of(samples[theirs], samples[ours]), *medians, note)


def gemm_share(regime: Regime, flops: int, samples: dict[str, list[float]], ours: str, note: str = "") -> Row:
    """Return the row for the rate in FLOP/s of the call named `ours`, which has this number of operations, divided by
    that of a large matrix product, named `GEMM`.
    """
    ratio = Ratio.of(
        [flops * seconds for seconds in samples[GEMM]], [gemm_flops() * seconds for seconds in samples[ours]]
    )
    rates = flops / statistics.median(samples[ours]), gemm_flops() / statistics.median(samples[GEMM])
    return Row(regime, GEMM, ratio, *rates, note)


def machine() -> dict[str, object]:
    """Return the CPU, its cores and capability, the instruction set of headwise's native kernels or the reason why they
    are not used, the number of threads, and the GPU of this machine.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "native": library.why_not_loaded() or library.instruction_set(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, headwise and the installed peers."""
    installed = {"python": platform.python_version()}
    for package in ("headwise", *PEERS):
        if importlib.util.find_spec(package.replace("-", "_")) is not None:
            installed[package] = importlib.metadata.version(package)
    return installed


def show(row: Row) -> None:
    """Print a row of results."""
    bounds = f"({row.ratio.lowest:.2f} to {row.ratio.highest:.2f})"
    print(f"{row.ratio.median:7.2f} {bounds:18} {row.regime.name}, against {row.against} {row.note}", flush=True)


def report(benchmark: str, rows: Sequence[Row], options: Options, left_out: dict[str, str] | None = None) -> dict:
    """Print the results as one line of JSON, and return them."""
    results = {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "rounds": options.rounds,
        "long_rounds": options.long_rounds,
        "quick": options.quick,
        "only": options.only,
        "peers": options.peers,
        "machine": machine(),
        "versions": versions(),
        "rows": [_rounded(asdict(row)) for row in rows],
        "left_out": left_out or {},
    }
    print(json.dumps(results))
    return results


def _rounded(value: object) -> object:
    """Return a value with its floats rounded to four significant digits, inside nested dictionaries too."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
