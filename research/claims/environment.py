"""The machine and the packages that a measurement ran on."""

import os
import platform
from datetime import date
from importlib.metadata import version
from typing import Any

from benchmarks.measure import machine

PACKAGES = ("headwise", "torch", "transformers", "optuna")


def describe_environment(size: str, processes: int = 1) -> dict[str, Any]:
    """Return the date, the machine, the number of processes and threads, and the versions of the packages.

    Args:
        size: name of the `Size` that was measured.
        processes: number of processes that shared the work.
    """
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {
        "size": size,
        "date": date.today().isoformat(),
        "processes": processes,
        **machine(),
        "versions": versions,
    }


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
