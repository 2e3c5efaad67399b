"""Plan of a study, and the order of its trials: how long to train, what to train next, and when to stop."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwise.errors import InputError
from headwise.studies.space import MIN_TRIALS, Setting, StudyBudget
from headwise.studies.training import UNTIMED_STEPS, StudyDefinition, evaluate
from headwise.studies.trials import FinishedTrial, TrialKey, TrialStore
from headwise.wording import counted

SEARCH_COST = 0.85
"""Expected cost of a learning-rate trial, in complete trainings: the pruner stops some of them early."""

MAX_EPOCHS = 4.0
"""Largest number of passes over the data when the time limit sets the number of steps: up to four passes are nearly as
good as new data (Muennighoff et al. 2023)."""

MIN_STEPS = 20
"""Smallest number of steps of a training: with fewer, nothing is learned."""

TIMED_STEPS = 5
"""Steps that are timed for each setting."""

MARGIN = 0.8
"""Share of the remaining time that is planned for. The learning-rate search uses time that is left over, and gives way
when time is short."""

RESERVE = 1.05
"""Time that the search leaves to the final trainings, as a multiple of their expected duration."""

OVERRUN = 1.05
"""A training that is expected to end later than this multiple of the time limit is not started."""

POLL_SECONDS = 0.5
"""Seconds between two checks of the trials of other processes, which may die."""


@dataclass(frozen=True)
class StudyPlan:
    """Plan of the trainings of a study: the number of steps of each training, and for each head setting (numbers of
    heads and head dimension) the number of parameters. With a time limit, it also has the expected seconds of a step,
    of an evaluation, and of additional measurements of a compared model. The plan is computed once and stored in the
    database with the fingerprint `spec`, so that all processes use the same values.

    Attributes:
        steps: steps of each training.
        step_seconds: seconds per training step, by setting name; empty without a time limit.
        judge_seconds: seconds to evaluate a trained model on the held-out batches, by setting name.
        more_seconds: seconds of the additional measurements of a compared model, by setting name.
        parameters: number of parameters, by setting name.
        spec: fingerprint of the study.
    """

    steps: int
    step_seconds: dict[str, float]
    judge_seconds: dict[str, float]
    more_seconds: dict[str, float]
    parameters: dict[str, int]
    spec: dict[str, Any]

    def seconds(self, key: TrialKey) -> float:
        """Return the planned seconds of a trial (one training with its evaluation) that is not stopped early; 0 without
        a time limit.
        """
        name = key.setting.name
        if name not in self.step_seconds:
            return 0.0
        more = self.more_seconds[name] if key.final else 0.0
        return self.steps * self.step_seconds[name] + self.judge_seconds[name] + more


def make_plan(
    definition: StudyDefinition, spec: dict[str, Any], budget: StudyBudget, seconds_spent: Callable[[], float]
) -> StudyPlan:
    """Return the plan of a study: the number of steps of each training, and expected durations. With a time limit, a
    few steps are timed for each head setting. If the budget does not state the number of steps, it is the largest for
    which the study ends in time, up to four passes over the training batches. Raise `InputError` if the time limit is
    too short.
    """
    limit, corpus = budget.seconds, definition.corpus
    step_seconds, judge_seconds, more_seconds, parameters = {}, {}, {}, {}

    def too_short(expected: str, steps: int) -> InputError:
        number = counted(len(definition.settings), "setting")
        expected = f"{expected} for trainings of {steps} steps of {number}"
        remedy = "fewer settings or seeds, or smaller models, need less time"
        return InputError("budget", expected=expected, got=f"{limit:g} s", remedy=remedy)

    def check_time(_step: int) -> None:
        if limit is not None and seconds_spent() > limit:
            raise too_short("more time", MIN_STEPS)

    for setting in definition.settings:
        model, name = definition.build(setting, definition.seed), setting.name
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        if limit is None:
            continue
        result = definition.train(model, UNTIMED_STEPS + TIMED_STEPS, 1e-4, definition.seed, check_time)
        step_seconds[name] = result.step_seconds
        start = time.perf_counter()
        evaluate(model, corpus.held_out[:1], corpus.loss)
        judge_seconds[name] = (time.perf_counter() - start) * len(corpus.held_out)
        start = time.perf_counter()
        for measure in definition.measures.values():
            measure(model)
        # A compared model is also evaluated on as many training batches.
        more_seconds[name] = judge_seconds[name] + time.perf_counter() - start
    steps = budget.steps
    if limit is not None:
        trainings = budget.seeds + SEARCH_COST * (budget.trials or MIN_TRIALS)
        fixed = trainings * sum(judge_seconds.values()) + budget.seeds * sum(more_seconds.values())
        per_step = trainings * sum(step_seconds.values())
        left, needed = MARGIN * (limit - seconds_spent()), fixed + (steps or MIN_STEPS) * per_step
        if left < needed:
            raise too_short(f"at least {seconds_spent() + needed / MARGIN:.0f} s", steps or MIN_STEPS)
        steps = steps or min(int((left - fixed) / per_step), round(MAX_EPOCHS * len(corpus.training)))
    assert steps is not None
    return StudyPlan(steps, step_seconds, judge_seconds, more_seconds, parameters, spec)


def duration_estimate(finished: Iterable[FinishedTrial], plan: StudyPlan) -> Callable[[TrialKey], float]:
    """Return a function that predicts the seconds of a trial (one training). The prediction is the planned seconds,
    times the median slowdown of similar finished trials that were not stopped early. A slowdown is the measured time
    divided by the planned time. Similar trials have the same head setting and kind (learning-rate trial or final
    training). If no similar trial has finished, all trials of the same kind are used, or else all trials.
    """

    def groups(key: TrialKey) -> tuple[Any, ...]:
        return (key.setting, key.final), key.final, None

    slowdowns: dict[Any, list[float]] = {}
    for trial in finished:
        if not trial.pruned and (planned := plan.seconds(trial.key)):
            for group in groups(trial.key):
                slowdowns.setdefault(group, []).append(trial.measured["seconds"] / planned)

    def expected_seconds(key: TrialKey) -> float:
        similar = next((slowdowns[group] for group in groups(key) if group in slowdowns), [1.0])
        return plan.seconds(key) * statistics.median(similar)

    return expected_seconds


def next_trial(store: TrialStore, plan: StudyPlan, settings: Sequence[Setting], budget: StudyBudget) -> TrialKey | None:
    """Return the trial (one training) that this process should run next, or None if none can start now. Learning-rate
    trials come first, then final trainings with the best learning rates. The search for learning rates ends for all
    processes when the budget allows no further trial, or when the remaining time is needed for the final trainings.
    """
    running, finished, spent = store.running(), store.finished(), store.seconds_spent()
    claimed = running | {trial.key for trial in finished}
    expected_seconds = duration_estimate(finished, plan)
    finals = [TrialKey(setting, True, 1 + seed) for seed in range(budget.seeds) for setting in settings]
    finals = [key for key in finals if key not in claimed]
    reserved = RESERVE * sum(expected_seconds(key) for key in finals) / store.active_processes()

    def is_in_time(key: TrialKey) -> bool:
        """Return True if the time limit allows a trial to start. A final training may start if it is expected to end
        before 105 % of the time limit. A learning-rate trial may start if enough time remains for the final trainings,
        and always if it is the first of a head setting.
        """
        if budget.seconds is None:
            return True
        if key.final:
            return spent + expected_seconds(key) <= OVERRUN * budget.seconds
        return key.number == 0 or spent + reserved + SEARCH_COST * expected_seconds(key) <= budget.seconds

    searches = [
        next(key for number in itertools.count() if (key := TrialKey(setting, False, number)) not in claimed)
        for setting in settings
    ]
    if store.search_sizes is None:
        key = min(searches, key=lambda key: key.number)
        if key.number < budget.max_trials and is_in_time(key):
            return key
        store.close_search({key.setting: key.number for key in searches})
    sizes = store.search_sizes or {}
    for key in searches:
        if key.number < sizes[key.setting.name] and is_in_time(key):  # the process that ran it died
            return key
    searching = {key.setting for key in running if not key.final}
    return next((key for key in finals if key.setting not in searching and is_in_time(key)), None)


def run_trials(
    store: TrialStore,
    definition: StudyDefinition,
    plan: StudyPlan,
    budget: StudyBudget,
    show_progress: Callable[[], None],
) -> None:
    """Run the trials of a study (its trainings) one after another in this process, until none is left. Trials that
    other processes run or have finished are skipped. `show_progress` is called before each trial and after each
    training step.
    """

    def after_step() -> None:
        store.update_session()
        show_progress()

    while True:
        show_progress()
        store.update_session()
        store.fail_stale_trials()
        key = next_trial(store, plan, definition.settings, budget)
        if key is not None:
            store.run_trial(key, partial(definition.run_trial, key, plan.steps, after_step), definition.seed)
        elif store.running():
            time.sleep(POLL_SECONDS)
        else:
            return
