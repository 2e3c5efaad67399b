"""Which modules of visited models run, in every thread, and what is shown and changed of the attention they compute.

A visitor comes to a model from outside. Of each call of attention it may be shown the rows, on the way, and it may
change what comes out of each head, before the output projection reads it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer, RowBlock
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem
from headwise.attention.uniform_attention import uniform_output
from headwise.intercept.layer_index import layer_number_of
from headwise.shapes import Float
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.registry import blocks_of_weights

FROM_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Arguments by which a module is told to attend to something else than its own input."""

NOT_TOKENS = ("pixel_values", "input_features", "input_values")
"""Arguments of a module that reads something else, though the model around it reads tokens."""


class Site(NamedTuple):
    """One place where a model attends.

    Attributes:
        path: path of the innermost module that computes the attention.
        cross: True for cross-attention, to something else than the module's own input.
    """

    path: str
    cross: bool


@dataclass(frozen=True)
class Call:
    """One attention call inside a model, as its interceptors see it.

    Attributes:
        site: where in the model.
        layer: number of the layer in the model's own count; None where the model does not number it.
        index: number of the call among those of this site in one call of the model, from 0.
        grid: size of the scores: batch, query heads, queries, keys.
        kv_heads: number of key/value heads.
        value_dim: features of a value; None where unknown.
        tokens: token ids that the part of the model which attends was called with; None where it had none.
        padding: mask `(batch, length)` of that part's input, True or 1 at tokens that are not padding; None without.
    """

    site: Site
    layer: int | None
    index: int
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


class Interceptor:
    """Base class of objects that observe or change the attention calls of a model; this one does neither."""

    def on_model_call(self) -> None:
        """Handle the start of a call of the model."""

    def on_module_call(self, path: str) -> None:
        """Handle the start of a call of the module at `path`; the model's own path is empty."""

    def on_unreadable(self, path: str) -> None:
        """Handle a computation in the attention module at `path` that looks like attention and cannot be read."""

    def observe(self, call: Call) -> Observation | None:
        """Return how the rows of `call` are observed; None to observe nothing."""
        return None

    def change(self, call: Call) -> Change | None:
        """Return the function that changes the head outputs of `call`; None to leave them unchanged."""
        return None


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
    calls: Counter[Site] = field(default_factory=Counter)

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
def exclusive(visitor: Interceptor) -> Iterator[None]:
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
        site = Site(frame.path, frame.cross)
        index = calls[site]
        calls[site] += 1
        call = Call(site, layer_number_of(frame.module), index, grid, kv_heads, value_dim, *inputs)
        look, change = frame.visitor.observe(call), frame.visitor.change(call)
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
