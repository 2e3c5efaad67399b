"""Time budget of the GPU benchmark: what no longer fits is left out, and named."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Seconds that all parts of the benchmark may take together.

    Attributes:
        seconds: length of the whole benchmark.
        clock: returns the current time in seconds.
        left_out: reason for each check, regime or contestant that was left out, by name.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def used(self) -> float:
        """Seconds since the benchmark started."""
        return self.clock() - self.start

    def allows(self, name: str, share: float, expected: float = 0.0) -> bool:
        """Return True if work of `expected` seconds may start; otherwise note under its name that it was left out.

        Args:
            name: of the work, for the report.
            share: share of all seconds at which this part of the benchmark ends.
            expected: seconds that the work is expected to take.
        """
        if self.used + expected <= share * self.seconds:
            return True
        self.left_out[name] = "no time was left"
        return False
