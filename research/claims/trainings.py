"""Trainings of one cell: the search for its learning rate on validation data, then the models that are reported.

The rate is searched on the grid 0.001 times powers of 2. Each rate is tried with several seeds; none is stopped early.
The grid grows until the rate with the lowest mean validation loss has a neighbour on both sides that was tried. The
reported models have other seeds than the search. Their losses are those of the test part.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.studies.training import Recipe, build_seeded, evaluate, train
from research.claims.environment import describe_environment
from research.claims.head_measures import compare_with_untrained, ranks, removals
from research.claims.relations_task import Relations, accuracy, weights
from research.claims.result_files import read_json, write_json
from research.claims.tasks import DIFFERENT, Cell, Data, learning_rate

FIRST_SEARCH_SEED = 1000
"""Seeds of the search start here, those of the reported models at 0."""

TRIED_FIRST = 3
"""Number of neighbouring rates that are tried first."""

COMPARED_ON, REMOVED_ON = 4, 8
"""Number of test batches on which heads are compared, and without heads."""


def measure_cell(cell: Cell, out: Path) -> None:
    """Do the trainings of a cell that its file of results lacks, and save after each."""
    path = out / "cells" / f"{cell.name}.json"
    result = read_json(path) if path.exists() else _empty(cell)
    if result["complete"]:
        return
    data = cell.task.data()
    result["rows of documents"] = list(_rows_of_documents(data).values())
    for exponent, seed in iter(lambda: _next_search(cell, result["search"]), None):
        model = _train(cell, data, learning_rate(exponent), FIRST_SEARCH_SEED + seed)
        result["search"].setdefault(str(exponent), []).append(_finite(evaluate(model, data.validation, cell.task.loss)))
        write_json(path, result, indent=None)
    result["rate"] = learning_rate(_best(result["search"]))
    for seed in range(len(result["runs"]), cell.task.seeds):
        result["runs"].append(_report(cell, data, result["rate"], seed))
        write_json(path, result, indent=None)
    result["complete"] = True
    write_json(path, result, indent=None)


def _empty(cell: Cell) -> dict[str, Any]:
    task = cell.task
    return {
        "task": task.name,
        "source": task.source,
        "words": task.words,
        "scheme": cell.scheme,
        "heads": cell.heads,
        "compared": list(task.heads),
        "width": task.width,
        "depth": task.depth,
        "is_setting": task.is_setting,
        "steps": task.steps,
        "parameters": sum(parameter.numel() for parameter in cell.build().parameters()),
        "about": describe_environment(),
        "search": {},
        "rate": None,
        "runs": [],
        "complete": False,
    }


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _mean(losses: list[float | None]) -> float:
    """Return the mean of losses; infinity if a training diverged."""
    return sum(math.inf if loss is None else loss for loss in losses) / len(losses)


def _best(search: dict[str, list[float | None]]) -> int:
    return min((_mean(losses), int(exponent)) for exponent, losses in search.items())[1]


def _next_search(cell: Cell, search: dict[str, list[float | None]]) -> tuple[int, int] | None:
    """Return the exponent of the rate and the number of the seed to try next, or None if the search is at its end."""
    first = cell.task.first
    for exponent in range(first, first + TRIED_FIRST):
        if len(search.get(str(exponent), ())) < cell.task.search_seeds:
            return exponent, len(search.get(str(exponent), ()))
    tried = [int(exponent) for exponent in search]
    for tried_exponent, losses in search.items():
        if len(losses) < cell.task.search_seeds:
            return int(tried_exponent), len(losses)
    best = _best(search)
    if best == min(tried):
        return best - 1, 0
    return (best + 1, 0) if best == max(tried) else None


def _train(cell: Cell, data: Data, rate: float, seed: int) -> nn.Module:
    model = build_seeded(cell.build, seed)
    train(model, data.training, cell.task.loss, steps=cell.task.steps, rate=rate, seed=seed, recipe=Recipe())
    return model.eval()


def _report(cell: Cell, data: Data, rate: float, seed: int) -> dict[str, Any]:
    """Train a model with the chosen rate and return everything that is measured of it."""
    task, model = cell.task, _train(cell, data, rate, seed)
    run: dict[str, Any] = {
        "seed": seed,
        "training": _finite(evaluate(model, data.training[: len(data.validation)], task.loss)),
        "validation": _finite(evaluate(model, data.validation, task.loss)),
        **_test_loss(cell, model, data),
    }
    if isinstance(model, Relations):
        run |= {"accuracy": accuracy(model, data.test), "weights": weights(model, data.test[0]["input_ids"])}
    if task.compares_heads and cell.heads in DIFFERENT:
        untrained = build_seeded(cell.build, seed).eval()
        run |= compare_with_untrained(model, untrained, data.test[:COMPARED_ON])
    if task.removes_heads:
        run["ranks"] = ranks(model, data.test[0]["input_ids"])
        run["removed"] = removals(model, data.validation[:REMOVED_ON], data.test[:REMOVED_ON], task.loss)
    return run


@torch.no_grad()
def _test_loss(cell: Cell, model: nn.Module, data: Data) -> dict[str, Any]:
    """Return the mean test loss over rows; of text also that of each document, in the order of their names."""
    rows = torch.cat([cell.task.loss(model, batch).double() for batch in data.test]).tolist()
    mean, by_document = _finite(sum(rows) / len(rows)), dict.fromkeys(_rows_of_documents(data), 0.0)
    if not by_document:
        return {"test": mean}
    for name, loss in zip(data.documents, rows, strict=True):
        by_document[name] += loss
    return {"test": mean, "documents": [by_document[name] / n for name, n in _rows_of_documents(data).items()]}


def _rows_of_documents(data: Data) -> dict[str, int]:
    """Return the number of test rows of each document, in the order of their names; empty for generated data."""
    counted = Counter(data.documents)
    return {} if len(counted) == len(data.documents) else dict(sorted(counted.items()))
