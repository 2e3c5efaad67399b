"""Observation of the forward passes of one training step."""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headwise.intercept.call_stack import call_stack
from headwise.intercept.heads import Heads
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.statistics_observer import StatisticsObserver

INDICATORS = frozenset({"entropy", "output_norm"})
"""Statistics that show NaN and infinite numbers, and are always computed."""


class TrainingObserver(StatisticsObserver):
    """Interceptor that adds the statistics of the attention calls in a training forward pass to `heads`. The model's
    own functions compute all outputs, so these have the same bits as without it. Calls of modules in evaluation mode,
    and calls that activation checkpointing repeats, are not observed.

    Args:
        model: the model.
        heads: results to add to.
        statistics: names of the statistics to compute.
        sequences: number of sequences of each module after which further calls of the model are not observed in it;
            None for no limit. Calls of the model that have begun are observed to their end.

    Attributes:
        inputs: arguments of the latest call of the model, by name; None before the first one.
    """

    def __init__(self, model: nn.Module, heads: Heads, statistics: Collection[str], sequences: int | None) -> None:
        measured = frozenset(statistics) | INDICATORS
        super().__init__(model, heads, (), None, measured=measured, keeps_output=True)
        self._modules = dict(model.named_modules())
        self._most_sequences, self._observed_sequences = sequences, dict[str, int]()
        self._of_thread = threading.local()
        self.inputs: Mapping[str, Any] | None = None

    def on_model_call(self) -> None:
        """Begin a call of the model in this thread, and count the sequences of the previous one. They count only now,
        since a module may attend several times to the same sequences in one call of the model.
        """
        super().on_model_call()
        for path, sequences in vars(self._of_thread).pop("sequences", {}).items():
            self._observed_sequences[path] = self._observed_sequences.get(path, 0) + sequences

    def on_module_call(self, path: str) -> None:
        """Record that a module in training mode ran. Attention of other modules is not missing in the results."""
        if self._modules[path].training:
            if not path:
                self.inputs = call_stack.module_calls[-1].arguments
            super().on_module_call(path)

    def observe(self, call: Call) -> Observation | None:
        """Return the functions that observe `call`; None if it is not part of training, repeats another, or if enough
        sequences were observed.
        """
        path = call.site.path
        if call.is_recomputation or not self._modules[path].training:
            return None
        if self._most_sequences is not None:
            if self._observed_sequences.get(path, 0) >= self._most_sequences:
                return None
            of_call = vars(self._of_thread).setdefault("sequences", dict[str, int]())
            of_call[path] = max(of_call.get(path, 0), call.grid.batch)
        return super().observe(call)


class _ForcedEager:
    """Context in which compiled modules run without compilation, in all threads. It may be entered again before it is
    left, in any order; the last exit restores the stance of the compiler.
    """

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._stance = torch.compiler.set_stance("force_eager")
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._stance.__exit__(None, None, None)


forced_eager = _ForcedEager()
"""Context in which compiled modules run without compilation; the monitors of several models share it."""


@contextmanager
def observed_training(
    model: nn.Module, heads: Heads, statistics: Collection[str], sequences: int | None
) -> Iterator[TrainingObserver]:
    """Add the statistics of the training forward passes of `model` within the context to `heads`, and yield their
    observer. Compiled modules run without compilation there.

    Args:
        model: the model.
        heads: results to add to.
        statistics: names of the statistics to compute.
        sequences: as for `TrainingObserver`.
    """
    observer = TrainingObserver(model, heads, statistics, sequences)
    with forced_eager, intercepted(model, observer, context="hw.monitor", runs_eagerly=True):
        yield observer
    observer.finish()
