"""The layer with features of torch: torch.func, checkpointing, adapters, parametrizations, meta devices, FSDP, jit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import headwise as hw
from shape_checks import shapes_unchecked

BATCH, LENGTH, EMBED = 3, 5, 12
OPTIONS = {
    "plain": {},
    "decoder": {"num_kv_heads": 2, "rotary": hw.Rotary(), "mask": hw.causal(), "qk_norm": hw.QKNorm()},
    "fused": {"fused_qkv": True, "output_gate": "element"},
    "sinks": {"scores": hw.Scores(sinks=True, temperature=True), "mask": hw.causal() & hw.window(3)},
    "gated sinks": {"scores": hw.Scores(sinks=True), "output_gate": "head"},
    "biased": {"position_bias": hw.ALiBi(), "output_gate": "head", "qk_norm": hw.QKNorm("layer", "heads")},
    "learned bias": {"position_bias": hw.RelativeBias(6, 8, 20)},
    "scores": {"scores": hw.Scores(softcap=3.0, talking_heads=True), "backend": "reference"},
}


@pytest.fixture(params=OPTIONS)
def layer(request):
    """Return a float64 layer with random parameters, once for each set of options."""
    made = hw.MultiHeadAttention(EMBED, 6, **copy.deepcopy(OPTIONS[request.param])).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def x_of(*shape):
    """Return a random float64 input with these leading axes."""
    return torch.randn(*shape, EMBED, dtype=torch.float64)


by_torch = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
"""Ignores the warning that vmap has no batched form of torch's attention operator on CPUs."""


@by_torch
def test_vmap_over_sequences_equals_the_batch(layer):
    x = x_of(BATCH, LENGTH)
    torch.testing.assert_close(vmap(layer)(x), layer(x), rtol=0, atol=1e-12)


@by_torch
def test_vmap_over_masks_equals_a_batch_of_masks():
    layer = hw.MultiHeadAttention(EMBED, 6).double()
    x, allowed = x_of(BATCH, LENGTH), torch.rand(BATCH, LENGTH, LENGTH) > 0.3
    together = vmap(lambda one, mask: layer(one, mask=mask))(x, allowed)
    torch.testing.assert_close(together, layer(x, mask=allowed[:, None]), rtol=0, atol=1e-12)
    lengths = torch.tensor([2, 5, 3])
    together = vmap(lambda one, length: layer(one, mask=hw.padding(length[None])))(x, lengths)
    torch.testing.assert_close(together, layer(x, mask=hw.padding(lengths)), rtol=0, atol=1e-12)


