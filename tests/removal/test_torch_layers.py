"""Removal of heads from torch's attention layers, against gates of 0, and fits of their output projections."""

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.compat import MultiheadAttention
from headwise.compression.pruning.pruning_plan import PlannedModule
from headwise.compression.scores.least_squares import LeastSquaresScores
from headwise.errors import InputError
from headwise.intercept.survey import survey
from headwise.removal.torch_layers import with_own_layers


class CrossAttention(nn.Module):
    """Attention of one input to another one of other width, with learned keys and values."""

    def __init__(self, batch_first):
        super().__init__()
        self.layer = nn.MultiheadAttention(24, 4, add_bias_kv=True, kdim=10, vdim=7, batch_first=batch_first)

    def forward(self, x, keys, values):
        return self.layer(x, keys, values, need_weights=False)[0]


def encoder(batch_first=True):
    """Return an encoder of 2 layers of 4 heads, in float64."""
    block = nn.TransformerEncoderLayer(24, 4, 37, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False)


def numbers(*shape):
    """Return numbers drawn with a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


MODELS = {
    "encoder": (encoder, lambda: (numbers(3, 9, 24),)),
    "tokens first": (lambda: encoder(batch_first=False), lambda: (numbers(9, 3, 24),)),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 37, dropout=0.0, batch_first=True), 2),
        lambda: (numbers(3, 9, 24), numbers(3, 5, 24)),
    ),
    "cross": (lambda: CrossAttention(True), lambda: (numbers(3, 9, 24), numbers(3, 5, 10), numbers(3, 5, 7))),
}


def model_and_arguments(name):
    """Return a model in evaluation mode, whose biases are not 0, and its arguments."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, MODELS[name][1]()


@pytest.mark.parametrize("name", MODELS)
def test_pruned_layers_equal_gates_of_0(name):
    model, arguments = model_and_arguments(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    registry = survey(model, lambda: model(*arguments))
    gates = {(labels["layer"], 1 + labels["layer"] % 2): 0.0 for _, labels in registry.head_labels()}
    plan = hw.PruningPlan(_modules(registry, gates), "uniform", 0.75, "by hand", 1)
    with hw.gate(model, gates), torch.no_grad():
        expected = model(*arguments)
    pruned = hw.prune(model, plan)
    with torch.no_grad():
        found = pruned(*arguments)
    assert (found - expected).abs().max() < 1e-12
    assert (model(*arguments) - expected).abs().max() > 0.01
    layers = [module for module in pruned.modules() if isinstance(module, nn.MultiheadAttention)]
    assert {layer.num_heads for layer in layers} == {3}
    assert all(type(layer) is MultiheadAttention for layer in layers)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(type(module) is MultiheadAttention for module in model.modules())


def _modules(registry, gates):
    """Return the modules of a plan without the heads that have a gate."""
    by_module = {}
    for record, labels in registry.head_labels():
        by_module.setdefault((labels["layer"], record.site.path, labels["kind"]), []).append(labels["head"])
    return tuple(
        PlannedModule(layer, path, kind, len(heads), len(heads), tuple(h for h in heads if (layer, h) not in gates))
        for (layer, path, kind), heads in by_module.items()
    )


def test_fitted_projections_reproduce_the_dense_layer_better():
    model, (x,) = model_and_arguments("encoder")
    batches = [numbers(8, 9 + number, 24) for number in range(6)]
    plan = hw.plan_pruning(LeastSquaresScores(model, batches), keep=0.75)
    with torch.no_grad():
        dense, plain, fitted = (
            each(x) for each in (model, hw.prune(model, plan), hw.prune(model, plan, calibration=batches))
        )
    assert (fitted - dense).square().mean() < 0.8 * (plain - dense).square().mean()


def test_own_layers_share_the_parameters():
    model, (x,) = model_and_arguments("encoder")
    own = with_own_layers(model)
    assert all(new is old for new, old in zip(own.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(own(x), model(x), rtol=1e-12, atol=1e-12)


def test_padding_and_tokens_first_are_refused():
    model, (x,) = model_and_arguments("encoder")
    batch = {"src": x, "src_key_padding_mask": torch.zeros(3, 9, dtype=torch.bool).index_fill(1, torch.tensor(8), True)}
    with pytest.raises(InputError, match="a mask that hides 3 of 27 tokens in layers.0.self_attn; give such a mask"):
        LeastSquaresScores(model, [batch])
    model, (x,) = model_and_arguments("tokens first")
    with pytest.raises(InputError, match="the batch first"):
        LeastSquaresScores(model, [x], lambda model, batch: model(*batch.values()).sum((1, 2)))


def test_hooks_and_layers_in_two_places_are_refused():
    model, (x,) = model_and_arguments("encoder")
    plan = hw.plan_pruning(LeastSquaresScores(model, [x]), keep=0.5)
    hook = model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="without hooks, got a hook of layers.1.self_attn"):
        hw.prune(model, plan)
    hook.remove()
    model.layers[1].self_attn = model.layers[0].self_attn
    with pytest.raises(InputError, match="one for layers.0.self_attn and layers.1.self_attn"):
        with_own_layers(model)


def test_a_layer_can_be_the_model():
    layer = nn.MultiheadAttention(24, 4, batch_first=True).double().eval()
    own = with_own_layers(layer)
    x = numbers(2, 5, 24)
    with torch.no_grad():
        torch.testing.assert_close(own(x, x, x)[0], layer(x, x, x)[0], rtol=1e-12, atol=1e-12)
