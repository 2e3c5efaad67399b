"""Trials of a study in Optuna's database, which several processes share.

Optuna stores the trials, searches learning rates, stops unpromising trials early, and detects trials whose process
died. Processes on one machine or many divide the trials of a study without a coordinator. A process that wants to run a
trial adds an Optuna trial, writes the trial's name to it, and then looks for other Optuna trials of this name. The
process gives its trial up if another one has begun or has finished, or has a lower number. Because each process writes
the name before it looks, no two processes run the same trial.
"""

import logging
import math
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require
from headwise.studies.space import Setting
from headwise.wording import without_passwords, without_passwords_of

if TYPE_CHECKING:
    import optuna

HEARTBEAT, GRACE_PERIOD = 5, 20
"""Seconds between two heartbeats of a running trial, and seconds without one after which its process counts as dead."""

LOCK_TIMEOUT = 60.0
"""Seconds that a process waits while another one writes to an SQLite file."""

ATTEMPTS = 5
"""Number of attempts to open a database: of several processes that create its tables at once, all but one fail."""

SESSION_INTERVAL = 1.0
"""Least seconds between two writes of this process's working time to the database."""

SPREAD = (1 / 2, 1 / 4, 3 / 4)
"""Learning rates of the first trials of a setting, as shares of the range on a log scale: the start of van der Corput's
sequence. Optuna's TPE (tree-structured Parzen estimator) chooses later rates by the losses of earlier ones."""

KEY, SESSION, SEARCH_SIZES = "key", "session ", "search sizes"
"""User attributes in Optuna's database: name of a trial; start of the name of a process's working time; number of
learning-rate trials of each setting."""


@dataclass(frozen=True)
class OptunaOptions:
    """Database, study name and pruner for Optuna, which stores the trainings of a study (its trials) and searches
    learning rates. The pruner decides which trials of this search are stopped early.

    Attributes:
        storage: URL of a database, as SQLAlchemy accepts it, for processes on several machines; by default an SQLite
            file in the output folder.
        name: name of the study in the database.
        pruner: decides which learning-rate trials are stopped early; by default, those with a loss above the median
            of their setting at half or at three quarters of the steps.
    """

    storage: str | None = None
    name: str = "study"
    pruner: "optuna.pruners.BasePruner | None" = None


@dataclass(frozen=True)
class TrialKey:
    """Identity of a trial, which is one training of a study. A search trial tries a learning rate. A final trial uses
    the best rate, and its result is compared with those of other head settings. Trials of a setting are numbered from
    0; for a final trial, the number is the seed.

    Attributes:
        setting: heads of the trained model.
        final: True for a training with the best learning rate that is compared, False for a learning-rate trial.
        number: number within setting and stage: from 0 for learning rates, the seed from 1 for final trainings.
    """

    setting: Setting
    final: bool
    number: int

    @property
    def name(self) -> str:
        """Name of the trial within its head setting: `search NUMBER` for a learning-rate trial, `seed NUMBER` for a
        final training.
        """
        return f"{'seed' if self.final else 'search'} {self.number}"


@dataclass(frozen=True)
class FinishedTrial:
    """Result of a trial (one training of a study) that is complete or was stopped early.

    Attributes:
        key: identity of the trial.
        rate: peak learning rate.
        loss: mean held-out loss, or the last reported one if the trial was pruned (NaN if none was reported); infinite
            if training diverged.
        pruned: True if the trial was stopped early.
        measured: further measurements by name; empty if the trial was pruned.
    """

    key: TrialKey
    rate: float
    loss: float
    pruned: bool
    measured: Mapping[str, Any]


