"""The output projection of a module, and the norms of what its heads write through it.

Truth is the output of the model's own projection module for the output of one head alone, minus that for none.
"""

import warnings

import pytest
import torch
from self_attention import WIDTH, merge, sdpa, softmax, split
from torch import nn

import headwise as hw
from headwise.intercept.trace.projection import gram_of, output_projection
from tiny import TOKENS, family

PLACES = {
    "bert": "encoder.layer.{}.attention.output.dense",
    "gpt2": "h.{}.attn.c_proj",
    "llama": "layers.{}.self_attn.o_proj",
    "gemma2, softcap": "layers.{}.self_attn.o_proj",
    "t5 encoder": "encoder.block.{}.layer.0.SelfAttention.o",
}


@pytest.mark.parametrize("name", PLACES)
@torch.no_grad()
def test_written_norm_is_the_norm_after_the_output_projection(name):
    model, inputs = family(name, "eager" if "softcap" in name else "sdpa"), {}

    def keep(place):
        return lambda module, given: inputs.update({place: given[0]})

    places = [PLACES[name].format(layer) for layer in range(3)]
    hooks = [model.get_submodule(place).register_forward_pre_hook(keep(place)) for place in places]
    with hw.watch(model) as heads:
        model(input_ids=TOKENS)
    for hook in hooks:
        hook.remove()
    for layer, place in enumerate(places):
        weight = model.get_submodule(place).weight
        weight = weight if name != "gpt2" else weight.mT  # (out, heads x value_dim)
        x = inputs[place].unflatten(-1, (6, -1))  # (batch, length, heads, value_dim)
        written = torch.stack([x[:, :, h] @ weight.unflatten(1, (6, -1))[:, h].mT for h in range(6)])
        found = [row["written_norm"] for row in heads.rows() if row["layer"] == layer]
        assert found == pytest.approx(written.norm(dim=-1).mean((1, 2)).tolist(), rel=1e-4)


def test_a_projection_is_found_by_its_width():
    model = nn.ModuleDict({"attn": nn.ModuleDict({"proj": nn.Linear(24, 7), "out": nn.Linear(20, 24)})})
    modules = dict(model.named_modules())
    found = output_projection(modules, "attn", 24)
    assert found.path == "attn.proj"
    assert found.map.weight is model["attn"]["proj"].weight
    assert output_projection(modules, "attn", 21) is None
    gram = gram_of(found.map.weight, 3, 8)
    slices = model["attn"]["proj"].weight.view(7, 3, 8)
    torch.testing.assert_close(gram[1], slices[:, 1].mT @ slices[:, 1])


def test_written_norm_is_absent_without_a_projection():
    class Bare(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = Bare()
    with hw.watch(model) as heads:
        model(torch.randn(2, 3, 5, 8))
    assert "output_norm" in heads.rows()[0]
    assert "written_norm" not in heads.rows()[0]


# -- projections of all kinds -----------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Linear layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)
        self.dropout = nn.Dropout(0.5)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


class RectifiedAdapter(Adapted):
    """Linear layer with an adapter that is not linear."""

    def forward(self, x):
        return self.base(x) + self.up(self.down(x).relu())


class Quantised(nn.Module):
    """Linear layer whose weight is stored in 8 bits."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Convolution(nn.Conv1d):
    """Convolution of width 1 over tokens, which it moves to the last axis."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, 1)


def with_hook():
    linear = nn.Linear(WIDTH, WIDTH)
    linear.register_forward_hook(lambda module, args, output: output * 2.0)
    return linear


def with_other_forward():
    linear = nn.Linear(WIDTH, WIDTH)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight * 3.0)
    return linear


LINEAR = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "adapter": Adapted,
    "adapter around another": lambda: nn.Sequential(Adapted(), nn.Identity()),
    "quantised": Quantised,
    "with dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
    "two": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "older weight norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "another forward": with_other_forward,
    "convolution": Convolution,
}
NOT_LINEAR = {
    "hook": with_hook,
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "rectifier": lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    "adapter with a rectifier": RectifiedAdapter,
}


