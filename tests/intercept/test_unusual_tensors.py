"""Masks, tensors and weights of unusual forms: read rightly, or refused by name."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from oracles import statistics_of

WIDTH, HEADS, LENGTH, BATCH = 33, 3, 7, 2
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(4))


class Attention(nn.Module):
    """Self-attention by SDPA or by a softmax of its own, over the last two axes."""

    def __init__(self, way: str = "sdpa") -> None:
        super().__init__()
        self.qkv, self.out_proj, self.way, self.num_heads = nn.Linear(WIDTH, 99), nn.Linear(WIDTH, WIDTH), way, HEADS

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1))
        self.weights = None
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.out_proj(out.transpose(-2, -3).flatten(-2))

    def weights_of(self, x, mask):
        """Return the weights that torch's rules for broadcasting give."""
        q, k, _ = (part.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1))
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)


def attention(way: str = "sdpa") -> Attention:
    torch.manual_seed(0)
    return Attention(way)


@pytest.mark.parametrize(
    ("windows", "shape"),
    [
        ((), (HEADS, LENGTH, LENGTH)),
        ((), (1, LENGTH, LENGTH)),
        ((5,), (HEADS, LENGTH, LENGTH)),
        ((5,), (5, 1, LENGTH, LENGTH)),
        ((5,), (5, HEADS, LENGTH, LENGTH)),
        ((5,), (1, 1, LENGTH, LENGTH)),
    ],
)
@torch.no_grad()
def test_masks_broadcast_as_in_torch(windows, shape):
    model, generator = attention(), torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, *windows, LENGTH, WIDTH, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.6) | torch.eye(LENGTH, dtype=torch.bool)
    plain, weights = model(x, mask), model.weights_of(x, mask).reshape(-1, HEADS, LENGTH, LENGTH)
    with hw.watch(model) as heads:
        torch.testing.assert_close(model(x, mask), plain)
    for head, row in enumerate(heads.rows()):
        entropies = [statistics_of(weights[sequence, head])["entropy"] for sequence in range(len(weights))]
        assert row["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", ["sdpa", "softmax"])
