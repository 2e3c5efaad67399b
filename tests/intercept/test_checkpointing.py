"""Activation checkpointing of watched and gated models: gradients and statistics are those without checkpointing."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from self_attention import HEADS, LENGTH, WIDTH, SelfAttention, merge, sdpa, softmax
from torch import nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.intercept.heads import Heads

BATCH = 2


class Attention(SelfAttention):
    """Self-attention, and a sum with its input."""

    num_heads = HEADS

    def __init__(self, way):
        super().__init__(way, lambda module, q, k, v: module.out_proj(merge(way(q, k, v))))

    def forward(self, x):
        return x + super().forward(x)


class TorchAttention(nn.Module):
    """Self-attention by torch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Model(nn.Module):
    """Two layers, the first of them called twice, with activation checkpointing if `use_reentrant` is not None."""

    def __init__(self, way: str, use_reentrant: bool | None) -> None:
        super().__init__()
        kinds = {"torch": TorchAttention, "ours": lambda: hw.MultiHeadAttention(WIDTH, HEADS)}
        kinds |= {"sdpa": lambda: Attention(sdpa), "softmax": lambda: Attention(softmax)}
        self.layers = nn.ModuleList(kinds[way]() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Llama(nn.Module):
    """Llama with the activation checkpointing of transformers."""

    def __init__(self, implementation: str, use_reentrant: bool | None) -> None:
        super().__init__()
        sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 37}
        self.llama = transformers.LlamaModel(transformers.LlamaConfig(**sizes, attn_implementation=implementation))
        if use_reentrant is not None:
            self.llama.gradient_checkpointing_enable({"use_reentrant": use_reentrant})

    def forward(self, x):
        return self.llama(inputs_embeds=x).last_hidden_state


def model_of(way: str, use_reentrant: bool | None) -> nn.Module:
    torch.manual_seed(0)
    if way.startswith("llama"):
        return Llama(way.removeprefix("llama, "), use_reentrant).double().train()
    return Model(way, use_reentrant).double().train()


def statistics_of(heads: Heads) -> list[torch.Tensor]:
    """Return count, mean and standard error of each statistic of each site."""
    moments = [each for record in heads.records for each in record.statistics.values()]
    return [numbers for each in moments for numbers in (each.count, each.value, each.standard_error)]


def hooks_of(model: nn.Module) -> list[dict]:
    """Return copies of all forward hooks; transformers registers one of its own for checkpointing."""
    return [dict(hooks) for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]


@functools.cache
def gradients(way: str, use_reentrant: bool | None, backward: str, watched: bool) -> tuple[list, list]:
    """Return all gradients of a run under a gate, those of the gate's values last, and the statistics."""
    model = model_of(way, use_reentrant)
    width = 48 if way.startswith("llama") else WIDTH
    x = torch.randn(BATCH, LENGTH, width, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    values: dict = {key: value.clone().requires_grad_() for key, value in GATES.items()}
    hooks = hooks_of(model)
    observer = hw.watch(model) if watched else hw.record_outputs(model)
    with observer as heads:
        with hw.gate(model, values):
            loss = model(x).square().sum()
            if backward == "inside":
                loss.backward()
        if backward == "under watch alone":
            loss.backward()
    if backward == "under other gates":
        with hw.gate(model, {0: 0.0, 1: 0.0}), hw.watch(model):
            loss.backward()
            model(x)
    elif backward == "outside":
        loss.backward()
    embedding = model.llama.get_input_embeddings().weight if way.startswith("llama") else None
    tensors = [*model.parameters(), x, *values.values()]
    found = statistics_of(heads) if watched else list(heads.by_site.values())
    assert hooks_of(model) == hooks
    return [tensor.grad for tensor in tensors if tensor is not embedding], found


WAYS = ["sdpa", "softmax", "torch", "ours", "llama, sdpa", "llama, eager"]
GATES = {
    (0, 1): torch.tensor(0.0, dtype=torch.double),
    (1, 0): torch.tensor(0.3, dtype=torch.double),
    (1, 2): torch.full((BATCH, LENGTH), 1.7, dtype=torch.double),
}
CASES = [
    *((way, True, backward) for way in WAYS for backward in ("inside", "under other gates")),
    *(("sdpa", watched, backward) for watched in (True, False) for backward in ("outside", "under watch alone")),
]


@pytest.mark.parametrize("use_reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(("way", "watched", "backward"), CASES)
def test_gradients_and_statistics_are_those_without_checkpointing(way, use_reentrant, backward, watched):
    expected, statistics = gradients(way, None, "inside", watched)
    computed, repeated_statistics = gradients(way, use_reentrant, backward, watched)
    assert all(gradient is not None for gradient in expected)
    torch.testing.assert_close(computed, expected)
    torch.testing.assert_close(repeated_statistics, statistics, equal_nan=True)
    functions = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._CheckpointFrame
    assert all(function.__module__ == "torch.utils.checkpoint" for function in functions)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_whole_model_that_is_checkpointed_counts_once(use_reentrant):
    model, x = model_of("sdpa", None), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.double, requires_grad=True)
    with hw.watch(model) as heads, hw.gate(model, {(0, 1): 0.5}):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert [record.statistics["entropy"].count.tolist() for record in heads.records] == [[4.0] * 3, [2.0] * 3]
    gradient, x.grad = x.grad, None
    with hw.gate(model, {(0, 1): 0.5}):
        model(x).sum().backward()
    torch.testing.assert_close(gradient, x.grad)


def test_a_part_that_is_repeated_in_the_backward_pass_of_a_function_counts_once():
    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.layer(x).backward(grad)
            return x.grad, None

    model, x = model_of("sdpa", None), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.double, requires_grad=True)
    with hw.watch(model) as heads:
        Reversible.apply(x, model).sum().backward()
    assert heads.records[0].statistics["entropy"].count.tolist() == [4.0] * 3


def test_recomputation_stops_cleanly_at_an_error():
    model, x = model_of("sdpa", False), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.double, requires_grad=True)
    with hw.gate(model, {(0, 1): 0.5}):
        loss = model(x).sum()
    again = copy.deepcopy(model)
    hook = model.layers[1].qkv.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        loss.backward()
    hook.remove()
    assert F.scaled_dot_product_attention.__module__ != "headwise.intercept.adapters.sdpa"
    assert torch.overrides._get_current_function_mode() is None
    torch.testing.assert_close(model(x), again(x))
