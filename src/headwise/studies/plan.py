"""Plan of a study: the number of steps of each training, computed from the budget and the duration of a few steps."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.studies.budget import StudyBudget
from headwise.studies.definition import StudyDefinition
from headwise.studies.training import UNTIMED_STEPS, evaluate, train
from headwise.studies.trial_store import TrialKey

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


@dataclass(frozen=True)
class StudyPlan:
    """Number of steps of each training of a study and, for each head setting, the number of parameters of its models
    and the expected seconds of a training step, of an evaluation and of further measurements. A plan is computed once
    and stored in the database, so that all processes of a study use the same values.

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
        """Return the planned seconds of a trial that is not stopped early: training, evaluation and, for a final
        training, additional measurements; 0 without a time limit.
        """
        name = key.setting.name
        if name not in self.step_seconds:
            return 0.0
        more = self.more_seconds[name] if key.final else 0.0
        return self.steps * self.step_seconds[name] + self.judge_seconds[name] + more

    def packed(self) -> dict[str, Any]:
        """Return the fields of the plan as a dictionary of plain Python values, which can be stored as JSON."""
        return asdict(self)


def make_plan(
    definition: StudyDefinition, spec: dict[str, Any], budget: StudyBudget, seconds_spent: Callable[[], float]
) -> StudyPlan:
    """Return the plan of a study: the number of steps of each training, the expected durations (of a training step, an
    evaluation and further measurements), and the number of parameters of each model. With a time limit, a few steps of
    each head setting are timed. If the budget does not set the number of steps, it is the largest number that the time
    limit allows, but at most four passes over the training batches. A time limit that is too short raises `InputError`.

    Args:
        definition: models and data of the study.
        spec: fingerprint of the study, stored in the plan.
        budget: limits of the study; without `seconds` nothing is timed.
        seconds_spent: returns the seconds that the study has used so far.

    Raises:
        InputError: the time limit is too short for the trainings.
    """
    step_seconds, judge_seconds, more_seconds, parameters = {}, {}, {}, {}
    for setting in definition.settings:
        model = definition.build(setting, definition.seed)
        parameters[setting.name] = sum(parameter.numel() for parameter in model.parameters())
        if budget.seconds is not None:
            durations = _durations(model, definition, budget.seconds, seconds_spent)
            step_seconds[setting.name], judge_seconds[setting.name], more_seconds[setting.name] = durations
    steps = budget.steps
    if budget.seconds is not None:
        trainings = budget.seeds + SEARCH_COST * budget.min_trials
        fixed = trainings * sum(judge_seconds.values()) + budget.seeds * sum(more_seconds.values())
        per_step = trainings * sum(step_seconds.values())
        left, needed = MARGIN * (budget.seconds - seconds_spent()), fixed + (steps or MIN_STEPS) * per_step
        if left < needed:
            expected = f"at least {seconds_spent() + needed / MARGIN:.0f} s"
            raise _too_short(definition, budget.seconds, expected, steps or MIN_STEPS)
        steps = steps or min(int((left - fixed) / per_step), round(MAX_EPOCHS * len(definition.training)))
    assert steps is not None
    return StudyPlan(steps, step_seconds, judge_seconds, more_seconds, parameters, spec)


def _too_short(definition: StudyDefinition, seconds: float, expected: str, steps: int) -> InputError:
    """Return an `InputError`, which the caller raises, for a time limit of `seconds` that is too short for trainings of
    `steps` steps. Its message states the time needed, `expected`.
    """
    number = f"{len(definition.settings)} setting{'s' * (len(definition.settings) > 1)}"
    expected = f"{expected} for trainings of {steps} steps of {number}"
    remedy = "fewer settings or seeds, or smaller models, need less time"
    return InputError("budget", expected=expected, got=f"{seconds:g} s", remedy=remedy)


def _durations(
    model: nn.Module, definition: StudyDefinition, limit: float, seconds_spent: Callable[[], float]
) -> tuple[float, float, float]:
    """Train a model for a few steps, and return three durations in seconds: of one training step, of an evaluation on
    all held-out batches (estimated from one batch), and of all measurements that only final trainings need. Raise
    `InputError` if the study's time limit is used up meanwhile.
    """

    def check_time(_step: int) -> None:
        """Raise `InputError` if the study has used up its time limit."""
        if seconds_spent() > limit:
            raise _too_short(definition, limit, "more time", MIN_STEPS)

    result = train(
        model,
        definition.training,
        definition.loss,
        steps=UNTIMED_STEPS + TIMED_STEPS,
        rate=1e-4,
        seed=definition.seed,
        recipe=definition.recipe,
        after_step=check_time,
    )
    start = time.perf_counter()
    evaluate(model, definition.held_out[:1], definition.loss)
    judge = (time.perf_counter() - start) * len(definition.held_out)
    start = time.perf_counter()
    for measure in definition.measures.values():
        measure(model)
    # A compared model is also evaluated on as many training batches.
    return result.step_seconds, judge, judge + time.perf_counter() - start
