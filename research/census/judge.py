"""Verdict on one model type: the worst of its runs."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from research.census import batches, steps
from research.census.batches import Batch
from research.census.runs import Run, Subject, all_runs, recorded
from research.dispatcher_truth.recorder import double_copy
from research.tiny_models.builder import build
from research.tiny_models.inputs import LENGTH

OUTCOMES = ("wrong", "crash", "silent", "right", "partly", "refused", "unverified", "no attention", "not built")
"""Outcomes of a model type."""


@dataclass
class Verdict:
    """Verdict on a model type.

    Attributes:
        model_type: name of the model type in `transformers`.
        outcome: one of `OUTCOMES`.
        reason: first problem of the run that decides.
        model: class that was built.
        dtype: dtype of model and truth.
        modules: number of modules that attend.
        runs: verdicts on all runs.
        seconds: time that it took.
    """

    model_type: str
    outcome: str
    reason: str = ""
    model: str = ""
    dtype: str = ""
    modules: int = 0
    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0


def judge(model_type: str) -> Verdict:
    """Build a model type, run it in every way that it supports, and return the verdict."""
    start = time.perf_counter()
    verdict = Verdict(model_type, "not built")
    try:
        subject = subject_of(model_type)
    except Exception as error:
        verdict.reason = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        verdict.model, verdict.dtype = type(subject.model).__name__, str(subject.dtype).removeprefix("torch.")
        verdict.modules = len({call.path for call in subject.record.calls})
        verdict.runs = list(all_runs(subject))
        verdict.outcome, verdict.reason = summary(verdict.runs)
    verdict.seconds = round(time.perf_counter() - start, 2)
    return verdict


def subject_of(model_type: str) -> Subject:
    """Return the model in float64 if it runs so, otherwise in float32, and inputs that it accepts.

    Raises:
        Exception: whatever building or running it raises.
    """
    model = _without_grouped_products(build(model_type))
    errors: list[Exception] = []
    for dtype in (torch.float64, torch.float32):
        variant = double_copy(model) if dtype == torch.float64 else model
        for plain in batches.unpadded(model_type, variant):
            batch = Batch(plain.name, batches.in_dtype(plain.inputs, dtype), plain.real, plain.tokens)
            try:
                record = recorded(variant, batch)
            except Exception as error:
                errors.append(error)
                continue
            ids = batch.tokens.get(LENGTH)
            special = set() if ids is None else {int(ids[0, 3])}
            return Subject(variant, batch, record, dtype, special, _generator(model_type, dtype))
    raise errors[0]


def _generator(model_type: str, dtype: torch.dtype) -> nn.Module | None:
    try:
        model = steps.generator_of(model_type)
    except Exception:
        return None
    return None if model is None else _without_grouped_products(model).to(dtype)


def _without_grouped_products(model: nn.Module) -> nn.Module:
    """Set the experts of a model to plain matrix products, since torch has no grouped ones in float64."""
    experts: Any = model
    if hasattr(model, "set_experts_implementation"):
        experts.set_experts_implementation("eager")
    return model


def summary(runs: list[Run]) -> tuple[str, str]:
    """Return the outcome of a model type and its first reason: the worst of its runs, "right" only if none was refused
    or incomplete, and "partly" if some were.
    """
    by_outcome = {run.outcome: run for run in reversed(runs) if run.name != "restored" or run.outcome == "wrong"}
    for outcome in ("wrong", "crash", "silent", "refused", "partly", "right", "unverified", "no attention"):
        if outcome in by_outcome:
            run = by_outcome[outcome]
            details = run.problems or run.named or run.unverified
            is_part = outcome == "refused" and "right" in by_outcome
            return "partly" if is_part else outcome, f"{run.name}: {details[0]}" if details else ""
    return "not built", "no run succeeded"
