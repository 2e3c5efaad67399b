"""The progress bar of a run, on standard error."""

import io
import operator
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

import headwise as hw
import tiny
from headwise.runs.data_pass import tokenize
from headwise.runs.progress import progress_bar
from headwise.studies.study_progress import study_progress
from profile_runs import texts

pytestmark = pytest.mark.usefixtures("as_user")


def test_a_profile_shows_tokens_or_batches(capsys):
    model = tiny.model("decoder")
    hw.profile(model, texts(), progress=True, repeats=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "70/70 tokens" in printed.err
    hw.profile(model, (batch for batch in texts()), progress=True)
    assert "6/?" in capsys.readouterr().err
    hw.profile(model, texts(), repeats=False)
    assert capsys.readouterr().err == ""


def test_resumed_units_count_towards_the_total(capsys):
    with progress_bar("data", 10, "batches", shown=True) as advance:
        advance(7, True)
        advance(3, False)
    assert "10/10 batches" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Stream that says that it is a terminal."""

    def isatty(self):
        return True


def test_tokenizing_shows_its_progress_on_a_terminal_and_once(monkeypatch):
    dataset, terminal = texts(limit=5), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    hw.profile(tiny.model("decoder"), dataset, progress=True, repeats=False)
    assert re.search(r"tokenizing.*5/5.*sequences", terminal.getvalue())
    within = dataset.within(tiny.model("decoder"))
    assert "sequences" not in vars(within)  # the model accepts fewer tokens than the tokenizer
    tokenize(within, shown=False)
    calls = []
    within.tokenize(calls.append)
    assert calls == []


def test_texts_are_tokenized_once_if_model_and_tokenizer_have_the_same_limit():
    tokenizer = tiny.tokenizer("decoder")
    tokenizer.model_max_length = 128
    dataset = hw.Texts(tiny.texts(7, 11), tokenizer)
    sequences = dataset.sequences
    assert all(map(operator.is_, dataset.within(tiny.model("decoder")).sequences, sequences))


@pytest.mark.parametrize("budget", [hw.StudyBudget(60.0), hw.StudyBudget(tokens=7, trials=13, seeds=2)])
def test_the_bar_of_a_finished_study_is_full(budget, capsys):
    """The last trainings end before the time limit, because no other one fits into it."""
    sessions = SimpleNamespace(seconds_spent=lambda: 57.3)
    store = SimpleNamespace(settings=range(3), sessions=sessions, finished=lambda: range(41))
    with study_progress(store, budget, shown=True) as update:
        update()
    expected = "60/60 s" if budget.seconds else "45/45 trainings"
    assert expected in capsys.readouterr().err
    with suppress(KeyboardInterrupt), study_progress(store, budget, shown=True) as update:
        update()
        raise KeyboardInterrupt
    assert expected not in capsys.readouterr().err


def test_a_view_shows_its_layers_on_a_terminal(monkeypatch, minilm):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    hw.view(minilm.model, minilm.tokenizer, "Coffee or tea?")
    assert terminal.getvalue() == ""
    hw.view(minilm.model, minilm.tokenizer, "Coffee or tea?", progress=True)
    assert re.search(r"view.*6/6.*layers", terminal.getvalue())
