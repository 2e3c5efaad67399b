"""Which trials of a study there are, who runs them and what came out: a database that Optuna keeps.

Several processes work on one study, on one machine or many. There is no master: each looks for something that nobody
does, claims it, and looks whether somebody claimed it before. Optuna numbers trials in the order in which they were
made, so all agree on who was first. What a process that died had begun is claimed again.
"""

import logging
import math
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require
from headwise.studies.space import Setting

if TYPE_CHECKING:
    import optuna

HEARTBEAT, GRACE = 5, 20
"""Seconds after which a process says that it lives, and after which one that has not is taken for dead."""

PATIENCE = 60.0
"""Seconds that a process waits for others to write."""

SPREAD = 3
"""Learning rates that are spread over their range before the search looks at what they gave."""

ENTRY = "entry"
"""What a trial is, as an attribute of it."""


@dataclass(frozen=True)
class Job:
    """One training: of which setting, to find a learning rate or to show the spread, and its number."""

    setting: Setting
    final: bool
    number: int

    @property
    def entry(self) -> str:
        """Its name among the trials of its setting."""
        return f"{'seed' if self.final else 'search'} {self.number}"


@dataclass(frozen=True)
class Done:
    """A trial that is no longer running: what was trained, its learning rate, its loss and what else was measured."""

    job: Job
    rate: float
    loss: float
    pruned: bool
    measured: Mapping[str, Any]


