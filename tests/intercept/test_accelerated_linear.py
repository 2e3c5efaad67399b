"""Linear maps of accelerated models: outputs and gradients, what stays torch's, and what is restored."""

import copy
import functools
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.attention.backends.native import library
from headwise.intercept import accelerate
from headwise.nn import linear_engine
from headwise.nn.linear_engine import LinearChoice

WIDTH, OUT = 256, 272  # two blocks of oneDNN
ENGINES = ["torch", "onednn", "native", "few tokens"]
"""Engines; the last is the native kernel for few tokens, with torch for others."""


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """Let this library compute all linear maps of accelerated models that `choice_of` leaves to no other code."""
    if request.param in ENGINES[2:] and library.why_not_loaded() is not None:
        pytest.skip(str(library.why_not_loaded()))
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    use(monkeypatch, request.param)
    return request.param


def use(monkeypatch, name: str) -> None:
    """Let the engine `name` count as the fastest one."""
    is_for_few = name == "few tokens"
    monkeypatch.setattr(linear_engine, "engine_of", lambda _: LinearChoice("torch" if is_for_few else name, "a"))
    rows = range(1, 9) if is_for_few else range(0)
    monkeypatch.setattr(linear_engine, "native_rule", lambda _: linear_engine.NativeRule(rows, 0, "a test"))


def mlp(dtype=torch.float32) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model with two linear maps, one without a bias, an input that is large and one of few rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, OUT), nn.GELU(), nn.Linear(OUT, WIDTH, bias=False)).to(dtype)
    return model, torch.randn(2, 96, WIDTH, dtype=dtype), torch.randn(1, 5, WIDTH, dtype=dtype)


def is_used_by(acceleration: hw.Acceleration, engine: str) -> bool:
    return {"few tokens": "native"}.get(engine, engine) in {choice.engine for choice in acceleration.linear_calls}


def errors(found, exact) -> list[float]:
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


def outcome(model, x) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(each.grad for each in (x, *model.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_the_models_own(engine, dtype):
    model, *inputs = mlp(dtype)
    for x in inputs:
        exact = outcome(copy.deepcopy(model).double(), x.double())
        plain = outcome(model, x)
        with torch.no_grad():
            plain_output = model(x)
        with hw.accelerate(model, linear=True) as acceleration:
            ours = outcome(model, x)
            with torch.no_grad():
                output = model(x)
        allowed = [
            2 * max(error, torch.finfo(dtype).eps / 2) for error in errors([*plain, plain_output], [*exact, exact[0]])
        ]
        assert all(e <= most for e, most in zip(errors([*ours, output], [*exact, exact[0]]), allowed, strict=True))
        assert sum(acceleration.linear_calls.values()) == 4 or dtype == torch.bfloat16
        is_used = engine == "few tokens" and x.shape[1] < 9
        is_used |= engine in ("torch", "native") and dtype == torch.float32
        is_used |= engine == "onednn" and x.shape[1] > 9 and dtype == torch.float32
        assert is_used_by(acceleration, engine) or not is_used, str(acceleration)


def test_new_weights_are_used_at_once(engine):
    model, x, few = mlp()
    other = {name: 2.0 * each for name, each in model.state_dict().items()}
    with torch.no_grad(), hw.accelerate(model, linear=True):
        for change in (
            lambda: [parameter.mul_(0.5) for parameter in model.parameters()],
            lambda: [parameter.data.add_(0.1) for parameter in model.parameters()],
            lambda: model.load_state_dict(other),
            lambda: model.double().float(),
            lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(OUT, WIDTH))),
        ):
            model(x), model(few)
            change()
            for each in (x, few):
                expected = F.linear(F.gelu(F.linear(each, model[0].weight, model[0].bias)), model[2].weight)
                torch.testing.assert_close(model(each), expected, rtol=1e-4, atol=1e-4)


