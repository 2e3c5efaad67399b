"""Monitor of a training that a library runs, for the callbacks of these libraries."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.monitor import BY_DEFAULT, Monitor, OnAlarm, monitor
from headwise.monitoring.scalars import LogHeads, heads_to_log, step_scalars


class TrainingRun:
    """Monitor of the trainings of one callback, one after the other.

    Args:
        log_heads: heads to log, as the argument of the callbacks.
        options: options of `monitor`, except the model and the first step.

    Attributes:
        monitor: monitor of the latest training; None before the first one.
        next_step: number of the next step.
    """

    def __init__(self, log_heads: Any, **options: Any) -> None:
        monitor(nn.Identity(), **options)  # raises an error for options that cannot be used
        self._log_heads, self._options = heads_to_log(log_heads), options
        self._is_open = False
        self.monitor: Monitor | None = None
        self.next_step = 0

    def begin(self, model: nn.Module, start: int) -> None:
        """Begin to observe a training of `model`. The monitor of a training that did not end is closed first.

        Args:
            model: the model.
            start: number of steps of the training that were finished before.
        """
        self.close()
        self.next_step = start
        # A folder that has steps must not be continued by a training that starts from the beginning.
        self.monitor = monitor(model, **self._options, start=start or None)
        self.monitor.__enter__()
        self._is_open = True

    def step(self) -> dict[str, float]:
        """End a step, and return the scalars to log; empty if the step was not observed."""
        if self.monitor is None or not self._is_open:
            return {}
        step, self.next_step = self.next_step, self.next_step + 1
        alarms = self.monitor.step()
        is_observed = step % self._options["every"] == 0
        return step_scalars(self.monitor.history, step, alarms, self._log_heads) if is_observed else {}

    def close(self) -> None:
        """Stop to observe. Nothing happens if no training is observed."""
        if self.monitor is not None and self._is_open:
            self._is_open = False
            self.monitor.__exit__(None, None, None)


class TrainingCallback:
    """Base of the callbacks of training libraries: the options of a monitor, and the monitor of each training."""

    def __init__(
        self,
        *,
        every: int = 100,
        statistics: Collection[str] = BY_DEFAULT,
        sequences: int | None = None,
        layers: Collection[int] | None = None,
        out: str | Path | None = None,
        alarms: AlarmLimits | None = None,
        on_alarm: OnAlarm | None = None,
        log_heads: LogHeads = 4,
    ) -> None:
        options = {"every": every, "statistics": statistics, "sequences": sequences, "layers": layers, "out": out}
        self._run = TrainingRun(log_heads, **options, alarms=alarms, on_alarm=on_alarm)

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the latest training, with its history and alarms; None before the first one."""
        return self._run.monitor

    def close(self) -> None:
        """Stop to observe, and release the run folder. Nothing happens if the training ended."""
        self._run.close()


_MADE: dict[tuple[type, ...], type] = {}


def with_bases(derived: type, bases: tuple[type, ...]) -> type:
    """Return a subclass of `derived` and of `bases`, the classes of a training library, with the name of the first.

    Callbacks get their bases when they are made, so that these libraries are imported only then.
    """
    names = {"__module__": derived.__module__, "__qualname__": derived.__qualname__, "__doc__": derived.__doc__}
    if (derived, *bases) not in _MADE:
        _MADE[derived, *bases] = type(derived.__name__, (derived, *bases), names)
    return _MADE[derived, *bases]
