"""Which modules of visited models run, in every thread, and what is shown and changed of the attention they compute.

A visitor comes to a model from outside. Of each call of attention it may be shown the rows, on the way, and it may
change what comes out of each head, before the output projection reads it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer, RowBlock
from headwise.attention.masks.base import Grid
from headwise.attention.problem import Answer, Problem
from headwise.attention.uniform_attention import uniform_output
from headwise.intercept.layer_index import own_number
from headwise.shapes import Float
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.registry import blocks_of_weights

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
        number: of the call among those of this module and kind in one run of the model, from 0.
        grid: of its scores.
        kv_heads: how many heads its keys and values have.
        value_dim: how wide a value is, where it is known.
        tokens: the ids that the part of the model which attends was called with, if it was.
        padding: that part's mask of what is no padding, `(batch, length)`, if there is one.
    """

    path: str
    layer: int | None
    cross: bool
    number: int
    grid: Grid
    kv_heads: int
    value_dim: int | None
    tokens: Tensor | None
    padding: Tensor | None


class Observation(NamedTuple):
    """How a call is looked at: who is shown its rows, what is known of it, and what is done when all were shown."""

    observer: Observer
    known: CallContext
    ends: Callable[[], None]


class HeadOutput(NamedTuple):
    """What a call of attention came to.

    Attributes:
        out: each head's output, before the output projection.
        evenly: what it were if each query gave all keys that it may see the same weight.
    """

    out: Float[Tensor, "batch heads queries value_dim"]
    uniform_output: Callable[[], Float[Tensor, "batch heads queries value_dim"]]


Change = Callable[[HeadOutput], Float[Tensor, "batch heads queries value_dim"]]
"""What becomes of the output of the heads of a call."""


@runtime_checkable
class Interceptor(Protocol):
    """Who comes to a model from outside."""

    def starts(self) -> None:
        """The model is called."""

    def runs(self, path: str) -> None:
        """A module of it is called."""

    def misses(self, path: str) -> None:
        """Something in a module called attention looks like attention and cannot be read."""

    def sees(self, call: Call) -> Observation | None:
        """How it looks at a call of attention; None where it does not."""

    def changes(self, call: Call) -> Change | None:
        """What it makes of the output of a call; None where it leaves that alone."""


@dataclass(frozen=True)
class Frame:
    """A module that runs, of a model that is visited.

    Attributes:
        visitor: who visits the model.
        path: of the module in it.
        module: which runs.
        arguments: what it was called with, by name.
        calls: how often attention was called in it, by module and kind.
    """

    visitor: Interceptor
    path: str
    module: nn.Module
    arguments: dict[str, Any]
    calls: Counter[tuple[str, bool]] = field(default_factory=Counter)

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
        only: the visitor who alone is asked; None where all are.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.answering = False
        self.only: Interceptor | None = None

    @property
    def are_met(self) -> bool:
        """Whether attention calls are those of a visited model."""
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


@contextmanager
def alone(visitor: Interceptor) -> Iterator[None]:
    """Within the context no other visitor is asked: what it runs a model for is nobody else's run."""
    before, running.only = running.only, visitor
    try:
        yield
    finally:
        running.only = before


class CallHandlers(NamedTuple):
    """A call of attention, and what its visitors want of it."""

    looks: list[Observation]
    changes: list[Change]

    def answer(self, problem: Callable[[], Problem], otherwise: Callable[[], Answer]) -> Answer:
        """The answer, its rows shown to all who look; `otherwise` where nobody does."""
        with answering():
            if not self.looks:
                return otherwise()
            stated = problem()
            with _quietly(stated.q):
                answered = attend_observed(stated, self._observer, self.looks[0].known, lambda _: otherwise())
        self._end()
        return answered

    def show(
        self,
        weights: Float[Tensor, "batch heads queries keys"],
        out: Float[Tensor, "batch heads queries value_dim"] | None,
    ) -> None:
        """Show the rows of weights that are there already to all who look."""
        if self.looks:
            with answering(), torch.no_grad(), _quietly(weights):
                for rows in blocks_of_weights(weights.detach(), None if out is None else out.detach(), self._known):
                    self._observer(rows)
            self._end()

    def changed(
        self,
        out: Float[Tensor, "batch heads queries value_dim"],
        uniform_output: Callable[[], Float[Tensor, "batch heads queries value_dim"]],
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """The output as the visitors want it, one after the other, the innermost context last."""
        with answering():
            for change in self.changes:
                out = change(HeadOutput(out, uniform_output))
        return out

    @property
    def _known(self) -> CallContext:
        return self.looks[0].known

    def _observer(self, rows: RowBlock) -> None:
        """One observer for all, each of whom knows other things."""
        for look in self.looks:
            look.observer(rows if len(self.looks) == 1 else rows.with_call_context(look.known))

    def _end(self) -> None:
        for look in self.looks:
            look.ends()


def meet(grid: Grid, kv_heads: int, value_dim: int | None, frames: list[Frame] | None = None) -> CallHandlers:
    """What the visitors of these modules, or else of those that run, want of a call."""
    frames = running.frames if frames is None else frames
    met = CallHandlers([], [])
    innermost: dict[int, Frame] = {}
    for frame in reversed(frames):  # in a module, the frame of the innermost context comes first
        if running.only in (None, frame.visitor):
            innermost.setdefault(id(frame.visitor), frame)
    for frame in innermost.values():
        own = [other for other in frames if other.visitor is frame.visitor]
        calls, inputs = own[0].calls, _inputs_of(own)
        number = calls[frame.path, frame.cross]
        calls[frame.path, frame.cross] += 1
        call = Call(frame.path, own_number(frame.module), frame.cross, number, grid, kv_heads, value_dim, *inputs)
        look, change = frame.visitor.sees(call), frame.visitor.changes(call)
        met.looks.extend([] if look is None else [look])
        met.changes.extend([] if change is None else [change])
    return met


def answer(problem: Problem, run: Callable[[Problem], Answer]) -> Answer:
    """The answer to a problem that `headwise.attend` was given, shown to those who look and changed by those who do."""
    if not running.are_met:
        return run(problem)
    met = meet(problem.grid, problem.k.shape[1], problem.v.shape[-1])
    answered = met.answer(lambda: problem, lambda: run(problem))
    return answered._replace(out=met.changed(answered.out, lambda: uniform_output(problem)))


def _quietly(like: Tensor) -> AbstractContextManager[Any]:
    """No mode of torch is asked about the thousands of small operations that follow, where tensors are torch's own."""
    return torch._C.DisableTorchFunction() if type(like) is Tensor else nullcontext()


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
