"""Scheduler of a study: which trial runs next, and when the search and the study end."""

import itertools
import time
from collections.abc import Callable, Sequence, Set

from headwise.studies.budget import StudyBudget
from headwise.studies.definition import StudyDefinition
from headwise.studies.durations import DurationEstimate
from headwise.studies.objective import TrialObjective
from headwise.studies.plan import SEARCH_COST, StudyPlan
from headwise.studies.space import Setting
from headwise.studies.trial_store import TrialKey, TrialStore

RESERVE = 1.05
"""Time that the search leaves to the final trainings, as a multiple of their expected duration."""

OVERRUN = 1.05
"""A training that is expected to end later than this multiple of the time limit is not started."""

POLL_SECONDS = 0.5
"""Seconds between two checks of the trials of other processes, which may die."""


def run_trials(
    store: TrialStore,
    definition: StudyDefinition,
    plan: StudyPlan,
    budget: StudyBudget,
    show_progress: Callable[[], None],
) -> None:
    """Run the trials (trainings) of a study one after another in this process, except those that other processes run or
    have finished. Return when no trial is left to start and no process is running one. `show_progress` is called before
    each trial and after each training step.
    """

    def after_step() -> None:
        """Record in the database that this process is still working on the study, and update the progress bar."""
        store.sessions.update()
        show_progress()

    while True:
        show_progress()
        store.sessions.update()
        store.fail_stale_trials()
        key = next_trial(store, plan, definition.settings, budget)
        if key is not None:
            store.run_trial(key, TrialObjective(definition, plan.steps, key, after_step), definition.seed)
        elif store.running():
            time.sleep(POLL_SECONDS)
        else:
            return


def next_trial(store: TrialStore, plan: StudyPlan, settings: Sequence[Setting], budget: StudyBudget) -> TrialKey | None:
    """Return the trial that this process should run next, or None if no trial can start now. Learning-rate trials come
    first, then final trainings with the best learning rates. Once the budget allows no further learning-rate trial, the
    learning-rate search is closed for all processes: the number of learning-rate trials of each setting is stored in
    the database.

    With a time limit, the search ends when the remaining time is needed for the final trainings.
    """
    claimed, spent = store.claimed(), store.sessions.seconds_spent()
    expected_seconds = DurationEstimate(store.finished(), plan)
    finals = [TrialKey(setting, True, 1 + seed) for seed in range(budget.seeds) for setting in settings]
    finals = [key for key in finals if key.name not in claimed[key.setting]]
    reserved = RESERVE * sum(expected_seconds(key) for key in finals) / store.sessions.active()

    def is_in_time(key: TrialKey) -> bool:
        """Return True if the time limit, if there is one, allows a trial to start. A final training must be expected to
        end at most 5 % after the limit. A learning-rate trial must leave time for the final trainings, unless it is the
        first of its setting.
        """
        if budget.seconds is None:
            return True
        if key.final:
            return spent + expected_seconds(key) <= OVERRUN * budget.seconds
        return key.number == 0 or spent + reserved + SEARCH_COST * expected_seconds(key) <= budget.seconds

    searches = [_next_search(setting, claimed[setting]) for setting in settings]
    if store.search_sizes is None:
        key = min(searches, key=lambda key: key.number)
        if key.number < budget.max_trials and is_in_time(key):
            return key
        store.close_search({key.setting: key.number for key in searches})
    sizes = store.search_sizes or {}
    for key in searches:
        if key.number < sizes[key.setting.name] and is_in_time(key):  # the process that ran it died
            return key
    for key in finals:
        is_searching = any(name.startswith("search") for name in store.running(key.setting))
        if not is_searching and is_in_time(key):
            return key
    return None


def _next_search(setting: Setting, claimed: Set[str]) -> TrialKey:
    """Return the next learning-rate trial of a setting: the one with the lowest number whose name is not in `claimed`,
    the names of the setting's running and finished trials.
    """
    keys = (TrialKey(setting, False, number) for number in itertools.count())
    return next(key for key in keys if key.name not in claimed)
