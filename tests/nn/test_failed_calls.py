"""A call that raises leaves the cache unchanged, so that the same call can be repeated."""

import pytest
import torch

import headwise as hw

BATCH, LENGTH, EMBED, HEADS = 2, 7, 24, 6

LAYERS = {
    "multi-head": lambda: hw.MultiHeadAttention(EMBED, HEADS, rotary=hw.Rotary(), output_gate="head"),
    "differential": lambda: hw.DifferentialAttention(EMBED, HEADS, output_gate="element"),
    "latent": lambda: hw.LatentAttention(EMBED, HEADS, kv_rank=5, head_dim=4, rotary_dim=2),
}
CACHES = {
    "dynamic": lambda layer: hw.DynamicCache(),
    "static": lambda layer: layer.static_cache(BATCH, LENGTH),
    "sliding": lambda layer: hw.SlidingCache(3),
    "sliding with sinks": lambda layer: hw.SlidingCache(2, sinks=1),
}


class Refusal(RuntimeError):
    """Error that the hook `refuse` raises in the middle of a call."""


def refuse(module, arguments):
    """Raise `Refusal`; a forward pre-hook that makes the call of a projection fail."""
    raise Refusal


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("projection", ["gate_proj", "out_proj"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_call_can_be_repeated_after_a_projection_failed(kind, cache, projection, grad):
    layer = LAYERS[kind]()
    layer.mask = hw.causal()
    module = getattr(layer, projection, layer.out_proj)
    if grad and cache == "static":
        layer.requires_grad_(False)
    x = torch.randn(BATCH, LENGTH, EMBED)
    expected, repeated = CACHES[cache](layer), CACHES[cache](layer)
    with torch.set_grad_enabled(grad):
        for piece in x.split([3, 1, 2, 1], dim=1):
            y = layer(piece, cache=expected)
            hook = module.register_forward_pre_hook(refuse)
            with pytest.raises(Refusal):
                layer(piece, cache=repeated)
            hook.remove()
            assert torch.equal(layer(piece, cache=repeated), y)
    for repeated_tensor, expected_tensor in zip(repeated.tensors, expected.tensors, strict=True):
        assert torch.equal(repeated_tensor, expected_tensor)