class TrialStore:
    """Trials of a study (its trainings) in Optuna's database, which several processes share. The trials of each head
    setting are in Optuna's study `name/setting`. The database also stores values on which all processes agree: the
    plan, the number of learning-rate trials of each setting after the search, and the working time of each process.
    """

    def __init__(
        self,
        url: str,
        options: OptunaOptions,
        settings: Sequence[Setting],
        rates: tuple[float, float],
        *,
        force: bool = False,
    ) -> None:
        self._optuna = require_optuna()
        self.settings, self.rates = settings, rates
        with quiet():
            storage = open_storage(url)
            if force:
                for name in self._optuna.get_all_study_names(storage):
                    if name == options.name or name.startswith(f"{options.name}/"):
                        self._optuna.delete_study(study_name=name, storage=storage)
            pruner = options.pruner or self._optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
            shared: Any = {"storage": storage, "pruner": pruner, "load_if_exists": True}
            self._root = self._optuna.create_study(study_name=options.name, **shared)
            self._studies = {
                setting: self._optuna.create_study(study_name=f"{options.name}/{setting}", **shared)
                for setting in settings
            }
        self._session, self._start, self._written = f"{SESSION}{uuid.uuid4()}", time.time(), 0.0
        self.update_session()

    # -- agreements between processes ---------------------------------------------------------------------------------

    def agree_on_plan(self, make_plan: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the plan of the study that is stored in the database. If there is none yet, store the plan that
        `make_plan` returns. If another process stores one first, return the plan of that process.
        """
        if not self._root.get_trials(deepcopy=False):
            trial = self._optuna.trial.create_trial(value=0.0, user_attrs={"plan": make_plan()})
            with quiet():
                self._root.add_trial(trial)
        plan: dict[str, Any] = self._root.get_trials(deepcopy=False)[0].user_attrs["plan"]
        return plan

    @property
    def search_sizes(self) -> Mapping[str, int] | None:
        """Number of learning-rate trials by name of the head setting. It is None until the learning-rate search has
        ended for all processes.
        """
        sizes: Mapping[str, int] | None = self._root.user_attrs.get(SEARCH_SIZES)
        return sizes

    def close_search(self, sizes: Mapping[Setting, int]) -> None:
        """End the learning-rate search for all processes: store the number of learning-rate trials of each setting."""
        self._root.set_user_attr(SEARCH_SIZES, {setting.name: number for setting, number in sizes.items()})

    # -- working time -------------------------------------------------------------------------------------------------

    def update_session(self) -> None:
        """Record in the database, at most once per second, that this process is still working on the study."""
        if time.time() - self._written > SESSION_INTERVAL:
            self._written = time.time()
            self._root.set_user_attr(self._session, [self._start, self._written])

    def close(self) -> None:
        """Record in the database that this process has stopped working on the study."""
        self._root.set_user_attr(self._session, [self._start, time.time(), "left"])

    def seconds_spent(self) -> float:
        """Return the seconds during which at least one process worked on the study, by the clocks of the processes."""
        total, covered_until = 0.0, -math.inf
        for start, end, *_ in sorted(self._sessions()):
            total += max(0.0, end - max(start, covered_until))
            covered_until = max(covered_until, end)
        return total

    def active_processes(self) -> int:
        """Return the number of processes that work on the study, at least 1: those that wrote to the database in the
        last 10 seconds and have not stopped.
        """
        now = time.time()
        active = [session for session in self._sessions() if len(session) == 2 and now - session[1] < 2 * HEARTBEAT]
        return max(1, len(active))

    def _sessions(self) -> list[Any]:
        """Return one list for each process: the times of its start and of its last write to the database, followed by
        "left" if the process has stopped.
        """
        return [value for name, value in self._root.user_attrs.items() if name.startswith(SESSION)]

    # -- trials -------------------------------------------------------------------------------------------------------

    def running(self) -> set[TrialKey]:
        """Return the keys of the trials (trainings) that any process is running now."""
        return {key for key, trial in self._living() if not trial.state.is_finished()}

    def finished(self) -> list[FinishedTrial]:
        """Return the results of all trials (trainings) that are complete or were stopped early, ordered by head setting
        and then by start.
        """
        results = []
        for key, trial in self._living():
            if trial.state.is_finished():
                loss = math.nan if trial.value is None else trial.value
                pruned = trial.state == self._optuna.trial.TrialState.PRUNED
                measured = trial.user_attrs.get("measured", {})
                results.append(FinishedTrial(key, trial.params["rate"], loss, pruned, measured))
        return results

    def best_rate(self, setting: Setting) -> float | None:
        """Return the learning rate with the lowest held-out loss among the complete learning-rate trials of a head
        setting; None if no loss is finite.
        """
        searched = [trial for trial in self.finished() if trial.key.setting == setting and not trial.key.final]
        complete = [trial for trial in searched if math.isfinite(trial.loss) and not trial.pruned]
        return min(complete, key=lambda trial: trial.loss).rate if complete else None

    def fail_stale_trials(self) -> None:
        """Mark running trials as failed if their process sends no heartbeats, so that another process can claim
        them.
        """
        with quiet():
            for study in self._studies.values():
                self._optuna.storages.fail_stale_trials(study)

    def run_trial(
        self, key: TrialKey, objective: Callable[["optuna.Trial", float], tuple[float, dict[str, Any]]], seed: int
    ) -> None:
        """Claim a trial (one training) for this process, run `objective`, and store its result. `objective` trains a
        model at a learning rate, and returns its loss and further measurements by name. The rate is the next one of the
        search or, for a final training, the best one found. If another process claims the trial, nothing is run.
        """
        exceptions, samplers = self._optuna.exceptions, self._optuna.samplers
        if key.final:
            rate = self.best_rate(key.setting)
            if rate is None:
                expected = f"at least one learning rate with which {key.setting} trains"
                raise InputError("rates", expected=expected, got="no finite loss in the search")
        elif key.number < len(SPREAD):
            low, high = map(math.log, self.rates)
            rate = math.exp(low + (high - low) * SPREAD[key.number])
        else:
            rate = None
        study = self._studies[key.setting]
        errors: list[BaseException] = []

        def claim_and_run(trial: "optuna.Trial") -> float:
            """Run an Optuna trial and return its loss. If another process has already claimed the same training, return
            NaN: Optuna then marks this trial as failed.
            """
            trial.set_user_attr(KEY, key.name)
            while others := [
                other for other_key, other in self._living() if other_key == key and other.number != trial.number
            ]:
                if any(other.params or other.number < trial.number for other in others):
                    return math.nan
                time.sleep(0.05)  # the others give up, unless they looked before this process wrote the name
                self._optuna.storages.fail_stale_trials(study)
            try:
                loss, measured = objective(trial, trial.suggest_float("rate", *self.rates, log=True))
                trial.set_user_attr("measured", measured)
            except (exceptions.TrialPruned, exceptions.UpdateFinishedTrialError):
                raise
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
                raise
            return loss

        with quiet():
            if rate is None:
                study.sampler = samplers.TPESampler(seed=seed + key.number, n_startup_trials=1)
            else:
                study.sampler = samplers.PartialFixedSampler({"rate": rate}, samplers.RandomSampler(seed=seed))
            # Optuna raises one of these errors if another process considered this one dead and failed its trial.
            with suppress(exceptions.UpdateFinishedTrialError, ValueError, AssertionError):
                study.optimize(claim_and_run, n_trials=1)
        if errors:
            raise errors[0]

    def _living(self) -> Iterator[tuple[TrialKey, Any]]:
        """Yield the key and the Optuna trial of each trial that is running, complete or stopped early, ordered by head
        setting and then by start.
        """
        states = self._optuna.trial.TrialState
        for setting, study in self._studies.items():
            for trial in study.get_trials(deepcopy=False, states=(states.RUNNING, states.COMPLETE, states.PRUNED)):
                if KEY in trial.user_attrs:
                    stage, number = trial.user_attrs[KEY].split()
                    yield TrialKey(setting, stage == "seed", int(number)), trial


# -- Optuna -----------------------------------------------------------------------------------------------------------


def open_storage(url: str) -> Any:
    """Return the database at a URL as an Optuna storage in which running trials send heartbeats. Missing tables are
    created. Opening is tried up to 5 times, since other processes may be creating the same tables.
    """
    optuna = require_optuna()
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    require_database_url(url)
    is_sqlite = url.startswith("sqlite")
    engine: dict[str, Any] = {"connect_args": {"timeout": LOCK_TIMEOUT}} if is_sqlite else {"pool_pre_ping": True}
    options: Any = {"heartbeat_interval": HEARTBEAT, "grace_period": GRACE_PERIOD, "engine_kwargs": engine}
    for attempt in range(ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, **options)
        except (ImportError, ArgumentError, ValueError) as error:
            raise _unusable(url, "the URL of a database", error) from None
        except (SQLAlchemyError, RuntimeError) as error:
            if attempt == ATTEMPTS - 1:
                raise _unusable(url, "a usable database", getattr(error, "orig", None) or error) from None
            time.sleep(0.2 * 2**attempt)
    raise AssertionError


def require_database_url(url: str) -> None:
    """Raise an error if a URL is not that of a database, or if the Python package that connects to such databases (the
    driver) is not installed. The message does not contain the password of the URL. No connection is made.
    """
    require_optuna()
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    expected = "the URL of a database"
    if not isinstance(url, str):
        raise InputError("storage", expected=expected, got=repr(url))
    try:
        make_url(url).get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        got = f"{without_passwords(url)!r}, whose driver {error.name} is not installed"
        raise InputError("storage", expected=expected, got=got, remedy=f"pip install {error.name}") from None
    except (ImportError, ArgumentError, ValueError, AttributeError) as error:
        raise _unusable(url, expected, error) from None


def _unusable(url: str, expected: str, error: BaseException) -> InputError:
    """Return the error for a database that cannot be used. It states the first line of the original error, without the
    password of the URL.
    """
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    got = f"{without_passwords(url)!r}: {without_passwords_of(url, reason)}"
    return InputError("storage", expected=expected, got=got)


def require_optuna() -> Any:
    """Import and return the package optuna, or raise `MissingExtra` if it is not installed."""
    return require("optuna", purpose="a study", extra="study")


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager within which Optuna logs critical messages only, and does not warn of experimental features."""
    optuna = require_optuna()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
