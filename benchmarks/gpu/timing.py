"""Time of calls on a GPU by device events, in interleaved rounds, within a number of seconds."""

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.measure import LEAST, Call, Ratio, Row
from benchmarks.regime import Regime

MOST_ROUNDS, FEWEST_ROUNDS = 9, 3
"""Rounds in which the contestants of a regime are timed."""
LONGEST = 4.0
"""Seconds after which no further round of a regime starts, once there are the fewest."""


@dataclass(frozen=True)
class DeviceCall(Call):
    """A call that is timed by events on the GPU instead of a clock on the CPU."""

    def seconds(self, times: int, clock: Callable[[], float]) -> float:
        """Return the mean seconds of one run over `times` runs, from two device events; `clock` is not used."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / times


def timer(device: str) -> type[Call]:
    """Return the kind of call that measures time on a device."""
    return DeviceCall if device == "cuda" else Call


def rounds_of(calls: dict[str, Call], most: int = MOST_ROUNDS) -> dict[str, list[float]]:
    """Return the seconds of each call in every round, by name. In a round, all calls run in a new random order, each
    once without being counted and then for at least 20 ms. Rounds end after `LONGEST` seconds, but not before the
    third.
    """
    clock, began = time.perf_counter, time.perf_counter()
    for call in calls.values():
        call.seconds(1, clock)
    once = {name: max(call.seconds(1, clock), 1e-9) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffler = list(calls), random.Random(0)
    for number in range(most):
        if number >= FEWEST_ROUNDS and clock() - began > LONGEST:
            break
        shuffler.shuffle(order)
        for name in order:
            if once[name] < LEAST:
                calls[name].seconds(1, clock)
            samples[name].append(calls[name].seconds(math.ceil(LEAST / once[name]), clock))
    return samples


def rows_against(
    regime: Regime, samples: dict[str, list[float]], ours: str, *, note: str = "", of_ours: bool = False
) -> list[Row]:
    """Return a row for each call but `ours`: its seconds divided by those of `ours`, or the other way round with
    `of_ours`.
    """
    rows = []
    for name, seconds in samples.items():
        if name != ours:
            ratio = Ratio.of(samples[ours], seconds) if of_ours else Ratio.of(seconds, samples[ours])
            medians = statistics.median(samples[ours]), statistics.median(seconds)
            rows.append(Row(regime, name, ratio, *medians, note))
    return rows
