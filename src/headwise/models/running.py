"""Which modules of watched models run, in every thread, and what is shown of the attention that they compute."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.attention.known import Known
from headwise.attention.masks import Grid
from headwise.attention.observed import observed
from headwise.attention.problem import Answer, Problem
from headwise.attention.rows import Observer, Rows
from headwise.attention.statistics import blocks_of_weights
from headwise.shapes import Float


@dataclass(frozen=True)
class Call:
    """One call of attention inside a model.

    Attributes:
        path: the innermost module that was running.
        layer: that module's number, where the model gives it one.
        cross: whether it attends to something else than its own input.
        grid: of its scores.
        kv_heads: how many heads its keys and values have.
        value_dim: how wide a value is, where it is known.
    """

    path: str
    layer: int | None
    cross: bool
    grid: Grid
    kv_heads: int
    value_dim: int | None


class Look(NamedTuple):
    """How a call is looked at: who is shown its rows, what is known of it, and what is done when all were shown."""

    observer: Observer
    known: Known
    ends: Callable[[], None]


@runtime_checkable
class Watcher(Protocol):
    """Who watches a model."""

    def starts(self, arguments: dict[str, Any]) -> None:
        """The model is called, with these arguments by name."""

    def runs(self, path: str) -> None:
        """A module of it is called."""

    def misses(self, path: str) -> None:
        """Something in a module called attention looks like attention and cannot be read."""

    def sees(self, call: Call) -> Look:
        """A call of attention is to be shown."""


@dataclass(frozen=True)
class Frame:
    """A module that runs, of a model that is watched."""

    watcher: Watcher
    path: str
    module: nn.Module
    cross: bool


class _Running(threading.local):
    """What runs in this thread.

    Attributes:
        frames: the modules, from the outside in.
        answering: whether a call is being answered, so that those made on the way are not met.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.answering = False

    @property
    def are_met(self) -> bool:
        """Whether attention calls are those of a watched model."""
        return bool(self.frames) and not self.answering


running = _Running()


@contextmanager
def answering() -> Iterator[None]:
    """Calls made within the context are not met."""
    before, running.answering = running.answering, True
    try:
        yield
    finally:
        running.answering = before


def answer(problem: Problem, otherwise: Callable[[Problem], Answer]) -> Answer:
    """The answer to a call, its rows shown to all who watch the modules that run; `otherwise` where nobody does."""
    if not running.are_met:
        return otherwise(problem)
    looks = _looks(problem.grid, problem.k.shape[1], problem.v.shape[-1], running.frames)
    with answering():
        answered = observed(problem, _each_of(looks), looks[0].known, otherwise)
    for look in looks:
        look.ends()
    return answered


def show(
    weights: Float[Tensor, "batch heads queries keys"],
    out: Float[Tensor, "batch heads queries value_dim"] | None,
    kv_heads: int,
    frames: list[Frame],
) -> None:
    """Show the rows of a call whose weights are there already to all who watch these modules."""
    batch, heads, queries, keys = weights.shape
    value_dim = None if out is None else out.shape[-1]
    looks = _looks(Grid(batch, heads, queries, keys, weights.device), kv_heads, value_dim, frames)
    observer = _each_of(looks)
    with answering(), torch.no_grad():
        for rows in blocks_of_weights(weights.detach(), out if out is None else out.detach(), looks[0].known):
            observer(rows)
    for look in looks:
        look.ends()


def _looks(grid: Grid, kv_heads: int, value_dim: int | None, frames: list[Frame]) -> list[Look]:
    """How each watcher looks at a call of the innermost of its modules."""
    innermost = {id(frame.watcher): frame for frame in frames}
    looks = []
    for frame in innermost.values():
        layer = getattr(frame.module, "layer_idx", None)
        number = layer if isinstance(layer, int) else None
        looks.append(frame.watcher.sees(Call(frame.path, number, frame.cross, grid, kv_heads, value_dim)))
    return looks


def _each_of(looks: list[Look]) -> Observer:
    """One observer for all, each of whom knows other things."""
    if len(looks) == 1:
        return looks[0].observer

    def observer(rows: Rows) -> None:
        for look in looks:
            look.observer(replace(rows, known=look.known))

    return observer
