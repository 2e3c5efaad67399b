"""Results as JSON: what was measured, of what, when and on which machine."""

import json
import math
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("headwise", "torch", "transformers", "optuna")


def about(size: str, threads: int | None = None, processes: int = 1) -> dict[str, Any]:
    """The machine, the versions, the day."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "size": size,
        "date": date.today().isoformat(),
        "cpu": model,
        "cores": cores(),
        "processes": processes,
        "threads": torch.get_num_threads() if threads is None else threads,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write(path: Path, found: Any) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Any:
    """What was written."""
    return json.loads(path.read_text(encoding="utf-8"))


def rounded(value: Any) -> Any:
    """Floats to six figures; None for what is not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {str(name): rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def scratch(out: Path) -> Path:
    """A folder for databases and what one training gave, which git does not see."""
    folder = out / ".work"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder
