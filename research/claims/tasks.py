"""The trained tasks, and the cells that are compared: a task with a position scheme and a number of heads.

| task | data | width, layers | what it is for |
| --- | --- | --- | --- |
| python, bible | next byte of two real texts | 64, 2 | numbers of heads on real text |
| masked | masked bytes of the Python text | 64, 2 | the same for an encoder |
| lookup | pairs, repeated in another order | 64, 2 | needs an induction head |
| relations | the four previous random symbols | 64, 1 | needs several relations at once |
| relations-places, relations-mlp | the same | 64, 1 | illustrate the argument about one head |
| python-few, bible-few | next byte after training on 25 KB | 64, 2 | overfitting |
| bible-large | next byte | 128, 6 (1.2M parameters) | a larger model |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

import headwise as hw
from headwise.analysis.losses import Loss
from headwise.studies.model import ModelShape
from headwise.studies.space import Setting
from research.claims import generated_tasks
from research.claims.corpora import CORPORA, Batches, Corpus
from research.claims.positions import SCHEMES, PositionedTransformer
from research.claims.relations_task import WIDTH, Relations, relations_loss

HEADS = (1, 2, 4, 8, 16, 32)
FEWER_HEADS = (1, 4, 8, 32)
"""Numbers of heads of further tasks, which count for nothing but their own claim."""

FEW = 24
"""Number of training batches of the tasks with few data: 25 KB."""

JUDGED = 64
"""Largest number of validation batches of a task, and of test batches."""

DIFFERENT = (4, 8, 16)
"""Numbers of heads of the models whose heads are compared with each other."""


@dataclass(frozen=True)
class Data:
    """Batches of the three parts, and the document of each row of the test part.

    Attributes:
        training: batches to train on.
        validation: batches on which learning rates, heads and importances are chosen.
        test: batches on which everything is reported.
        documents: document of each test row; of generated data, each row is its own document.
    """

    training: Batches
    validation: Batches
    test: Batches
    documents: list[str]


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        name: of the task.
        source: what its data come from; tasks of one source are not independent.
        words: short description for the report.
        width: of the model.
        depth: number of layers.
        loss: loss of each sequence.
        make: returns the untrained model of a setting and a position scheme.
        data: returns the batches.
        schemes: position schemes that are compared.
        heads: numbers of heads that are compared.
        steps: length of a training.
        first: exponent of the smallest learning rate that is tried first, see `learning_rate`.
        search_seeds: number of trainings for each learning rate.
        seeds: number of trainings with the chosen rate.
        compares_heads: whether distances between heads are measured.
        removes_heads: whether models lose heads.
        is_setting: whether the task compares numbers of heads for their own sake.
    """

    name: str
    source: str
    words: str
    width: int
    depth: int
    loss: Loss
    make: Callable[[Setting, str], nn.Module]
    data: Callable[[], Data]
    schemes: Sequence[str] = SCHEMES
    heads: Sequence[int] = HEADS
    steps: int = 500
    first: int = 1
    search_seeds: int = 2
    seeds: int = 6
    compares_heads: bool = False
    removes_heads: bool = False
    is_setting: bool = True


