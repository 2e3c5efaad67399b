"""Which modules of watched models run, in every thread, and what is shown of the attention that they compute."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

FROM_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Arguments by which a module is told to attend to something else than its own input."""

NOT_TOKENS = ("pixel_values", "input_features", "input_values")
"""Arguments of a module that reads something else, though the model around it reads tokens."""


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
        tokens: the ids that the part of the model which attends was called with, if it was.
        padding: that part's mask of what is no padding, `(batch, length)`, if there is one.
    """

    path: str
    layer: int | None
    cross: bool
    grid: Grid
    kv_heads: int
    value_dim: int | None
    tokens: Tensor | None
    padding: Tensor | None


class Look(NamedTuple):
    """How a call is looked at: who is shown its rows, what is known of it, and what is done when all were shown."""

    observer: Observer
    known: Known
    ends: Callable[[], None]


@runtime_checkable
class Watcher(Protocol):
    """Who watches a model."""

    def starts(self) -> None:
        """The model is called."""

    def runs(self, path: str) -> None:
        """A module of it is called."""

    def misses(self, path: str) -> None:
        """Something in a module called attention looks like attention and cannot be read."""

    def sees(self, call: Call) -> Look:
        """A call of attention is to be shown."""


@dataclass(frozen=True)
class Frame:
    """A module that runs, of a model that is watched, and what it was called with, by name."""

    watcher: Watcher
    path: str
    module: nn.Module
    arguments: dict[str, Any]

    @property
    def cross(self) -> bool:
        """Whether it is told to attend to something else than its own input."""
        own = next(iter(self.arguments.values()), None)
        return any(given is not None and given is not own for given in map(self.arguments.get, FROM_ELSEWHERE))


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
    with answering(), _quietly(problem.q):
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
    with answering(), torch.no_grad(), _quietly(weights):
        for rows in blocks_of_weights(weights.detach(), out if out is None else out.detach(), looks[0].known):
            observer(rows)
    for look in looks:
        look.ends()


def _quietly(like: Tensor) -> AbstractContextManager[Any]:
    """No mode of torch is asked about the thousands of small operations that follow, where tensors are torch's own."""
    return torch._C.DisableTorchFunction() if type(like) is Tensor else nullcontext()


def _looks(grid: Grid, kv_heads: int, value_dim: int | None, frames: list[Frame]) -> list[Look]:
    """How each watcher looks at a call of the innermost of its modules."""
    innermost = {id(frame.watcher): frame for frame in frames}
    looks = []
    for frame in innermost.values():
        layer = getattr(frame.module, "layer_idx", None)
        number = layer if isinstance(layer, int) else None
        inputs = _inputs_of([other for other in frames if other.watcher is frame.watcher])
        looks.append(frame.watcher.sees(Call(frame.path, number, frame.cross, grid, kv_heads, value_dim, *inputs)))
    return looks


def _inputs_of(frames: list[Frame]) -> tuple[Tensor | None, Tensor | None]:
    """Tokens and padding, from the innermost module that reads tokens: a decoder has others than its encoder."""
    padding = None
    for frame in reversed(frames):
        tokens, mask = frame.arguments.get("input_ids"), frame.arguments.get("attention_mask")
        if padding is None and isinstance(mask, Tensor) and mask.ndim == 2:
            padding = mask
        if isinstance(tokens, Tensor):
            return tokens, padding
        given = {name for name, value in frame.arguments.items() if value is not None}
        if given.intersection(NOT_TOKENS) or given >= {"inputs_embeds", "encoder_hidden_states"}:
            break
    return None, padding


def _each_of(looks: list[Look]) -> Observer:
    """One observer for all, each of whom knows other things."""
    if len(looks) == 1:
        return looks[0].observer

    def observer(rows: Rows) -> None:
        for look in looks:
            look.observer(replace(rows, known=look.known))

    return observer
