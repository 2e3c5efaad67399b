"""The progress bar of a run, on standard error."""

import io
import operator
import re
import sys
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import headwise as hw
import tiny
from headwise.data.batches import call_model
from headwise.progress import progress_bar
from headwise.runs.data_pass import tokenize
from headwise.studies.study import study_progress
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
    with progress_bar("data", 10, "batches", shown=True) as bar:
        bar.resume(7)
        bar.advance(3)
    assert "10/10 batches" in capsys.readouterr().err


def terminal_in_place_of_errors(monkeypatch):
    """Return a stream that is a terminal, in place of standard error."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.fixture
def shown_units(monkeypatch):
    """The numbers of done units that a progress bar has shown, in this order, by the label of the bar."""
    from rich.progress import Progress

    update, shown = Progress.update, {}

    def recording(display, task, completed):
        shown.setdefault(display.tasks[-1].description, []).append(completed)
        update(display, task, completed=completed)

    monkeypatch.setattr(Progress, "update", recording)
    return shown


def test_the_bar_moves_within_a_batch(shown_units):
    model, batches = tiny.model("decoder"), list(texts())[:1]
    profile = hw.profile(model, batches, progress=True)
    assert shown_units == {"data": [pytest.approx(1 / 3), pytest.approx(2 / 3), 1]}  # after each of two layers
    assert not any(module._forward_hooks for module in model.modules())
    assert profile.table().equals(hw.profile(model, batches).table())


def test_the_bar_of_texts_moves_by_a_part_of_the_tokens_of_a_batch(shown_units):
    hw.sink_rate(tiny.model("decoder"), texts(), progress=True)
    expected, done = [], 0
    for count in [int(batch["attention_mask"].sum()) for batch in texts()]:
        expected += [done + count / 3, done + 2 * count / 3, done + count]
        done += count
    assert shown_units["memory"] == pytest.approx(expected)


def test_a_model_keeps_no_hooks_after_an_error(shown_units):
    model = tiny.model("decoder")
    model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hw.profile(model, list(texts())[:1], progress=True)
    assert shown_units == {"data": [pytest.approx(1 / 3)]}
    assert not any(module._forward_hooks for module in model.modules())


def test_a_layer_of_torch_keeps_its_fast_path(shown_units):
    class Layer(torch.nn.TransformerEncoderLayer):
        def forward(self, x, *args, **options):
            hooks.append(len(self._forward_hooks))
            return super().forward(x, *args, **options)

    model = torch.nn.Sequential(Layer(8, 2, 11, batch_first=True), Layer(8, 2, 11, batch_first=True)).eval()
    hooks, batch = [], {"": torch.randn(3, 5, 8)}
    with torch.no_grad(), progress_bar("data", 1, "batches", shown=True) as bar:
        bar.step = 1
        call_model(model, batch)
        assert (hooks, shown_units) == ([0, 0], {})
        with hw.watch(model):  # which has hooks
            call_model(model, batch)
    assert shown_units == {"data": [pytest.approx(1 / 3), pytest.approx(2 / 3)]}


def test_a_bar_within_another_is_shown_below_it_and_removed(capsys):
    with progress_bar("outer", 2, "rounds", shown=True) as outer, progress_bar("inner", 3, "batches") as inner:
        display = inner._display
        assert [task.description for task in display.tasks] == ["outer", "inner"]
        assert list(inner.track("abc")) == ["a", "b", "c"]
        assert [task.completed for task in display.tasks] == [0, 3]
        outer.advance(2)
    err = capsys.readouterr().err
    assert "2/2 rounds" in err
    assert "inner" not in err
    with progress_bar("alone", 3, "batches"):
        pass
    assert capsys.readouterr().err == ""


def test_steps_of_compression_and_circuits_show_progress(monkeypatch):
    """A model that is pruned, merged and localized, and the bars of each step."""
    terminal = terminal_in_place_of_errors(monkeypatch)

    def shown():
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")
        terminal.truncate(0)
        return text

    tokenizer, model = tiny.tokenizer("decoder"), tiny.model("decoder", top="ForCausalLM")
    dataset = hw.Texts(tiny.texts(11, 13, 17, 19), tokenizer, batch=2)

    def plan(**options):
        scores = hw.LeastSquaresScores(model, dataset, **options)
        return hw.plan_pruning(scores, keep=0.5, constraint="groups", **options)

    def merge(**options):
        return hw.merge_kv(model, num_kv_heads=1, calibration=dataset, method="procrustes", **options)

    def circuits(**options):
        found = hw.circuits(model, **options)
        return found.scores("ov_norm"), found.composition("v")

    made = plan()
    calibration = ("calibration", "weights of tokens")
    for step, labels in (
        (plan, (*calibration, "outputs of heads", "plan")),
        (
            partial(hw.prune, model, made, calibration=dataset),
            (*calibration, "runs of single layers", "output projections", "comparison"),
        ),
        (merge, ("keys and values", "alignment", "output projections")),
        (partial(hw.localize, model, dataset, 9.0, window=3, first=1), ("window effects", "loss")),
        (circuits, ("circuits", "scores", "composition")),
    ):
        step()
        assert shown() == ""
        result, printed = step(progress=True), shown()
        assert [label for label in labels if not re.search(rf"^{label} .*(\d+)/(\1|\?) ", printed, re.M)] == []
        assert step is not plan or result.modules == made.modules


def test_tokenizing_shows_its_progress_on_a_terminal_and_once(monkeypatch):
    dataset, terminal = texts(limit=5), terminal_in_place_of_errors(monkeypatch)
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
    store = SimpleNamespace(settings=range(3), seconds_spent=lambda: 57.3, finished=lambda: range(41))
    with study_progress(store, budget, shown=True) as update:
        update()
    expected = "60/60 s" if budget.seconds else "45/45 trainings"
    assert expected in capsys.readouterr().err
    with suppress(KeyboardInterrupt), study_progress(store, budget, shown=True) as update:
        update()
        raise KeyboardInterrupt
    assert expected not in capsys.readouterr().err


def test_a_view_shows_its_layers_on_a_terminal(monkeypatch):
    model, tokenizer = tiny.model("encoder"), tiny.tokenizer("encoder")
    terminal = terminal_in_place_of_errors(monkeypatch)
    hw.view(model, tokenizer, "w5 w6 w7")
    assert terminal.getvalue() == ""
    hw.view(model, tokenizer, "w5 w6 w7", progress=True)
    assert re.search(r"view.*2/2.*layers", terminal.getvalue())
