"""The jobs of a study: which one is to be done now, and how it is done."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.studies.budget import SEARCH_COST, Plan, Work
from headwise.studies.space import Setting
from headwise.studies.training import evaluate, train
from headwise.studies.trial_store import Job, Ledger, require_optuna

LEAST_TRIALS, MOST_TRIALS = 3, 8
"""Learning rates that are tried for each setting, where a budget and not a number decides."""

RESERVE = 1.05
"""Time that is set aside for what must be trained after the search, in what is foreseen for it."""

SLACK = 1.05
"""A training that would end later than this, in budgets, is not begun."""

CHECKED = 8
"""Batches on which a training is judged on its way."""

RUNGS = (0.5, 0.75)
"""When it is, in shares of its steps."""


@dataclass(frozen=True)
class Wanted:
    """How much is to be done."""

    budget: float | None
    steps: int | None
    trials: int | None
    seeds: int

    @property
    def least_trials(self) -> int:
        """Learning rates that are planned for each setting."""
        return self.trials or LEAST_TRIALS

    @property
    def most_trials(self) -> int:
        """Learning rates that are tried for each setting if time allows."""
        return self.trials or (LEAST_TRIALS if self.budget is None else MOST_TRIALS)


def run(ledger: Ledger, work: Work, plan: Plan, wanted: Wanted, show: Callable[[], None]) -> None:
    """Do what nobody does until all is done."""
    while True:
        show()
        ledger.tick()
        ledger.sweep()
        job = next_job(ledger, plan, work.settings, wanted)
        if job is not None:
            ledger.run(job, Training(ledger, work, plan, job, show), work.seed)
        elif ledger.running():
            time.sleep(0.5)  # others are at it, and may die
        else:
            return


def next_job(ledger: Ledger, plan: Plan, settings: Sequence[Setting], wanted: Wanted) -> Job | None:
    """What to do now; None where there is nothing, or nothing yet."""
    taken, seconds, spent = ledger.taken(), Foreseen(ledger, plan), ledger.spent()
    finals = [Job(setting, True, 1 + seed) for seed in range(wanted.seeds) for setting in settings]
    finals = [job for job in finals if job.entry not in taken[job.setting]]
    reserved = RESERVE * sum(seconds(job) for job in finals) / ledger.workers()

    def in_time(job: Job) -> bool:
        if wanted.budget is None:
            return True
        if job.final:
            return spent + seconds(job) <= SLACK * wanted.budget
        return job.number == 0 or spent + reserved + SEARCH_COST * seconds(job) <= wanted.budget

    searches = [_next_search(setting, taken[setting]) for setting in settings]
    if ledger.searched is None:
        job = min(searches, key=lambda job: job.number)
        if job.number < wanted.most_trials and in_time(job):
            return job
        ledger.end_search({job.setting: job.number for job in searches})
    begun = ledger.searched or {}
    for job in searches:
        if job.number < begun[job.setting.name] and in_time(job):  # whoever did it died
            return job
    for job in finals:
        unsettled = any(entry.startswith("search") for entry in ledger.running(job.setting))
        if not unsettled and in_time(job):
            return job
    return None


def _next_search(setting: Setting, taken: Set[str]) -> Job:
    """The first learning rate of a setting that nobody tries or has tried."""
    jobs = (Job(setting, False, number) for number in itertools.count())
    return next(job for job in jobs if job.entry not in taken)


class Foreseen:
    """How long a job takes: as planned, times what others took more or less, the most alike of them."""

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self._plan = plan
        self._paces: dict[Any, list[float]] = {}
        for each in ledger.done():
            if each.pruned or not (planned := plan.seconds(each.job)):
                continue
            for alike in self._alike(each.job):
                self._paces.setdefault(alike, []).append(each.measured["seconds"] / planned)

    def __call__(self, job: Job) -> float:
        paces = next((self._paces[alike] for alike in self._alike(job) if alike in self._paces), [1.0])
        return self._plan.seconds(job) * statistics.median(paces)

    @staticmethod
    def _alike(job: Job) -> tuple[Any, ...]:
        """What jobs may have in common, most first: setting and kind, kind, nothing."""
        return (job.setting, job.final), job.final, None


@dataclass
class Training:
    """One job, as a trial of Optuna."""

    ledger: Ledger
    work: Work
    plan: Plan
    job: Job
    show: Callable[[], None]

    def __call__(self, trial: Any, rate: float) -> tuple[float, dict[str, Any]]:
        """The held-out loss, and what else was measured."""
        start = time.perf_counter()
        work, job, steps = self.work, self.job, self.plan.steps
        seed = work.seed + (job.number if job.final else 0)
        model = work.model(job.setting, seed)
        rungs = {math.ceil(share * steps) for share in RUNGS} - {steps}

        def after(step: int) -> None:
            self.ledger.tick()
            self.show()
            if step in rungs and not job.final:
                self._judge_early(trial, model, step)

        options: Any = {"steps": steps, "rate": rate, "seed": seed, "recipe": work.recipe, "after": after}
        trained = train(model, work.training, work.loss, **options)
        loss = evaluate(model.eval(), work.held_out, work.loss)
        measured: dict[str, Any] = {}
        if job.final:
            seen = work.training[: len(work.held_out)]
            measured = {"train_loss": evaluate(model, seen, work.loss), "step_ms": 1000 * trained.step_seconds}
            measured |= {name: float(measure(model)) for name, measure in work.measures.items()}
            if work.keep is not None:
                work.keep(model, job.setting, job.number)
        measured["seconds"] = time.perf_counter() - start
        return loss if math.isfinite(loss) else math.inf, measured

    def _judge_early(self, trial: Any, model: nn.Module, step: int) -> None:
        """Give up where Optuna's pruner says so, or where nothing can come of it."""
        loss = evaluate(model, self.work.held_out[:CHECKED], self.work.loss)
        if math.isfinite(loss):
            trial.report(loss, step)
        if not math.isfinite(loss) or trial.should_prune():
            raise require_optuna().TrialPruned
