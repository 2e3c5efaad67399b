"""Who does what, agreed through a database: of several processes, of one that dies, of two that were as quick."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import optuna
import pytest

import headwise as hw
from headwise.studies import trial_store
from headwise.studies.trial_store import Job, Ledger, quiet, spread, union

pytestmark = pytest.mark.usefixtures("as_user")

SETTINGS = (hw.Setting(1, 8, 1), hw.Setting(2, 4, 2))
RATES = (1e-3, 1e-1)


def url(folder):
    return f"sqlite:///{folder}/study.db"


@pytest.fixture
def book(tmp_path):
    return Ledger(url(tmp_path), "study", SETTINGS, RATES)


def trials(folder, setting=SETTINGS[0], name="study"):
    return optuna.load_study(study_name=f"{name}/{setting}", storage=url(folder))


def test_points_that_are_spread_evenly():
    """Van der Corput's sequence: the digits of 1, 2, 3, ... in base 2, behind the point and turned round."""
    expected = [1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8, 1 / 16, 9 / 16, 5 / 16, 13 / 16, 3 / 16]
    assert [spread(number) for number in range(12)] == expected
    assert [spread(n) for n in range(64)] == [int(bin(n + 1)[:1:-1], 2) / 2 ** len(bin(n + 1)[2:]) for n in range(64)]


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
def test_the_length_of_what_intervals_cover(intervals, length):
    assert union(intervals) == length


# -- one process ------------------------------------------------------------------------------------------------------


def test_jobs_and_what_came_out(book, tmp_path):
    one, two = SETTINGS
    assert book.taken() == {one: set(), two: set()}
    seen = []

    def objective(loss):
        def measure(_trial, rate):
            seen.append(rate)
            assert "search 0" in book.taken()[one]
            return loss, {"seconds": 2.0, "more": loss + 1}

        return measure

    def pruned(trial, rate):
        trial.report(7.0, 3)
        raise optuna.TrialPruned

    for number, loss in enumerate((3.0, 1.0)):
        book.run(Job(one, False, number), objective(loss), 0)
    book.run(Job(one, False, 2), pruned, 0)
    # In the middle of the logarithms; then a quarter, three quarters.
    assert seen == pytest.approx([10**-2, 10**-2.5])
    assert book.best_rate(one) == seen[1]
    assert book.best_rate(two) is None
    book.run(Job(one, True, 1), objective(0.5), 0)
    assert seen[2] == seen[1]
    found = book.done()
    assert [(each.job, each.loss, each.pruned) for each in found] == [
        (Job(one, False, 0), 3.0, False),
        (Job(one, False, 1), 1.0, False),
        (Job(one, False, 2), 7.0, True),
        (Job(one, True, 1), 0.5, False),
    ]
    assert found[2].rate == pytest.approx(10**-1.5)
    assert [each.measured for each in found] == [
        {"seconds": 2.0, "more": 4.0},
        {"seconds": 2.0, "more": 2.0},
        {},
        {"seconds": 2.0, "more": 1.5},
    ]
    assert book.taken() == {one: {"search 0", "search 1", "search 2", "seed 1"}, two: set()}
    assert book.running() == []
    again = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    assert again.done() == found
    assert again.best_rate(one) == seen[1]  # not that of the final


def test_after_those_that_are_spread_optuna_decides_from_a_seed(tmp_path):
    drawn = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made = Ledger(url(tmp_path), name, SETTINGS, RATES)
        for number in range(4):
            made.run(Job(SETTINGS[0], False, number), lambda _trial, rate: (abs(math.log(rate / 0.02)), {}), seed)
        drawn.append([each.rate for each in made.done()])
    a, b, c = drawn
    assert a == b
    assert a[:3] == c[:3]
    assert a[3:] != c[3:]
    assert all(RATES[0] <= rate <= RATES[1] for rate in a + c)


def test_a_final_training_needs_a_rate(book):
    book.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: (math.inf, {}), 0)
    sentence = "rates: expected one with which 1x8 trains, got no loss that is finite"
    with pytest.raises(hw.InputError, match=f"^{sentence}$"):
        book.run(Job(SETTINGS[0], True, 1), None, 0)
    assert book.taken()[SETTINGS[0]] == {"search 0"}


def test_a_job_that_fails_is_there_to_be_done_again(book):
    def fails(_trial, _rate):
        raise RuntimeError("stopped")

    def interrupted(_trial, _rate):
        raise KeyboardInterrupt

    for objective, error in ((fails, RuntimeError), (interrupted, KeyboardInterrupt)):
        with pytest.raises(error):
            book.run(Job(SETTINGS[0], False, 0), objective, 0)
        assert book.taken()[SETTINGS[0]] == set()
        assert book.running() == []
    book.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: (rate, {}), 0)
    assert [each.rate for each in book.done()] == pytest.approx([1e-2])


