"""Monitors for the training loops of libraries: `MonitorCallback` for transformers, and `LightningMonitor`.

A model may have a thousand heads, so only some heads have scalars of their own in the dashboards of these libraries.
Each layer has summaries.
"""

import math
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from headwise.checks import collection_of, head_pair, is_whole, whole_number
from headwise.errors import InputError, MissingExtra, require
from headwise.monitoring.alarms import Alarm, AlarmLimits
from headwise.monitoring.history import History, Row
from headwise.monitoring.monitor import BY_DEFAULT, Monitor, OnAlarm, monitor

MOST_ALARMS = 32
"""Largest number of alarms of a step whose statistics are logged."""

LogHeads = int | Collection[tuple[int, int]]
"""Number of heads for each statistic, or the heads `(layer, head)`."""

PRINTING = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
"""Classes of callbacks of transformers that print all scalars in the terminal or the notebook."""

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""The two packages of Lightning. Each has its own class of callbacks."""

_MADE: dict[tuple[type, ...], type] = {}
"""Classes that `_object_with_bases` has made, by their bases."""


class TrainingCallback:
    """Base class of training callbacks that observe attention heads. It stores the options of `headwise.monitor`, and
    opens a monitor.
    """

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
        self._options: dict[str, Any] = {"every": every, "statistics": statistics, "sequences": sequences}
        self._options |= {"layers": layers, "out": out, "alarms": alarms, "on_alarm": on_alarm}
        monitor(nn.Identity(), **self._options)  # raises an error for options that cannot be used
        if isinstance(log_heads, int):
            self._log_heads: int | tuple[tuple[int, int], ...] = whole_number("log_heads", log_heads, least=0)
        else:
            heads = collection_of("log_heads", log_heads, of="heads (layer, head), or their number")
            pairs = tuple(head_pair("log_heads", head, of="a collection of (layer, head)") for head in heads)
            for pair in pairs:
                if not all(is_whole(number, 0) for number in pair):
                    expected = "heads (layer, head) with whole numbers from 0"
                    raise InputError("log_heads", expected=expected, got=repr(pair))
            self._log_heads = pairs
        self._monitor: Monitor | None = None
        self._is_open = False
        self._next_step = 0

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the latest training, with its history and alarms; None before the first one."""
        return self._monitor

    def close(self) -> None:
        """Stop observing the training, and release the run folder. If the training has ended, nothing happens."""
        if self._monitor is not None and self._is_open:
            self._is_open = False
            self._monitor.__exit__(None, None, None)

    def _begin(self, model: nn.Module, start: int) -> None:
        """Open a monitor that observes a training from step `start` on. If the previous training did not end, its
        monitor is closed first.
        """
        self.close()
        self._next_step = start
        # A folder that has steps must not be continued by a training that starts from the beginning.
        self._monitor = monitor(model, **self._options, start=start or None)
        self._monitor.__enter__()
        self._is_open = True

    def _step(self) -> dict[str, float]:
        """End a step of the monitor, and return the numbers to log, by name. The dict is empty if the step was not
        observed.
        """
        if self._monitor is None or not self._is_open:
            return {}
        step, self._next_step = self._next_step, self._next_step + 1
        alarms = self._monitor.step()
        is_observed = step % self._options["every"] == 0
        return step_scalars(self._monitor.history, step, alarms, self._log_heads) if is_observed else {}


class MonitorCallback(TrainingCallback):
    """Callback for `transformers.Trainer` that observes every head during training, as `headwise.monitor` does. It logs
    numbers to the dashboards in `report_to`, such as TensorBoard, W&B and MLflow. The callback is also an instance of
    `transformers.TrainerCallback`.

    A step is one of the optimizer, whatever the gradient accumulation. A training that resumes from a checkpoint
    continues the numbers of the steps, and the history in the folder `out`. After an error in the training,
    transformers calls no callback: call `close`, or use the callback as a context manager.

    Args:
        every, statistics, sequences, layers, out, alarms, on_alarm: as for `headwise.monitor`, with the same defaults.
        log_heads: number of heads whose value is logged for each statistic, those that changed most since the first
            observed step; or the heads `(layer, head)` whose statistics are all logged. The statistics that cause
            alarms are logged, too, and summaries of each layer.

    Raises:
        InputError: an argument cannot be used.
        MissingExtra: transformers is not installed.

    Example:
        callback = hw.MonitorCallback(every=100, out="run")
        Trainer(model, args, train_dataset=dataset, callbacks=[callback]).train()
        callback.monitor.history.table()
    """

    def __new__(cls, *_: Any, **__: Any) -> "MonitorCallback":
        base = require("transformers", purpose="MonitorCallback", extra="hf").TrainerCallback
        made: MonitorCallback = _object_with_bases(cls, (base,))
        return made

    _has_warned = False

    def __enter__(self) -> "MonitorCallback":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start observing the model, from the trainer's present step on."""
        self._begin(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step of the monitor after an optimizer step. If the step was observed, log its numbers."""
        scalars = self._step()
        if scalars:
            for callback in self._logging_callbacks():
                callback.on_log(args, state, control, logs=dict(scalars), **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing the model at the end of training."""
        self.close()

    def _logging_callbacks(self) -> list[Any]:
        """Return the trainer's other callbacks that log numbers, except those that print: the numbers of all layers
        would fill the terminal. The trainer does not pass its callbacks to this one, so they are read from the stack
        frame of the caller.
        """
        frame = sys._getframe(1)
        while frame is not None:
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and any(callback is self for callback in callbacks):
                return [
                    callback
                    for callback in callbacks
                    if callback is not self and not {base.__name__ for base in type(callback).__mro__} & {*PRINTING}
                ]
            frame = frame.f_back  # type: ignore[assignment]
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "MonitorCallback found no list of callbacks of a trainer: no scalars are logged", stacklevel=3
            )
        return []


