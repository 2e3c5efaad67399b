"""`MonitorCallback`: a monitor for the `Trainer` of transformers."""

import sys
import warnings
from typing import Any

from headwise.errors import require
from headwise.monitoring.training_run import TrainingCallback, with_bases

PRINTING = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
"""Classes of callbacks of transformers that print all scalars in the terminal or the notebook."""


class MonitorCallback(TrainingCallback):
    """Callback that observes every head while a `transformers.Trainer` trains a model, as `headwise.monitor` does, and
    logs scalars to the dashboards in `report_to`, such as TensorBoard, W&B and MLflow. Its objects are also
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
        made: MonitorCallback = object.__new__(cls if issubclass(cls, base) else with_bases(cls, (base,)))
        return made

    _has_warned = False

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
