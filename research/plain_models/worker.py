"""Judge one model in a process of its own."""

import logging
import random
import signal
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from research.plain_models.imports import make_importable
from research.plain_models.judge import judge
from research.plain_models.registry import MODELS, Built, build

SECONDS = 240
"""Longest time for one model."""
ZOO = sorted(path.stem for path in (Path(__file__).parent / "zoo").glob("*_models.py"))
"""Modules that add models to the registry."""


def load_zoo() -> list[str]:
    """Import all builders, and return the names of all models."""
    for module in ZOO:
        import_module(f"research.plain_models.zoo.{module}")
    return list(MODELS)


class _TooLong(BaseException):
    """A model takes too long. It is not an Exception, so that nothing on the way handles it."""


def judge_model(name: str) -> dict[str, Any]:
    """Build a model, judge each of its calls, and return the verdicts as a dict for the results file."""
    make_importable()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.modules.setdefault("loguru", import_module("loguru")).logger.remove()
    load_zoo()
    entry, start = MODELS[name], time.perf_counter()
    result: dict[str, Any] = {"name": name, "library": entry.library, "category": entry.category, "cases": []}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        built, dtype = _built(name)
        for case in built.cases:
            torch.manual_seed(0)
            random.seed(0)
            verdict = judge(built, case, budget=1e-6 if dtype == torch.float64 else 2e-5)
            result["cases"].append({"case": case.name, "dtype": str(dtype), **vars(verdict)})
    except (Exception, _TooLong) as error:
        result["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def _built(name: str) -> tuple[Built, torch.dtype]:
    """Return a model in float64 if it runs in float64, otherwise in float32, and this dtype."""
    dtypes = [torch.float32] if MODELS[name].float32 else [torch.float64, torch.float32]
    for dtype in dtypes:
        torch.set_default_dtype(dtype)
        try:
            built = build(MODELS[name])
            with torch.no_grad():
                for case in built.cases:
                    torch.manual_seed(0)
                    case.call(built.model)
        except Exception:
            if dtype is dtypes[-1]:
                raise
        else:
            break
    return built, dtype


def _too_long(*_: Any) -> None:
    """Handle the alarm: fail the model."""
    raise _TooLong(f"longer than {SECONDS} seconds")