def test_gradients_have_tangents_and_batches(engine):
    model, x, _ = mlp()
    x = x.requires_grad_()
    tangent, upstreams = torch.randn(2, 96, WIDTH), torch.randn(3, 2, 96, WIDTH)

    def results():
        y = model(x)
        batched = torch.autograd.grad(y, x, upstreams, is_grads_batched=True, retain_graph=True)
        outer = torch.func.jvp(
            lambda u: torch.autograd.grad(y, x, u, create_graph=True)[0], (upstreams[0],), (tangent,)
        )
        return [*batched, *outer]

    expected = results()
    with hw.accelerate(model) as acceleration:
        actual = results()
    assert acceleration.linear_calls
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("engine")
def test_sizes_that_the_function_of_torch_broadcasts(dtype):
    model, x, _ = mlp(dtype)
    with torch.no_grad():
        for bias in (torch.ones(1), torch.tensor(2.0), torch.ones(1, OUT)):
            model[0].bias = nn.Parameter(bias.to(dtype))
            expected = model(x)
            with hw.accelerate(model):
                torch.testing.assert_close(model(x), expected)
        linear = nn.Linear(WIDTH, OUT).to(dtype)
        linear.weight, linear.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype)), None
        expected = linear(x)
        with hw.accelerate(linear):
            torch.testing.assert_close(linear(x), expected)


class Adapted(nn.Module):
    """A linear layer with a trained addition of low rank (LoRA, Hu et al. 2021)."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 4), nn.Linear(4, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_train_beside_frozen_weights(engine):
    model, x, _ = mlp()
    model.requires_grad_(False)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    trained = [each for each in model.parameters() if each.requires_grad]
    other = copy.deepcopy(model)

    def losses(model, steps=3):
        optimizer, values = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2), []
        for _ in range(steps):
            optimizer.zero_grad()
            values.append(model(x).square().mean())
            values[-1].backward()
            optimizer.step()
        return torch.stack(values).detach()

    expected = losses(other)
    with hw.accelerate(model) as acceleration:
        torch.testing.assert_close(losses(model), expected, rtol=1e-4, atol=1e-5)
    assert len(trained) == 8
    assert all(parameter.grad is None for each in (model[0], model[2]) for parameter in each.base.parameters())
    assert is_used_by(acceleration, engine) or engine == "few tokens"


SHARDED = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import headwise as hw
torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = nn.TransformerEncoderLayer(96, 4, 200, 0.0, batch_first=True)
model = nn.Sequential(layer, nn.Linear(96, 96))
plain, x = copy.deepcopy(model), torch.randn(2, 70, 96)
for module in (model[0], model[1], model):
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
outputs = []
with hw.accelerate(model) as acceleration:
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            y = each(x)
            y.square().mean().backward()
            optimizer.step()
            outputs.append(y.detach())
    sharded = {name: each.full_tensor() for name, each in model.state_dict().items()}
torch.testing.assert_close(outputs[3:], outputs[:3], rtol=1e-4, atol=1e-4)
torch.testing.assert_close(sharded, dict(plain.state_dict()), rtol=1e-3, atol=1e-3)
assert acceleration.linear_calls, acceleration
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_a_fully_sharded_model_trains_as_before(tracing_server):
    tracing_server.run(SHARDED)


class Scaled(nn.Linear):
    """Subclass with another result."""

    def forward(self, x):
        return 2.0 * super().forward(x)


@pytest.mark.usefixtures("engine")
def test_other_modules_and_functions_are_torchs():
    model = nn.Sequential(
        Scaled(WIDTH, WIDTH), parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Bilinear(WIDTH, WIDTH, 3)
    )
    x = torch.randn(200, WIDTH)

    def run(x):
        return model[2](model[1](model[0](x)), x)

    other, before = nn.Linear(WIDTH, WIDTH), run(x)
    expected = other(x)
    with hw.accelerate(model, linear=True) as acceleration:
        assert torch.equal(run(x), before)
        assert torch.equal(other(x), expected)
    assert not acceleration.linear_calls


@pytest.mark.usefixtures("engine")
def test_attention_alone_is_accelerated_on_request():
    model, x, _ = mlp()
    expected = model(x)
    with hw.accelerate(model, linear=False) as acceleration:
        assert torch.equal(model(x), expected)
    assert not acceleration.linear_calls
    with pytest.raises(hw.InputError, match="linear: expected True or False, got 1"):
        hw.accelerate(model, linear=1)


def run_in_a_context(model, x):
    with hw.accelerate(model, linear=True):
        model(x)


def run_nested(model, x):
    with hw.accelerate(model, linear=True) as outer, hw.accelerate(model[0], linear=True) as inner:
        model(x)
    assert (sum(outer.linear_calls.values()), sum(inner.linear_calls.values())) == (2, 1)


def run_with_an_error(model, x):
    with pytest.raises(RuntimeError), hw.accelerate(model, linear=True):
        model(x[..., 1:])


def run_closed_in_another_order(model, x):
    first, second = hw.accelerate(model, linear=True), hw.accelerate(model, linear=True)
    first.restore()
    model(x)
    second.restore()
    assert sum(second.linear_calls.values()) == 2


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("run", [run_in_a_context, run_nested, run_with_an_error, run_closed_in_another_order])
def test_nothing_is_left(run):
    model, x, _ = mlp()
    own, before = vars(nn.Linear)["forward"], [dict(vars(each)) for each in model.modules()]
    expected = model(x)
    run(model, x)
    assert vars(nn.Linear)["forward"] is own
    assert [dict(vars(each)) for each in model.modules()] == before
    assert not accelerate._recorders
    assert torch.equal(model(x), expected)


@pytest.mark.usefixtures("engine")
def test_copies_are_not_accelerated():
    model, x, _ = mlp()
    expected = model(x)
    with hw.accelerate(model, linear=True) as acceleration:
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(each(x), expected)
        assert not acceleration.linear_calls
        assert model.state_dict().keys() == copy.deepcopy(model).state_dict().keys()


@pytest.mark.usefixtures("engine")
def test_hooks_run_as_before():
    model, x, _ = mlp()
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    model[0].register_forward_hook(lambda module, args, output: seen.append(args[0]))
    model[2].register_full_backward_hook(lambda module, grads, of_output: seen.append(of_output[0]))
    plain = outcome(model, x)
    before, seen[:] = seen[:], []
    with hw.accelerate(model, linear=True):
        ours = outcome(model, x)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen, before, rtol=1e-4, atol=1e-4)


class Checkpointed(nn.Module):
    """A module whose call is repeated in the backward pass."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("are_accelerated", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(200, WIDTH), (2, 96, WIDTH), (5, WIDTH)])
