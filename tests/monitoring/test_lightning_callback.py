"""`LightningMonitor` observes trainings of Lightning without changing them."""

import math
import sys
from typing import Any

import pytest
import torch

import headwise as hw
import tiny
from headwise.monitoring.history import History

lightning: Any = pytest.importorskip("lightning.pytorch")
pytorch_lightning = pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(num_workers|GPU|log_every_n_steps|logging interval|checkpoint).*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def loader(number, seed=3, size=2):
    """Return random sequences of 11 tokens in batches, always in the same order."""
    ids = torch.randint(5, 97, (number, 11), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(list(ids), batch_size=size)


def module_class(base):
    """Return the class of a tiny language model that records its losses and gradients, for a package of Lightning."""

    class Module(base):
        def __init__(self, fails_at=None):
            super().__init__()
            self.model = tiny.model("decoder", top="ForCausalLM", hidden_size=32, num_attention_heads=4).train()
            self.losses, self.gradients, self.fails_at = [], [], fails_at

        def training_step(self, ids, index):
            loss = self.model(ids, labels=ids).loss
            self.losses.append(loss.item())
            if len(self.losses) == self.fails_at:
                raise RuntimeError("an error in the training")
            self.log("loss", loss)
            return loss

        def validation_step(self, ids, index):
            self.log("validation_loss", self.model(ids, labels=ids).loss)

        def on_before_optimizer_step(self, optimizer):
            self.gradients.append(torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module


Module: Any = module_class(lightning.LightningModule)


class Manual(Module):
    """Module with manual optimization: a step of the optimizer after every second batch."""

    automatic_optimization = False

    def training_step(self, ids, index):
        self.manual_backward(super().training_step(ids, index))
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Scalars(lightning.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, dict(metrics)))


def fit(module, *callbacks, number=12, package=lightning, validation=None, ckpt_path=None, **options):
    """Train a module on batches of 2 sequences, and return the trainer."""
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    trainer = package.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **options
    )
    trainer.fit(module, loader(number), validation, ckpt_path=ckpt_path)
    return trainer


