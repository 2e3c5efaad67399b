"""What is looked at in a model: how far apart its heads are, of what rank their scores, what is lost without heads.

Distances are those of `hw.redundancy`: the Jensen-Shannon distance of the weights of two heads of a layer, the mean
over rows, from 0 to sqrt(ln 2) = 0.83.
"""

import copy
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.losses import Loss
from headwise.data.batches import call_model

ENERGY = 0.99
"""The share of the squares of singular values that a rank has to hold."""

SMALLEST = 1e-9
"""A singular value below that share of the largest counts as none."""

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Of the heads that are removed."""

HALVINGS, WIDEST = 9, 8.0
"""Steps of the search for a sharpness, and the powers of two among which it goes."""

# -- how far apart ----------------------------------------------------------------------------------------------------


def distances(model: nn.Module, batches: Sequence[Any]) -> dict[int, float]:
    """The mean distance of every two heads, by layer; layers of one head are left out."""
    found = hw.redundancy(model, batches)
    layers = [head["layer"] for head in found.heads]
    values: dict[int, list[float]] = {}
    for a, b in combinations(range(len(layers)), 2):
        if layers[a] == layers[b]:
            values.setdefault(layers[a], []).append(found.distance[a, b].item())
    return {layer: sum(each) / len(each) for layer, each in values.items()}


def entropies(model: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
    """The mean entropy of the heads of each module that attends, nats."""
    was = model.training
    model.eval()
    with torch.no_grad(), hw.watch(model) as heads:
        for batch in batches:
            call_model(model, batch)
    model.train(was)
    rows: dict[str, list[float]] = {}
    for row in heads.rows():
        rows.setdefault(row["module"], []).append(row["entropy"])
    return {module: sum(each) / len(each) for module, each in rows.items()}


def sharpened(model: nn.Module, wanted: dict[str, float], batches: Sequence[Any]) -> nn.Module:
    """A copy whose queries are longer or shorter, so that each layer's mean entropy is the wanted one, or the nearest.

    Heads that attend evenly cannot differ: with this, an untrained model is held against a trained one whose heads
    are as sharp. All layers are searched at once, by halving.
    """
    made = copy.deepcopy(model)
    queries = {name: _query(made.get_submodule(name)) for name in wanted}
    first = {name: [each.detach().clone() for each in query.parameters()] for name, query in queries.items()}
    low, high = dict.fromkeys(wanted, -WIDEST), dict.fromkeys(wanted, WIDEST)
    for _ in range(HALVINGS):
        middle = {name: (low[name] + high[name]) / 2 for name in wanted}
        with torch.no_grad():
            for name, query in queries.items():
                for parameter, before in zip(query.parameters(), first[name], strict=True):
                    parameter.copy_(before * 2 ** middle[name])
        for name, entropy in entropies(made, batches).items():
            (low if entropy > wanted[name] else high)[name] = middle[name]
    return made


def _query(module: nn.Module) -> nn.Module:
    """The projection of queries, by the names it has in our layer, in Llama's and in BERT's."""
    return module.get_submodule("q_proj" if hasattr(module, "q_proj") else "query")


def apart(trained: nn.Module, untrained: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """Distances by layer of a trained model, of an untrained one, and of that one made as sharp."""
    goal = entropies(trained, batches)
    sharp = sharpened(untrained, goal, batches)
    models = {"trained": trained, "untrained": untrained, "as sharp": sharp}
    return {
        "distance": {name: distances(model, batches) for name, model in models.items()},
        "entropy": {name: list(entropies(model, batches).values()) for name, model in models.items()},
    }


# -- of what rank -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def ranks(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Means over layers, heads and sequences: the rank of the scores, and what holds 99 % of them and of the weights.

    The scores are those of all pairs of tokens, before the mask and the softmax.
    """
    inputs: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, hw.MultiHeadAttention)}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))
        for name, layer in layers.items()
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    found: dict[str, list[Tensor]] = {"rank": [], "of the scores": [], "of the weights": []}
    for name, layer in layers.items():
        q, k = (_turned(layer, projection(inputs[name])) for projection in (layer.q_proj, layer.k_proj))
        scores = torch.linalg.svdvals(q @ k.mT)
        _, weights = layer(inputs[name], return_weights=True)
        found["rank"].append((scores > SMALLEST * scores[..., :1]).double().sum(-1).flatten())
        found["of the scores"].append(_holding(scores))
        found["of the weights"].append(_holding(torch.linalg.svdvals(weights.double())))
    return {name: torch.cat(each).mean().item() for name, each in found.items()}


def _turned(layer: hw.MultiHeadAttention, projected: Tensor) -> Tensor:
    """Queries or keys as the scores are made of them, in float64: `(batch, heads, length, head_dim)`."""
    heads = projected.double().unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2)
    if layer.rotary is None:
        return heads
    return layer.rotary.rotate(heads, torch.arange(heads.shape[2])[None])


def _holding(values: Tensor) -> Tensor:
    """How many singular values hold `ENERGY` of all."""
    share = (values**2).cumsum(-1) / (values**2).sum(-1, keepdim=True)
    return ((share < ENERGY).sum(-1) + 1).double().flatten()


# -- without heads ----------------------------------------------------------------------------------------------------


def removals(
    model: nn.Module, training: Sequence[Any], held_out: Sequence[Any], loss: Loss, drawn: int
) -> dict[str, Any]:
    """The held-out loss without some shares of all heads: drawn at random, and the least important first.

    Importance is the mean absolute derivative of the loss in a head's gate (Michel et al. 2019), on training data.
    """
    ranking = hw.importance(model, training, loss).ranking()[::-1]
    order, sets = random.Random(0), {}
    numbers = sorted({round(share * len(ranking)) for share in SHARES if (share * len(ranking)).is_integer()})
    for number in numbers:
        sets[f"least {number}"] = ranking[:number]
        for each in range(drawn if number < len(ranking) else 0):
            sets[f"random {number} {each}"] = order.sample(ranking, number)
    found = hw.ablate(model, held_out, loss, units=sets)
    losses = {row.name: row.statistics["loss"].value for row in found.rows}
    return {
        "heads": len(ranking),
        "whole": found.baseline.value,
        "least": {number: losses[f"least {number}"] for number in numbers},
        "random": {
            number: [losses[name] for name in losses if name.startswith(f"random {number} ")]
            for number in numbers
            if number < len(ranking)
        },
    }
