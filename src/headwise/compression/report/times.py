"""Times of a compression report: two models run in turns, and the attention modules in each run are timed as well."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.compression.report.report_data import ModelPair
from headwise.compression.report.report_result import ReportRow
from headwise.data.batches import device_of

LEAST_SECONDS = 0.02
"""Shortest sample; faster calls are repeated within a sample."""

LEAST_ROUNDS = 6
"""Smallest number of rounds for which there is a 95 % interval of the median."""

TOTAL, ATTENTION = "total", "attention"
"""Names of the time of a run, and of the sum over the attention modules in it."""


def time_rows(
    name: str,
    models: ModelPair,
    paths: Sequence[Sequence[str]],
    run: Callable[[nn.Module, Any], Any],
    prepare: Callable[[nn.Module], Any],
    rounds: int,
    steps: int = 1,
) -> list[ReportRow]:
    """Time `run(model, prepare(model))` for a dense and a compressed model, without the time of `prepare`. Return a
    report row of the whole run and, if `paths` lists attention modules for each model, a row of these modules. The
    times are divided by `steps`, the number of equal steps in a run.
    """

    def timed(model: nn.Module, of_model: Sequence[str]) -> dict[str, float]:
        prepared = prepare(model)
        return run_times(model, of_model, lambda: run(model, prepared))

    dense, compressed = (partial(timed, *each) for each in zip(models, paths, strict=True))
    samples = paired_times((dense, compressed), rounds, steps)
    titles = {TOTAL: name, ATTENTION: f"{name}, attention"}
    return [ReportRow.of_times(titles[part], *seconds) for part, seconds in samples.items()]


def paired_times(
    calls: tuple[Callable[[], dict[str, float]], Callable[[], dict[str, float]]], rounds: int, steps: int = 1
) -> dict[str, tuple[list[float], list[float]]]:
    """Time two models in turns. Return, by the name of the timed part, such as "total", the seconds of each model in
    each round. Each of the `calls` runs one model and returns the seconds of each part. The seconds are divided by
    `steps`, the number of equal steps in a call.

    Each round runs both, the dense model first in every second round, so that slow changes of the machine's speed do
    not favour one of them. Each model first runs twice without being counted, as a warm-up. The second of these runs
    determines how many runs make a sample of at least 20 ms.
    """
    for call in calls:
        call()
    repeats = [max(1, math.ceil(LEAST_SECONDS / max(call()[TOTAL], 1e-9))) for call in calls]
    samples: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for number in range(rounds):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            runs = [calls[index]() for _ in range(repeats[index])]
            samples[index].append({name: statistics.fmean(run[name] for run in runs) / steps for name in runs[0]})
    dense, compressed = samples
    names = [name for name in dense[0] if name in compressed[0]]
    return {name: ([each[name] for each in dense], [each[name] for each in compressed]) for name in names}


def run_times(
    model: nn.Module,
    paths: Sequence[str],
    run: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Run a model, and return the seconds of the run as "total". If `paths` names attention modules, their summed
    seconds are "attention". None of these modules may contain another one.

    On the CPU both are times of the clock. On an accelerator, the run is timed until the device has finished, and
    modules by events on the device, so that hooks do not wait for it.
    """
    device, begun, marks = device_of(model), [], []
    is_on_cpu = device.type == "cpu"

    def mark() -> Any:
        if is_on_cpu:
            return clock()
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    def finish() -> float:
        if not is_on_cpu:
            torch.accelerator.synchronize(device)
        return clock()

    with ExitStack() as stack:
        for module in map(model.get_submodule, paths):
            stack.callback(module.register_forward_pre_hook(lambda *_: begun.append(mark())).remove)
            stack.callback(module.register_forward_hook(lambda *_: marks.append((begun.pop(), mark()))).remove)
        start = finish()
        run()
        times = {TOTAL: finish() - start}
    if paths:
        times[ATTENTION] = sum(
            stop - start if is_on_cpu else float(start.elapsed_time(stop)) / 1000.0 for start, stop in marks
        )
    return times