@dataclass(frozen=True)
class Cell:
    """A task with a position scheme and a number of heads.

    Attributes:
        task: the task.
        scheme: one of `SCHEMES`.
        heads: number of heads of each layer.
    """

    task: Task
    scheme: str
    heads: int

    @property
    def name(self) -> str:
        """Name of the file of results."""
        return f"{self.task.name}-{self.scheme}-{self.heads}"

    def build(self) -> nn.Module:
        """Return an untrained model."""
        return self.task.make(Setting(self.heads, self.task.width // self.heads, self.heads), self.scheme)


def learning_rate(exponent: int) -> float:
    """Return a learning rate of the grid, 0.001 times a power of 2."""
    return 1e-3 * 2.0**exponent


def cells(tasks: Sequence[Task]) -> list[Cell]:
    """Return all cells of tasks, in the order in which they are measured."""
    return [Cell(task, scheme, heads) for task in tasks for scheme in task.schemes for heads in task.heads]


def all_tasks() -> list[Task]:
    """Return all tasks."""
    python = _text("python", "python", "the Python reference, next byte", compares_heads=True, removes_heads=True)
    bible = _text("bible", "bible", "the Bible, next byte", compares_heads=True, removes_heads=True)
    few: dict[str, Any] = {"schemes": ("learned", "spread"), "heads": FEWER_HEADS, "training": FEW, "first": 0}
    rotary: dict[str, Any] = {"schemes": ("rotary",), "heads": (1, 2, 4, 8), "is_setting": False}
    return [
        python,
        bible,
        _lookup(),
        _relations("relations", "tokens", "several relations"),
        _relations("relations-places", "places", "several relations, weights by place alone", **rotary),
        _relations("relations-mlp", "mlp", "several relations, with an MLP", **rotary),
        _masked(),
        _text("python-few", "python", "25 KB of the Python reference, next byte", **few),
        _text("bible-few", "bible", "25 KB of the Bible, next byte", **few),
        _large(),
    ]


def tiny(task: Task) -> Task:
    """Return a task that takes seconds, to test the code."""

    def data() -> Data:
        parts = task.data()
        rows = len(parts.test[0]["input_ids"])
        return Data(parts.training[:4], parts.validation[:2], parts.test[:2], parts.documents[: 2 * rows])

    return replace(
        task, data=data, heads=tuple(task.heads[:4:3]), schemes=task.schemes[:2], steps=4, search_seeds=2, seeds=2
    )


# -- the tasks --------------------------------------------------------------------------------------------------------


def _shape(vocabulary: int, width: int, depth: int, *, causal: bool = True) -> ModelShape:
    """Return a shape with about 12 width^2 parameters a block; the MLP is then 2.7 times as wide as the model."""
    parameters = vocabulary * width + 12 * depth * width**2 + width * (2 * depth + 1)
    return ModelShape(vocabulary, width, depth, parameters, causal=causal)


def _text_data(corpus: Callable[[], Corpus], rows: int, length: int, training: int | None = None) -> Data:
    """Return batches of `rows` rows of a corpus, from the first `training` training batches or all."""
    test = corpus().rows("test", length)
    batches = test.batches(rows, JUDGED)
    return Data(
        corpus().rows("training", length).batches(rows, training),
        corpus().rows("validation", length).batches(rows, JUDGED),
        batches,
        test.documents[: rows * len(batches)],
    )


def _text(
    name: str,
    source: str,
    words: str,
    width: int = 64,
    depth: int = 2,
    rows: int = 16,
    length: int = 64,
    training: int | None = None,
    **options: Any,
) -> Task:
    def make(setting: Setting, scheme: str) -> nn.Module:
        return PositionedTransformer(_shape(CORPORA[source]().vocabulary, width, depth), setting, scheme, length)

    data = partial(_text_data, CORPORA[source], rows, length, training)
    return Task(name, source, words, width, depth, hw.next_token_loss, make, data, **options)


def _large() -> Task:
    options: dict[str, Any] = {
        "width": 128,
        "depth": 6,
        "rows": 8,
        "length": 128,
        "steps": 800,
        "seeds": 3,
    }
    options |= {"schemes": ("rotary", "spread"), "heads": FEWER_HEADS, "compares_heads": True}
    return _text("bible-large", "bible", "the Bible, next byte", **options)


def _masked() -> Task:
    corpus = CORPORA["python"]()

    def make(setting: Setting, scheme: str) -> nn.Module:
        return PositionedTransformer(_shape(corpus.vocabulary, 64, 2, causal=False), setting, scheme, 64)

    data, words = partial(_text_data, CORPORA["python"], 16, 64), "the Python reference, masked bytes"
    loss = hw.MaskedTokenLoss(corpus.mask)
    options: dict[str, Any] = {"schemes": ("learned", "spread"), "heads": FEWER_HEADS, "compares_heads": True}
    return Task("masked", "python", words, 64, 2, loss, make, data, **options)


def _generated(make: Callable[[int, int], Batches], steps: int) -> Data:
    """Return generated batches: a new one for each training step, and batches of other seeds to judge."""
    test = make(JUDGED // 2, 3)
    rows = sum(len(batch["input_ids"]) for batch in test)
    return Data(make(steps, 1), make(JUDGED // 2, 2), test, [str(row) for row in range(rows)])


def _lookup() -> Task:
    def make(setting: Setting, scheme: str) -> nn.Module:
        length = 4 * generated_tasks.PAIRS
        return PositionedTransformer(_shape(2 * generated_tasks.KEYS, 64, 2), setting, scheme, length)

    data = partial(_generated, generated_tasks.lookups, Task.steps)
    words = "lookup of generated pairs"
    return Task("lookup", "lookup", words, 64, 2, generated_tasks.lookup_loss, make, data, first=2)


def _relations(name: str, kind: str, words: str, **options: Any) -> Task:
    """Return the task of several relations. Without positions no model can solve it."""
    of_task: dict[str, Any] = {"schemes": SCHEMES[1:], "first": 2, **options}

    def make(setting: Setting, scheme: str) -> nn.Module:
        return Relations(setting, kind, scheme)

    data = partial(_generated, generated_tasks.symbols, Task.steps)
    return Task(name, "relations", words, WIDTH, 1, relations_loss, make, data, **of_task)
