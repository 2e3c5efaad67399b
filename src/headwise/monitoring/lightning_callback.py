"""`LightningMonitor`: a monitor for the `Trainer` of Lightning."""

import sys
from collections.abc import Mapping
from typing import Any

from headwise.errors import MissingExtra, require
from headwise.monitoring.training_run import TrainingCallback, with_bases

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages of Lightning. Each has its own class of callbacks."""


class LightningMonitor(TrainingCallback):
    """Callback that observes every head while Lightning trains a model, as `headwise.monitor` does, and logs scalars to
    the loggers of the trainer. It works with the packages `lightning` and `pytorch_lightning`: its objects are also
    callbacks of those that are imported, or installed.

    A step ends with each batch after which an optimizer made a step, in automatic and in manual optimization. All
    batches of gradient accumulation are one step, and several optimizers in one batch too. A checkpoint contains the
    number of the step, from which a resumed training continues. An error in the training closes the monitor.

    Args:
        every, statistics, sequences, layers, out, alarms, on_alarm: as for `headwise.monitor`, with the same defaults.
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

    _restored: int | None = None
    _optimizer_steps = 0

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


def _lightning_classes() -> tuple[type, ...]:
    """Return the classes of callbacks of the packages of Lightning that are imported, or else of an installed one."""
    imported = [sys.modules[name] for name in PACKAGES if sys.modules.get(name) is not None]
    if not imported:
        try:
            imported = [require(PACKAGES[0], purpose="LightningMonitor", extra="lightning")]
        except MissingExtra:
            imported = [require(PACKAGES[1], purpose="LightningMonitor", extra="lightning")]
    return tuple(dict.fromkeys(package.Callback for package in imported))
