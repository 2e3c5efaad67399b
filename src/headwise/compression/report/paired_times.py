"""Times of two models that run in turns, and the ratio of their times with an interval."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwise.errors import require

LEAST_SECONDS = 0.02
"""Shortest sample; faster calls are repeated within a sample."""

LEAST_ROUNDS = 6
"""Smallest number of rounds for which there is a 95 % interval of the median."""

Times = dict[str, float]
"""Seconds of one run, by name of what was timed."""


@dataclass(frozen=True)
class PairedRatio:
    """Times of two models, and the ratio of the second one's time to the first one's.

    Attributes:
        dense, compressed: median seconds of each model.
        ratio: median of the ratios of both models' times in the same round.
        low, high: 95 % confidence interval of the median ratio.
        rounds: number of rounds.
    """

    dense: float
    compressed: float
    ratio: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(dense: Sequence[float], compressed: Sequence[float]) -> "PairedRatio":
        """Return the ratio of paired times. The interval is that of the sign test (Conover 1999, section 3.2), which
        assumes no distribution; it is exact for rounds that are independent.

        Raises:
            MissingExtra: scipy is not installed.
        """
        stats = require("scipy.stats", purpose="a compression report", extra="tables")
        ratios = [after / before for before, after in zip(dense, compressed, strict=True)]
        interval = stats.quantile_test(ratios, q=1.0, p=0.5).confidence_interval(0.95)
        medians = statistics.median(dense), statistics.median(compressed), statistics.median(ratios)
        return PairedRatio(*medians, float(interval.low), float(interval.high), len(ratios))


def paired_times(
    calls: tuple[Callable[[], Times], Callable[[], Times]], rounds: int, steps: int = 1
) -> dict[str, PairedRatio]:
    """Time two models in turns, and return the ratio of their times for everything that both calls time.

    Each round runs both, the dense model first in every second round, so that slow changes of the machine's speed do
    not favour one of them. Each model first runs twice without being counted, as a warm-up. The second of these runs
    determines how many runs make a sample of at least 20 ms.

    Args:
        calls: run the dense model and the compressed one once, and return the seconds by name; one of the names is
            "total".
        rounds: number of rounds, at least 6.
        steps: number of steps in a run; the times are those of one step.
    """
    for call in calls:
        call()
    repeats = [max(1, math.ceil(LEAST_SECONDS / max(call()["total"], 1e-9))) for call in calls]
    samples: tuple[list[Times], list[Times]] = ([], [])
    for number in range(rounds):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            runs = [calls[index]() for _ in range(repeats[index])]
            samples[index].append({name: statistics.fmean(run[name] for run in runs) / steps for name in runs[0]})
    names = [name for name in samples[0][0] if name in samples[1][0]]
    return {name: PairedRatio.of(*([each[name] for each in of_model] for of_model in samples)) for name in names}