class Attention(nn.Module):
    """Attention with a projection module of a given kind; `before` is applied to the heads' outputs."""

    def __init__(self, projection, before=lambda x: x):
        super().__init__()
        self.qkv, self.out_proj, self.before = nn.Linear(WIDTH, 3 * WIDTH), projection, before

    def forward(self, x):
        self.heads = sdpa(*map(split, self.qkv(x).chunk(3, -1)))
        return self.project(self.before(merge(self.heads)))

    def project(self, x):
        return self.out_proj(x.mT).mT if isinstance(self.out_proj, nn.Conv1d) else self.out_proj(x)


def written(module):
    """Return the mean norm of what each head writes."""
    alone = [module.heads * (torch.arange(3)[:, None, None] == head) for head in (0, 1, 2)]
    none = module.project(torch.zeros(2, 7, WIDTH))
    parts = [module.project(merge(out)) - none for out in alone]
    return [part.norm(dim=-1).mean().item() for part in parts]


@pytest.mark.parametrize("kind", LINEAR)
@torch.no_grad()
def test_the_map_that_the_projection_computes_is_used(kind):
    model, x = nn.Sequential(Attention(LINEAR[kind]())).eval(), torch.randn(2, 7, WIDTH)
    before = torch.get_rng_state()
    ran = []
    model[0].out_proj.register_forward_hook(lambda *_: ran.append(None))
    with hw.watch(model) as heads:
        output = model(x)
    assert len(ran) == 1
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(output, model(x))
    assert [row["written_norm"] for row in heads.rows()] == pytest.approx(written(model[0]), rel=1e-4)


def require_left_out(model, x):
    expected = "the output projection was not seen to map the outputs of the heads .*, so written_norm is left out: 0$"
    with pytest.warns(UserWarning, match=expected), hw.watch(model) as heads:
        [model(x) for _ in range(2)]
    assert all("written_norm" not in row and "output_norm" in row for row in heads.rows())


@pytest.mark.parametrize("kind", NOT_LINEAR)
@torch.no_grad()
def test_a_projection_that_is_not_a_linear_map_is_left_out(kind):
    require_left_out(nn.Sequential(Attention(NOT_LINEAR[kind]())).eval(), torch.randn(2, 7, WIDTH))


class BatchNormed(nn.Sequential):
    """A linear layer with a batch norm of its features."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        return self[1](self[0](x).mT).mT


@torch.no_grad()
def test_a_projection_that_normalises_by_the_batch_is_left_out_in_training():
    model, x = nn.Sequential(Attention(BatchNormed())), torch.randn(2, 7, WIDTH)
    require_left_out(model, x)
    model.eval()
    with hw.watch(model) as heads:
        model(x)
    assert all("written_norm" in row for row in heads.rows())
    with pytest.warns(UserWarning, match="was not seen to map"), hw.watch(model) as heads:
        [model.train(training)(x) for training in (False, True)]
    assert all("written_norm" not in row for row in heads.rows())


BEFORE = {
    "norm of all": lambda x: nn.functional.layer_norm(x, x.shape[-1:], torch.rand(WIDTH)),
    "factor by feature": lambda x: x * torch.rand(x.shape[1:]).sigmoid(),
    "factor by head": lambda x: x * torch.tensor([1.0, 0.9, 1.1]).repeat_interleave(5),
    "factor by token": lambda x: x * torch.linspace(0.5, 0.9, 7)[:, None],
}


@pytest.mark.parametrize("before", BEFORE)
@torch.no_grad()
def test_a_projection_of_something_else_than_the_heads_is_left_out(before):
    model = nn.Sequential(Attention(nn.Linear(WIDTH, WIDTH), BEFORE[before])).eval()
    require_left_out(model, torch.randn(2, 7, WIDTH))


class Misnamed(Attention):
    """Attention in which another module has the usual name of an output projection."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH))
        self.mixes = nn.Linear(WIDTH, WIDTH)

    def project(self, x):
        return self.mixes(x)

    def forward(self, x):
        return super().forward(self.out_proj(x))


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_a_projection_that_is_found_by_a_wrong_name_is_left_out(training):
    require_left_out(nn.Sequential(Misnamed()).train(training), torch.randn(2, 7, WIDTH))


