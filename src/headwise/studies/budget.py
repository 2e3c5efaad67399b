"""How long trainings take, and how many batches each may have in a budget."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from headwise.analysis.losses import Loss
from headwise.errors import InputError
from headwise.studies.space import Setting
from headwise.studies.training import FIRST, Batches, Recipe, build, evaluate, train
from headwise.studies.trial_store import Job

SEARCH_COST = 0.85
"""What a trial of a learning rate costs, in whole trainings: some are given up on their way."""

EPOCHS = 4.0
"""How often a batch is seen at most where a budget decides: so many are nearly as good as new ones (Muennighoff et al.
2023)."""

LEAST_STEPS = 20
"""Of a training: with fewer nothing is learned."""

TIMED = 5
"""Steps that are timed of each setting before anything is planned."""

MARGIN = 0.8
"""The share of what is left of a budget that is planned with: what is over the search takes up, what lacks it loses."""

Measure = Callable[[nn.Module], float]
"""A number of a trained model."""


@dataclass(frozen=True)
class Work:
    """What is trained, on what, and how it is judged."""

    build_model: Callable[[Setting], nn.Module]
    settings: tuple[Setting, ...]
    training: Batches
    held_out: Batches
    loss: Loss
    recipe: Recipe
    measures: Mapping[str, Measure]
    keep: Callable[[nn.Module, Setting, int], None] | None
    device: torch.device | None
    seed: int

    def model(self, setting: Setting, seed: int) -> nn.Module:
        """One that has not been trained, its weights drawn from a seed."""
        made = build(lambda: self.build_model(setting), seed)
        return made if self.device is None else made.to(self.device)


@dataclass(frozen=True)
class Plan:
    """What all processes agree on: the batches of a training, and how long things take.

    Attributes:
        steps: of each training.
        step_seconds: of a step, by setting; empty where nobody asks for time.
        judge_seconds: of judging a model that was trained, by setting.
        more_seconds: of what else is measured of one that is compared, by setting.
        parameters: of a model, by setting.
        spec: what the study was begun with.
    """

    steps: int
    step_seconds: dict[str, float]
    judge_seconds: dict[str, float]
    more_seconds: dict[str, float]
    parameters: dict[str, int]
    spec: dict[str, Any]

    def seconds(self, job: Job) -> float:
        """Of a whole training, and what follows; 0 where nothing was timed."""
        name = job.setting.name
        if name not in self.step_seconds:
            return 0.0
        more = self.more_seconds[name] if job.final else 0.0
        return self.steps * self.step_seconds[name] + self.judge_seconds[name] + more

    def packed(self) -> dict[str, Any]:
        """As plain containers."""
        return asdict(self)


def planned(
    work: Work,
    spec: dict[str, Any],
    *,
    budget: float | None,
    spent: Callable[[], float],
    steps: int | None,
    trials: int,
    seeds: int,
) -> Plan:
    """A plan for these trainings.

    Args:
        work: what is to be trained.
        spec: what the study was begun with.
        budget: seconds for all of them; None without one, and then nothing is timed.
        spent: seconds that are gone.
        steps: of each training; None to have it follow from the budget.
        trials: learning rates that are tried for each setting, at least.
        seeds: trainings of each setting after that.

    Raises:
        InputError: a budget that is too small.
    """
    step_seconds, judge_seconds, more_seconds, parameters = {}, {}, {}, {}
    for setting in work.settings:
        model = work.model(setting, work.seed)
        parameters[setting.name] = sum(each.numel() for each in model.parameters())
        if budget is not None:
            found = _timed(model, work, budget, spent)
            step_seconds[setting.name], judge_seconds[setting.name], more_seconds[setting.name] = found
    if budget is not None:
        trainings = seeds + SEARCH_COST * trials
        fixed = trainings * sum(judge_seconds.values()) + seeds * sum(more_seconds.values())
        a_step = trainings * sum(step_seconds.values())
        left, least = MARGIN * (budget - spent()), fixed + (steps or LEAST_STEPS) * a_step
        if left < least:
            raise _too_small(work, budget, f"at least {spent() + least / MARGIN:.0f} s", steps or LEAST_STEPS)
        steps = steps or min(int((left - fixed) / a_step), round(EPOCHS * len(work.training)))
    assert steps is not None
    return Plan(steps, step_seconds, judge_seconds, more_seconds, parameters, spec)


def _too_small(work: Work, budget: float, expected: str, steps: int) -> InputError:
    number = f"{len(work.settings)} setting{'s' * (len(work.settings) > 1)}"
    expected = f"{expected} for trainings of {steps} steps of {number}"
    remedy = "fewer settings, seeds or parameters take less"
    return InputError("budget", expected=expected, got=f"{budget:g} s", remedy=remedy)


def _timed(model: nn.Module, work: Work, budget: float, spent: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds of a step, of judging a model when it is trained, and of what else is measured of it."""

    def in_time(_step: int) -> None:
        if spent() > budget:
            raise _too_small(work, budget, "more", LEAST_STEPS)

    options: Any = {"steps": FIRST + TIMED, "rate": 1e-4, "seed": work.seed, "recipe": work.recipe, "after": in_time}
    trained = train(model, work.training, work.loss, **options)
    start = time.perf_counter()
    evaluate(model, work.held_out[:1], work.loss)
    judge = (time.perf_counter() - start) * len(work.held_out)
    start = time.perf_counter()
    for measure in work.measures.values():
        measure(model)
    return trained.step_seconds, judge, judge + time.perf_counter() - start  # the training loss is judged as well
