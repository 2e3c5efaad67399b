"""Expected duration of a trial, corrected by the durations of finished ones."""

import statistics
from collections.abc import Iterable
from typing import Any

from headwise.studies.plan import StudyPlan
from headwise.studies.trial_store import FinishedTrial, TrialKey


class DurationEstimate:
    """Callable that predicts the seconds of a trial (one training of a study): its planned seconds times the median
    slowdown of similar finished trials. The slowdown of a trial is its measured seconds divided by its planned seconds.
    Similar trials are those of the same head setting and stage (learning-rate search or final training) or, if none of
    these has finished, those of the same stage or, if none of these either, all.

    Args:
        finished: trials that ended; pruned ones are ignored.
        plan: planned seconds of each trial.
    """

    def __init__(self, finished: Iterable[FinishedTrial], plan: StudyPlan) -> None:
        self._plan = plan
        self._slowdowns: dict[Any, list[float]] = {}
        for trial in finished:
            if trial.pruned or not (planned := plan.seconds(trial.key)):
                continue
            for group in self._groups(trial.key):
                self._slowdowns.setdefault(group, []).append(trial.measured["seconds"] / planned)

    def __call__(self, key: TrialKey) -> float:
        """Return the expected seconds of a trial: its planned seconds times the median slowdown of similar finished
        trials, or the planned seconds if no trial has finished.
        """
        slowdowns = next((self._slowdowns[group] for group in self._groups(key) if group in self._slowdowns), [1.0])
        return self._plan.seconds(key) * statistics.median(slowdowns)

    @staticmethod
    def _groups(key: TrialKey) -> tuple[Any, ...]:
        """Return the dictionary keys of the three groups of similar trials to which a trial belongs, from narrow to
        broad: trials of the same head setting and stage (learning-rate search or final training), trials of the same
        stage, and all trials.
        """
        return (key.setting, key.final), key.final, None