@pytest.mark.parametrize("kind", ["linear", "with dropout", "adapter", "convolution"])
@torch.no_grad()
def test_a_projection_with_dropout_before_it_is_confirmed_by_its_weight_in_training(kind):
    attention = Attention(LINEAR[kind](), nn.Dropout(0.3))
    model, x = nn.Sequential(attention), torch.randn(2, 7, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    model.eval()(x)
    assert [row["written_norm"] for row in heads.rows()] == pytest.approx(written(attention), rel=1e-4)


@torch.no_grad()
def test_a_projection_is_confirmed_under_gates_and_after_changes_of_its_weight():
    model, x = nn.Sequential(Attention(nn.Linear(WIDTH, WIDTH))).eval(), torch.randn(2, 7, WIDTH)
    model(x)
    expected = written(model[0])
    with hw.watch(model) as heads, hw.gate(model, {("0", 1): 0.0, ("0", 2): -0.5}):
        model(x)
    assert [row["written_norm"] for row in heads.rows()] == pytest.approx(expected, rel=1e-4)
    with hw.watch(model) as heads:
        model(x)
        first = written(model[0])
        model[0].out_proj.weight *= 3.0
        model(x)
    assert [row["written_norm"] for row in heads.rows()] == pytest.approx([2.0 * each for each in first], rel=1e-4)


def test_dropout_after_the_projection_does_not_count_in_training():
    model, x = nn.Sequential(Attention(LINEAR["with dropout"]())), torch.randn(2, 7, WIDTH)
    with torch.no_grad(), hw.watch(model) as heads:
        model(x)
        model.eval()
        model(x)
        assert [row["written_norm"] for row in heads.rows()] == pytest.approx(written(model[0]), rel=1e-4)


class Merge(nn.Module):
    def forward(self, out):
        return merge(out)


class Renamed(nn.Module):
    """Attention whose projection has two names, one of them in a sequence that also merges the heads."""

    def __init__(self, way):
        super().__init__()
        self.qkv, self.mixes, self.way = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), way
        self.out = nn.Sequential(Merge(), self.mixes)

    def forward(self, x):
        return self.out(self.way(*map(split, self.qkv(x).chunk(3, -1))))


@pytest.mark.parametrize("way", [sdpa, softmax])
@torch.no_grad()
def test_a_projection_with_two_names_is_left_out(way):
    require_left_out(nn.Sequential(Renamed(way)).eval(), torch.randn(2, 7, WIDTH))


