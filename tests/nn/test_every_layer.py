"""Properties that all attention layers share: multi-head, differential, and latent in both of its forms."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import headwise as hw

BATCH, LENGTH, EMBED, HEADS = 2, 7, 24, 6
LATENT = {"kv_rank": 5, "q_rank": 5, "head_dim": 4, "rotary_dim": 2, "bias": True}
DIFFERENTIAL = {"num_kv_heads": 3, "norm_weight": True, "depth": 3}
LAYERS = {
    "multi-head": functools.partial(hw.MultiHeadAttention, EMBED, HEADS, num_kv_heads=2),
    "differential": functools.partial(
        hw.DifferentialAttention, EMBED, HEADS, num_kv_heads=3, norm_weight=True, depth=3
    ),
    "latent": functools.partial(hw.LatentAttention, EMBED, HEADS, **LATENT),
}
FORMS = {name: {} for name in LAYERS if name != "latent"}
FORMS |= {"latent, expanded": {"absorbed": False}, "latent, absorbed": {"absorbed": True}}
CACHES = {
    "dynamic": lambda layer: hw.DynamicCache(),
    "static": lambda layer: layer.static_cache(BATCH, LENGTH),
    "sliding": lambda layer: hw.SlidingCache(3),
    "sliding with sinks": lambda layer: hw.SlidingCache(2, sinks=1),
}
every_kind = pytest.mark.parametrize("kind", LAYERS)
every_form = pytest.mark.parametrize("form", FORMS)


def layer_with(kind, **options):
    """Return a layer of a kind, or of the kind of a form, with these options and random parameters."""
    layer = LAYERS[kind.split(",")[0]](**options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


def text(dtype=torch.float32):
    """Return a random input."""
    return torch.randn(BATCH, LENGTH, EMBED, dtype=dtype)


@every_kind
def test_copied_pickled_and_reloaded_layers_compute_the_same(kind):
    options = {"mask": hw.causal() & hw.window(3), "scores": hw.Scores(sinks=True)}
    layer, loaded, x = layer_with(kind, **options), layer_with(kind, **options), text()
    loaded.load_state_dict(layer.state_dict(), strict=True)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(twin(x), layer(x))


@every_form
def test_dropout_acts_in_training_only(form):
    layer, x = layer_with(form, dropout=0.5, dtype=torch.float64), text(torch.float64)
    without = copy.deepcopy(layer)
    without.dropout = 0.0
    expected = without(x, **FORMS[form])
    assert not torch.allclose(layer(x, **FORMS[form]), expected)
    torch.testing.assert_close(layer.eval()(x, **FORMS[form]), expected, rtol=0, atol=1e-12)


@every_kind
def test_a_layer_made_on_meta_is_initialised_by_reset_parameters(kind):
    layer = LAYERS[kind](scores=hw.Scores(sinks=True), device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer(text(torch.bfloat16).to("meta")).shape == (BATCH, LENGTH, EMBED)
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    layer.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    for name, module in layer.named_modules():
        if isinstance(module, nn.RMSNorm):
            assert module.weight.eq(1).all(), name
        elif isinstance(module, nn.Linear):
            assert module.weight.std() > 0.01, name
            assert module.bias is None or not module.bias.any(), name
    assert kind != "differential" or layer.lambda_q1.std() > 0.01


@every_form
def test_half_precision_and_autocast_stay_near_float32(form):
    layer, x, options = layer_with(form, mask=hw.causal()), text(), FORMS[form]
    exact = layer(x, **options)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = layer(x, **options)
        torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.3)
        cache = layer.static_cache(BATCH, 8, dtype=torch.bfloat16)
        torch.testing.assert_close(layer(x, cache=cache, **options), y, rtol=0.02, atol=0.02)
    narrow, weights = layer.bfloat16()(x.bfloat16(), gate=torch.ones(HEADS), return_weights=True, **options)
    assert y.dtype == narrow.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), exact, rtol=0.1, atol=0.3)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("cache", CACHES)
@every_kind
def test_a_rejected_call_leaves_the_cache_unchanged(kind, cache):
    layer = layer_with(kind, mask=hw.causal())
    cache = CACHES[cache](layer)
    with torch.no_grad():
        layer(text()[:, :3], cache=cache)
        with pytest.raises(hw.InputError, match="^gate: expected a shape of"):
            layer(text()[:, :3], cache=cache, gate=torch.ones(5))
        positions = cache.next_positions(BATCH, 1, None, torch.device("cpu"))
    assert positions.flatten().unique().tolist() == [3]


class Refusal(RuntimeError):
    """Error that the hook `refuse` raises in the middle of a call."""


def refuse(module, arguments):
    """Raise `Refusal`; a forward pre-hook that makes the call of a projection fail."""
    raise Refusal


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("projection", ["gate_proj", "out_proj"])
@pytest.mark.parametrize("cache", CACHES)
@every_kind
def test_a_call_can_be_repeated_after_a_projection_failed(kind, cache, projection, grad):
    gated = {} if kind == "latent" else {"output_gate": "element"}
    layer = layer_with(kind, rotary=hw.Rotary(width=2), mask=hw.causal(), **gated)
    module = getattr(layer, projection, layer.out_proj)
    if grad and cache == "static":
        layer.requires_grad_(False)
    expected, repeated = CACHES[cache](layer), CACHES[cache](layer)
    with torch.set_grad_enabled(grad):
        for piece in text().split([3, 1, 2, 1], dim=1):
            y = layer(piece, cache=expected)
            hook = module.register_forward_pre_hook(refuse)
            with pytest.raises(Refusal):
                layer(piece, cache=repeated)
            hook.remove()
            assert torch.equal(layer(piece, cache=repeated), y)
    torch.testing.assert_close(repeated.tensors, expected.tensors, rtol=0, atol=0)


COMPILED = """
import torch, headwise as hw
x, layer = torch.randn(2, 5, 12), LAYER
for call in CALLS:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, **call), layer(x, **call))
if isinstance(layer, hw.LatentAttention):
    torch._dynamo.reset()
    step = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = layer.static_cache(2, 8)
        y = torch.cat([step(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(y, layer(x))
"""
PLAIN_CALLS = '{}, {"bias": torch.randn(5, 5)}, {"mask": torch.rand(5, 5) > 0.3}, {"gate": torch.rand(6)}'
LATENT_LAYER = "hw.LatentAttention(12, 3, kv_rank=7, q_rank=5, head_dim=4, rotary_dim=2, mask=hw.causal())"
OF_MULTI_HEAD = [f"hw.MultiHeadAttention(12, 6, mask={mask})" for mask in ("None", "hw.causal()")]


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        ("hw.MultiHeadAttention(12, 6, mask=hw.causal() & hw.window(3))", PLAIN_CALLS),
        *(pytest.param(layer, PLAIN_CALLS, marks=pytest.mark.slow) for layer in OF_MULTI_HEAD),
        pytest.param(
            "hw.DifferentialAttention(12, 3, mask=hw.causal(), rotary=hw.Rotary(), scores=hw.Scores(temperature=True))",
            '{}, {"gate": torch.rand(3)}, {"return_weights": True}',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LATENT_LAYER,
            '{"absorbed": False}, {"absorbed": True}, {"gate": torch.rand(3)}, {"return_weights": True}',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_compile_to_one_graph(layer, calls, tracing_server):
    tracing_server.run(COMPILED.replace("LAYER", layer, 1).replace("CALLS", calls, 1))
