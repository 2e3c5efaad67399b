"""Time of a run of a model, and of its attention modules in it."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from headwise.data.batches import device_of

TOTAL, ATTENTION = "total", "attention"
"""Names of the time of a run, and of the sum over the attention modules in it."""


class Stopwatch:
    """Context manager that times a run of a model, and by hooks the sum over its attention modules.

    On the CPU both are times of the clock. On an accelerator, the run is timed until the device has finished, and
    modules by events on the device, so that hooks do not wait for it.

    Args:
        model: the model.
        paths: paths of the attention modules, none of which is inside of another one.
        clock: returns seconds.

    Attributes:
        times: seconds of the last run: "total" and, if there are attention modules, "attention".
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self.times: dict[str, float] = {}
        self._modules = [model.get_submodule(path) for path in paths]
        self._device, self._clock = device_of(model), clock
        self._hooks: list[Any] = []
        self._marks: list[tuple[Any, Any]] = []
        self._begun: list[Any] = []
        self._start = 0.0

    def __enter__(self) -> "Stopwatch":
        self._marks.clear()
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(lambda *_: self._begun.append(self._mark())))
            self._hooks.append(
                module.register_forward_hook(lambda *_: self._marks.append((self._begun.pop(), self._mark())))
            )
        self._synchronize()
        self._start = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._synchronize()
        self.times = {TOTAL: self._clock() - self._start}
        while self._hooks:
            self._hooks.pop().remove()
        self._begun.clear()
        if self._modules:
            self.times[ATTENTION] = sum(self._seconds(*marks) for marks in self._marks)

    @property
    def _is_on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def _synchronize(self) -> None:
        """Wait until an accelerator has finished."""
        if not self._is_on_cpu:
            torch.accelerator.synchronize(self._device)

    def _mark(self) -> Any:
        """Return the time of the clock, or an event that an accelerator records."""
        if self._is_on_cpu:
            return self._clock()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two marks."""
        return float(stop - start) if self._is_on_cpu else float(start.elapsed_time(stop)) / 1000.0
