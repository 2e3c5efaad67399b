"""`MonitorCallback` observes trainings of the transformers `Trainer` without changing them."""

import gc

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.monitoring.history import History


class Tokens(torch.utils.data.Dataset):
    """Random sequences of 11 tokens, the same in every training."""

    def __init__(self, number):
        self.ids = torch.randint(5, 97, (number, 11), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Recorder(transformers.TrainerCallback):
    """Record the gradients before each step of the optimizer, and all scalars."""

    def __init__(self):
        self.gradients, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append((state.global_step, logs))

    def scalars(self, prefix=""):
        """Return the scalars of each step whose names start with a prefix."""
        found = {}
        for step, logs in self.logs:
            found.setdefault(step, {}).update({name: value for name, value in logs.items() if name.startswith(prefix)})
        return {step: logs for step, logs in found.items() if logs}


def tiny_llama():
    """Return a model with 2 layers of 4 heads, of width 32."""
    return tiny.model("decoder", top="ForCausalLM", hidden_size=32, num_attention_heads=4)


def trainer(folder, *callbacks, model=None, steps=6, sequences=8, **options):
    """Return a trainer of a tiny model, with batches of 2 sequences."""
    options = {"logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3, "disable_tqdm": True} | options
    options |= {"per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(folder), max_steps=steps, **options)
    data = {"train_dataset": Tokens(sequences), "eval_dataset": Tokens(5)}
    return transformers.Trainer(model or tiny_llama(), arguments, **data, callbacks=list(callbacks))


OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "bfloat16": {"bf16": True},
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("plain", "accumulation") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS],
)
def test_losses_and_gradients_have_the_same_bits(name, tmp_path):
    steps, results = 14, []
    for callbacks in ([], [hw.MonitorCallback(every=5, statistics=("max_logit", "entropy", "received"))]):
        recorder = Recorder()
        trainer(tmp_path, recorder, *callbacks, steps=steps, **OPTIONS[name]).train()
        losses = [logs["loss"] for logs in recorder.scalars("loss").values()]
        results.append((losses, recorder.gradients))
    (losses, gradients), (losses_with, gradients_with) = results
    assert len(losses) == len(gradients) == steps
    assert losses == losses_with
    assert all(torch.equal(one, other) for one, other in zip(gradients, gradients_with, strict=True))
    assert not torch.equal(gradients[0], gradients[-1])
    history = callbacks[0].monitor.history
    assert history.steps == [0, 5, 10]
    sequences = 4 if name == "accumulation" else 2
    assert {row["sequences"] for row in history.rows()} == {sequences}
    assert len(history.rows(5)) == 8


def test_the_callback_is_one_of_transformers_and_of_headwise():
    callback = hw.MonitorCallback()
    assert isinstance(callback, transformers.TrainerCallback)
    assert isinstance(callback, hw.MonitorCallback)
    assert type(callback) is type(hw.MonitorCallback())
    assert callback.monitor is None

    class Derived(hw.MonitorCallback):
        pass

    assert isinstance(Derived(every=2), Derived)
    assert isinstance(Derived(every=2), transformers.TrainerCallback)


def test_the_statistics_are_those_of_a_monitor(tmp_path):
    callback, model, ids = hw.MonitorCallback(every=2), tiny_llama(), []
    model.register_forward_pre_hook(lambda _, __, inputs: ids.append(inputs["input_ids"].clone()), with_kwargs=True)
    trainer(tmp_path, callback, model=model, steps=3).train()
    model = tiny_llama().train()
    with hw.monitor(model) as monitor:
        model(input_ids=ids[0])
        monitor.step()
    assert callback.monitor.history.rows(0) == monitor.history.rows(0)
    assert len(ids) == 3


def test_summaries_of_layers_and_some_heads_are_logged(tmp_path):
    recorder, callback = Recorder(), hw.MonitorCallback(every=2, statistics=["entropy", "first"], log_heads=1)
    trainer(tmp_path, recorder, callback, learning_rate=0.1).train()
    logged = recorder.scalars("heads/")
    assert list(logged) == [1, 3, 5]  # the trainer counts finished steps
    history = callback.monitor.history
    assert history.steps == [0, 2, 4]
    entropies = [row["entropy"] for row in history.rows(2) if row["layer"] == 1]
    assert logged[3]["heads/1/entropy_mean"] == pytest.approx(sum(entropies) / 4)
    assert logged[3]["heads/1/entropy_min"] == min(entropies)
    assert logged[3]["heads/1/entropy_max"] == max(entropies)
    of_heads = [{name for name in scalars if "." in name} for scalars in logged.values()]
    assert of_heads[0] == set()
    layer, head, _ = history.changes("first")[0]
    assert len(of_heads[2]) == 2
    assert f"heads/{layer}.{head}/first" in of_heads[2]
    assert logged[5][f"heads/{layer}.{head}/first"] == history.rows(4)[4 * layer + head]["first"]


def test_stated_heads_and_heads_with_alarms_are_logged(tmp_path):
    recorder = Recorder()
    callback = hw.MonitorCallback(every=5, log_heads=[(1, 2)], alarms=hw.AlarmLimits(max_logit=1e-6, entropy=None))
    trainer(tmp_path, recorder, callback, steps=1).train()
    scalars = recorder.scalars("heads/")[1]
    alarms = {f"heads/{alarm.layer}.{alarm.head}/{alarm.statistic}" for alarm in callback.monitor.alarms}
    stated = {f"heads/1.2/{name}" for name in ("max_logit", "entropy", "first", "output_norm")}
    assert {name for name in scalars if "." in name} == alarms | stated
    assert len(alarms) > 3
    assert scalars["heads/alarms"] == len(alarms)


def test_the_terminal_and_the_log_of_the_trainer_have_no_scalars_of_heads(tmp_path, capsys):
    trained = trainer(tmp_path, hw.MonitorCallback(every=1), steps=2, disable_tqdm=False)
    trained.train()
    assert "heads/" not in "".join(capsys.readouterr())
    assert not any("heads/" in name for logs in trained.state.log_history for name in logs)
    assert [logs["step"] for logs in trained.state.log_history if "loss" in logs] == [1, 2]


def test_evaluation_during_training_is_not_counted(tmp_path):
    callback = hw.MonitorCallback(every=1)
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    trainer(tmp_path, callback, steps=3, **options, per_device_eval_batch_size=5).train()
    assert callback.monitor.history.steps == [0, 1, 2]
    assert {row["sequences"] for row in callback.monitor.history.rows()} == {2}


def test_a_resumed_training_continues_the_history(tmp_path):
    run, options = tmp_path / "run", {"save_strategy": "steps", "save_steps": 4}
    whole = hw.MonitorCallback(every=3)
    trainer(tmp_path / "whole", whole, steps=10).train()
    first = trainer(tmp_path / "part", hw.MonitorCallback(every=3, out=run), steps=10, **options)
    first.add_callback(StopAt(6))
    first.train()
    assert History.load(run).steps == [0, 3]
    second, recorder = hw.MonitorCallback(every=3, out=run), Recorder()
    trainer(tmp_path / "part", recorder, second, steps=10, **options).train(resume_from_checkpoint=True)
    assert second.monitor.history.steps == [0, 3, 6, 9]
    assert list(recorder.scalars("heads/")) == [7, 10]  # the trainer counts finished steps
    assert History.load(run).rows() == whole.monitor.history.rows()


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


def test_a_new_training_in_the_folder_of_another_is_refused(tmp_path):
    trainer(tmp_path, hw.MonitorCallback(every=3, out=tmp_path / "run"), steps=2).train()
    sentence = "start: expected the number of the step at which the training resumes, got None, with steps up to 0 in"
    with pytest.raises(hw.InputError, match=sentence):
        trainer(tmp_path, hw.MonitorCallback(every=3, out=tmp_path / "run"), steps=2).train()


class Failing(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        raise RuntimeError("an error in the training")


def test_after_an_error_the_callback_closes_as_a_context_manager(tmp_path, is_intercepted):
    with (
        pytest.raises(RuntimeError, match="an error in the training"),
        hw.MonitorCallback(every=1, out=tmp_path / "run") as callback,
    ):
        trainer(tmp_path, callback, Failing()).train()
    assert not list((tmp_path / "run").glob(".headwise.lock*"))
    assert not is_intercepted()


def test_after_an_error_the_next_training_can_use_the_callback(tmp_path, is_intercepted):
    callback = hw.MonitorCallback(every=1, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="an error in the training"):
        trainer(tmp_path, callback, Failing()).train()
    assert is_intercepted()
    trainer(tmp_path, callback, steps=2).train()
    assert callback.monitor.history.steps == [0, 1]


def test_after_an_error_a_callback_without_references_leaves_nothing(tmp_path, is_intercepted):
    with pytest.raises(RuntimeError, match="an error in the training"):
        trainer(tmp_path, hw.MonitorCallback(every=1), Failing()).train()
    gc.collect()
    assert not is_intercepted()
    assert torch.compile(torch.compiler.is_compiling, backend="eager")()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 0}, "every: expected a whole number of 1 or more, got 0"),
        ({"statistics": ["special"]}, "statistics: expected names among .*, got 'special'"),
        ({"log_heads": -1}, "log_heads: expected a whole number of 0 or more, got -1"),
        ({"log_heads": "1.2"}, r"log_heads: expected a collection of heads \(layer, head\), or their number, got '1"),
        ({"log_heads": [(1, 2, 3)]}, r"log_heads: expected a collection of \(layer, head\), got \(1, 2, 3\)"),
        ({"log_heads": [(1, -2)]}, r"log_heads: expected heads \(layer, head\) with whole numbers from 0, got \(1, -2"),
    ],
)
def test_options_are_checked_before_the_training(options, sentence):
    with pytest.raises(hw.InputError, match=sentence):
        hw.MonitorCallback(**options)
