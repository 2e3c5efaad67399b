"""Trials in a shared database: claims, failures, processes that die, and several processes at once."""

import json
import math
import multiprocessing
import os
import re
import signal
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import optuna
import pytest

import headwise as hw
from headwise.studies import trials
from headwise.studies.scheduler import StudyPlan, next_trial
from headwise.studies.space import StudyBudget
from headwise.studies.trials import OptunaOptions, TrialKey, TrialStore, quiet

pytestmark = pytest.mark.usefixtures("as_user")

SETTINGS = (hw.Setting(1, 8, 1), hw.Setting(2, 4, 2))
RATES = (1e-3, 1e-1)
FIRST, SECOND = (TrialKey(SETTINGS[0], False, number) for number in range(2))


def url(folder):
    return f"sqlite:///{folder}/study.db"


def open_store(folder, name="study", **options):
    return TrialStore(url(folder), OptunaOptions(name=name), SETTINGS, RATES, **options)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def optuna_study(folder, setting=SETTINGS[0], name="study"):
    return optuna.load_study(study_name=f"{name}/{setting}", storage=url(folder))


def loss_is_rate(_trial, rate):
    return rate, {}


def claimed(store):
    """Return the keys of all trials that are running or have finished."""
    return store.running() | {trial.key for trial in store.finished()}


def must_not_run(_trial, _rate):
    raise AssertionError("the trial ran, although another process claimed it")


