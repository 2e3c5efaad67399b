"""`MonitorCallback`: a monitor for the `Trainer` of transformers."""

import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from headwise.errors import require
from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.monitor import BY_DEFAULT, Monitor, OnAlarm
from headwise.monitoring.scalars import LogHeads
from headwise.monitoring.training_run import TrainingRun, with_bases

PRINTING = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
"""Classes of callbacks of transformers that print all scalars in the terminal or the notebook."""


class MonitorCallback:
    """Callback that observes every head while a `transformers.Trainer` trains a model, as `headwise.monitor` does, and
    logs scalars to the dashboards in `report_to`, such as TensorBoard, W&B and MLflow. Its objects are also
    `transformers.TrainerCallback`.

    A step is one of the optimizer, whatever the gradient accumulation. A training that resumes from a checkpoint
    continues the numbers of the steps, and the history in the folder `out`. After an error in the training,
    transformers calls no callback: call `close`, or use the callback as a context manager.

    Args:
        every: number of steps from one observed step to the next.
        statistics: names of the statistics, as in `monitor`.
        sequences: number of sequences in each process after which further forward passes of a step are not observed;
            by default all are.
        layers: numbers of the layers in the results; by default all.
        out: run folder for the history; by default it is in memory alone.
        alarms: limits outside of which a head causes an alarm.
        on_alarm: function that is called with each `Alarm` of an observed step, in the first process.
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
        made: MonitorCallback = object.__new__(cls if issubclass(cls, base) else with_bases(cls, (base,)))
        return made

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
        self._has_warned = False

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the latest training, with its history and alarms; None before the first one."""
        return self._run.monitor

    def close(self) -> None:
        """Stop to observe, and release the run folder. Nothing happens if the training ended."""
        self._run.close()

    def __enter__(self) -> "MonitorCallback":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to observe the model, at the step of the trainer."""
        self._run.begin(kwargs["model"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step, and log its scalars if it was observed."""
        scalars = self._run.step()
        if scalars:
            for callback in self._logging_callbacks():
                callback.on_log(args, state, control, logs=dict(scalars), **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop to observe."""
        self.close()

    def _logging_callbacks(self) -> list[Any]:
        """Return the callbacks of the trainer that receive scalars. Those that print are left out, since the scalars of
        all layers would fill the terminal.

        The trainer does not pass itself to callbacks. Its list of callbacks is read from the caller.
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