class LightningMonitor(TrainingCallback):
    """Callback for Lightning that observes every head during training, as `headwise.monitor` does, and logs numbers to
    the loggers of the trainer. It works with the packages `lightning` and `pytorch_lightning`: the callback is also an
    instance of the `Callback` class of each package that is imported.

    A step ends with each batch after which an optimizer made a step, in automatic and in manual optimization. All
    batches of gradient accumulation are one step, and several optimizers in one batch too. A checkpoint contains the
    number of the step, from which a resumed training continues. An error in the training closes the monitor.

    Args:
        every, statistics, sequences, layers, out, alarms, on_alarm: as for `headwise.monitor`, with the same defaults.
        log_heads: as for `headwise.MonitorCallback`.

    Raises:
        InputError: an argument cannot be used.
        MissingExtra: Lightning is not installed.

    Example:
        callback = hw.LightningMonitor(every=100, out="run")
        lightning.Trainer(max_epochs=1, callbacks=[callback]).fit(module, loader)
        callback.monitor.history.table()
    """

    def __new__(cls, *_: Any, **__: Any) -> "LightningMonitor":
        packages = [sys.modules[name] for name in LIGHTNING if sys.modules.get(name) is not None]
        if not packages:
            try:
                packages = [require(LIGHTNING[0], purpose="LightningMonitor", extra="lightning")]
            except MissingExtra:
                packages = [require(LIGHTNING[1], purpose="LightningMonitor", extra="lightning")]
        bases = tuple(dict.fromkeys(package.Callback for package in packages))
        made: LightningMonitor = _object_with_bases(cls, bases)
        return made

    _restored: int | None = None
    _optimizer_steps = 0

    @property
    def state_key(self) -> str:
        """Key under which a checkpoint stores the state of this callback. It is the same for both packages of
        Lightning.
        """
        return "headwise.LightningMonitor"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the number of the next training step."""
        return {"next_step": self._next_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number of the next training step from a checkpoint."""
        self._restored = int(state_dict["next_step"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start observing the model, from the step in the checkpoint on or, without one, from the trainer's present
        step.
        """
        self._optimizer_steps = trainer.global_step
        # Without a state of its own in the checkpoint, the number of optimizer steps is the best one that is known.
        start = trainer.global_step if self._restored is None else self._restored
        self._restored = None
        self._begin(pl_module, start)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step of the monitor if an optimizer made a step in this batch. If the step was observed, log its
        numbers.
        """
        if trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        step = self._next_step
        scalars = self._step()
        if scalars:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop observing the model at the end of training."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop observing the model after an error or an interruption of the training."""
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop observing the model, if the training ended without another hook of this callback."""
        self.close()


def _object_with_bases(derived: type, bases: tuple[type, ...]) -> Any:
    """Return an object of class `derived` that is also an instance of `bases`, classes of an optional training library.
    If `derived` is not a subclass of the first base, a class with the same name is created that inherits from `derived`
    and `bases`.
    """
    if issubclass(derived, bases[0]):
        return object.__new__(derived)
    names = {"__module__": derived.__module__, "__qualname__": derived.__qualname__, "__doc__": derived.__doc__}
    if (derived, *bases) not in _MADE:
        _MADE[derived, *bases] = type(derived.__name__, (derived, *bases), names)
    return object.__new__(_MADE[derived, *bases])


def step_scalars(
    history: History, step: int, alarms: Sequence[Alarm], log_heads: int | tuple[tuple[int, int], ...]
) -> dict[str, float]:
    """Return the numbers to log for an observed step, by name: summaries of each layer, values of single heads, and the
    number of alarms. Values are logged for the heads in `log_heads` and for the heads of the first 32 alarms. If
    `log_heads` is a number n, the n heads that changed most since the first observed step are chosen for each
    statistic.

    - `heads/<layer>/<statistic>_mean`, `_min` and `_max`: over the heads of a layer with a finite value.
    - `heads/<layer>/<statistic>_nonfinite`: number of heads of a layer without one, if there are some.
    - `heads/<layer>.<head>/<statistic>`: value of one head.
    - `heads/alarms`: number of alarms.
    """
    rows = history.rows(step)
    scalars: dict[str, float] = {"heads/alarms": float(len(alarms))}
    of_layers: dict[int, list[Row]] = {}
    for row in rows:
        of_layers.setdefault(row["layer"], []).append(row)
    for layer, members in sorted(of_layers.items()):
        for statistic in history.statistics:
            name, values = f"heads/{layer}/{statistic}", [row[statistic] for row in members if statistic in row]
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                scalars[f"{name}_mean"] = math.fsum(finite) / len(finite)
                scalars |= {f"{name}_min": min(finite), f"{name}_max": max(finite)}
            if len(finite) < len(values):
                scalars[f"{name}_nonfinite"] = float(len(values) - len(finite))
    logged = [(alarm.layer, alarm.head, alarm.statistic) for alarm in alarms[:MOST_ALARMS]]
    if isinstance(log_heads, int):
        of_statistics = [(statistic, history.changes(statistic, step)[:log_heads]) for statistic in history.statistics]
        changed = [(layer, head, name) for name, changes in of_statistics for layer, head, change in changes if change]
        logged = changed + logged
    else:
        logged = [(*head, statistic) for head in log_heads for statistic in history.statistics] + logged
    of_heads = {(row["layer"], row["head"]): row for row in rows}
    for layer, head, statistic in logged:
        value = of_heads.get((layer, head), {}).get(statistic)
        if value is not None:
            scalars[f"heads/{layer}.{head}/{statistic}"] = float(value)
    return scalars