def test_checkpointing_repeats_the_same(use_reentrant, are_accelerated, shape):
    """Forward and backward pass may be within the context or outside of it. A square weight is not transposed."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
    model, x, of_output = Checkpointed(inner, use_reentrant), torch.randn(shape, requires_grad=True), torch.randn(shape)
    leaves = [x, *inner.parameters()]
    expected = torch.autograd.grad(inner(x), leaves, of_output)
    with hw.accelerate(model) if are_accelerated[0] else nullcontext():
        out = model(x)
    for leaf in leaves:
        leaf.grad = None
    with hw.accelerate(model) if are_accelerated[1] else nullcontext():
        out.backward(of_output)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("engine")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_nested_tensors_are_torchs():
    model = nn.Sequential(nn.Linear(WIDTH, OUT))
    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(150, WIDTH)])
    with hw.accelerate(model):
        for ours, plain in zip(model(x).unbind(), [F.linear(part, *model[0].parameters()) for part in x], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("engine")
@torch.no_grad()
def test_an_attribute_takes_precedence_over_a_parameter():
    model, x, few = mlp()
    vars(model[0])["weight"] = 2.0 * model[0].weight
    for each in (x, few):
        expected = model(each)
        with hw.accelerate(model):
            torch.testing.assert_close(model(each), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("engine")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_and_modes_see_the_call_of_torch():
    model, x, _ = mlp()
    expected = model(x)
    tangent = torch.randn_like(x)
    _, of_tangent = torch.func.jvp(model, (x,), (tangent,))
    with hw.accelerate(model, linear=True):
        torch.testing.assert_close(torch.func.vmap(model)(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.func.jvp(model, (x,), (tangent,))[1], of_tangent)
        torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
        torch.testing.assert_close(torch.jit.script(copy.deepcopy(model))(x), expected)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected, rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x)
        assert half.dtype == torch.bfloat16
        with torch.device("meta"):
            assert model.to("meta")(x.to("meta")).is_meta


@pytest.mark.parametrize("length", [2, 96])
@torch.no_grad()
def test_the_same_library_computes_in_watched_models(engine, length, monkeypatch):
    torch.manual_seed(0)
    layer, x = hw.MultiHeadAttention(WIDTH, num_heads=4), torch.randn(2, length, WIDTH)
    model, computed_by, used = nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)).eval(), linear_engine.computed_by, []

    def recorded(name, *args):
        if name != "torch" and not torch._C._len_torch_function_stack():
            used.append(name)
        return computed_by(name, *args)

    for each in (linear_engine, accelerate):
        monkeypatch.setattr(each, "computed_by", recorded)
    expected = model(x)
    is_used = engine == "native" or engine == {2: "few tokens", 96: "onednn"}[length]
    name = "onednn" if engine == "onednn" else "native"
    assert used == 4 * is_used * [name]
    with hw.watch(model) as heads:
        for _ in range(3):  # traced, confirmed, and by a plan
            used.clear()
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
            assert used == 4 * is_used * [name]
    accelerate_all = functools.partial(hw.accelerate, linear=True)
    for order in ((accelerate_all, hw.watch), (hw.watch, accelerate_all)):
        with order[0](model) as first, order[1](model) as second:
            for _ in range(3):
                used.clear()
                torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
                assert used == 5 * is_used * [name]
        found, acceleration = (first, second) if order[0] is hw.watch else (second, first)
        assert is_used_by(acceleration, engine) == (is_used or engine == "torch")
        for row, other in zip(found.rows(), heads.rows(), strict=True):
            assert row["entropy"] == pytest.approx(other["entropy"], rel=1e-4)


@pytest.mark.usefixtures("engine")
@torch.no_grad()
def test_a_watched_layer_with_hooks_of_others_calls_torch_as_before():
    layer, x, seen = hw.MultiHeadAttention(WIDTH, num_heads=4), torch.randn(2, 96, WIDTH), []
    layer.q_proj.register_forward_hook(lambda module, args, output: seen.append(F.linear(output, module.weight)))
    layer(x)
    with hw.watch(layer):
        layer(x)
    assert torch.equal(*seen)


def test_the_summary_states_libraries_and_reasons(monkeypatch):
    use(monkeypatch, "onednn")
    model, x, few = mlp()
    with torch.no_grad(), hw.accelerate(model, linear=True) as acceleration:
        model(x), model(few)
    text = str(acceleration)
    assert "linear maps computed by torch: the product is too small for another engine to be faster (2 calls)" in text
    if torch.backends.mkldnn.is_available():
        assert "linear maps computed by oneDNN: a (2 calls)" in text


def test_compiled_code_has_the_operator(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.records_linear_maps()")


@pytest.mark.skipif(library.why_not_loaded() is not None, reason="the native kernels are not available")
def test_compiled_models_in_bfloat16_have_the_native_operator(tracing_server):
    tracing_server.run("import traced_acceleration; traced_acceleration.records_native_linear_maps()")


def test_a_function_of_another_library_is_called(monkeypatch):
    use(monkeypatch, "onednn")
    model, x, _ = mlp()
    calls = []

    def counted(own):
        @functools.wraps(own)
        def call(*args):
            calls.append(own)
            return own(*args)

        return call

    for owner, name in ((F, "linear"), (nn.Linear, "forward")):
        calls.clear()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(owner, name, counted(getattr(owner, name)))
            with hw.accelerate(model, linear=True):
                model(x)
        assert len(calls) == 2
