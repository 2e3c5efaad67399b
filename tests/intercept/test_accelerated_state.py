"""State of models, torch and threads during and after `accelerate`; copies, checkpointing and compilation."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_accelerate import LENGTH, SDPA, Attention, attention
from test_state import X, a_model, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import headwise as hw
from headwise.attention.backends.native import library
from headwise.errors import InputError
from headwise.intercept.accelerated_sdpa import accelerated_modules
from tiny import PADDED, TOKENS, family

pytestmark = [
    pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded())),
    pytest.mark.usefixtures("kernels_count_as_faster"),
]


def run_with_a_handle(model):
    acceleration = hw.accelerate(model)
    model(X)
    acceleration.restore()
    acceleration.restore()


def run_in_a_context(model):
    with hw.accelerate(model):
        model(X)


def run_with(error: BaseException):
    def run(model):
        model[2].fails = error
        with pytest.raises(type(error), match="stop"), hw.accelerate(model):
            model(X)
        model[2].fails = None

    return run


def run_nested(model):
    with hw.accelerate(model) as outer, hw.accelerate(model) as inner, hw.accelerate(model[0]) as part:
        model(X)
    assert [len(each.modules) for each in (outer, inner, part)] == [2, 2, 1]
    assert part.modules[0].path == ""


def run_closed_in_another_order(model):
    first, watched, second = hw.accelerate(model), hw.watch(model), hw.accelerate(model)
    watched.__enter__()
    model(X)
    first.restore()
    model(X)
    watched.__exit__(None, None, None)
    model(X)
    second.restore()
    assert [module.accelerated for module in second.modules] == [3, 3]


def run_in_threads(model):
    with hw.accelerate(model) as acceleration:
        threads = [threading.Thread(target=model, args=(X,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [module.accelerated for module in acceleration.modules] == [3, 3]


RUNS = [
    run_with_a_handle,
    run_in_a_context,
    run_with(ZeroDivisionError("stop")),
    run_with(KeyboardInterrupt("stop")),
    run_nested,
    run_closed_in_another_order,
    run_in_threads,
]


@pytest.mark.parametrize("run", RUNS)
def test_everything_is_restored(run):
    model = a_model()
    before, expected = state_of(model), model(X)
    run(model)
    assert state_of(model) == before
    assert not accelerated_modules.running
    assert torch.equal(model(X), expected)


def test_nothing_else_is_accelerated():
    model, other = a_model(), a_model()
    with hw.accelerate(model) as acceleration:
        expected = SDPA(X, X, X)
        other(X)
        assert torch.equal(F.scaled_dot_product_attention(X, X, X), expected)
        assert "no module has run" in str(acceleration)
        model[2].fails = KeyboardInterrupt("stop")
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model[2].fails = None
        model(X)
    assert [module.accelerated for module in acceleration.modules] == [2, 2]


def test_state_dict_config_and_checkpoint_are_the_models_own(tmp_path):
    model = family("llama", "sdpa")
    state, config = {name: each.clone() for name, each in model.state_dict().items()}, model.config.to_dict()
    acceleration = hw.accelerate(model)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert model.config.to_dict() == config
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    loaded(TOKENS)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in loaded.modules())
    assert "no module has run" in str(acceleration)
    acceleration.restore()


def copies(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("model", [attention()[0], nn.TransformerEncoderLayer(33, 3, 7, batch_first=True)])
def test_copies_are_not_accelerated(model):
    x = torch.randn(2, LENGTH, 33)
    with hw.accelerate(model) as acceleration:
        for name, each in copies(model).items():
            for parameter in each.parameters():
                parameter.data.zero_()
            assert torch.equal(each.eval()(x), copy.deepcopy(each)(x)), name
            assert b"headwise" not in pickle.dumps(each)
        assert "no module has run" in str(acceleration)
        model(x)
        assert "native kernels" in str(acceleration)
    assert not any(each._forward_hooks for each in copies(model)["deepcopy"].modules())


def test_a_forgotten_model_is_freed_and_torch_restored():
    for make in (Attention, lambda: nn.TransformerEncoderLayer(33, 3, 7, batch_first=True)):
        model = make()
        own = vars(nn.TransformerEncoderLayer)["forward"]
        reference = weakref.ref(model)
        hw.accelerate(model)
        assert F.scaled_dot_product_attention is not SDPA
        del model
        gc.collect()
        assert reference() is None
        assert F.scaled_dot_product_attention is SDPA
        assert vars(nn.TransformerEncoderLayer)["forward"] is own


def test_masks_are_freed_when_the_model_ends():
    model, x = attention()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    reference = weakref.ref(mask)
    with hw.accelerate(model), torch.no_grad():
        model(x, attn_mask=mask)
        assert not accelerated_modules._masks
        del mask
        assert reference() is None


# -- activation checkpointing -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Layers of which each is repeated in the backward pass; the last attention is in no module of its own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        heads = x.unflatten(-1, (3, 11)).transpose(1, 2)
        return checkpoint(F.scaled_dot_product_attention, *3 * [heads], use_reentrant=self.use_reentrant).sum((1, 3))


def gradients(model: nn.Module, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the input and of all parameters, as one vector."""
    model.zero_grad()
    x.grad = None
    (out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum().backward()
    return [x.grad, torch.cat([each.grad.flatten() for each in model.parameters()])]


@pytest.mark.filterwarnings("ignore:attention of these modules is left out")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("when", ["within", "ended before backward", "started before backward"])
def test_checkpointing(use_reentrant, when):
    torch.manual_seed(0)
    model, x = Checkpointed(use_reentrant), torch.randn(2, LENGTH, 33).requires_grad_()
    expected = gradients(model, x, model(x))
    for is_watched in (False, True):
        acceleration = hw.accelerate(model) if when != "started before backward" else None
        with hw.watch(model) if is_watched else contextlib.nullcontext():
            out = model(x)
        if when == "ended before backward":
            acceleration.restore()
        acceleration = acceleration or hw.accelerate(model)
        counts = {module.path: module.accelerated for module in acceleration.modules}
        actual = gradients(model, x, out)
        assert counts == ({} if when == "started before backward" else {"": 1, "layers.0": 1, "layers.1": 1})
        assert {module.path: module.accelerated for module in acceleration.modules} == counts
        acceleration.restore()
        for ours, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
        assert F.scaled_dot_product_attention is SDPA


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_transformers(use_reentrant):
    model = family("llama", "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    x = torch.randn(2, LENGTH, 48).requires_grad_()
    inputs = {"inputs_embeds": x, "attention_mask": PADDED["left"][:, :LENGTH]}
    model.embed_tokens = None
    expected = gradients(model, x, model(**inputs).last_hidden_state)
    with hw.accelerate(model) as acceleration:
        actual = gradients(model, x, model(**inputs).last_hidden_state)
    assert [module.accelerated for module in acceleration.modules] == [1, 1, 1]
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_a_whole_model_and_of_its_layers(use_reentrant):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(2, LENGTH, 33).requires_grad_()
    expected = gradients(model, x, model(x).sum((1, 2)))
    ways = (
        lambda: checkpoint(model, x, use_reentrant=use_reentrant),
        lambda: model[2](checkpoint(model[1], model[0](x), use_reentrant=use_reentrant)),
        lambda: checkpoint_sequential(model, 3, x, use_reentrant=use_reentrant),
    )
    for way in ways:
        with hw.accelerate(model) as acceleration:
            actual = gradients(model, x, way().sum((1, 2)))
            assert acceleration.linear_calls
            assert way is not ways[0] or [module.accelerated for module in acceleration.modules] == [1, 1, 1]
        for ours, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


# -- compilation ------------------------------------------------------------------------------------------------------


def test_compiled_models_are_refused():
    model = attention()[0]
    with pytest.raises(InputError, match="expected modules that run in Python, got a compiled one"):
        hw.accelerate(torch.compile(model, backend="eager"))
    with pytest.raises(InputError, match="expected a torch module, got str"):
        hw.accelerate("llama")


def test_a_compiled_model_records_native_operators(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.records_native_operators()")


def test_a_compiled_model_runs_as_without_acceleration(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.runs_as_without()")


def test_gradients_by_transforms_of_compiled_models(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.differentiates_within_compiled_code()")


def test_the_rule_for_few_queries_does_not_break_the_graph(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.follows_the_rule()")


def test_a_compiled_model_marks_no_other_models(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.marks_no_other_models()")