class InSequence(nn.Module):
    """Attention of two heads, with a projection in a sequence."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(14, 42), nn.Sequential(nn.Linear(14, 14))

    def attend(self, x):
        q, k, v = (part.unflatten(-1, (2, 7)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    forward = attend


class CalledDirectly(nn.Module):
    """A module that does not call its attention module, but a method of it."""

    def __init__(self):
        super().__init__()
        self.inner = InSequence()

    def forward(self, x):
        return self.inner.attend(x)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = InSequence(), InSequence()

    def forward(self, x):
        return self.second.attend(self.first.attend(x))


def quantized():
    model = InSequence()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        model.out = torch.ao.quantization.quantize_dynamic(model.out, {nn.Linear}, dtype=torch.qint8)
    return model


@torch.no_grad()
def test_a_projection_in_a_module_that_is_not_called_is_found():
    torch.manual_seed(0)
    model, x = CalledDirectly(), torch.randn(2, 5, 14)
    model.inner.out = model.inner.out[0]
    with hw.watch(model) as heads:
        model(x)
    with hw.watch(model.inner) as of_inner:
        model.inner(x)
    for row, other in zip(heads.rows(), of_inner.rows(), strict=True):
        assert row["written_norm"] == pytest.approx(other["written_norm"])


class UnusualName(nn.Module):
    """Attention with a projection whose name is none of the usual ones."""

    def __init__(self):
        super().__init__()
        self.mixture = nn.Linear(14, 14)

    def forward(self, x):
        heads = x.unflatten(-1, (2, 7)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.mixture(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("new", [TwoLayers, quantized, UnusualName])
@torch.no_grad()
def test_modules_whose_projection_is_not_found_are_named(new):
    torch.manual_seed(0)
    model = new()
    match = f"so written_norm is left out: {type(model).__name__}$"
    with pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        model(torch.randn(2, 5, 14))
    assert not any("written_norm" in row for row in heads.rows())
    assert all("output_norm" in row for row in heads.rows())


def run_with_another(model):
    model[1] = InSequence()
    model(torch.randn(2, 5, 14))


@torch.no_grad()
def test_modules_that_are_added_while_a_model_is_watched_are_named():
    model, match = nn.Sequential(nn.Linear(14, 14), InSequence()), "added to the model while it was watched.*: 1$"
    with pytest.warns(UserWarning, match=match), hw.watch(model):
        run_with_another(model)


@torch.no_grad()
def test_a_projection_under_vmap_is_not_compared():
    class Mapped(InSequence):
        def attend(self, x):
            q, k, v = (part.unflatten(-1, (2, 7)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            weights = (q @ k.mT).softmax(-1)
            return torch.vmap(self.out)((weights @ v).transpose(1, 2).flatten(2))

        forward = attend

    model, x = nn.Sequential(Mapped()), torch.randn(2, 5, 14)
    plain = model(x)
    with pytest.warns(UserWarning, match="so written_norm is left out: 0$"), hw.watch(model) as heads:
        torch.testing.assert_close(model(x), plain)
    assert len(heads.rows()) == 2


class Chosen(InSequence):
    """Attention with two output projections, one of which the class states."""

    which = 0

    def __init__(self):
        super().__init__()
        self.other, self.adapter = nn.Linear(14, 14), nn.Linear(14, 14)

    def forward(self, x):
        """Return the output of one projection, or of a projection with an adapter."""
        q, k, v = (part.unflatten(-1, (2, 7)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = (self.out, self.other)[Chosen.which == 1](heads)
        return out + self.adapter(heads) if Chosen.which == 2 else out


def with_another_projection(model, monkeypatch):
    monkeypatch.setattr(Chosen, "which", 1)


def with_an_adapter(model, monkeypatch):
    monkeypatch.setattr(Chosen, "which", 2)


def with_a_new_module(model, monkeypatch):
    model[0].out = nn.Linear(14, 14)


@pytest.mark.parametrize("change", [with_another_projection, with_an_adapter, with_a_new_module])
@torch.no_grad()
def test_modules_whose_projection_changes_between_two_calls_are_named(change, monkeypatch):
    model, x = nn.Sequential(Chosen()), torch.randn(2, 5, 14)
    match = "so written_norm is left out: 0$"

    def run():
        with hw.watch(model) as heads:
            model(x)
            change(model, monkeypatch)
            model(x[:, 1:])  # calls of the same size follow a plan, and contradict it
        return heads

    with pytest.warns(UserWarning, match=match):
        heads = run()
    assert not any("written_norm" in row for row in heads.rows())
    assert all("output_norm" in row for row in heads.rows())


@torch.no_grad()
def test_the_data_of_a_projection_may_be_replaced_between_two_calls():
    model, x = nn.Sequential(InSequence()), torch.randn(2, 5, 14)
    rows = []
    for weights in ([model[0].out[0].weight.data], [2 * model[0].out[0].weight.data], None):
        with hw.watch(model) as heads:
            for weight in weights or [model[0].out[0].weight.data / 2, model[0].out[0].weight.data]:
                model[0].out[0].weight.data = weight
                model(x)
        rows.append([row["written_norm"] for row in heads.rows()])
    means = [(one + other) / 2 for one, other in zip(*rows[:2], strict=True)]
    assert rows[2] == pytest.approx(means)
