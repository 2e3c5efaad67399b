"""`LightningMonitor`: a monitor for the `Trainer` of Lightning."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import MissingExtra, require
from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.monitor import BY_DEFAULT, Monitor, OnAlarm
from headwise.monitoring.scalars import LogHeads
from headwise.monitoring.training_run import TrainingRun, with_bases

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages of Lightning. Each has its own class of callbacks."""


class LightningMonitor:
    """Callback that observes every head while Lightning trains a model, as `headwise.monitor` does, and logs scalars to
    the loggers of the trainer. It works with the packages `lightning` and `pytorch_lightning`: its objects are also
    callbacks of those that are imported, or installed.

    A step ends with each batch after which an optimizer made a step, in automatic and in manual optimization. All
    batches of gradient accumulation are one step, and several optimizers in one batch too. A checkpoint contains the
    number of the step, from which a resumed training continues. An error in the training closes the monitor.

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
        MissingExtra: Lightning is not installed.

    Example:
        callback = hw.LightningMonitor(every=100, out="run")
        lightning.Trainer(max_epochs=1, callbacks=[callback]).fit(module, loader)
        callback.monitor.history.table()
    """

    def __new__(cls, *_: Any, **__: Any) -> "LightningMonitor":
        bases = _lightning_classes()
        made: LightningMonitor = object.__new__(cls if issubclass(cls, bases[0]) else with_bases(cls, bases))
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
        self._restored: int | None = None
        self._optimizer_steps = 0

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the latest training, with its history and alarms; None before the first one."""
        return self._run.monitor

    @property
    def state_key(self) -> str:
        """Name of the state in checkpoints, the same for both packages of Lightning."""
        return "headwise.LightningMonitor"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step, for a checkpoint."""
        return {"next_step": self._run.next_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Read the number of the next step from a checkpoint."""
        self._restored = int(state_dict["next_step"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to observe the model, at the step of the checkpoint if there is one."""
        self._optimizer_steps = trainer.global_step
        # Without a state of its own in the checkpoint, the number of optimizer steps is the best one that is known.
        start = trainer.global_step if self._restored is None else self._restored
        self._restored = None
        self._run.begin(pl_module, start)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step if an optimizer made one, and log its scalars if it was observed."""
        if trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        step = self._run.next_step
        scalars = self._run.step()
        if scalars:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop to observe."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop to observe after an error or an interruption."""
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop to observe, if the training ended in another way."""
        self.close()

    def close(self) -> None:
        """Stop to observe, and release the run folder. Nothing happens if the training ended."""
        self._run.close()


def _lightning_classes() -> tuple[type, ...]:
    """Return the classes of callbacks of the packages of Lightning that are imported, or else of an installed one."""
    imported = [sys.modules[name] for name in PACKAGES if sys.modules.get(name) is not None]
    if not imported:
        try:
            imported = [require(PACKAGES[0], purpose="LightningMonitor", extra="lightning")]
        except MissingExtra:
            imported = [require(PACKAGES[1], purpose="LightningMonitor", extra="lightning")]
    return tuple(dict.fromkeys(package.Callback for package in imported))