@torch.no_grad()
def test_gates_act_under_vmap_and_watch_names_the_module(way):
    model = nn.Sequential()
    model.add_module("attention", attention(way))
    several = torch.randn(5, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = torch.func.vmap(model)(several)
    with hw.gate(model, {(0, 1): 0.0}):
        gated, expected = torch.func.vmap(model)(several), torch.stack([model(x) for x in several])
    torch.testing.assert_close(gated, expected)
    assert not torch.allclose(gated, plain)
    named = r"none in attention; attention under torch.func.vmap cannot be observed; call the model with a batch"
    with pytest.raises(hw.InputError, match=named), hw.watch(model):
        watched = [model(X), torch.func.vmap(model)(several)]
    torch.testing.assert_close(watched[1], plain)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_torch_func_are_unchanged():
    model = attention()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = per_sample(parameters, X)
    with hw.gate(model, {0: 1.0}):
        gated = per_sample(parameters, X)
    with hw.watch(model) as heads:
        watched = torch.func.grad(loss)(parameters, X[0])
    torch.testing.assert_close(gated, expected)
    torch.testing.assert_close(
        watched, {name: gradient[0] for name, gradient in expected.items()}, rtol=1e-3, atol=1e-4
    )
    assert heads.rows()


@torch.no_grad()
def test_nested_tensors_are_named_and_left_alone():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested, self.plain = attention(), attention()

        def forward(self, x):
            self.plain(X)
            parts = (part.contiguous() for part in self.nested.qkv(x).chunk(3, -1))
            q, k, v = (part.unflatten(-1, [HEADS, 11]).transpose(1, 2) for part in parts)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model, x = Model(), torch.nested.nested_tensor([X[0, :5], X[1, :3]], layout=torch.jagged)
    with sdpa_kernel(SDPBackend.MATH):
        plain = model(x)
        named = "^attention over tensors of the class NestedTensor is neither observed nor changed; pass padded, local"
        with pytest.warns(UserWarning, match=named), hw.watch(model) as heads:
            watched = model(x)
        none = pytest.raises(hw.InputError, match="^values: expected modules in which attention is seen, got none in ")
        with none, hw.gate(model, {"nested": 0.5}):
            model(x)
    assert torch.equal(watched.values(), plain.values())
    assert {row["module"] for row in heads.rows()} == {"plain"}


def test_a_model_without_values_is_refused_by_name():
    model = nn.Sequential(attention().to("meta"))
    none = pytest.raises(hw.InputError, match="got none in 0; attention on the meta device has no values")
    with none, hw.watch(model):
        model(X.to("meta"))


class QuantisedLinear(nn.Module):
    """Linear layer with a weight of int8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale, self.bias = linear.weight.detach().abs().max() / 127, linear.bias
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def int8(model: Attention) -> nn.Module:
    model.qkv, model.out_proj = QuantisedLinear(model.qkv), QuantisedLinear(model.out_proj)
    return model


def float8(model: Attention) -> nn.Module:
    weight = nn.Parameter(model.out_proj.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model.out_proj.weight = weight
    model.out_proj.forward = lambda x: F.linear(x, weight.to(x.dtype))
    return model


def offloaded(model: Attention) -> nn.Module:
    """Keep the weights of linear layers on the meta device while they do not run, as accelerate does."""
    for layer in (model.qkv, model.out_proj):
        weight = layer.weight
        layer.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        layer.forward = lambda x, weight=weight, layer=layer: F.linear(x, weight, layer.bias)
    return model


NO_NORM = "the output projection was not seen .* so written_norm is left out: Attention$"


@pytest.mark.parametrize("changed", [int8, float8, offloaded])
@torch.no_grad()
def test_unusual_weights_do_not_disturb(changed):
    model = changed(attention())
    plain = model(X)
    warns = nullcontext() if changed is int8 else pytest.warns(UserWarning, match=NO_NORM)
    with warns, hw.watch(model) as heads:
        torch.testing.assert_close(model(X), plain)
    with hw.gate(model, {0: 1.0}):
        torch.testing.assert_close(model(X), plain)
    assert all(row["entropy"] > 0 for row in heads.rows())


class Complex(nn.Module):
    """Attention of complex numbers by the softmax of real parts or of absolute values."""

    def __init__(self, scores, is_real):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(4, WIDTH, WIDTH, dtype=torch.complex64) / 6)
        self.scores, self.is_real = scores, is_real

    def forward(self, x):
        maps = [(x + 0j) @ each for each in self.maps[:3]]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in maps)
        self.weights = self.scores(q @ k.mH).softmax(-1)
        out = self.weights @ v.real + 0j if self.is_real else self.weights.to(v.dtype) @ v
        return out.transpose(1, 2).flatten(2) @ self.maps[3]


@torch.no_grad()
@pytest.mark.parametrize("scores", [torch.real, torch.abs])
def test_complex_outputs_of_heads_are_named(scores):
    match = "attention of these modules is left out, since its outputs are complex numbers"
    with pytest.raises(hw.InputError, match=match), hw.watch(model := Complex(scores, is_real=False)):
        model(X)
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("", 1): 0.0}):
        model(X)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_real_values_of_complex_queries_and_keys_are_observed_and_gated():
    model = Complex(torch.real, is_real=True)
    with hw.watch(model) as heads:
        model(X)
    entropy = torch.special.entr(model.weights.double()).sum(-1).mean((0, 2))
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-4)
    with hw.gate(model, {("", 1): 0.0}):
        gated = model(X)
    model.maps[3, 11:22] = 0
    torch.testing.assert_close(gated, model(X))


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@torch.no_grad()
def test_distributed_parameters_are_watched_and_distributed_activations_named(mesh):
    with hw.watch(attention()) as expected_heads:
        pass
    single, model = attention(), attention()
    with hw.watch(single) as expected_heads:
        plain = single(X)
    parallelize_module(model, mesh, {"qkv": ColwiseParallel(), "out_proj": RowwiseParallel()})
    with pytest.warns(UserWarning, match=NO_NORM), hw.watch(model) as heads:
        torch.testing.assert_close(model(X), plain)
    for row, other in zip(heads.rows(), expected_heads.rows(), strict=True):
        assert row["entropy"] == pytest.approx(other["entropy"], rel=1e-5)
    model = distribute_module(attention(), mesh)
    none = pytest.raises(hw.InputError, match="^model: expected attention in a way that can be seen, got none in ")
    with none, hw.watch(model):
        out = model(distribute_tensor(X, mesh, [Replicate()]))
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.to_local(), plain)
