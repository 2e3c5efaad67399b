"""State of models, torch and threads after `watch` and `gate`, and copies of models made inside."""

import asyncio
import contextvars
import copy
import functools
import gc
import io
import pickle
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

import headwise as hw
from headwise.attention import attend
from headwise.intercept.session import RUNNING, Session, current_session
from tiny import TOKENS, family

WIDTH, HEADS, LENGTH, BATCH = 33, 3, 7, 2


class Attention(nn.Module):
    """Self-attention by SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out_proj, self.fails = nn.Linear(WIDTH, 99), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v)
        if self.fails is not None:
            raise self.fails
        return x + self.out_proj(out.transpose(1, 2).flatten(2))


def a_model() -> nn.Module:
    """Return a model with hooks of its own, a forward in an instance, and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.BatchNorm1d(LENGTH), Attention())
    model[0].register_forward_hook(lambda *_: None)
    model[1].register_forward_pre_hook(lambda *_: None, with_kwargs=False)
    model[2].forward = model[2].forward
    return model.eval()


X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(4))


LOADED = hw.watch, hw.gate, hw.accelerate  # a public name loads its modules at its first use


def state_of(model: nn.Module) -> list:
    """Return all that interception may change: functions, hooks, attributes, random numbers and the session."""
    owners = [torch, F, checkpoint, attend, torch.Tensor, nn.Module, transformers.modeling_utils.AttentionInterface]
    functions = [dict(vars(owner)) for owner in owners]
    attributes = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]
    numbers = [parameter.detach().clone().tolist() for parameter in (*model.parameters(), *model.buffers())]
    random_state = torch.get_rng_state().tolist()
    session = current_session()
    stack = (
        session.module_calls[:],
        session.torch_mode,
        session.is_paused,
        Session.interceptions,
        list(RUNNING.sessions),
    )
    modules = set(sys.modules)
    return [functions, attributes, numbers, random_state, stack, list(_get_current_function_mode_stack()), modules]


def run_normally(model):
    with hw.watch(model), hw.gate(model, {0: 0.5}):
        model(X)


def run_with_an_error_in_the_body(model):
    def fail():
        model(X)
        raise ZeroDivisionError("division")

    with pytest.raises(ZeroDivisionError, match="division"), hw.watch(model), hw.gate(model, {0: 0.5}):
        fail()


def run_with(error: BaseException):
    def run(model):
        model[2].fails = error
        with pytest.raises(type(error), match="stop"), hw.watch(model), hw.gate(model, {0: 0.5}):
            model(X)
        model[2].fails = None

    return run


def run_nested_and_closed_in_another_order(model):
    first, second = hw.watch(model), hw.gate(model, {0: 0.5})
    first.__enter__()
    second.__enter__()
    model(X)
    first.__exit__(None, None, None)
    model(X)
    second.__exit__(None, None, None)


def run_in_an_abandoned_generator(model):
    def outputs():
        with hw.watch(model), hw.gate(model, {0: 0.5}):
            yield model(X)

    next(outputs())
    gc.collect()


