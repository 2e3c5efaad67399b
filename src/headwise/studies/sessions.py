"""Working sessions of the processes of a study: how long they worked, and how many are working now."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from headwise.studies.optuna_storage import HEARTBEAT

PREFIX = "session "
"""Start of the name of an attribute that stores a session."""

WRITE_INTERVAL = 1.0
"""Least seconds between two writes of this process's session to the database."""


class Sessions:
    """Working times of all processes of a study, stored in the study's database as one interval `[start, last sign of
    life]` per process. The object records the interval of this process, and computes the time during which at
    least one process worked.

    Args:
        study: Optuna study whose user attributes store the sessions.
    """

    def __init__(self, study: Any) -> None:
        self._study = study
        self._attribute, self._start = f"{PREFIX}{uuid.uuid4()}", time.time()
        self._written = 0.0

    def update(self) -> None:
        """Record in the database, at most once per second, that this process is still working on the study."""
        if time.time() - self._written > WRITE_INTERVAL:
            self._written = time.time()
            self._study.set_user_attr(self._attribute, [self._start, self._written])

    def close(self) -> None:
        """Record in the database that this process has stopped working on the study."""
        self._study.set_user_attr(self._attribute, [self._start, time.time(), "left"])

    def seconds_spent(self) -> float:
        """Return the seconds during which at least one process worked on the study, by the clocks of the processes;
        time during which several processes worked is counted once.
        """
        return union_length([(session[0], session[1]) for session in self._all()])

    def active(self) -> int:
        """Return the number of processes, at least 1, that are working on the study now: those that recorded a sign of
        life in the last 10 seconds and did not record that they have stopped.
        """
        now = time.time()
        active = [session for session in self._all() if len(session) == 2 and now - session[1] < 2 * HEARTBEAT]
        return max(1, len(active))

    def _all(self) -> list[Any]:
        """Return the stored session of each process: `[start, last sign of life]`, followed by "left" if the process
        has stopped.
        """
        return [value for name, value in self._study.user_attrs.items() if name.startswith(PREFIX)]


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the total length that intervals `(start, end)` cover; overlaps count once."""
    total, covered_until = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total
