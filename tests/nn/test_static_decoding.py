"""A step of decoding with a static cache can be captured in a CUDA graph: each step is the same list of operators on
tensors at the same addresses, and changes nothing on the host.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import headwise as hw
from shape_checks import shapes_unchecked
from without_a_gpu import as_on_a_gpu

BATCH, CAPACITY, WIDTH, HEADS = 2, 13, 24, 6

LAYERS = {
    "layer": lambda: hw.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, rotary=hw.Rotary(), mask=hw.causal()),
    "window": lambda: hw.MultiHeadAttention(WIDTH, HEADS, mask=hw.window(3) | hw.causal() & hw.prefix(2)),
    "ALiBi": lambda: hw.MultiHeadAttention(WIDTH, HEADS, position_bias=hw.ALiBi(), mask=hw.causal()),
    "relative": lambda: hw.MultiHeadAttention(WIDTH, HEADS, position_bias=hw.RelativeBias(HEADS), mask=hw.causal()),
    "sinks": lambda: hw.MultiHeadAttention(WIDTH, HEADS, scores=hw.Scores(sinks=True), mask=hw.causal()),
    "dynamic angles": lambda: hw.MultiHeadAttention(
        WIDTH, HEADS, rotary=hw.Rotary(scaling=hw.DynamicNTK(2.0, 4)), mask=hw.causal()
    ),
    "differential": lambda: hw.DifferentialAttention(WIDTH, HEADS, mask=hw.causal()),
    "latent": lambda: hw.LatentAttention(WIDTH, HEADS, kv_rank=5, head_dim=4, rotary_dim=4, mask=hw.causal()),
}


class Operators(TorchDispatchMode):
    """Mode that lists every operator with its numbers, and with the shapes of its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        described = tree_map(
            lambda each: (tuple(each.shape), each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each,
            (args, kwargs or {}),
        )
        self.calls.append((str(func), str(described)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_steps_are_the_same_operators_at_the_same_addresses(kind, monkeypatch):
    layer = LAYERS[kind]().eval()
    x = torch.randn(BATCH, CAPACITY, WIDTH)
    expected = layer(x)
    as_on_a_gpu(monkeypatch)
    cache = layer.static_cache(BATCH, CAPACITY)
    outputs, steps, hosts, addresses = [layer(x[:, :4], cache=cache)], [], [], []
    for token in x[:, 4:].split(1, dim=1):
        with Operators() as operators, shapes_unchecked():
            outputs.append(layer(token, cache=cache))
        steps.append(operators.calls)
        hosts.append({name: value for name, value in vars(cache).items() if name not in ("slots", "lengths")})
        addresses.append([tensor.data_ptr() for tensor in (*cache.slots, cache.lengths)])
    assert len(steps[0]) > 20
    assert all(step == steps[0] for step in steps)
    assert all(host == hosts[0] for host in hosts)
    assert all(each == addresses[0] for each in addresses)
    last = slice(-1, None) if kind == "dynamic angles" else slice(None)  # its earlier angles are those of shorter texts
    torch.testing.assert_close(torch.cat(outputs, 1)[:, last], expected[:, last], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_steps_that_read_their_length_are_different_operators():
    """On a CPU, attention reads only the slots that are filled."""
    layer = LAYERS["layer"]().eval()
    cache, steps = layer.static_cache(BATCH, CAPACITY), []
    for token in torch.randn(BATCH, 3, WIDTH).split(1, dim=1):
        with Operators() as operators, shapes_unchecked():
            layer(token, cache=cache)
        steps.append(operators.calls)
    assert steps[1] != steps[2]