@by_torch
def test_gradients_per_sample_equal_separate_backward_passes(layer):
    """They are computed with vmap of grad, as in differentially private training."""
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = x_of(BATCH, LENGTH)

    def loss(parameters, one):
        return functional_call(layer, parameters, (one,)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(BATCH):
        alone = torch.autograd.grad(layer(x[index]).square().sum(), list(layer.parameters()))
        for batched_gradient, gradient in zip(together.values(), alone, strict=True):
            torch.testing.assert_close(batched_gradient[index], gradient, rtol=0, atol=1e-11)


def test_second_derivatives_are_refused_by_kernels_and_correct_in_the_reference_backend(layer):
    x = x_of(1, 3).requires_grad_()

    def gradient(x):
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return first

    if layer.backend is None and not isinstance(layer.position_bias, nn.Module):
        with pytest.raises(RuntimeError, match="derivative for .* is not implemented"):
            torch.autograd.grad(gradient(x).sum(), x)
    layer.backend = "reference"
    gradient(x)  # with shape checks, which numerical differentiation repeats hundreds of times
    with shapes_unchecked():
        assert torch.autograd.gradgradcheck(layer.__call__, (x,), atol=1e-6)


def test_checkpointing_does_not_change_output_or_gradients(layer):
    layer.dropout = 0.3
    x = x_of(BATCH, LENGTH)
    parameters = list(layer.parameters())
    results = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), parameters)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_copied_pickled_and_reloaded_layers_compute_the_same(layer):
    x = x_of(BATCH, LENGTH)
    fresh = copy.deepcopy(layer)
    fresh.reset_parameters()
    fresh.load_state_dict(layer.state_dict(), strict=True)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_made_on_meta_and_reset_equals_one_made_on_the_device(name):
    options = copy.deepcopy(OPTIONS[name])
    options.pop("position_bias", None)  # created by the caller, possibly for several layers
    on_meta = hw.MultiHeadAttention(EMBED, 6, **options, device="meta")
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    assert on_meta(torch.randn(2, 3, EMBED, device="meta")).shape == (2, 3, EMBED)
    direct, moved = hw.MultiHeadAttention(EMBED, 6, **options), on_meta.to_empty(device="cpu")
    for made in (direct, moved):
        torch.manual_seed(7)
        made.reset_parameters()
    for (parameter_name, actual), expected in zip(moved.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(actual, expected), parameter_name


class Adapter(nn.Module):
    """Low-rank adapter around a linear layer, which adds to its output; the adapter has no `weight` of its own."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def merged(layer):
    """Return a copy of the layer without adapters, their products added to the weights."""
    plain = copy.deepcopy(layer)
    for name, module in layer.named_children():
        if isinstance(module, Adapter):
            base = copy.deepcopy(module.base)
            with torch.no_grad():
                base.weight += module.up.weight @ module.down.weight
            setattr(plain, name, base)
    return plain


def test_adapters_on_projections_are_called(layer):
    x = x_of(BATCH, LENGTH)
    before = layer(x)
    wrapped = [name for name, module in layer.named_children() if isinstance(module, nn.Linear)]
    for name in wrapped:
        setattr(layer, name, Adapter(getattr(layer, name)))
    assert len(wrapped) >= 2
    torch.testing.assert_close(layer(x), merged(layer)(x), rtol=0, atol=1e-12)
    assert (layer(x) - before).abs().max() > 1e-3
    layer(x).sum().backward()
    assert all(getattr(layer, name).up.weight.grad.abs().max() > 0 for name in wrapped)


class Doubled(nn.Module):
    """Parametrization that doubles a weight."""

    def forward(self, weight):
        return 2 * weight


def test_parametrizations_are_honoured(layer):
    x = x_of(BATCH, LENGTH)
    doubled = copy.deepcopy(layer)
    for name, module in layer.named_children():
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                getattr(doubled, name).weight.mul_(2)
            parametrize.register_parametrization(module, "weight", Doubled())
    torch.testing.assert_close(layer(x), doubled(x), rtol=0, atol=1e-12)


def test_every_parameter_has_an_axis_and_a_gradient(layer):
    """Sharded training splits parameters along their first axis, and waits for the gradient of each."""
    layer(x_of(BATCH, LENGTH)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.ndim >= 1, name
        assert parameter.grad is not None, name


SHARDED = """
import torch, torch.distributed as dist, headwise as hw
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
layer = hw.MultiHeadAttention(12, 6, num_kv_heads=2, rotary=hw.Rotary(), mask=hw.causal(),
                              scores=hw.Scores(sinks=True), output_gate="head")
x = torch.randn(2, 5, 12)
expected = layer(x)
expected.square().sum().backward()
gradients = [parameter.grad.clone() for parameter in layer.parameters()]
layer.zero_grad()
fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
y = layer(x)
y.square().sum().backward()
torch.testing.assert_close(y, expected)
for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
    torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
dist.destroy_process_group()
"""


def test_a_fully_sharded_layer_computes_the_same(tracing_server):
    tracing_server.run(SHARDED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast_stay_near_float64(layer, dtype):
    x = x_of(BATCH, LENGTH)
    exact = layer(x)
    half = copy.deepcopy(layer).to(dtype)
    y = half(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    single = copy.deepcopy(layer).float()
    with torch.autocast("cpu", dtype):
        y = single(x.float())
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in single.parameters())


def test_cached_decoding_under_autocast_equals_one_forward_pass():
    layer = hw.MultiHeadAttention(EMBED, 6, mask=hw.causal(), rotary=hw.Rotary())
    x = torch.randn(BATCH, LENGTH, EMBED)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = layer(x)
        for cache in (hw.DynamicCache(), layer.static_cache(BATCH, LENGTH, dtype=torch.bfloat16)):
            y = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(LENGTH)], dim=1)
            torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


def test_dropout_is_unbiased_in_training_and_off_in_evaluation():
    """Its mean over many draws is the output without dropout, and equal seeds give equal outputs."""
    layer = hw.MultiHeadAttention(EMBED, 6, dropout=0.4).double()
    x = x_of(1, LENGTH)
    layer.eval()
    expected = layer(x)
    assert torch.equal(expected, layer(x))
    layer.train()
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(first, layer(x))
    assert not torch.equal(first, layer(x))
    samples = layer(x.expand(4000, -1, -1))
    deviation = samples.std(0) / 4000**0.5
    assert ((samples.mean(0) - expected[0]).abs() < 5 * deviation).all()


@pytest.mark.usefixtures("as_user")  # sizes are tensors while tracing
@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:Converting a tensor", "ignore:Iterating over a tensor")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_traced_layer_computes_the_same(name):
    layer = hw.MultiHeadAttention(EMBED, 6, **copy.deepcopy(OPTIONS[name])).double()
    traced = torch.jit.trace(layer, x_of(BATCH, LENGTH))
    x = x_of(BATCH, LENGTH)
    torch.testing.assert_close(traced(x), layer(x), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("scores", [None, hw.Scores(sinks=True)], ids=["no parameters", "sinks"])
def test_a_dynamically_quantised_layer_decodes_with_a_static_cache(scores):
    layer = hw.MultiHeadAttention(EMBED, 6, mask=hw.causal(), scores=scores).eval()
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    x = torch.randn(BATCH, LENGTH, EMBED)
    cache = quantised.static_cache(BATCH, LENGTH)
    assert cache.tensors[0].dtype == torch.float32
    with torch.no_grad():
        y = torch.cat([quantised(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(y, layer(x), rtol=0, atol=0.1)
