"""Healing: its loss against an independent computation, resumption after a kill, and mistakes."""

import copy
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.compression.healing.distillation import distillation_loss
from headwise.compression.healing.heal import HealingFolder, HealingOptions, TrainingBatches, heal
from headwise.compression.healing.model_settings import model_settings
from removal import families

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_accelerator(monkeypatch):
    """Forget the precision that a trainer of another test chose for the whole process."""
    from accelerate.state import AcceleratorState

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)


@functools.cache
def _pair(kind, top):
    teacher = tiny.model(kind, top=top)
    batch = {"input_ids": tiny.TOKENS}
    plan = hw.plan_pruning(hw.MagnitudeScores(teacher, batch), keep=0.5, constraint="groups")
    return hw.prune(teacher, plan), teacher


def pair(kind="decoder", top="ForCausalLM"):
    """Return a model without half of its groups of heads, and the dense model."""
    return tuple(map(copy.deepcopy, _pair(kind, top)))


def texts(*lengths, batch=2, kind="decoder"):
    return hw.Texts(tiny.texts(*(lengths or (11, 5, 11, 7, 5, 11, 3))), tiny.tokenizer(kind), batch=batch)


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.state_dict().values()])


def distance(model, teacher, data):
    with torch.no_grad():
        return sum(float(distillation_loss(model(**batch), teacher(**batch), model, batch)) for batch in data)


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", "no padding"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_divergence_of_logits_is_a_mean_over_real_tokens(side, temperature):
    student, teacher = (each.double() for each in pair())
    batch = {"input_ids": tiny.TOKENS, "attention_mask": tiny.PADDED[side]}
    with torch.no_grad():
        outputs = [each(**batch) for each in (student, teacher)]
    found = distillation_loss(*outputs, student, batch, temperature)
    divergences = []
    for row, token in batch["attention_mask"].nonzero().tolist():
        q, p = ((each.logits[row, token] / temperature).exp() for each in outputs)
        q, p = q / q.sum(), p / p.sum()
        divergences.append(float((p * (p / q).log()).sum()) * temperature**2)
    assert float(found) == pytest.approx(sum(divergences) / len(divergences), rel=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_error_of_embeddings_is_relative_and_without_padding(side):
    student, teacher = (each.double() for each in pair("encoder", ""))
    batch = {"input_ids": tiny.TOKENS, "attention_mask": tiny.PADDED[side]}
    with torch.no_grad():
        outputs = [each(**batch) for each in (student, teacher)]
    found = distillation_loss(*outputs, student, batch)
    pairs = [
        (outputs[0].last_hidden_state[row, token], outputs[1].last_hidden_state[row, token])
        for row, token in batch["attention_mask"].nonzero().tolist()
    ]
    error = sum(float((s - t).square().sum()) for s, t in pairs)
    assert float(found) == pytest.approx(error / sum(float(t.square().sum()) for _, t in pairs), rel=1e-9)


def test_a_single_logit_and_plain_tensors_are_compared_by_squared_error():
    student, teacher = torch.randn(2, 1), torch.randn(2, 1)
    expected = (student - teacher).square().sum() / teacher.square().sum()
    for kind in (lambda x: x, lambda x: transformers.modeling_outputs.SequenceClassifierOutput(logits=x)):
        assert distillation_loss(kind(student), kind(teacher), torch.nn.Identity(), {}) == pytest.approx(
            float(expected)
        )


def test_a_decoder_of_a_pair_has_padding_of_its_own():
    config = transformers.T5Config(vocab_size=97, d_model=48, num_layers=1, num_heads=6, d_kv=11, d_ff=37)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    student = copy.deepcopy(model)
    with torch.no_grad():
        student.shared.weight.mul_(1.1)
    batch = {"input_ids": tiny.TOKENS, "attention_mask": tiny.PADDED["right"], "decoder_input_ids": tiny.TOKENS[:, :9]}
    with torch.no_grad():
        outputs = [each(**batch) for each in (student, model)]
    with pytest.raises(hw.InputError, match=r"^data: expected a padding mask for the \(2, 9\) tokens of the output"):
        distillation_loss(*outputs, student, batch)
    with pytest.raises(hw.InputError, match="tokens of the output in each batch with padding, got dict$"):
        distillation_loss(*outputs, student, {**batch, "decoder_attention_mask": {"full_attention": None}})
    first = {**batch, "decoder_attention_mask": torch.tensor([[1] * 9, [0] * 9])}
    alone = [transformers.modeling_outputs.Seq2SeqLMOutput(logits=each.logits[:1]) for each in outputs]
    expected = distillation_loss(*alone, student, {})
    assert float(distillation_loss(*outputs, student, first)) == pytest.approx(float(expected), rel=1e-5)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "top"),
    [("decoder", "ForCausalLM"), ("encoder", ""), pytest.param("encoder", "ForMaskedLM", marks=pytest.mark.slow)],
)
def test_the_model_approaches_its_teacher(kind, top):
    model, teacher = pair(kind, top)
    data, before = texts(kind=kind), weights(teacher)
    first = distance(model, teacher, data)
    state = torch.get_rng_state()
    healed = heal(model, teacher, data, 60, lr=3e-3)
    assert healed is model
    assert not any(module.training for module in model.modules())
    assert distance(model, teacher, data) < 0.5 * first
    assert torch.equal(weights(teacher), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for each in (model, teacher) for weight in each.parameters())


