"""Measures of the heads of trained models: ablation, sharpness, distance and rank."""

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import nn

import headwise as hw
from headwise.studies.model import ModelShape, Transformer
from research.claims import head_measures


def random_model(heads, seed):
    """Return a model of two layers with this number of heads, whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = Transformer(ModelShape(13, 16, 2, 6000), hw.Setting(heads, 16 // heads, heads)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return model


def batches_of(number):
    """Return this number of batches of random token ids."""
    return [{"input_ids": torch.randint(13, (3, 7))} for _ in range(number)]


ALL_HEADS = list(itertools.product(range(2), range(2)))
"""(layer, head) of all heads of a model with two layers of two heads."""


def mean_loss(model, batches, heads=()):
    """Return the mean next-token loss over all sequences without the given heads."""
    with torch.no_grad(), hw.gate(model, dict.fromkeys(heads, 0.0)):
        return torch.cat([hw.next_token_loss(model, batch) for batch in batches]).double().mean().item()


def by_importance(model, batches):
    """Return all heads sorted by the mean over sequences of the absolute derivative with respect to the gate, computed
    one sequence at a time.
    """
    absolute_derivatives = torch.zeros(2, 2)
    for row in torch.cat([batch["input_ids"] for batch in batches]):
        gates = [torch.ones(2, requires_grad=True) for _ in range(2)]
        with hw.gate(model, dict(enumerate(gates))):
            loss = hw.next_token_loss(model, {"input_ids": row[None]}).sum()
        absolute_derivatives += torch.stack(torch.autograd.grad(loss, gates)).abs()
    return sorted(ALL_HEADS, key=lambda head: absolute_derivatives[head].item())


def test_removals_are_all_halves_and_the_least_important_one():
    model, validation, test = random_model(2, 3), batches_of(1), batches_of(1)
    found = head_measures.removals(model, validation, test, hw.next_token_loss)
    order = by_importance(model, validation)
    halves = list(itertools.combinations(ALL_HEADS, 2))
    assert (found["heads"], found["halves"]) == (4, 6)
    assert found["half"] == pytest.approx([mean_loss(model, test, each) for each in halves], rel=1e-5)
    assert found["least"] == pytest.approx(mean_loss(model, test, order[:2]), rel=1e-5)
    assert found["whole"] == pytest.approx(mean_loss(model, test), rel=1e-5)
    assert found["all"] == pytest.approx(mean_loss(model, test, ALL_HEADS), rel=1e-5)
    assert len({f"{loss:.3f}" for loss in found["half"]}) == 6


def test_of_many_halves_different_ones_are_drawn(monkeypatch):
    monkeypatch.setattr(head_measures, "MOST_SETS", 5)
    model, batch = random_model(2, 3), batches_of(1)
    found = head_measures.removals(model, batch, batch, hw.next_token_loss)
    every = [mean_loss(model, batch, each) for each in itertools.combinations(ALL_HEADS, 2)]
    assert len({f"{loss:.5f}" for loss in found["half"]}) == 5
    assert all(min(abs(loss - each) for each in every) < 1e-5 for loss in found["half"])


def test_removing_heads_with_zero_output_does_not_change_the_loss():
    model = random_model(2, 3)
    with torch.no_grad():
        model.layers[0].self_attn.out_proj.weight[:, 8:] = 0.0
        model.layers[1].self_attn.out_proj.weight[:, :8] = 0.0
    found = head_measures.removals(model, batches_of(1), batches_of(1), hw.next_token_loss)
    assert found["least"] == pytest.approx(found["whole"], abs=1e-6)
    assert abs(found["all"] - found["whole"]) > 0.01


def test_untrained_model_is_given_the_entropies_of_a_trained_one():
    model, untrained, batches = random_model(2, 3), random_model(2, 4), batches_of(1)
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.mul_(3.0)
        model.layers[1].self_attn.q_proj.weight.mul_(0.2)
    before = {name: each.clone() for name, each in untrained.state_dict().items()}
    goal, first = head_measures.entropies(model, batches), head_measures.entropies(untrained, batches)
    changed = head_measures.with_entropies(untrained, goal, batches)
    for name, each in head_measures.entropies(changed, batches).items():
        assert abs(each - goal[name]) < 0.03 < abs(first[name] - goal[name])
    for name, each in changed.state_dict().items():
        assert torch.equal(before[name], untrained.state_dict()[name])
        assert torch.equal(each, before[name]) == ("q_proj" not in name)


def layers_and_inputs(model, batch):
    """Return pairs of an attention layer and the input it receives for a batch."""
    layers = [module for module in model.modules() if isinstance(module, hw.MultiHeadAttention)]
    layer_inputs = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: layer_inputs.append(args[0])) for layer in layers]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return zip(layers, layer_inputs, strict=True)


@torch.no_grad()
def test_distances_are_means_over_pairs_of_heads_of_a_layer():
    """The expected Jensen-Shannon distance is computed by scipy row by row. Layers with one head have no distance."""
    model, batches = random_model(4, 3), batches_of(2)
    found = {0: [], 1: []}
    for batch in batches:
        for number, (layer, layer_inputs) in enumerate(layers_and_inputs(model, batch)):
            weights = layer(layer_inputs, return_weights=True)[1].double().numpy()
            for a, b in itertools.combinations(range(4), 2):
                found[number].append(jensenshannon(weights[:, a], weights[:, b], axis=-1).mean())
    expected = {number: np.mean(each) for number, each in found.items()}
    assert head_measures.distances(model, batches) == pytest.approx(expected, rel=1e-4)
    assert head_measures.distances(random_model(1, 3), batches) == {}


@torch.no_grad()
def test_rank_of_scores_is_the_head_dim():
    model, (batch,) = random_model(4, 3), batches_of(1)
    found = head_measures.ranks(model, batch["input_ids"])
    ranks = {"of the scores": [], "of the weights": []}
    for layer, layer_inputs in layers_and_inputs(model, batch):
        q, k = (
            layer.rotary.rotate(
                each(layer_inputs).double().unflatten(-1, (4, 4)).transpose(1, 2), torch.arange(7)[None]
            )
            for each in (layer.q_proj, layer.k_proj)
        )
        for name, matrices in zip(ranks, (q @ k.mT, layer(layer_inputs, return_weights=True)[1].double()), strict=True):
            for values in np.linalg.svd(matrices.numpy().reshape(-1, 7, 7), compute_uv=False):
                ranks[name].append(next(n for n in range(8) if sum(values[:n] ** 2) >= 0.99 * sum(values**2)))
    assert found == {"rank": 4.0, **{name: pytest.approx(np.mean(each)) for name, each in ranks.items()}}
