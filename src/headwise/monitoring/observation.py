"""Observation of the forward passes of one training step."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

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
        sequences: number of sequences of each module after which further calls are not observed; None for no limit.
    """

    def __init__(self, model: nn.Module, heads: Heads, statistics: Collection[str], sequences: int | None) -> None:
        measured = frozenset(statistics) | INDICATORS
        super().__init__(model, heads, (), None, measured=measured, keeps_output=True)
        self._modules, self._most_sequences = dict(model.named_modules()), sequences
        self._observed: dict[str, int] = {}

    def observe(self, call: Call) -> Observation | None:
        """Return the functions that observe `call`; None if it is not part of training, repeats another, or if enough
        sequences were observed.
        """
        path = call.site.path
        if call.is_recomputation or not self._modules[path].training:
            return None
        if self._most_sequences is not None and self._observed.get(path, 0) >= self._most_sequences:
            return None
        self._observed[path] = self._observed.get(path, 0) + call.grid.batch
        return super().observe(call)


@contextmanager
def observed_training(
    model: nn.Module, heads: Heads, statistics: Collection[str], sequences: int | None
) -> Iterator[None]:
    """Add the statistics of the training forward passes of `model` within the context to `heads`. Compiled modules run
    without compilation there.

    Args:
        model: the model.
        heads: results to add to.
        statistics: names of the statistics to compute.
        sequences: number of sequences of each module after which further calls are not observed; None for no limit.
    """
    observer = TrainingObserver(model, heads, statistics, sequences)
    with (
        torch.compiler.set_stance("force_eager"),
        intercepted(model, observer, context="hw.monitor", runs_eagerly=True),
    ):
        yield
    observer.finish()
