"""Warnings about a study that is printed to a terminal."""

import io

import pytest
from rich.console import Console

import headwise as hw
from headwise.show.trainings import print_study
from headwise.studies.study_result import collect_results
from headwise.studies.trials import FinishedTrial, TrialKey

ONE, TWO, FOUR, SHARED = hw.Setting(1, 16, 1), hw.Setting(2, 8, 2), hw.Setting(4, 4, 4), hw.Setting(4, 4, 2)


def study_with(trials):
    """Return a finished study with two seeds and these numbers of learning-rate trials; every second one is pruned."""
    finished = []
    for setting, number in trials.items():
        for n in range(number):
            finished.append(FinishedTrial(TrialKey(setting, False, n), 1e-3 * (n + 1), 3.0, n % 2 == 1, {}))
        for seed in (1, 2):
            measured = {"train_loss": 2.0, "step_ms": 5.0, "seconds": 1.0}
            finished.append(FinishedTrial(TrialKey(setting, True, seed), 1e-3, 3.0 + 0.1 * seed, False, measured))
    sizes = {setting.name: 1000 for setting in trials}
    metadata = {"model": {"name": "text"}, "settings": {}, "steps": 20, "left_out": []}
    return collect_results(finished, tuple(trials), sizes, metadata, 2, None)


@pytest.mark.parametrize(
    ("trials", "warnings"),
    [
        ({ONE: 1, TWO: 3, FOUR: 2, SHARED: 5}, [f"{ONE.name} (1), {FOUR.name} (2)"]),
        ({ONE: 2, TWO: 2, SHARED: 1}, [f"{ONE.name} (2), {TWO.name} (2), {SHARED.name} (1)"]),
        ({ONE: 3, TWO: 4, SHARED: 8}, []),
    ],
)
def test_each_setting_with_fewer_than_3_learning_rates_is_named_with_their_number(trials, warnings):
    stream = io.StringIO()
    print_study(study_with(trials), Console(file=stream, width=140, highlight=False))
    lines = [line for line in stream.getvalue().splitlines() if "learning rates" in line]
    assert lines == [f"fewer than 3 learning rates were tried for {settings}" for settings in warnings]


def test_one_setting_is_singular():
    stream = io.StringIO()
    print_study(study_with({TWO: 3}), Console(file=stream, width=140, highlight=False))
    assert stream.getvalue().startswith("text: 1 setting, 2 seeds, 20 steps each\n")
