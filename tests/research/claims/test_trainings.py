"""Trainings of a cell: the search for a learning rate, the models that are reported, and stopping in the middle."""

from dataclasses import replace

import pytest

from research.claims import trainings
from research.claims.result_files import read_json
from research.claims.tasks import Cell, all_tasks, cells, learning_rate, tiny


def searched(losses, seeds=2, first=1):
    """Return the search of a cell whose mean loss is a function of the exponent, and the number of trainings."""
    cell = Cell(replace(all_tasks()[0], search_seeds=seeds, first=first), "none", 1)
    search, number = {}, 0
    for exponent, seed in iter(lambda: trainings._next_search(cell, search), None):
        assert len(search.get(str(exponent), ())) == seed
        search.setdefault(str(exponent), []).append(losses(exponent))
        number += 1
    return search, number


@pytest.mark.parametrize("best", [-3, 0, 1, 2, 3, 6])
def test_search_ends_when_the_best_rate_has_tried_neighbours(best):
    search, number = searched(lambda exponent: abs(exponent - best))
    tried = sorted(map(int, search))
    assert {best - 1, best, best + 1} <= set(tried)
    assert tried == list(range(min(1, best - 1), max(3, best + 1) + 1))
    assert number == 2 * len(tried)
    assert trainings._best(search) == best


def test_a_diverged_training_counts_as_infinite():
    search, _ = searched(lambda exponent: None if exponent > 2 else -exponent)
    assert trainings._best(search) == 2
    assert learning_rate(2) == 0.004


def test_every_task_has_heads_that_divide_its_width_and_seeds_that_differ():
    for cell in cells(all_tasks()):
        assert cell.task.width % cell.heads == 0
        assert cell.task.seeds < trainings.FIRST_SEARCH_SEED
    assert len({cell.name for cell in cells(all_tasks())}) == len(cells(all_tasks()))


def test_a_cell_resumes_where_it_was_stopped(tmp_path, monkeypatch):
    task = tiny(next(task for task in all_tasks() if task.name == "relations"))
    cell = Cell(task, "rotary", 8)
    trainings.measure_cell(cell, tmp_path / "whole")
    whole = read_json(tmp_path / "whole" / "cells" / f"{cell.name}.json")
    assert whole["complete"]
    assert len(whole["runs"]) == task.seeds
    assert {run["seed"] for run in whole["runs"]} == set(range(task.seeds))
    trained = []
    train = trainings._train

    def stopping(cell, data, rate, seed):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((rate, seed))
        return train(cell, data, rate, seed)

    monkeypatch.setattr(trainings, "_train", stopping)
    for _ in range(20):
        trained.clear()
        try:
            trainings.measure_cell(cell, tmp_path / "parts")
            break
        except KeyboardInterrupt:
            continue
    parts = read_json(tmp_path / "parts" / "cells" / f"{cell.name}.json")
    assert not trained or len(trained) <= 3
    for name in ("search", "rate", "runs", "complete"):
        assert parts[name] == whole[name]


def test_reported_losses_are_means_over_test_rows(tmp_path):
    task = tiny(next(task for task in all_tasks() if task.name == "python"))
    cell, data = Cell(task, "spread", 8), task.data()
    run = trainings._report(cell, data, 1e-3, 0)
    rows = trainings._rows_of_documents(data)
    assert sum(rows.values()) == len(data.documents) == 32
    weighted = sum(loss * number for loss, number in zip(run["documents"], rows.values(), strict=True)) / 32
    assert run["test"] == pytest.approx(weighted, rel=1e-9)
    assert len(run["removed"]["half"]) == 70
    assert set(run["distance"]) == {"trained", "untrained", "as sharp"}