def test_the_first_plan_is_everybodys(book, tmp_path):
    asked = []
    plan = {"steps": 7, "rates": [1e-3, 0.1], "deep": {"a": None}}
    assert book.agreed(lambda: asked.append(1) or plan) == plan
    other = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    for each in (book, other):
        assert each.agreed(lambda: asked.append(2) or {"steps": 8}) == plan
    assert asked == [1]

    def meanwhile():
        rival.agreed(lambda: {"steps": 1})
        return {"steps": 2}

    one = Ledger(url(tmp_path), "other", SETTINGS, RATES)
    rival = Ledger(url(tmp_path), "other", SETTINGS, RATES)
    assert one.agreed(meanwhile) == rival.agreed(meanwhile) == {"steps": 1}


def test_the_end_of_the_search_is_everybodys(book, tmp_path):
    other = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    assert book.searched is other.searched is None
    book.end_search({SETTINGS[0]: 4, SETTINGS[1]: 3})
    assert book.searched == other.searched == {"1x8": 4, "2x4": 3}


def test_a_ledger_that_is_forgotten(book, tmp_path):
    book.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: (rate, {}), 0)
    other = Ledger(url(tmp_path), "study 2", SETTINGS, RATES)
    other.run(Job(SETTINGS[1], False, 0), lambda _trial, rate: (rate, {}), 0)
    fresh = Ledger(url(tmp_path), "study", SETTINGS, RATES, force=True)
    assert fresh.done() == []
    assert [each.job.setting for each in other.done()] == [SETTINGS[1]]


class Clock:
    """In the place of `time`."""

    def __init__(self, now=1000.0):
        self.now = now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_the_time_that_is_spent_is_that_of_those_at_work(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trial_store, "time", clock)
    one = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    assert (one.spent(), one.workers()) == (0.0, 1)
    clock.now += 10.0
    one.tick()
    two = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    assert (one.spent(), two.spent(), one.workers()) == (10.0, 10.0, 2)
    clock.now += 5.0
    for each in (one, two):
        each.tick()
    assert (one.spent(), one.workers()) == (15.0, 2)  # both at once
    one.leave()
    clock.now += 0.5
    two.tick()  # half a second later: not worth writing
    assert (two.spent(), two.workers()) == (15.0, 1)
    clock.now += 19.4
    assert two.workers() == 1  # nobody else, whoever asks
    two.tick()
    two.leave()
    assert two.spent() == pytest.approx(34.9)
    clock.now += 100.0
    three = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    clock.now += 2.0
    three.tick()
    assert three.spent() == pytest.approx(36.9)  # nobody was there in between
    four = Ledger(url(tmp_path), "study", SETTINGS, RATES)
    clock.now += 9.0
    four.tick()
    assert four.workers() == 2
    clock.now += 2.0
    assert four.workers() == 1  # the third one has not been heard of for 11 seconds


def test_optuna_is_left_as_it_was(tmp_path, capfd):
    level = optuna.logging.get_verbosity()
    try:
        optuna.logging.set_verbosity(optuna.logging.INFO)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            made = Ledger(url(tmp_path), "study", SETTINGS, RATES)
            made.agreed(dict)
            made.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: (rate, {}), 0)
            with pytest.raises(ZeroDivisionError):
                made.run(Job(SETTINGS[0], False, 1), lambda _trial, rate: 1 / 0, 0)
            made.sweep()
            assert warnings.filters == filters
        assert not told
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
        assert capfd.readouterr() == ("", "")
        with quiet(optuna):
            assert optuna.logging.get_verbosity() > optuna.logging.ERROR
    finally:
        optuna.logging.set_verbosity(level)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("foo://x", "Can't load plugin: sqlalchemy.dialects:foo"),
        ("nonsense", "Could not parse SQLAlchemy URL from given URL string"),
    ],
)
def test_a_storage_that_is_none(given, reason):
    sentence = f"storage: expected the URL of a database, got {given!r}: {reason}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        Ledger(given, "study", SETTINGS, RATES)


@pytest.mark.parametrize("what", ["another file", "no folder"])
def test_a_database_that_cannot_be_used(what, tmp_path, monkeypatch):
    naps = []
    monkeypatch.setattr(trial_store.time, "sleep", naps.append)
    if what == "another file":
        (tmp_path / "study.db").write_bytes(b"not a database, and longer than the header of one: " * 9)
        given, reason = url(tmp_path), "file is not a database"
    else:
        given, reason = url(tmp_path / "no"), "unable to open database file"
    sentence = f"storage: expected a database at {given!r}, got none that can be used: {reason}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        Ledger(given, "study", SETTINGS, RATES)
    assert naps == pytest.approx([0.2, 0.4, 0.8, 1.6])


