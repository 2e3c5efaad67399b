"""`attend` and the layers compute on the device of their inputs, whatever torch's default device is."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import headwise as hw
from headwise.compat import MultiheadAttention

BATCH, LENGTH, EMBED, HEADS = 2, 7, 24, 6
BACKENDS = ("fused", "blockwise", "reference")

PER_HEAD = hw.window([1, 2, 3, 5, 8, None])
DENSE = hw.dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3)
POSITIONS = torch.arange(LENGTH)[None]
CALLS = {
    "nothing": {},
    "causal": {"mask": hw.causal()},
    "a window per head": {"mask": PER_HEAD},
    "window and padding": {"mask": hw.window(3) & hw.padding([LENGTH, 4])},
    "segments": {"mask": hw.segments([[0, 0, 1, 1, 1, 2, 2]]) & hw.causal()},
    "dense": {"mask": DENSE},
    "mask rule": {"mask": hw.mask_rule(lambda b, h, q, k: (q >= k) & ((q + k + h) % 3 != b))},
    "bias": {"bias": torch.ones(1, HEADS, LENGTH, LENGTH).tril().log()},
    "softcap": {"softcap": 3.0, "mask": hw.causal()},
    "scale per head": {"scale": torch.arange(1.0, HEADS + 1)},
    "talking heads": {"talking_heads": (torch.eye(HEADS) + 0.1, torch.eye(HEADS) - 0.1)},
    "dropout": {"dropout": 0.5},
    "positions": {"mask": hw.causal(), "query_positions": POSITIONS + 2, "key_positions": POSITIONS},
    "gate": {"gate": torch.rand(BATCH, HEADS)},
}
OUTPUTS = {
    "output": {},
    "log-sum-exp": {"return_lse": True},
    "weights": {"return_weights": True},
    "sinks": {"sinks": torch.arange(HEADS) / 7},
}


def under_meta(compute):
    """Return what a function returns in a new thread, which has no buffers of earlier calls, if the default device is
    the meta device.
    """

    def run():
        with torch.device("meta"):
            return compute()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def require_same(compute) -> None:
    """Check that a function returns the same tensors, but for rounding, with the meta device as the default device.

    A default device is a mode of torch, in which projections of few tokens are left to torch. And MKL's products depend
    on where in memory their factors lie, on some processors.
    """
    for ours, expected in zip(under_meta(seeded(compute)), seeded(compute)(), strict=True):
        assert ours.device.type == "cpu"
        torch.testing.assert_close(ours, expected)


def seeded(compute):
    """Return a function that seeds torch before it calls `compute`."""

    def run():
        torch.manual_seed(0)
        return compute()

    return run


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attend_computes_on_the_device_of_its_inputs(backend, call, outputs):
    options = {**CALLS[call], **OUTPUTS[outputs]}
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(BATCH, heads, LENGTH, 5).to(dtype) for heads in (HEADS, 3, 3))
        if hw.why_not(backend, q, k, v, **options):
            continue

        def compute(q=q, k=k, v=v):
            leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            result = hw.attend(*leaves, backend=backend, **options)
            result = result if isinstance(result, tuple) else (result,)
            return (*result, *torch.autograd.grad(result[0].sum(), leaves))

        require_same(compute)


LAYERS = {
    "plain": lambda: hw.MultiHeadAttention(EMBED, HEADS, num_kv_heads=3, mask=hw.causal()),
    "sinks and gate": lambda: hw.MultiHeadAttention(
        EMBED, HEADS, mask=hw.causal(), scores=hw.Scores(sinks=True), output_gate="head", qk_norm=hw.QKNorm()
    ),
    "a window per head": lambda: hw.MultiHeadAttention(EMBED, HEADS, mask=PER_HEAD, position_bias=hw.ALiBi()),
    "relative": lambda: hw.MultiHeadAttention(EMBED, HEADS, position_bias=hw.RelativeBias(HEADS, 8, 10)),
    "rotary": lambda: hw.MultiHeadAttention(EMBED, HEADS, mask=hw.causal(), rotary=hw.Rotary()),
    "yarn": lambda: hw.MultiHeadAttention(EMBED, HEADS, mask=hw.causal(), rotary=hw.Rotary(scaling=hw.YaRN(4.0, 8))),
    "dynamic": lambda: hw.MultiHeadAttention(
        EMBED, HEADS, mask=hw.causal(), rotary=hw.Rotary(scaling=hw.DynamicNTK(4.0, 4))
    ),
    "llama3": lambda: hw.MultiHeadAttention(
        EMBED, HEADS, mask=hw.causal(), rotary=hw.Rotary(scaling=hw.Llama3(8.0, 8))
    ),
    "differential": lambda: hw.DifferentialAttention(EMBED, HEADS, mask=hw.causal()),
    "latent": lambda: hw.LatentAttention(EMBED, HEADS, kv_rank=5, head_dim=4, rotary_dim=4, mask=hw.causal()),
}
CACHES = {
    "dynamic": lambda layer: hw.DynamicCache(),
    "static": lambda layer: layer.static_cache(BATCH, LENGTH + 2),
    "sliding": lambda layer: hw.SlidingCache(LENGTH),
    "sliding with sinks": lambda layer: hw.SlidingCache(4, sinks=1),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_with_a_cache_computes_on_the_device_of_its_inputs(layer, cache):
    layer, x = LAYERS[layer]().eval(), torch.randn(BATCH, LENGTH, EMBED)
    order = torch.tensor([1, 0])

    def compute():
        with torch.no_grad():
            layer_cache = CACHES[cache](layer)
            y = [layer(piece, cache=layer_cache) for piece in x[:, :4].split([1, 2, 1], dim=1)]
            if "sliding" not in cache:
                layer_cache.crop(3)
            layer_cache.reorder(order)
            y.append(layer(x[:, 4:], cache=layer_cache, lengths=None if cache != "static" else [2, 3]))
            layer_cache.reset()
            return [*y, layer(x, cache=layer_cache)]

    require_same(compute)


@pytest.mark.parametrize("layer", ["rotary", "differential"])
def test_a_layer_with_padded_packed_and_nested_input_computes_on_the_device_of_its_inputs(layer):
    layer, x = LAYERS[layer]().eval(), torch.randn(BATCH, LENGTH, EMBED)
    nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)

    def compute():
        with torch.no_grad():
            packed = layer(x.flatten(0, 1), offsets=[0, 5, 14])
            return [layer(x), layer(x, lengths=torch.tensor([7, 4], device="cpu")), packed, layer(nested).values()]

    require_same(compute)


def test_the_replacement_for_torchs_layer_computes_on_the_device_of_its_inputs():
    layer, x = MultiheadAttention(EMBED, HEADS, batch_first=True).eval(), torch.randn(BATCH, LENGTH, EMBED)
    is_padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, 4])[:, None]
    hidden = torch.ones(LENGTH, LENGTH).triu(1) > 0
    calls = ({}, {"need_weights": False}, {"key_padding_mask": is_padding}, {"attn_mask": hidden, "is_causal": True})

    def compute():
        with torch.no_grad():
            return [tensor for call in calls for tensor in layer(x, x, x, **call) if tensor is not None]

    require_same(compute)
