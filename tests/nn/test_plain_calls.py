"""Plain calls of a layer, which skip checks, after every kind of change to the layer."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import headwise as hw
from headwise.attention import prepared_calls
from headwise.compat import MultiheadAttention
from headwise.nn import linear_engine

EMBED, HEADS, LENGTH = 24, 3, 7


class Doubled(nn.Module):
    """Adapter that doubles the result of a projection."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)


def double_output(module, arguments, output):
    """Forward hook that doubles the result of a module."""
    return 2 * output


def replace(layer, name, make):
    """Replace a module of a layer by a new one that is made from it."""
    setattr(layer, name, make(getattr(layer, name)))


def new_forward(linear):
    """Give a projection a `forward` of its own."""
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)


CHANGES = {
    "hook": lambda layer: layer.out_proj.register_forward_hook(double_output),
    "hook before": lambda layer: layer.out_proj.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
    "hook of the gradient": lambda layer: layer.out_proj.register_full_backward_hook(lambda m, i, o: (2 * i[0],)),
    "own forward": lambda layer: new_forward(layer.out_proj),
    "adapter": lambda layer: replace(layer, "out_proj", Doubled),
    "other weight": lambda layer: setattr(layer.out_proj, "weight", nn.Parameter(2 * layer.out_proj.weight.detach())),
    "frozen": lambda layer: layer.out_proj.requires_grad_(False),
    "other data": lambda layer: layer.out_proj.weight.data.mul_(2),
    "parametrization": lambda layer: parametrizations.weight_norm(layer.out_proj),
    "pruned": lambda layer: prune.l1_unstructured(layer.out_proj, "weight", amount=0.5),
    "evaluation": lambda layer: layer.eval(),
    "float64": lambda layer: layer.double(),
    "bfloat16": lambda layer: layer.bfloat16(),
}
ONLY_MULTI_HEAD = {
    "hook of q": lambda layer: layer.q_proj.register_forward_hook(double_output),
    "adapter of v": lambda layer: replace(layer, "v_proj", Doubled),
    "no bias": lambda layer: setattr(layer.k_proj, "bias", None),
    "mask": lambda layer: setattr(layer, "mask", hw.window(2)),
    "no mask": lambda layer: setattr(layer, "mask", None),
    "rotary": lambda layer: setattr(layer, "rotary", hw.Rotary()),
    "scores": lambda layer: setattr(layer, "scores", hw.Scores(softcap=1.0)),
    "sinks": lambda layer: setattr(layer, "sinks", nn.Parameter(torch.ones(HEADS))),
    "temperature": lambda layer: setattr(layer, "temperature", nn.Parameter(2 * torch.ones(HEADS))),
    "backend": lambda layer: setattr(layer, "backend", "reference"),
}
LAYERS = {
    "multi-head": lambda: hw.MultiHeadAttention(EMBED, HEADS, mask=hw.causal()),
    "fused projection": lambda: hw.MultiHeadAttention(EMBED, HEADS, fused_qkv=True, mask=hw.causal()),
    "torch's": lambda: MultiheadAttention(EMBED, HEADS, batch_first=True),
}
CASES = [
    (kind, change) for kind in LAYERS for change in (CHANGES, {**CHANGES, **ONLY_MULTI_HEAD})[kind == "multi-head"]
]


def results(layer, x):
    """Return the output of self-attention in a layer, and the gradients of x and of the parameters that have one."""
    x = x.to(next(layer.parameters()).dtype).requires_grad_()
    is_torch = isinstance(layer, MultiheadAttention)
    y = layer(x, x, x, need_weights=False)[0] if is_torch else layer(x)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    with torch.no_grad():
        alone = layer(x, x, x, need_weights=False)[0] if is_torch else layer(x)
    return [y, alone, *torch.autograd.grad(y.square().sum(), [x, *trained], allow_unused=True)]


def checked_results(layer, x):
    """Return the same from a layer that checks every call and calls all its modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_calls, "signature", lambda *_: None)
        patch.setattr(MultiheadAttention, "_is_plain_self_attention", lambda *_: False)
        patch.setattr(hw.MultiHeadAttention, "_short_call", lambda *_: None)
        patch.setattr(linear_engine, "plain_parameters", lambda *_: None)
        return results(layer, x)


def assert_same(got, wanted):
    """Assert that results are equal bit for bit."""
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_a_changed_layer(kind, change):
    layer, x = LAYERS[kind](), torch.randn(2, LENGTH, EMBED)
    for _ in range(3):
        before = results(layer, x)
    assert_same(before, checked_results(layer, x))
    (CHANGES | ONLY_MULTI_HEAD)[change](layer)
    for _ in range(3):
        after = results(layer, x)
    assert_same(after, checked_results(layer, x))
    if change not in ("frozen", "evaluation", "parametrization", "hook of the gradient", "no bias"):
        assert before[0].dtype != after[0].dtype or not torch.equal(before[0], after[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same(copied):
    layer, x = LAYERS["multi-head"](), torch.randn(2, LENGTH, EMBED)
    for _ in range(3):
        expected = results(layer, x)
    assert_same(results(copied(layer), x), expected)


def test_hooks_of_all_modules_see_the_projections():
    layer, x, seen = LAYERS["multi-head"](), torch.randn(2, LENGTH, EMBED), []
    layer(x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        layer(x)
    finally:
        handle.remove()
    assert seen == [layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj, layer]


def test_other_parameters_for_one_call():
    layer, x = LAYERS["multi-head"](), torch.randn(2, LENGTH, EMBED)
    for _ in range(3):
        layer(x)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in layer.named_parameters()}
    assert not torch.func.functional_call(layer, zeros, (x,)).any()
    assert layer(x).any()


def test_dropout_in_training_alone():
    layer = hw.MultiHeadAttention(EMBED, HEADS, dropout=0.5)
    x = torch.randn(2, LENGTH, EMBED)
    evaluated = [layer.eval()(x) for _ in range(3)]
    assert torch.equal(evaluated[0], evaluated[2])
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), evaluated[0])


@pytest.mark.parametrize("rotary", [None, hw.Rotary()], ids=["no rotary", "rotary"])
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static", "static, own lengths"])
def test_steps_with_a_cache(kind, rotary):
    batch = 10  # for fewer tokens the native kernel may compute the projections
    layer = hw.MultiHeadAttention(EMBED, HEADS, num_kv_heads=1, mask=hw.causal(), rotary=rotary).eval()
    prompt, steps = torch.randn(batch, LENGTH, EMBED), torch.randn(5, batch, 1, EMBED)
    lengths = torch.arange(batch) % LENGTH + 1 if kind == "static, own lengths" else None

    def decoded():
        cache = layer.static_cache(batch, 13)
        if kind in ("dynamic", "sliding"):
            cache = hw.DynamicCache() if kind == "dynamic" else hw.SlidingCache(4)
        with torch.no_grad():
            layer(prompt, cache=cache, lengths=lengths)
            return [layer(step, cache=cache) for step in steps]

    for _ in range(3):
        short = decoded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_calls, "signature", lambda *_: None)
        patch.setattr(hw.MultiHeadAttention, "_short_call", lambda *_: None)
        long = decoded()
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-6)