# -- claims -----------------------------------------------------------------------------------------------------------


def losing(_trial, _rate):
    raise AssertionError("done, although another one was first")


def test_of_two_that_claim_the_same_the_first_does_it(book, tmp_path):
    rival = trials(tmp_path).ask()
    rival.set_user_attr("entry", "search 0")
    book.run(Job(SETTINGS[0], False, 0), losing, 0)
    assert (book.taken()[SETTINGS[0]], book.running(), book.done()) == ({"search 0"}, ["search 0"], [])
    assert [trial.state.name for trial in trials(tmp_path).trials] == ["RUNNING", "FAIL"]
    other = []
    book.run(Job(SETTINGS[0], False, 1), lambda _trial, rate: other.append(1) or (rate, {}), 0)
    assert other == [1]
    trials(tmp_path).tell(rival.number, state=optuna.trial.TrialState.FAIL)
    book.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: other.append(0) or (rate, {}), 0)
    assert other == [1, 0]
    book.run(Job(SETTINGS[0], False, 0), losing, 0)  # done is taken as well


def test_one_that_came_later_is_not_first(book, tmp_path):
    done = []

    def objective(_trial, rate):
        done.append(rate)
        return rate, {}

    first = book._is_first

    def with_a_rival(study, number, entry):
        rival = trials(tmp_path).ask()
        rival.set_user_attr("entry", entry)
        assert rival.number > number
        return first(study, number, entry)

    book._is_first = with_a_rival
    book.run(Job(SETTINGS[0], False, 0), objective, 0)
    assert len(done) == 1


@pytest.mark.parametrize(("says", "done"), [("search 0", 0), ("search 1", 1)])
def test_one_that_has_not_said_yet_what_it_does_is_waited_for(says, done, book, tmp_path):
    rival, events = trials(tmp_path).ask(), []

    def say():
        time.sleep(0.4)
        events.append("said")
        rival.set_user_attr("entry", says)

    def objective(_trial, rate):
        events.append("done")
        return rate, {}

    other = threading.Thread(target=say)
    other.start()
    book.run(Job(SETTINGS[0], False, 0), objective, 0)
    other.join()
    assert events == ["said", "done"][: 1 + done]


def test_one_that_never_says_what_it_does_is_given_up(book, tmp_path, monkeypatch):
    """Its process died before its heart beat once, so Optuna cannot tell."""
    monkeypatch.setattr(trial_store, "GRACE", 0.2)
    trials(tmp_path).ask()
    done = []
    book.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: done.append(rate) or (rate, {}), 0)
    assert len(done) == 1
    assert [trial.state.name for trial in trials(tmp_path).trials] == ["FAIL", "COMPLETE"]


@pytest.mark.parametrize("ends", ["with a loss", "pruned"])
def test_who_was_taken_for_dead_leaves_it_to_others(ends, book, tmp_path):
    def objective(trial, rate):
        trials(tmp_path).tell(trial.number, state=optuna.trial.TrialState.FAIL)
        if ends == "pruned":
            raise optuna.TrialPruned
        return rate, {}

    book.run(Job(SETTINGS[0], False, 0), objective, 0)
    assert (book.taken()[SETTINGS[0]], book.done()) == (set(), [])
    book.run(Job(SETTINGS[0], False, 0), lambda _trial, rate: (rate, {}), 0)
    assert len(book.done()) == 1


def test_what_the_objective_raises_comes_through(book):
    def objective(_trial, _rate):
        raise hw.InputError("loss", expected="a number", got="none")

    with pytest.raises(hw.InputError, match=r"^loss: expected a number, got none$"):
        book.run(Job(SETTINGS[0], False, 0), objective, 0)
    assert book.taken()[SETTINGS[0]] == set()


# -- several processes ------------------------------------------------------------------------------------------------

WORKERS = """
import json, os, sys, time
from headwise.studies import trial_store
from headwise.studies.budget import Plan
from headwise.studies.space import Setting
from headwise.studies.scheduler import Wanted, next_job
import optuna, sqlalchemy.exc

trial_store.HEARTBEAT, trial_store.GRACE = 1, 2
url, log, number, slow = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
settings, wanted = (Setting(1, 8, 1), Setting(2, 4, 2)), Wanted(None, 1, 4, 3)
plan = Plan(steps=1, step_seconds={}, judge_seconds={}, more_seconds={}, parameters={}, spec={})


def write(*what):
    with open(log, "a") as file:
        file.write(json.dumps([os.getpid(), *what]) + "\\n")


def work(place):
    book = trial_store.Ledger(url, "study", settings, (1e-3, 1e-1))
    write("plan", book.agreed(lambda: {"by": place}))
    while True:
        book.tick()
        book.sweep()
        job = next_job(book, plan, settings, wanted)

        def objective(trial, rate):
            write("began", str(job.setting), job.entry)
            time.sleep(600 if place == slow else 0.05)
            write("ended", str(job.setting), job.entry)
            return rate, {"by": place, "seconds": 0.01}

        if job is not None:
            book.run(job, objective, 0)
        elif book.running():
            time.sleep(0.05)
        else:
            return book.leave()


start, children = time.time() + 0.3, []
for place in range(number):
    child = os.fork()
    if child == 0:
        time.sleep(start - time.time())  # all at once, also to make the tables
        status = 1
        try:
            work(place)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    children.append(child)
for child in children:
    write("left", child, os.waitpid(child, 0)[1])
"""