class Clock:
    """Replacement of the module `time`, whose time passes only when a test says so."""

    def __init__(self, now=1000.0):
        self.now = now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0.0),
        ([(2.0, 5.0)], 3.0),
        ([(2.0, 5.0), (7.0, 8.5)], 4.5),
        ([(7.0, 8.5), (2.0, 5.0)], 4.5),
        ([(2.0, 5.0), (3.0, 9.0)], 7.0),
        ([(2.0, 9.0), (3.0, 4.0), (5.0, 6.0)], 7.0),
        ([(2.0, 5.0), (5.0, 6.0)], 4.0),
        ([(2.0, 5.0), (2.0, 5.0)], 3.0),
        ([(1.0, 1.0), (0.0, 10.0), (2.0, 3.0), (9.0, 12.0), (20.0, 21.0)], 13.0),
    ],
)
def test_time_in_which_several_processes_work_counts_once(intervals, length, monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    monkeypatch.setattr(trials, "open_storage", lambda _url: storage)
    monkeypatch.setattr(trials, "time", Clock(0.0))
    store = TrialStore("", OptunaOptions(), SETTINGS, RATES)
    study = optuna.load_study(study_name="study", storage=storage)
    for number, interval in enumerate(intervals):
        study.set_user_attr(f"session {number}", [*interval, "left"][: 2 + number % 2])
    assert store.seconds_spent() == length


# -- one process ------------------------------------------------------------------------------------------------------


def test_trials_and_their_results(store, tmp_path):
    one, two = SETTINGS
    assert claimed(store) == set()
    rates = []

    def objective(loss):
        def measure(_trial, rate):
            rates.append(rate)
            assert TrialKey(one, False, 0) in claimed(store)
            return loss, {"seconds": 2.0, "more": loss + 1}

        return measure

    def pruned(trial, rate):
        trial.report(7.0, 3)
        raise optuna.TrialPruned

    for number, loss in enumerate((3.0, 1.0)):
        store.run_trial(TrialKey(one, False, number), objective(loss), 0)
    store.run_trial(TrialKey(one, False, 2), pruned, 0)
    # The middle of the range on a logarithmic scale, then a quarter, then three quarters.
    assert rates == pytest.approx([10**-2, 10**-2.5])
    assert store.best_rate(one) == rates[1]
    assert store.best_rate(two) is None
    store.run_trial(TrialKey(one, True, 1), objective(0.5), 0)
    assert rates[2] == rates[1]
    results = store.finished()
    assert [(trial.key, trial.loss, trial.pruned) for trial in results] == [
        (TrialKey(one, False, 0), 3.0, False),
        (TrialKey(one, False, 1), 1.0, False),
        (TrialKey(one, False, 2), 7.0, True),
        (TrialKey(one, True, 1), 0.5, False),
    ]
    assert results[2].rate == pytest.approx(10**-1.5)
    assert [trial.measured for trial in results] == [
        {"seconds": 2.0, "more": 4.0},
        {"seconds": 2.0, "more": 2.0},
        {},
        {"seconds": 2.0, "more": 1.5},
    ]
    assert claimed(store) == {*(TrialKey(one, False, number) for number in range(3)), TrialKey(one, True, 1)}
    assert store.running() == set()
    reopened = open_store(tmp_path)
    assert reopened.finished() == results
    assert reopened.best_rate(one) == rates[1]  # final trainings do not count


def test_after_the_spread_points_optuna_chooses_learning_rates_from_a_seed(tmp_path):
    rates = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        store = open_store(tmp_path, name)
        for number in range(4):
            key = TrialKey(SETTINGS[0], False, number)
            store.run_trial(key, lambda _trial, rate: (abs(math.log(rate / 0.02)), {}), seed)
        rates.append([trial.rate for trial in store.finished()])
    a, b, c = rates
    assert a == b
    assert a[:3] == c[:3]
    assert a[3:] != c[3:]
    assert all(RATES[0] <= rate <= RATES[1] for rate in a + c)


def test_a_trial_that_failed_can_be_claimed_again(store):
    for error in (RuntimeError("stopped"), KeyboardInterrupt(), hw.InputError("loss", expected="a number", got="none")):

        def fails(_trial, _rate, error=error):
            raise error

        with pytest.raises(type(error), match=f"^{error}$"):
            store.run_trial(FIRST, fails, 0)
        assert claimed(store) == set()
    store.run_trial(FIRST, loss_is_rate, 0)
    assert [trial.rate for trial in store.finished()] == pytest.approx([1e-2])


def test_all_processes_use_the_plan_that_was_stored_first(store, tmp_path):
    calls = []
    plan = {"steps": 7, "rates": [1e-3, 0.1], "deep": {"a": None}}
    assert store.agree_on_plan(lambda: calls.append(1) or plan) == plan
    other = open_store(tmp_path)
    for each in (store, other):
        assert each.agree_on_plan(lambda: calls.append(2) or {"steps": 8}) == plan
    assert calls == [1]

    def while_another_stores_one():
        rival.agree_on_plan(lambda: {"steps": 1})
        return {"steps": 2}

    one, rival = open_store(tmp_path, "other"), open_store(tmp_path, "other")
    assert one.agree_on_plan(while_another_stores_one) == rival.agree_on_plan(while_another_stores_one) == {"steps": 1}


def test_all_processes_use_the_same_end_of_the_search(store, tmp_path):
    other = open_store(tmp_path)
    assert store.search_sizes is other.search_sizes is None
    store.close_search({SETTINGS[0]: 4, SETTINGS[1]: 3})
    assert store.search_sizes == other.search_sizes == {"1x8": 4, "2x4": 3}


def test_force_deletes_the_study_with_that_name_alone(store, tmp_path):
    store.run_trial(FIRST, loss_is_rate, 0)
    other = open_store(tmp_path, "study 2")
    other.run_trial(TrialKey(SETTINGS[1], False, 0), loss_is_rate, 0)
    assert open_store(tmp_path, force=True).finished() == []
    assert [trial.key.setting for trial in other.finished()] == [SETTINGS[1]]


def test_working_time_is_recorded_once_per_second(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trials, "time", clock)
    one = open_store(tmp_path)
    clock.now += 10.0
    one.update_session()
    two = open_store(tmp_path)
    assert (one.seconds_spent(), two.seconds_spent(), one.active_processes()) == (10.0, 10.0, 2)
    one.close()
    clock.now += 0.5
    two.update_session()  # not written: the last update was half a second ago
    assert (two.seconds_spent(), two.active_processes()) == (10.0, 1)
    clock.now += 19.4
    assert two.active_processes() == 1  # at least the process that asks
    two.update_session()
    two.close()
    assert two.seconds_spent() == pytest.approx(29.9)
    clock.now += 100.0
    three, _ = open_store(tmp_path), open_store(tmp_path)
    clock.now += 9.0
    three.update_session()
    assert three.seconds_spent() == pytest.approx(38.9)  # nobody worked in between
    assert three.active_processes() == 2
    clock.now += 2.0
    assert three.active_processes() == 1  # the other one gave no sign of life for 11 seconds


def test_optunas_logging_and_warnings_are_restored(tmp_path, capfd):
    level = optuna.logging.get_verbosity()
    try:
        optuna.logging.set_verbosity(optuna.logging.INFO)
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            store = open_store(tmp_path)
            store.agree_on_plan(dict)
            store.run_trial(FIRST, loss_is_rate, 0)
            with pytest.raises(ZeroDivisionError):
                store.run_trial(TrialKey(SETTINGS[0], False, 1), lambda _trial, rate: 1 / 0, 0)
            store.fail_stale_trials()
            assert warnings.filters == filters
        assert not recorded
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
        assert capfd.readouterr() == ("", "")
        with quiet():
            assert optuna.logging.get_verbosity() > optuna.logging.ERROR
    finally:
        optuna.logging.set_verbosity(level)


USABLE, URL = "a usable database", "the URL of a database"


@pytest.mark.parametrize(
    ("storage", "expected", "reason"),
    [
        ("foo://x", URL, "Can't load plugin: sqlalchemy.dialects:foo"),
        ("nonsense", URL, "Could not parse SQLAlchemy URL from given URL string"),
        ("sqlite:///{folder}/study.db", USABLE, "file is not a database"),
        ("sqlite:///{folder}/no/study.db", USABLE, "unable to open database file"),
    ],
)
def test_an_unusable_database_is_refused_after_several_attempts(storage, expected, reason, tmp_path, monkeypatch):
    sleeps, storage = [], storage.format(folder=tmp_path)
    monkeypatch.setattr(trials.time, "sleep", sleeps.append)
    (tmp_path / "study.db").write_bytes(b"not a database, and longer than the header of one: " * 9)
    sentence = f"storage: expected {expected}, got {storage!r}: {reason}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        TrialStore(storage, OptunaOptions(), SETTINGS, RATES)
    assert sleeps == pytest.approx([0.2, 0.4, 0.8, 1.6] if expected == USABLE else [])


# -- claims -----------------------------------------------------------------------------------------------------------


def test_a_trial_that_another_process_claimed_is_not_run(store, tmp_path):
    rival = optuna_study(tmp_path).ask()
    rival.set_user_attr("key", "search 0")
    store.run_trial(FIRST, must_not_run, 0)
    assert (claimed(store), store.running(), store.finished()) == ({FIRST}, {FIRST}, [])
    assert [trial.state.name for trial in optuna_study(tmp_path).trials] == ["RUNNING", "FAIL"]
    numbers = []
    store.run_trial(SECOND, lambda _trial, rate: numbers.append(1) or (rate, {}), 0)
    assert numbers == [1]
    optuna_study(tmp_path).tell(rival.number, state=optuna.trial.TrialState.FAIL)
    store.run_trial(FIRST, lambda _trial, rate: numbers.append(0) or (rate, {}), 0)
    assert numbers == [1, 0]
    store.run_trial(FIRST, must_not_run, 0)  # a finished trial is claimed as well


def before_naming(monkeypatch, action):
    """Call `action` once, before the next trial writes its name to the database."""
    set_user_attr, actions = optuna.Trial.set_user_attr, [action]

    def after_the_action(trial, name, value):
        if name == "key" and actions:
            actions.pop()()
        set_user_attr(trial, name, value)

    monkeypatch.setattr(optuna.Trial, "set_user_attr", after_the_action)


def test_a_trial_that_is_named_late_is_given_up_although_it_was_added_first(store, tmp_path, monkeypatch):
    runs, rival = [], open_store(tmp_path)
    before_naming(monkeypatch, lambda: rival.run_trial(FIRST, lambda _trial, rate: runs.append(1) or (rate, {}), 0))
    store.run_trial(FIRST, must_not_run, 0)
    assert runs == [1]
    assert [trial.state.name for trial in optuna_study(tmp_path).trials] == ["FAIL", "COMPLETE"]


def test_of_two_claims_at_the_same_moment_the_first_counts(store, tmp_path):
    """The rival adds its trial first, and looks for others when the other process has given its trial up."""
    rival = open_store(tmp_path)
    look = rival._living

    def look_late():
        rival._living = look
        store.run_trial(FIRST, must_not_run, 0)
        return look()

    rival._living = look_late
    rival.run_trial(FIRST, loss_is_rate, 0)
    assert [trial.state.name for trial in optuna_study(tmp_path).trials] == ["COMPLETE", "FAIL"]


@pytest.mark.parametrize("end", ["begins", "gives up"])
def test_a_later_claim_that_is_undecided_is_waited_for(end, store, tmp_path, monkeypatch):
    """A later claim begins if its process looked for others before the earlier claim was named."""
    study, sleeps = optuna_study(tmp_path), []
    before_naming(monkeypatch, lambda: later.append(study.ask()))

    def sleep(seconds):
        sleeps.append(seconds)
        if end == "begins":
            later[0].suggest_float("rate", *RATES, log=True)
        else:
            study.tell(later[0], state=optuna.trial.TrialState.FAIL)

    later, look = [], store._living
    monkeypatch.setattr(trials, "time", SimpleNamespace(time=time.time, sleep=sleep))

    def look_late():
        later[0].set_user_attr("key", "search 0")
        store._living = look
        return look()

    store._living = look_late
    store.run_trial(FIRST, must_not_run if end == "begins" else loss_is_rate, 0)
    states = ["FAIL", "RUNNING"] if end == "begins" else ["COMPLETE", "FAIL"]
    assert [trial.state.name for trial in optuna_study(tmp_path).trials] == states
    assert len(sleeps) == 1


def test_a_trial_without_a_name_hinders_no_other(store, tmp_path):
    """Its process died before the trial's first heartbeat, so that Optuna cannot detect it."""
    optuna_study(tmp_path).ask()
    store.run_trial(FIRST, loss_is_rate, 0)
    assert [trial.state.name for trial in optuna_study(tmp_path).trials] == ["RUNNING", "COMPLETE"]
    assert store.running() == set()


@pytest.mark.parametrize("end", ["with a loss", "pruned", "with an error"])
def test_a_process_taken_for_dead_leaves_its_trial_to_others(end, store, tmp_path):
    def objective(trial, rate):
        optuna_study(tmp_path).tell(trial.number, state=optuna.trial.TrialState.FAIL)
        if end == "pruned":
            raise optuna.TrialPruned
        if end == "with an error":
            raise ValueError("out of memory")
        return rate, {}

    raises = pytest.raises(ValueError, match=r"^out of memory$") if end == "with an error" else nullcontext()
    with raises:
        store.run_trial(FIRST, objective, 0)
    assert claimed(store) == set()
    store.run_trial(FIRST, loss_is_rate, 0)
    assert len(store.finished()) == 1


# -- several processes ------------------------------------------------------------------------------------------------

BUDGET = StudyBudget(steps=1, trials=4, seeds=3)
PLAN = StudyPlan(steps=1, step_seconds={}, judge_seconds={}, more_seconds={}, parameters={}, spec={})
NAMES = [(str(s), n) for s in SETTINGS for n in (*(f"search {i}" for i in range(4)), "seed 1", "seed 2", "seed 3")]


def work(folder, place, start, *, slow):
    """Run trials in a process of its own, and log what happens; a slow process never ends its first trial."""
    with open(folder / f"stderr-{place}", "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    time.sleep(max(0.0, start - time.time()))  # all at the same moment, also to create the tables
    store = open_store(folder)
    log(folder, "plan", store.agree_on_plan(lambda: {"by": place}))
    while True:
        store.update_session()
        store.fail_stale_trials()
        key = next_trial(store, PLAN, SETTINGS, BUDGET)

        def objective(_trial, rate, key=key):
            log(folder, "began", str(key.setting), key.name)
            time.sleep(600 if slow else 0.05)
            log(folder, "ended", str(key.setting), key.name)
            return rate, {"by": place, "seconds": 0.01}

        if key is not None:
            store.run_trial(key, objective, 0)
        elif store.running():
            time.sleep(0.05)
        else:
            store.close()
            return


def log(folder, *event):
    with open(folder / "log", "a") as file:
        file.write(json.dumps([os.getpid(), *event]) + "\n")


def logged(folder, event):
    """The entries of one kind, each starting with the id of the process that wrote it."""
    path = folder / "log"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line[0], *line[2:]) for line in lines if line[1] == event]