STEPS = 40
"""Number of steps of the trainings that must not change."""


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Module, {}),
        pytest.param(Module, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param(Module, {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        (Manual, {}),
    ],
    ids=["plain", "accumulation", "bfloat16", "manual"],
)
def test_losses_and_gradients_have_the_same_bits(made, options):
    parts = 2 if options.get("accumulate_grad_batches") or made is Manual else 1
    results, callback = [], hw.LightningMonitor(every=13, statistics=("max_logit", "entropy", "received"))
    for callbacks in ([], [callback]):
        module = made()
        fit(module, *callbacks, number=2 * STEPS * parts, **options)
        results.append((module.losses, module.gradients))
    (losses, gradients), (losses_with, gradients_with) = results
    assert (len(losses), len(gradients)) == (STEPS * parts, STEPS)
    assert losses == losses_with
    assert all(torch.equal(one, other) for one, other in zip(gradients, gradients_with, strict=True))
    assert not torch.equal(gradients[0], gradients[-1])
    history = callback.monitor.history
    assert history.steps == list(range(0, STEPS, 13))
    assert {row["sequences"] for row in history.rows()} == {2 * parts}
    assert len(history.rows(13)) == 8


@pytest.mark.parametrize("package", [lightning, pytorch_lightning])
def test_both_packages_of_lightning_accept_the_callback(package):
    callback = hw.LightningMonitor(every=2)
    assert isinstance(callback, package.Callback)
    assert isinstance(callback, hw.LightningMonitor)
    fit(module_class(package.LightningModule)(), callback, package=package)
    assert callback.monitor.history.steps == [0, 2, 4]


def test_the_last_batches_of_an_epoch_are_a_step_too():
    callback = hw.LightningMonitor(every=1)
    fit(Module(), callback, number=10, accumulate_grad_batches=2)
    sequences = [callback.monitor.history.rows(step)[0]["sequences"] for step in callback.monitor.history.steps]
    assert sequences == [4, 4, 2]


def test_validation_within_an_epoch_is_not_counted():
    callback = hw.LightningMonitor(every=1)
    trainer = fit(Module(), callback, validation=loader(15, size=5), val_check_interval=2, num_sanity_val_steps=2)
    assert "validation_loss" in trainer.callback_metrics
    assert callback.monitor.history.steps == [0, 1, 2, 3, 4, 5]
    assert {row["sequences"] for row in callback.monitor.history.rows()} == {2}


def test_several_optimizers_in_a_batch_are_one_step():
    class TwoOptimizers(Module):
        automatic_optimization = False

        def training_step(self, ids, index):
            for optimizer in self.optimizers():
                self.manual_backward(super().training_step(ids, index))
                optimizer.step()
                optimizer.zero_grad()

        def on_before_optimizer_step(self, optimizer):
            pass

        def configure_optimizers(self):
            halves = list(self.parameters())[::2], list(self.parameters())[1::2]
            return [torch.optim.SGD(half, lr=1e-3) for half in halves]

    callback = hw.LightningMonitor(every=4)
    trainer = fit(TwoOptimizers(), callback)
    assert trainer.global_step == 12
    assert callback.monitor.history.steps == [0, 4]
    assert {row["sequences"] for row in callback.monitor.history.rows()} == {4}


def test_a_resumed_training_continues_the_history(tmp_path):
    """Lightning reads the batches of an epoch from the beginning, so the checkpoint is that of the end of an epoch."""
    whole, run = hw.LightningMonitor(every=3), tmp_path / "run"
    fit(Module(), whole, number=10, max_epochs=2)
    saved = lightning.callbacks.ModelCheckpoint(tmp_path, "end", save_on_train_epoch_end=True)
    fit(Module(), hw.LightningMonitor(every=3, out=run), saved, number=10, enable_checkpointing=True)
    assert History.load(run).steps == [0, 3]
    second = hw.LightningMonitor(every=3, out=run)
    fit(Module(), second, number=10, max_epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert second.monitor.history.steps == [0, 3, 6, 9]
    assert History.load(run).rows() == whole.monitor.history.rows()
    with pytest.raises(hw.InputError, match="start: expected the number of the step at which the training resumes"):
        fit(Module(), hw.LightningMonitor(every=3, out=run))


def test_a_checkpoint_without_the_callback_has_the_step_of_the_trainer(tmp_path):
    saved = lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    fit(Module(), saved, number=20, enable_checkpointing=True, max_steps=5)
    callback = hw.LightningMonitor(every=3)
    fit(Module(), callback, number=20, ckpt_path=tmp_path / "step=5.ckpt")
    assert callback.monitor.history.steps == [6, 9]


@pytest.mark.parametrize("every", [1, 5])
def test_an_error_in_the_training_closes_the_monitor(every, tmp_path, is_intercepted):
    callback = hw.LightningMonitor(every=every, out=tmp_path)
    with pytest.raises(RuntimeError, match="an error in the training"):
        fit(Module(fails_at=4), callback)
    assert not is_intercepted()
    assert not list(tmp_path.glob(".headwise.lock*"))
    assert callback.monitor.history.steps == list(range(0, 3, every))


def test_scalars_are_logged_at_the_steps_of_lightning():
    logger, callback = Scalars(), hw.LightningMonitor(every=2, statistics=["entropy"], log_heads=[(1, 3)])
    fit(Module(), callback, logger=logger, log_every_n_steps=1)
    of_heads = {step: metrics for step, metrics in logger.logged if "heads/alarms" in metrics}
    assert list(of_heads) == callback.monitor.history.steps == [0, 2, 4]
    assert {step for step, metrics in logger.logged if "loss" in metrics} == {0, 1, 2, 3, 4, 5}
    rows = {(row["layer"], row["head"]): row["entropy"] for row in callback.monitor.history.rows(2)}
    names = {f"heads/{layer}/entropy_{each}" for layer in (0, 1) for each in ("mean", "min", "max")}
    assert of_heads[2].keys() == names | {"heads/alarms", "heads/1.3/entropy"}
    assert of_heads[2]["heads/1.3/entropy"] == rows[1, 3]
    assert of_heads[2]["heads/0/entropy_max"] == max(value for (layer, _), value in rows.items() if layer == 0)
    assert math.isfinite(of_heads[2]["heads/0/entropy_mean"])


def test_a_missing_package_is_named(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        hw.MissingExtra, match=r'LightningMonitor needs the package .* pip install "headwise\[lightning'
    ):
        hw.LightningMonitor()
