"""Store of the trials of a study in Optuna's database, shared by the processes that work on it.

Processes on one machine or many work on one study without a coordinator. A process that wants to run a trial claims it:
it adds an Optuna trial with the same key, then checks whether a living trial with that key has a lower number. Optuna
numbers trials in the order in which they were added, so all processes agree on who was first. A trial whose process
died counts as failed, and is claimed again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.studies import optuna_storage
from headwise.studies.optuna_storage import OptunaOptions, open_storage, quiet, require_optuna
from headwise.studies.rate_search import final_sampler, search_sampler
from headwise.studies.sessions import Sessions
from headwise.studies.space import Setting

if TYPE_CHECKING:
    import optuna

KEY = "key"
"""User attribute of an Optuna trial that stores the name of its key."""


@dataclass(frozen=True)
class TrialKey:
    """Identity of a trial, which is one training of a study: its head setting, its stage (learning-rate trial, or final
    training with the best learning rate), and its number within this setting and stage.

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
        """Name that distinguishes the trial from others of its head setting: `search NUMBER` for a learning-rate trial,
        `seed NUMBER` for a final training.
        """
        return f"{'seed' if self.final else 'search'} {self.number}"


@dataclass(frozen=True)
class FinishedTrial:
    """Result of a trial (one training of a study) that is complete or was stopped early: its learning rate, held-out
    loss and further measurements.

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


Objective = Callable[[Any, float], tuple[float, dict[str, Any]]]
"""`(trial, rate) -> (loss, measured)`; it may raise `optuna.TrialPruned`."""


class TrialStore:
    """Store of the trials (trainings) of one study, in a database that several processes share. The store claims and
    runs trials in this process, and returns the results of all processes. It also stores two things that all
    processes use: the plan, which states the number of steps of each training; and, once no more learning rates will
    be tried, how many were tried for each head setting (number and width of heads).

    Args:
        url: URL of the database, such as sqlite:///study.db.
        options: name of the study, whose trials of each setting are Optuna's study `name/setting`; and its pruner.
        settings: settings that are compared.
        rates: smallest and largest learning rate.
        force: delete an existing study with the same name.

    Attributes:
        sessions: working times of the processes.

    Raises:
        InputError: the database cannot be opened.
        MissingExtra: optuna is not installed.
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
        with quiet(self._optuna):
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
        self.sessions = Sessions(self._root)
        self.sessions.update()

    # -- agreements between processes ---------------------------------------------------------------------------------

    def agree_on_plan(self, make_plan: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the plan of the study that is stored in the database, as a dictionary. If none is stored yet, call
        `make_plan` and store its result; if another process has stored one meanwhile, return that one.
        """
        if (stored := self._first_plan()) is not None:
            return stored
        trial = self._optuna.trial.create_trial(value=0.0, user_attrs={"plan": make_plan()})
        with quiet(self._optuna):
            self._root.add_trial(trial)
        stored = self._first_plan()
        assert stored is not None
        return stored

    def _first_plan(self) -> dict[str, Any] | None:
        """Return the stored plan of the study as a dictionary, or None if the database has no plan. If several
        processes stored a plan, return the one that was stored first.
        """
        return next((trial.user_attrs["plan"] for trial in self._root.get_trials(deepcopy=False)), None)

    @property
    def search_sizes(self) -> Mapping[str, int] | None:
        """Number of learning-rate trials of each head setting, by setting name, if the learning-rate search has been
        closed for all processes; None while that search may still add trials.
        """
        sizes: Mapping[str, int] | None = self._root.user_attrs.get("search sizes")
        return sizes

    def close_search(self, sizes: Mapping[Setting, int]) -> None:
        """End the learning-rate search for all processes, by storing `sizes`, the number of learning-rate trials of
        each setting, in the database.
        """
        self._root.set_user_attr("search sizes", {setting.name: number for setting, number in sizes.items()})

    # -- results ------------------------------------------------------------------------------------------------------

    def claimed(self) -> dict[Setting, set[str]]:
        """Return, for each head setting, the names of its trials (trainings) that any process is running or has
        finished.
        """
        return {setting: {*self._living(setting)} for setting in self.settings}

    def running(self, setting: Setting | None = None) -> list[str]:
        """Return the names of the trials (trainings) that any process is running now: those of one head setting or, if
        `setting` is None, those of all settings.
        """
        state = self._optuna.trial.TrialState.RUNNING
        settings = self.settings if setting is None else (setting,)
        trials = [item for compared in settings for item in self._living(compared).items()]
        return [name for name, trial in trials if trial.state == state]

    def finished(self) -> list[FinishedTrial]:
        """Return the results of all trials (trainings) that are complete or were stopped early, in the order of the
        settings and, within a setting, in the order in which the trials were started.
        """
        states = self._optuna.trial.TrialState
        results = []
        for setting in self.settings:
            for name, trial in self._living(setting).items():
                if trial.state in (states.COMPLETE, states.PRUNED):
                    stage, number = name.split()
                    key = TrialKey(setting, stage == "seed", int(number))
                    loss = math.nan if trial.value is None else trial.value
                    pruned, measured = trial.state == states.PRUNED, trial.user_attrs.get("measured", {})
                    results.append(FinishedTrial(key, trial.params["rate"], loss, pruned, measured))
        return results

    def best_rate(self, setting: Setting) -> float | None:
        """Return the best learning rate found for a head setting: that of the learning-rate trial with the lowest
        finite held-out loss, among those that were not stopped early; None if there is none.
        """
        searched = [trial for trial in self.finished() if trial.key.setting == setting and not trial.key.final]
        complete = [trial for trial in searched if math.isfinite(trial.loss) and not trial.pruned]
        return min(complete, key=lambda trial: trial.loss).rate if complete else None

    # -- running trials -----------------------------------------------------------------------------------------------

    def fail_stale_trials(self) -> None:
        """Mark each running trial as failed whose process has stopped sending heartbeats, so that the trial can be
        claimed again.
        """
        with quiet(self._optuna):
            for study in self._studies.values():
                self._optuna.storages.fail_stale_trials(study)

    def run_trial(self, key: TrialKey, objective: Objective, seed: int) -> None:
        """Claim the trial `key` for this process, run `objective`, which trains a model, and store the result. The
        learning rate is the next one of the search or, for a final training, the best one found. If another process
        claimed the trial first, nothing is run.

        Args:
            key: trial to run.
            objective: trains a model at a learning rate; returns its loss and further measurements.
            seed: seed of the learning-rate search.

        Raises:
            InputError: a final training of a setting for which every learning rate diverged.
        """
        study, finished_error = self._studies[key.setting], self._optuna.exceptions.UpdateFinishedTrialError
        numbers: list[int] = []  # number of the Optuna trial, once it exists
        objective_errors: list[Exception] = []

        def claim_and_run(trial: "optuna.Trial") -> float:
            """Run the training `key`, the argument of the enclosing method, as the Optuna trial `trial`: claim the
            training, choose the learning rate, call `objective`, store the measurements and return the loss. Raise
            `_ClaimLostError` if another process claimed the training first.
            """
            numbers.append(trial.number)
            trial.set_user_attr(KEY, key.name)
            if not self._claimed_first(study, trial.number, key.name):
                trial.set_user_attr("failed because", "another process claimed it first")
                raise _ClaimLostError
            rate = trial.suggest_float("rate", *self.rates, log=True)
            try:
                loss, measured = objective(trial, rate)
            except Exception as error:
                objective_errors.append(error)
                raise
            trial.set_user_attr("measured", measured)
            return loss

        with quiet(self._optuna):
            study.sampler = self._sampler(key, seed)
            try:
                study.optimize(claim_and_run, n_trials=1, catch=(_ClaimLostError,))
            except (finished_error, ValueError) as error:
                # Another process considered this one dead and failed its trial; Optuna then raises either error.
                failed_by_other = numbers and study.get_trials(deepcopy=False)[numbers[0]].state.is_finished()
                from_objective = error in objective_errors and not isinstance(error, finished_error)
                if not failed_by_other or from_objective:
                    raise

    def _sampler(self, key: TrialKey, seed: int) -> Any:
        """Return the Optuna sampler that chooses the learning rate of the trial `key`: for a final training the best
        rate found for its head setting, otherwise the next rate of the search.
        """
        if key.final:
            return final_sampler(key.setting, self.best_rate(key.setting), seed)
        return search_sampler(key.number, self.rates, seed)

    def _claimed_first(self, study: "optuna.Study", number: int, name: str) -> bool:
        """Return True if the Optuna trial `number` was the first to claim the trial called `name`: no Optuna trial of
        this name with a lower number is running or finished. Wait while a trial with a lower number has no name yet; a
        trial that still has none after 20 seconds of waiting is marked as failed.

        A trial that never gets a name belongs to a process that died before its first heartbeat, so that Optuna cannot
        detect it; it is failed here.
        """
        states, start = self._optuna.trial.TrialState, time.time()
        while True:
            trials = study.get_trials(deepcopy=False)
            earlier = [trial for trial in trials if trial.number < number and self._is_living(trial)]
            if any(trial.user_attrs.get(KEY) == name for trial in earlier):
                return False
            if all(KEY in trial.user_attrs for trial in earlier):
                return True
            self._optuna.storages.fail_stale_trials(study)
            if time.time() - start > optuna_storage.GRACE_PERIOD:
                for trial in earlier:
                    if KEY not in trial.user_attrs:
                        study.tell(trial.number, state=states.FAIL, skip_if_finished=True)
            time.sleep(0.05)

    def _living(self, setting: Setting) -> dict[str, Any]:
        """Return the Optuna trials of a head setting that are running or have finished, by trial name. Of several
        trials with the same name, only the one with the lowest number is returned.
        """
        trials: dict[str, Any] = {}
        for trial in self._studies[setting].get_trials(deepcopy=False):
            if KEY in trial.user_attrs and self._is_living(trial):
                trials.setdefault(trial.user_attrs[KEY], trial)
        return trials

    def _is_living(self, trial: Any) -> bool:
        """Return True if an Optuna trial is running, complete or pruned, False if it has failed."""
        states = self._optuna.trial.TrialState
        return trial.state in (states.RUNNING, states.COMPLETE, states.PRUNED)


class _ClaimLostError(Exception):
    """Raised to end an Optuna trial when another process claimed the same training first."""