def start_workers(folder, number, slow=-1):
    """Start processes by fork: they have imported everything already."""
    context, start = multiprocessing.get_context("fork"), time.time() + 0.3
    workers = [
        context.Process(target=work, args=(folder, place, start), kwargs={"slow": place == slow})
        for place in range(number)
    ]
    for worker in workers:
        worker.start()
    return workers


def errors_of(folder):
    return "".join(path.read_text() for path in folder.glob("stderr-*"))


def living_names(folder):
    """Setting and name of each trial that has not failed."""
    names = []
    for setting in SETTINGS:
        for trial in optuna_study(folder, setting).trials:
            if trial.state.name != "FAIL":
                assert trial.state.name == "COMPLETE"
                names.append((str(setting), trial.user_attrs["key"]))
    return sorted(names)


@pytest.fixture
def short_grace(monkeypatch):
    """Processes count as dead after 2 seconds."""
    monkeypatch.setattr(trials, "HEARTBEAT", 1)
    monkeypatch.setattr(trials, "GRACE_PERIOD", 2)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_start_together_run_each_trial_once(number, tmp_path):
    workers = start_workers(tmp_path, number)
    for worker in workers:
        worker.join(timeout=60)
    assert ([worker.exitcode for worker in workers], errors_of(tmp_path)) == ([0] * number, "")
    for event in ("began", "ended"):
        assert sorted((setting, name) for _, setting, name in logged(tmp_path, event)) == sorted(NAMES)
    assert living_names(tmp_path) == sorted(NAMES)
    plans = {plan["by"] for _, plan in logged(tmp_path, "plan")}
    assert len(plans) == 1
    assert len(logged(tmp_path, "plan")) == number
    assert len({process for process, _, _ in logged(tmp_path, "ended")}) > 1  # they shared the work
    rates = {trial.key: trial.rate for trial in open_store(tmp_path).finished()}
    for setting in SETTINGS:
        lowest = min(rates[TrialKey(setting, False, number)] for number in range(4))
        assert {rates[TrialKey(setting, True, seed)] for seed in (1, 2, 3)} == {lowest}


