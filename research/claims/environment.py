"""The machine and the packages that a measurement ran on."""

import os
import platform
from datetime import date
from importlib.metadata import version
from typing import Any

from benchmarks.measure import machine

PACKAGES = ("headwise", "torch", "transformers")


def describe_environment() -> dict[str, Any]:
    """Return the date, the machine, the number of threads, and the versions of the packages."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {
        "date": date.today().isoformat(),
        **machine(),
        "versions": versions,
    }


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