def test_each_epoch_uses_every_sequence_once_in_a_new_order():
    data = texts(batch=2)
    batches = TrainingBatches(data, None, 0)
    steps = 5  # of lengths 11, 7, 5, 3: two, one, one and one
    epochs = [
        [row.tolist() for step in range(epoch * steps, (epoch + 1) * steps) for row in batches.at(step)["input_ids"]]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == sorted(each.tolist() for each in data.sequences) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = TrainingBatches(data, None, 0)
    assert torch.equal(again.at(13)["input_ids"], batches.at(13)["input_ids"])  # without the steps before


def test_the_learning_rate_rises_and_falls():
    options = HealingOptions(100)
    rates = [options.rate_factor(step) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.11


# -- resumption -------------------------------------------------------------------------------------------------------


class Kill(BaseException):
    """Stands for the end of the process in tests that run in one."""


def undisturbed(kind, top, **options):
    model, teacher = pair(kind, top)
    return weights(heal(model, teacher, texts(kind=kind), 12, lr=1e-2, **options))


@pytest.mark.parametrize(
    ("kind", "top"), [("encoder", ""), pytest.param("decoder", "ForCausalLM", marks=pytest.mark.slow)]
)
def test_a_stopped_run_resumes_to_the_same_bits(kind, top, tmp_path, monkeypatch):
    expected, at, starts = undisturbed(kind, top), TrainingBatches.at, []
    for stop in (2, 5, 6, 11):

        def stopping(self, step, stop=stop):
            starts.append(step)
            if step == stop:
                raise Kill
            return at(self, step)

        monkeypatch.setattr(TrainingBatches, "at", stopping)
        model, teacher = pair(kind, top)
        with pytest.raises(Kill):
            heal(model, teacher, texts(kind=kind), 12, lr=1e-2, out=tmp_path, checkpoint_every=3)
    monkeypatch.setattr(TrainingBatches, "at", at)
    assert starts == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11]
    torch.manual_seed(99)  # the state of the process does not matter
    for _ in range(2):  # the second time, the run is finished
        model, teacher = pair(kind, top)
        torch.rand(3)
        found = heal(model, teacher, texts(kind=kind), 12, lr=1e-2, out=tmp_path, checkpoint_every=4)
        assert torch.equal(weights(found), expected)
        assert [path.name for path in tmp_path.iterdir()] == ["healed.pt"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from headwise.runs import files
from headwise.compression.healing import heal as module
from compression.healing.test_heal import pair, texts

calls, write = [], os.fsync
def fsync(descriptor):  # the second checkpoint is half done
    calls.append(0)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    write(descriptor)
os.fsync = fsync
module.heal(*pair("encoder", ""), texts(kind="encoder"), 12, lr=1e-2, out={out!r}, checkpoint_every=2)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_run_that_resumes_to_the_same_bits(tmp_path):
    code = KILLED.format(tests=str(TESTS), out=str(tmp_path))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"unfinished-heal.pt", "unfinished-heal.pt.part"} <= names
    model, teacher = pair("encoder", "")
    found = heal(model, teacher, texts(kind="encoder"), 12, lr=1e-2, out=tmp_path, checkpoint_every=2)
    assert torch.equal(weights(found), undisturbed("encoder", ""))


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    model, teacher = pair()
    fsync, calls = os.fsync, []

    def failing(descriptor):
        calls.append(0)
        if len(calls) > 2:  # a checkpoint takes two: of the file and of the folder
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(hw.InputError, match=r"^out: expected a file '.*unfinished-heal.pt' .* got No space left on de"):
        heal(model, teacher, texts(), 12, lr=1e-2, out=tmp_path, checkpoint_every=3)
    monkeypatch.setattr(os, "fsync", fsync)
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished-heal.pt"]
    model, teacher = pair()
    found = heal(model, teacher, texts(), 12, lr=1e-2, out=tmp_path, checkpoint_every=3)
    assert torch.equal(weights(found), undisturbed("decoder", "ForCausalLM"))


@pytest.fixture(scope="module")
def healed_folder(tmp_path_factory):
    """Output folder of a finished run of three steps, which no test may change."""
    folder = tmp_path_factory.mktemp("healed")
    heal(*pair(), texts(), 3, out=folder)
    return folder


@pytest.fixture(scope="module")
def unfinished_folder(tmp_path_factory):
    """Output folder of a run of three steps that ended before its last files were in place."""
    folder = tmp_path_factory.mktemp("unfinished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HealingFolder, "finish", lambda folder, model: None)
        heal(*pair(), texts(), 3, out=folder, checkpoint_every=1)
    return folder


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"steps": 4}, "settings.steps"),
        ({"lr": 2e-3}, "settings.lr"),
        ({"seed": 1}, "settings.seed"),
        ({"batch": 3}, "settings.content"),
    ],
)
def test_another_run_in_the_folder_is_refused_or_replaced(options, difference, healed_folder, tmp_path):
    def run(**more):
        options = {"steps": 3} | more
        return heal(*pair(), texts(), options.pop("steps"), out=tmp_path, **options)

    shutil.copytree(healed_folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(hw.InputError, match=rf"^out: expected .* got another run \({difference} differs\) .* --force"):
        run(**options)
    replaced = run(**options, force=True)
    assert torch.equal(weights(run(**options)), weights(replaced))


FREQUENCIES = "modules.model.rotary_emb.inv_freq"
OTHER_MODELS = [
    (lambda model, teacher: model.model.embed_tokens.requires_grad_(False), "settings.trained"),
    (lambda model, teacher: model.model.rotary_emb.inv_freq.mul_(0.5), f"settings.student.{FREQUENCIES}"),
    (lambda model, teacher: teacher.model.rotary_emb.inv_freq.mul_(0.5), f"settings.teacher.{FREQUENCIES}"),
    (
        lambda model, teacher: setattr(teacher.model.norm, "variance_epsilon", 0.1),
        "settings.teacher.modules.model.norm.variance_epsilon",
    ),
    (
        lambda model, teacher: setattr(teacher.config, "rms_norm_eps", 0.1),
        r"settings.teacher.(attention|config.rms_norm_eps)",
    ),
    (lambda model, teacher: model.set_attn_implementation("eager"), "settings.student.config.attn_implementation"),
]


@pytest.mark.parametrize(("change", "difference"), OTHER_MODELS)
@pytest.mark.parametrize("is_finished", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_of_other_models_is_refused(change, difference, is_finished, healed_folder, unfinished_folder, tmp_path):
    shutil.copytree(healed_folder if is_finished else unfinished_folder, tmp_path, dirs_exist_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == ["healed.pt" if is_finished else "unfinished-heal.pt"]
    model, teacher = pair()
    change(model, teacher)
    before = weights(model)
    with pytest.raises(hw.InputError, match=rf"^out: expected .* got another run \({difference} differs\) in"):
        heal(model, teacher, texts(), 3, out=tmp_path, checkpoint_every=1)
    assert torch.equal(weights(model), before)


def test_a_run_with_another_dropout_is_refused(tmp_path):
    def run(share):
        model, teacher = pair("encoder", "")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = share
        heal(model, teacher, texts(kind="encoder"), 3, out=tmp_path)

    run(0.1)
    with pytest.raises(hw.InputError, match=r"got another run \(settings.student.modules.embeddings.dropout.p differs"):
        run(0.5)


def test_settings_do_not_depend_on_the_history_of_a_model(tmp_path):
    for kind, top in (("decoder", "ForCausalLM"), ("encoder", "")):
        model, teacher = pair(kind, top)
        before = model_settings(model)
        assert model_settings(copy.deepcopy(model).train()) == before
        model.train()(input_ids=tiny.TOKENS)
        heal(model, teacher, texts(kind=kind), 2)
        assert model_settings(model) == before
        hw.save_model(model, tiny.tokenizer(kind), tmp_path / kind)
        loaded, _ = hw.load(str(tmp_path / kind), "saved")
        assert model_settings(loaded) == before


@pytest.mark.parametrize("name", [name for name in families.CONFIGS if name not in ("phi3",)])
def test_a_call_does_not_change_the_settings(name):
    model, arguments = families.model(name), families.inputs(name)
    before = model_settings(model)
    model(**arguments)
    assert model_settings(model) == before
    assert model_settings(families.model(name)) == before


def test_settings_of_objects_are_read():
    def settings(**attributes):
        module = torch.nn.Identity()
        vars(module).update(attributes)
        return model_settings(module)

    values = [1, 1.0, True, "1", None, [1], (1, 2), {"a": 1}, {"a": torch.ones(1)}, torch.ones(1), torch.zeros(1)]
    values += [torch.float32, torch.tanh, torch.nn.functional.relu, HealingOptions(3), HealingOptions(4), object()]
    values += [transformers.LlamaConfig(), transformers.LlamaConfig(rope_theta=3.0)]
    found = [settings(value=value)["modules"]["Identity"]["value"] for value in values]
    assert len(set(found)) == len(values)
    assert settings(value=object()) == settings(value=object())
    assert settings(_private=3, training=True, name_or_path="a") == settings()


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
def test_mistakes_are_named(tmp_path):
    model, teacher = pair()
    data = texts()
    frozen = copy.deepcopy(model).requires_grad_(False)
    (tmp_path / "file").touch()
    for arguments, options, message in (
        ((3, teacher, data, 5), {}, "^model: expected a torch module, got int"),
        ((model, "minilm", data, 5), {}, "^teacher: expected a torch module, got str"),
        ((model, teacher, data, 0), {}, "^steps: expected a whole number of 1 or more, got 0"),
        ((model, teacher, data, 5), {"lr": 0}, "^lr: expected a finite number above 0, got 0"),
        ((model, teacher, data, 5), {"temperature": -1.0}, "^temperature: expected a finite number above 0, got -1"),
        ((model, teacher, data, 5), {"seed": -1}, "^seed: expected a whole number of 0 or more"),
        ((model, teacher, data, 5), {"batch": 0}, "^batch: expected a whole number of 1 or more, got 0"),
        ((model, teacher, list(data), 5), {"batch": 2}, "^batch: expected None for data that are batches.*, got 2"),
        ((model, teacher, [], 5), {}, "^data: expected at least one batch, got none"),
        ((model, teacher, 7, 5), {}, "^dataset: expected Texts, or batches, got int"),
        ((frozen, teacher, data, 5), {}, "^model: expected parameters that require gradients, got none"),
        ((model, model, data, 5), {}, "^teacher: expected a model of its own, got one that shares .*copy.deepcopy"),
        (
            (copy.deepcopy(model).bfloat16(), teacher, data, 5),
            {},
            r"^model: expected parameters of float32 or float64, got torch.bfloat16 in .*model.float\(\)",
        ),
        ((model, teacher.model, data, 5), {}, "^model: expected embeddings of shape .* like the teacher's, got logits"),
        ((model, teacher, data, 5), {"out": tmp_path / "file"}, "^out: expected a folder that can be created and"),
    ):
        with pytest.raises(hw.InputError, match=message):
            heal(*arguments, **options)
    with pytest.raises(hw.InputError, match="^model: expected one that returns logits, a last_hidden_state or a tens"):
        distillation_loss((1, 2), (1, 2), model, {})
    masked = {"input_ids": tiny.TOKENS, "attention_mask": torch.zeros(2, 13)}
    with pytest.raises(hw.InputError, match="^data: expected at least one token that is not padding in each batch"):
        distillation_loss(model(**masked), teacher(**masked), model, masked)


def test_a_loss_that_is_not_finite_is_refused_before_the_step():
    model, teacher = pair()
    with torch.no_grad():
        teacher.lm_head.weight[3] = float("nan")
    before = weights(model)
    with pytest.raises(hw.InputError, match="^model: expected a finite loss at step 1, got nan; a smaller lr may help"):
        heal(model, teacher, texts(), 5)
    assert torch.equal(weights(model), before)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(hw.MissingExtra, match=r'^healing needs the package accelerate.*"headwise\[heal\]"'):
        heal(*pair(), texts(), 5)