class Ledger:
    """A study in a database.

    Args:
        url: of the database, such as sqlite:///study.db.
        name: of the study; each setting is one of Optuna's, `name/setting`.
        settings: what is compared.
        rates: the least and the largest learning rate.
        pruner: which trials of a search are given up; by default those that at half of their steps are behind the
            median of those before.
        force: forget what there is of that name.

    Raises:
        InputError: a database that cannot be opened.
        MissingExtra: optuna is not installed.
    """

    def __init__(
        self,
        url: str,
        name: str,
        settings: Sequence[Setting],
        rates: tuple[float, float],
        pruner: "optuna.pruners.BasePruner | None" = None,
        *,
        force: bool = False,
    ) -> None:
        self._optuna = require_optuna()
        self.settings, self.rates = settings, rates
        self._session, self._began = f"session {uuid.uuid4()}", time.time()
        self._ticked = 0.0
        with quiet(self._optuna):
            storage = self._open(url)
            pruner = pruner or self._optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
            if force:
                for each in self._optuna.get_all_study_names(storage):
                    if each == name or each.startswith(f"{name}/"):
                        self._optuna.delete_study(study_name=each, storage=storage)
            make: Any = {"storage": storage, "pruner": pruner, "load_if_exists": True}
            self._root = self._optuna.create_study(study_name=name, **make)
            self._studies = {
                setting: self._optuna.create_study(study_name=f"{name}/{setting}", **make) for setting in settings
            }
        self.tick()

    def _open(self, url: str) -> Any:
        """The storage. Of several processes that make its tables at once, all but one fail, and find them then."""
        from sqlalchemy.exc import ArgumentError, SQLAlchemyError

        local = url.startswith("sqlite")
        engine: dict[str, Any] = {"connect_args": {"timeout": PATIENCE}} if local else {"pool_pre_ping": True}
        options: Any = {"heartbeat_interval": HEARTBEAT, "grace_period": GRACE, "engine_kwargs": engine}
        for attempt in range(5):
            try:
                return self._optuna.storages.RDBStorage(url, **options)
            except (ImportError, ArgumentError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise InputError("storage", expected="the URL of a database", got=f"{url!r}: {reason}") from None
            except (SQLAlchemyError, RuntimeError) as error:
                reason = str(getattr(error, "orig", error)).splitlines()[0]
                if attempt == 4:
                    raise InputError(
                        "storage", expected=f"a database at {url!r}", got=f"none that can be used: {reason}"
                    ) from None
                time.sleep(0.2 * 2**attempt)
        raise AssertionError

    # -- what all processes agree on ----------------------------------------------------------------------------------

    def agreed(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was written first, by any process; `make` is asked where nothing was."""
        if (there := self._first_written()) is not None:
            return there
        written = self._optuna.trial.create_trial(value=0.0, user_attrs={"plan": make()})
        with quiet(self._optuna):
            self._root.add_trial(written)
        found = self._first_written()
        assert found is not None
        return found

    def _first_written(self) -> dict[str, Any] | None:
        return next((trial.user_attrs["plan"] for trial in self._root.get_trials(deepcopy=False)), None)

    @property
    def searched(self) -> Mapping[str, int] | None:
        """How many learning rates are tried for each setting, by name; None as long as there may be more."""
        found: Mapping[str, int] | None = self._root.user_attrs.get("searched")
        return found

    def end_search(self, tried: Mapping[Setting, int]) -> None:
        """From now on there are no more than these."""
        self._root.set_user_attr("searched", {setting.name: number for setting, number in tried.items()})

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Say that this process is at work."""
        if time.time() - self._ticked > 1.0:
            self._ticked = time.time()
            self._root.set_user_attr(self._session, [self._began, self._ticked])

    def leave(self) -> None:
        """Say that it is no longer."""
        self._root.set_user_attr(self._session, [self._began, time.time(), "left"])

    def spent(self) -> float:
        """Seconds during which one process or more was at work, by their clocks."""
        return union([(session[0], session[1]) for session in self._sessions()])

    def workers(self) -> int:
        """Processes that are at work."""
        now = time.time()
        here = [session for session in self._sessions() if len(session) == 2 and now - session[1] < 2 * HEARTBEAT]
        return max(1, len(here))

    def _sessions(self) -> list[Any]:
        return [value for name, value in self._root.user_attrs.items() if name.startswith("session ")]

    # -- trials -------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Give up the trials of processes that died."""
        with quiet(self._optuna):
            for study in self._studies.values():
                self._optuna.storages.fail_stale_trials(study)

    def taken(self) -> dict[Setting, set[str]]:
        """The entries that are done or being done, by setting."""
        return {setting: {*self._entries(setting)} for setting in self.settings}

    def running(self, setting: Setting | None = None) -> list[str]:
        """The entries that are being done."""
        state = self._optuna.trial.TrialState.RUNNING
        of = self.settings if setting is None else (setting,)
        return [entry for each in of for entry, trial in self._entries(each).items() if trial.state == state]

    def done(self) -> list[Done]:
        """What came out, in the order of settings and trials."""
        states = self._optuna.trial.TrialState
        found = []
        for setting in self.settings:
            for entry, trial in self._entries(setting).items():
                if trial.state in (states.COMPLETE, states.PRUNED):
                    kind, number = entry.split()
                    job = Job(setting, kind == "seed", int(number))
                    loss = math.nan if trial.value is None else trial.value
                    pruned = trial.state == states.PRUNED
                    found.append(Done(job, trial.params["rate"], loss, pruned, trial.user_attrs.get("measured", {})))
        return found

    def best_rate(self, setting: Setting) -> float | None:
        """The learning rate of the search's lowest loss; None where every training diverged."""
        searched = [each for each in self.done() if each.job.setting == setting and not each.job.final]
        ended = [each for each in searched if math.isfinite(each.loss) and not each.pruned]
        return min(ended, key=lambda each: each.loss).rate if ended else None

    def run(self, job: Job, objective: Callable[[Any, float], tuple[float, dict[str, Any]]], seed: int) -> None:
        """Do one job, unless another process was first.

        Args:
            job: what to do.
            objective: of a trial and a learning rate; gives the loss and what else was measured, or raises
                `TrialPruned`.
            seed: of the search for learning rates.
        """
        study, finished = self._studies[job.setting], self._optuna.exceptions.UpdateFinishedTrialError
        begun: list[int] = []  # the number of the trial
        raised: list[Exception] = []  # by the objective

        def claimed(trial: "optuna.Trial") -> float:
            begun.append(trial.number)
            trial.set_user_attr(ENTRY, job.entry)
            if not self._is_first(study, trial.number, job.entry):
                trial.set_user_attr("given up", "another process was first")
                raise _TakenError
            rate = trial.suggest_float("rate", *self.rates, log=True)
            try:
                loss, measured = objective(trial, rate)
            except Exception as error:
                raised.append(error)
                raise
            trial.set_user_attr("measured", measured)
            return loss

        with quiet(self._optuna):
            study.sampler = self._sampler(job, seed)
            try:
                study.optimize(claimed, n_trials=1, catch=(_TakenError,))
            except (finished, ValueError) as error:
                # Whoever was taken for dead finds its trial finished by another; Optuna says so in either way.
                gone = begun and study.get_trials(deepcopy=False)[begun[0]].state.is_finished()
                if not gone or (error in raised and not isinstance(error, finished)):
                    raise

    def _is_first(self, study: "optuna.Study", number: int, entry: str) -> bool:
        """Whether no living trial before this one is the same; one that does not say yet what it is is waited for.

        One that never does was made by a process that died before its heart beat once: it is given up here.
        """
        states, waited = self._optuna.trial.TrialState, time.time()
        while True:
            there = study.get_trials(deepcopy=False)
            before = [trial for trial in there if trial.number < number and self._lives(trial)]
            if any(trial.user_attrs.get(ENTRY) == entry for trial in before):
                return False
            if all(ENTRY in trial.user_attrs for trial in before):
                return True
            self._optuna.storages.fail_stale_trials(study)
            if time.time() - waited > GRACE:
                for trial in before:
                    if ENTRY not in trial.user_attrs:
                        study.tell(trial.number, state=states.FAIL, skip_if_finished=True)
            time.sleep(0.05)

    def _entries(self, setting: Setting) -> dict[str, Any]:
        """The living trial of each entry, the first."""
        found: dict[str, Any] = {}
        for trial in self._studies[setting].get_trials(deepcopy=False):
            if ENTRY in trial.user_attrs and self._lives(trial):
                found.setdefault(trial.user_attrs[ENTRY], trial)
        return found

    def _lives(self, trial: Any) -> bool:
        states = self._optuna.trial.TrialState
        return trial.state in (states.RUNNING, states.COMPLETE, states.PRUNED)

    def _sampler(self, job: Job, seed: int) -> Any:
        """What gives the learning rate: the best one for a final training; spread ones, then Optuna's TPE."""
        samplers, rate = self._optuna.samplers, self.best_rate(job.setting) if job.final else None
        if not job.final and job.number < SPREAD:
            low, high = map(math.log, self.rates)
            rate = math.exp(low + (high - low) * spread(job.number))
        if not job.final and rate is None:
            return samplers.TPESampler(seed=seed + job.number, n_startup_trials=1)
        if rate is None:
            raise InputError("rates", expected=f"one with which {job.setting} trains", got="no loss that is finite")
        return samplers.PartialFixedSampler({"rate": rate}, samplers.RandomSampler(seed=seed))


class _TakenError(Exception):
    """Another process was first."""


def spread(number: int) -> float:
    """Point `number` of van der Corput's sequence: 1/2, 1/4, 3/4, 1/8, ...: wherever it stops, it is spread evenly."""
    point, part, number = 0.0, 0.5, number + 1
    while number:
        point += part * (number & 1)
        number, part = number >> 1, part / 2
    return point


def union(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of what intervals cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def require_optuna() -> Any:
    """Import and return `optuna`."""
    return require("optuna", purpose="a study", extra="study")


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Within the context Optuna says nothing of each trial, nor that what is used here is new to it."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