def run_in_threads(model):
    with hw.watch(model), hw.gate(model, {0: 0.5}):
        threads = [threading.Thread(target=model, args=(X,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def run_in_tasks(model):
    async def run():
        with hw.watch(model), hw.gate(model, {0: 0.5}):
            await asyncio.gather(*(asyncio.to_thread(model, X) for _ in range(3)))

    asyncio.run(run())


def run_in_an_interrupted_task(model):
    """Torch calls no hooks after the interrupt, and the task's own context ends with it."""

    async def run():
        model(X)

    model[2].fails = KeyboardInterrupt("stop")
    with pytest.raises(KeyboardInterrupt, match="stop"), hw.watch(model), hw.gate(model, {0: 0.5}):
        asyncio.run(run())
    model[2].fails = None


def run_while_a_module_runs(model):
    """End the context while modules of the model run."""
    context = hw.watch(model)
    handle = model[1].register_forward_hook(lambda *_: context.__exit__(None, None, None) or None)
    context.__enter__()
    model(X)
    handle.remove()


RUNS = {
    "normally": run_normally,
    "error in the body": run_with_an_error_in_the_body,
    "error in the model": run_with(ValueError("stop")),
    "keyboard interrupt": run_with(KeyboardInterrupt("stop")),
    "generator exit": run_with(GeneratorExit("stop")),
    "another order": run_nested_and_closed_in_another_order,
    "abandoned generator": run_in_an_abandoned_generator,
    "threads": run_in_threads,
    "tasks": run_in_tasks,
    "keyboard interrupt in a task": run_in_an_interrupted_task,
    "end within a module": run_while_a_module_runs,
}


@pytest.mark.parametrize("name", RUNS)
@torch.no_grad()
def test_everything_is_as_before_after_the_context(name):
    model = a_model()
    RUNS["normally"](model)  # imports are not undone
    before, plain = state_of(model), model(X)
    RUNS[name](model)
    after = state_of(model)
    for part, other in zip(before, after, strict=True):
        assert part == other
    assert torch.equal(model(X), plain)


def test_hooks_are_removed_if_one_of_them_cannot_be_registered():
    class Refuses(nn.Module):
        def register_forward_hook(self, *_, **__):
            raise RuntimeError("no hooks here")

        def forward(self, x):
            return x

    model = nn.Sequential(Attention(), Refuses())
    before = state_of(model)
    for context in (hw.watch(model), hw.gate(model, {"0": 0.0})):
        with pytest.raises(RuntimeError, match="no hooks here"), context:
            pass
        assert state_of(model) == before


@torch.no_grad()
def test_a_thread_that_outlives_the_context_keeps_no_model():
    """No hook ends the calls that run in a thread when the context ends elsewhere."""
    model, started, ended = a_model(), threading.Event(), threading.Event()
    model[1].register_forward_hook(lambda *_: started.set() or (ended.wait(60) and None))
    with hw.watch(model):
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        assert started.wait(60)
    ended.set()
    thread.join()
    reference = weakref.ref(model)
    del model, thread
    gc.collect()
    assert reference() is None


def attend_elsewhere(heads: int) -> Tensor:
    return F.scaled_dot_product_attention(*torch.randn(3, BATCH, heads, LENGTH, 5))


class RunsTasks(nn.Module):
    """Module that runs tasks of asyncio until they end, and then attends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.attention, self.tasks, self.loop = Attention(), [], loop

    def forward(self, x):
        self.loop.run_until_complete(asyncio.gather(*self.tasks))
        return self.attention(x)


@torch.no_grad()
def test_tasks_do_not_share_running_calls():
    """A task that was made before a call of the model runs while the call does. Neither its attention nor that of other
    models called there is the model's.
    """
    loop = asyncio.new_event_loop()
    model, other = RunsTasks(loop), a_model()

    async def attend_in_task():
        attend_elsewhere(HEADS + 4)
        await asyncio.sleep(0)
        other(X)
        attend_elsewhere(HEADS + 4)

    with hw.watch(model) as alone:
        model.attention(X)
    expected = other(X)
    model.tasks = [loop.create_task(attend_in_task()) for _ in range(2)]
    with hw.watch(model) as heads, hw.watch(other) as of_other:
        model(X)
    loop.close()
    assert heads.records[0].heads == HEADS
    assert [row["entropy"] for row in heads.rows()] == [row["entropy"] for row in alone.rows()]
    assert of_other.records[0].statistics["entropy"].count.tolist() == [2.0 * BATCH] * HEADS
    assert torch.equal(other(X), expected)


class AttendsInTask(nn.Module):
    """Module that attends in a task, in a copy of its context, or in a thread with such a copy."""

    def __init__(self, run) -> None:
        super().__init__()
        self.attention, self.run = Attention(), run

    def forward(self, x):
        return self.run(functools.partial(self.attention, x))


def in_task(attend):
    async def run():
        return attend()

    return asyncio.run(run())


def in_thread_with_context(attend):
    async def run():
        return await asyncio.to_thread(attend)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "run", [in_task, in_thread_with_context, lambda attend: contextvars.copy_context().run(attend)]
)
@torch.no_grad()
def test_attention_in_a_task_of_a_model_is_watched(run):
    model = AttendsInTask(run)
    expected = model(X)
    with hw.watch(model.attention) as alone:
        model.attention(X)
    for _ in range(3):
        with hw.watch(model) as heads, hw.gate(model, {"attention": 1.0}):
            assert torch.allclose(model(X), expected, atol=1e-6)
        assert [row["entropy"] for row in heads.rows()] == pytest.approx([row["entropy"] for row in alone.rows()])


class Asynchronous(nn.Module):
    """Model whose forward is a coroutine, which lets other tasks run between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    async def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            await asyncio.sleep(0)
        return x


@torch.no_grad()
def test_tasks_that_take_turns_are_watched():
    model, others = Asynchronous(), [X, X.flip(0), X.roll(1, 1)]

    async def run():
        return await asyncio.gather(*(model(x) for x in others))

    with hw.watch(model) as heads:
        outputs = asyncio.run(run())
    with hw.watch(model) as one_by_one:
        expected = [asyncio.run(model(x)) for x in others]
    for output, other in zip(outputs, expected, strict=True):
        assert torch.allclose(output, other, atol=1e-6)
    for row, other in zip(heads.rows(), one_by_one.rows(), strict=True):
        assert row["entropy"] == pytest.approx(other["entropy"])


class OwnState(nn.Module):
    """Module that copies and pickles its attributes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def __getstate__(self):
        return vars(self).copy()

    def forward(self, x):
        return self.inner(x)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved])
@pytest.mark.parametrize("kind", [Attention, OwnState, lambda: family("llama", "sdpa")])
@torch.no_grad()
def test_a_copy_made_inside_the_context_is_of_the_plain_model(copied, kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind()) if kind in (Attention, OwnState) else kind()
    x = X if isinstance(model, nn.Sequential) else TOKENS
    plain = model(x)[0]
    with hw.watch(model) as heads, hw.gate(model, {0: 0.0}):
        again = copied(model)
        assert not torch.equal(model(x)[0], plain)
        if copied is not copy.copy:  # which shares the parts of the model
            assert torch.equal(again(x)[0], plain)
    assert torch.equal(copied(model)(x)[0], plain)
    assert torch.equal(again(x)[0], plain)
    if kind is not OwnState:
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in again.modules())
    assert heads.records[0].statistics["entropy"].count.tolist() == [2.0] * heads.records[0].heads
    with hw.watch(again) as of_copy:
        again(x)
    assert [row["entropy"] for row in of_copy.rows()[:HEADS]] == pytest.approx(
        [row["entropy"] for row in heads.rows()[:HEADS]], rel=1e-5
    )


@torch.no_grad()
@pytest.mark.parametrize("forward", [torch.relu, functools.partial(F.gelu, approximate="tanh"), torch.ops.aten.relu])
def test_a_module_whose_forward_is_no_python_function_is_watched(forward):
    model = nn.Sequential(Attention(), nn.Identity())
    model[1].forward = forward
    plain = model(X)
    with hw.watch(model) as heads:
        assert torch.allclose(model(X), plain, atol=1e-6)
    assert len(heads.rows()) == HEADS
    assert not model[1]._forward_hooks
    assert model[1].forward is forward


# -- outputs of rows without visible keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_outputs_of_padded_rows_with_a_position_bias_stay(side, implementation):
    """Left padding hides all keys of a row of a decoder. T5 adds its mask to a position bias, as finite numbers."""
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 13, "num_layers": 2, "num_heads": 3, "vocab_size": 31}
    torch.manual_seed(0)
    config = transformers.T5Config(
        **sizes, pad_token_id=0, decoder_start_token_id=0, attn_implementation=implementation
    )
    model = transformers.T5Model(config).double().eval()
    tokens = torch.randint(1, 31, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens.flip(1), "decoder_attention_mask": mask}
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with hw.watch(model):
            watched = model(**inputs).last_hidden_state
    torch.testing.assert_close(watched, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_outputs_of_rows_that_two_masks_hide_stay():
    """A causal mask and one of padding, added up, have -inf where both have the lowest number: the padded rows attend
    to the other keys alone.
    """
    from transformers.models.kosmos2 import configuration_kosmos2, modeling_kosmos2

    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "ffn_dim": 13, "layers": 2, "attention_heads": 3, "vocab_size": 31}
    config = configuration_kosmos2.Kosmos2TextConfig(**sizes, attn_implementation="sdpa")
    model = modeling_kosmos2.Kosmos2TextForCausalLM(config).eval()
    tokens = torch.randint(3, 31, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        expected = model(**inputs).logits
        with hw.watch(model):
            watched = model(**inputs).logits
    torch.testing.assert_close(watched, expected, rtol=1e-4, atol=1e-5)
