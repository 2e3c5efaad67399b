"""Measures of the heads of trained models: ablation, sharpness, distance and rank."""

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import nn

import headwise as hw
from headwise.studies.model import Transformer
from headwise.studies.model_shape import ModelShape
from research.claims import (
    head_measures,
)


def made(heads, seed):
    """Two layers of so many heads, whose weights are far from even."""
    torch.manual_seed(seed)
    model = Transformer(ModelShape(13, 16, 2, 6000), hw.Setting(heads, 16 // heads, heads)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return model


def batches_of(number):
    return [{"input_ids": torch.randint(13, (3, 7))} for _ in range(number)]


EVERY = list(itertools.product(range(2), range(2)))
"""The heads of two layers of two."""


def plain(model, batches, heads=()):
    with torch.no_grad(), hw.gate(model, dict.fromkeys(heads, 0.0)):
        return torch.cat([hw.next_token_loss(model, batch) for batch in batches]).double().mean().item()


def least_first(model, batches):
    """By the mean over examples of the absolute derivative in a gate, an example at a time."""
    found = torch.zeros(2, 2)
    for row in torch.cat([batch["input_ids"] for batch in batches]):
        gates = [torch.ones(2, requires_grad=True) for _ in range(2)]
        with hw.gate(model, dict(enumerate(gates))):
            loss = hw.next_token_loss(model, {"input_ids": row[None]}).sum()
        found += torch.stack(torch.autograd.grad(loss, gates)).abs()
    return sorted(EVERY, key=lambda head: found[head].item())


def test_heads_are_removed_at_random_and_the_least_important_first():
    model, training, held_out = made(2, 3), batches_of(1), batches_of(1)
    found = head_measures.removals(model, training, held_out, hw.next_token_loss, 5)
    order = least_first(model, training)
    without = {some: plain(model, held_out, some) for n in range(5) for some in itertools.combinations(EVERY, n)}
    assert len({f"{loss:.3f}" for loss in without.values()}) == 16
    assert (found["heads"], found["whole"]) == (4, pytest.approx(without[()], rel=1e-5))
    assert found["least"] == {n: pytest.approx(without[tuple(sorted(order[:n]))], rel=1e-5) for n in (1, 2, 3, 4)}
    assert {number: len(each) for number, each in found["random"].items()} == {1: 5, 2: 5, 3: 5}
    for number, losses in found["random"].items():
        sets = [loss for some, loss in without.items() if len(some) == number]
        assert all(min(abs(loss - each) for each in sets) < 1e-5 for loss in losses)
        assert len({f"{loss:.3f}" for loss in losses}) > 1


def test_to_remove_heads_that_give_nothing_costs_nothing():
    model = made(2, 3)
    with torch.no_grad():
        model.layers[0].self_attn.out_proj.weight[:, 8:] = 0.0
        model.layers[1].self_attn.out_proj.weight[:, :8] = 0.0
    found = head_measures.removals(model, batches_of(1), batches_of(1), hw.next_token_loss, 1)
    assert found["least"][1] == found["least"][2] == pytest.approx(found["whole"], abs=1e-6)
    assert abs(found["least"][4] - found["whole"]) > 0.01


def test_an_untrained_model_is_made_as_sharp():
    model, untrained, batches = made(2, 3), made(2, 4), batches_of(1)
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


def inputs_of(model, batch):
    """What each layer that attends is given, and the layers."""
    layers = [module for module in model.modules() if isinstance(module, hw.MultiHeadAttention)]
    given = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: given.append(args[0])) for layer in layers]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return zip(layers, given, strict=True)


@torch.no_grad()
def test_distances_are_means_over_pairs_of_a_layer():
    """The Jensen-Shannon distance by scipy, row by row; layers of one head have none."""
    model, batches = made(4, 3), batches_of(2)
    found = {0: [], 1: []}
    for batch in batches:
        for number, (layer, given) in enumerate(inputs_of(model, batch)):
            weights = layer(given, return_weights=True)[1].double().numpy()
            for a, b in itertools.combinations(range(4), 2):
                found[number].append(jensenshannon(weights[:, a], weights[:, b], axis=-1).mean())
    wanted = {number: np.mean(each) for number, each in found.items()}
    assert head_measures.distances(model, batches) == pytest.approx(wanted, rel=1e-4)
    assert head_measures.distances(made(1, 3), batches) == {}


@torch.no_grad()
def test_the_rank_of_scores_is_head_dim():
    model, (batch,) = made(4, 3), batches_of(1)
    found = head_measures.ranks(model, batch["input_ids"])
    ranks = {"of the scores": [], "of the weights": []}
    for layer, given in inputs_of(model, batch):
        q, k = (
            layer.rotary.rotate(each(given).double().unflatten(-1, (4, 4)).transpose(1, 2), torch.arange(7)[None])
            for each in (layer.q_proj, layer.k_proj)
        )
        for name, matrices in zip(ranks, (q @ k.mT, layer(given, return_weights=True)[1].double()), strict=True):
            for values in np.linalg.svd(matrices.numpy().reshape(-1, 7, 7), compute_uv=False):
                ranks[name].append(next(n for n in range(8) if sum(values[:n] ** 2) >= 0.99 * sum(values**2)))
    assert found == {"rank": 4.0, **{name: pytest.approx(np.mean(each)) for name, each in ranks.items()}}