@pytest.mark.usefixtures("short_grace")
def test_the_trial_of_a_killed_process_is_run_again(tmp_path):
    workers = start_workers(tmp_path, 2, slow=0)
    victim, other = workers
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.05)
            began = Counter(process for process, _, _ in logged(tmp_path, "began"))
            if began[victim.pid] and sum(began.values()) > 4:  # the other process continues
                break
        assert not [process for process, _, _ in logged(tmp_path, "ended") if process == victim.pid]
        victim.kill()
        killed = time.monotonic()
        other.join(timeout=60)
        waited = time.monotonic() - killed
        victim.join(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
    assert ([victim.exitcode, other.exitcode], errors_of(tmp_path)) == ([-signal.SIGKILL, 0], "")
    began = Counter((setting, name) for _, setting, name in logged(tmp_path, "began"))
    assert sorted(began.values()) == [1] * (len(NAMES) - 1) + [2]
    (twice,) = (trial for trial, times in began.items() if times == 2)
    assert (victim.pid, *twice) in logged(tmp_path, "began")
    assert sorted((setting, name) for _, setting, name in logged(tmp_path, "ended")) == sorted(NAMES)
    assert living_names(tmp_path) == sorted(NAMES)
    assert 0.5 < waited < 15.0


@pytest.mark.usefixtures("short_grace")
def test_a_long_trial_stays_claimed_while_its_process_lives(tmp_path):
    """The trial takes longer than the grace period, but its process sends heartbeats."""
    one, two = (open_store(tmp_path) for _ in range(2))

    def long(_trial, rate):
        deadline = time.monotonic() + 3.5
        while time.monotonic() < deadline:
            two.fail_stale_trials()
            assert two.running() == {FIRST}
            time.sleep(0.2)
        return rate, {}

    one.run_trial(FIRST, long, 0)
    assert [trial.state.name for trial in optuna_study(tmp_path).trials] == ["COMPLETE"]