ENTRIES = [(str(s), e) for s in SETTINGS for e in (*(f"search {n}" for n in range(4)), "seed 1", "seed 2", "seed 3")]


def begin(folder, number, slow=-1):
    (folder / "workers.py").write_text(WORKERS)
    command = [sys.executable, str(folder / "workers.py"), url(folder), str(folder / "log"), str(number), str(slow)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)


def written(folder, what):
    """What the processes wrote of that kind, each with the process that did."""
    path = folder / "log"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line[0], *line[2:]) for line in lines if line[1] == what]


def living(folder):
    """What living trials say they are."""
    found = []
    for setting in SETTINGS:
        for trial in trials(folder, setting).trials:
            if trial.state.name != "FAIL":
                assert trial.state.name == "COMPLETE"
                found.append((str(setting), trial.user_attrs["entry"]))
    return sorted(found)


@pytest.mark.parametrize("number", [2, 4])
def test_processes_that_begin_at_once_do_everything_once(number, tmp_path):
    process = begin(tmp_path, number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert [status for _, _, status in written(tmp_path, "left")] == [0] * number
    for what in ("began", "ended"):
        assert sorted((setting, entry) for _, setting, entry in written(tmp_path, what)) == sorted(ENTRIES)
    assert living(tmp_path) == sorted(ENTRIES)
    plans = {plan["by"] for _, plan in written(tmp_path, "plan")}
    assert len(plans) == 1
    assert len(written(tmp_path, "plan")) == number
    assert len({by for by, _, _ in written(tmp_path, "ended")}) > 1  # they shared the work
    rates = {each.job: each.rate for each in Ledger(url(tmp_path), "study", SETTINGS, RATES).done()}
    for setting in SETTINGS:
        lowest = min(rates[Job(setting, False, each)] for each in range(4))
        assert {rates[Job(setting, True, each)] for each in (1, 2, 3)} == {lowest}


def test_what_a_killed_process_had_begun_is_done_again(tmp_path):
    process = begin(tmp_path, 2, slow=0)
    try:
        deadline = time.monotonic() + 60
        hanging = []
        while not hanging and time.monotonic() < deadline:
            time.sleep(0.05)
            ended = Counter(by for by, _, _ in written(tmp_path, "ended"))
            began = Counter(by for by, _, _ in written(tmp_path, "began"))
            if sum(began.values()) > 4:  # the other one goes on
                hanging = [by for by in began if not ended[by]]
        (victim,) = hanging
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        _, err = process.communicate(timeout=60)
        waited = time.monotonic() - killed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, err) == (0, "")
    statuses = {child: status for _, child, status in written(tmp_path, "left")}
    assert statuses.pop(victim) == signal.SIGKILL
    assert list(statuses.values()) == [0]
    began = Counter((setting, entry) for _, setting, entry in written(tmp_path, "began"))
    assert sorted(began.values()) == [1] * (len(ENTRIES) - 1) + [2]
    (twice,) = (what for what, times in began.items() if times == 2)
    assert (victim, *twice) in written(tmp_path, "began")
    assert sorted((setting, entry) for _, setting, entry in written(tmp_path, "ended")) == sorted(ENTRIES)
    assert living(tmp_path) == sorted(ENTRIES)
    assert 0.5 < waited < 15.0


def test_what_was_begun_is_left_to_it_as_long_as_it_lives(tmp_path, monkeypatch):
    """A training takes longer than the grace time, but its process says that it lives."""
    monkeypatch.setattr(trial_store, "HEARTBEAT", 1)
    monkeypatch.setattr(trial_store, "GRACE", 2)
    one, two = (Ledger(url(tmp_path), "study", SETTINGS, RATES) for _ in range(2))

    def long(_trial, rate):
        deadline = time.monotonic() + 3.5
        while time.monotonic() < deadline:
            two.sweep()
            assert two.running() == ["search 0"]
            time.sleep(0.2)
        return rate, {}

    one.run(Job(SETTINGS[0], False, 0), long, 0)
    assert [trial.state.name for trial in trials(tmp_path).trials] == ["COMPLETE"]
