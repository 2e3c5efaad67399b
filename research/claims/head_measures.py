"""Measures of the heads of a trained model: distances between heads, ranks of the scores, and the loss without heads.

The distance between two heads is that of `hw.redundancy`: the Jensen-Shannon distance of their attention weights,
averaged over rows. It lies between 0 and sqrt(ln 2) = 0.83.
"""

import copy
import math
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
"""Share of the sum of squared singular values that the leading singular values must reach."""

SMALLEST = 1e-9
"""A singular value below this share of the largest one counts as zero."""

MOST_SETS = 70
"""Largest number of sets of half of the heads that are removed; all sets if there are no more."""

HALVINGS, MAX_POWER = 9, 8.0
"""Steps of the bisection for the scale of the queries, and the largest power of two that it tries."""

# -- distances between heads ------------------------------------------------------------------------------------------


def distances(model: nn.Module, batches: Sequence[Any]) -> dict[int, float]:
    """Return the mean distance over all pairs of heads, by layer. Layers with one head are left out."""
    redundancy = hw.redundancy(model, batches)
    layers = [head["layer"] for head in redundancy.heads]
    values: dict[int, list[float]] = {}
    for a, b in combinations(range(len(layers)), 2):
        if layers[a] == layers[b]:
            values.setdefault(layers[a], []).append(redundancy.distance[a, b].item())
    return {layer: sum(of_layer) / len(of_layer) for layer, of_layer in values.items()}


def entropies(model: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
    """Return the mean entropy of the heads of each attention module in nats, by the path of the module."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), hw.watch(model) as heads:
        for batch in batches:
            call_model(model, batch)
    model.train(was_training)
    rows: dict[str, list[float]] = {}
    for row in heads.rows():
        rows.setdefault(row["module"], []).append(row["entropy"])
    return {module: sum(of_module) / len(of_module) for module, of_module in rows.items()}


def with_entropies(model: nn.Module, targets: dict[str, float], batches: Sequence[Any]) -> nn.Module:
    """Copy a model and scale its queries so that the mean entropy of each layer comes closest to a target.

    Heads with uniform attention cannot differ from each other. The copy makes an untrained model comparable with a
    trained one whose heads are equally sharp. One bisection over powers of two searches all layers at once.

    Args:
        model: is not changed.
        targets: mean entropy in nats, by the path of the module.
        batches: data on which entropies are measured.
    """
    copied = copy.deepcopy(model)
    queries = {name: _query(copied.get_submodule(name)) for name in targets}
    first = {name: [each.detach().clone() for each in query.parameters()] for name, query in queries.items()}
    low, high = dict.fromkeys(targets, -MAX_POWER), dict.fromkeys(targets, MAX_POWER)
    for _ in range(HALVINGS):
        middle = {name: (low[name] + high[name]) / 2 for name in targets}
        with torch.no_grad():
            for name, query in queries.items():
                for parameter, before in zip(query.parameters(), first[name], strict=True):
                    parameter.copy_(before * 2 ** middle[name])
        for name, entropy in entropies(copied, batches).items():
            (low if entropy > targets[name] else high)[name] = middle[name]
    return copied


def _query(module: nn.Module) -> nn.Module:
    """Return the query projection of an attention module of headwise, Llama or BERT."""
    return module.get_submodule("q_proj" if hasattr(module, "q_proj") else "query")


def compare_with_untrained(trained: nn.Module, untrained: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """Measure distances and entropies of a trained model, an untrained one, and one scaled to the same entropy.

    Returns:
        `distance` and `entropy`, each by "trained", "untrained" and "as sharp", then by layer.
    """
    sharp = with_entropies(untrained, entropies(trained, batches), batches)
    models = {"trained": trained, "untrained": untrained, "as sharp": sharp}
    return {
        "distance": {name: distances(model, batches) for name, model in models.items()},
        "entropy": {name: list(entropies(model, batches).values()) for name, model in models.items()},
    }


# -- ranks ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def ranks(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Return the rank of the scores, and the number of singular values that carry 99 % of scores and of weights.

    Each number is a mean over layers, heads and sequences. The scores are those of all pairs of tokens, before mask
    and softmax. "99 %" is a share of the sum of squared singular values.
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
    values: dict[str, list[Tensor]] = {"rank": [], "of the scores": [], "of the weights": []}
    for name, layer in layers.items():
        q, k = (_rotated(layer, projection(inputs[name])) for projection in (layer.q_proj, layer.k_proj))
        scores = torch.linalg.svdvals(q @ k.mT)
        _, weights = layer(inputs[name], return_weights=True)
        values["rank"].append((scores > SMALLEST * scores[..., :1]).double().sum(-1).flatten())
        values["of the scores"].append(_number_of_leading(scores))
        values["of the weights"].append(_number_of_leading(torch.linalg.svdvals(weights.double())))
    return {name: torch.cat(parts).mean().item() for name, parts in values.items()}


def _rotated(layer: hw.MultiHeadAttention, projected: Tensor) -> Tensor:
    """Return queries or keys by head, rotated and in float64: `(batch, heads, length, head_dim)`."""
    heads = projected.double().unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2)
    if layer.rotary is None:
        return heads
    return layer.rotary.rotate(heads, torch.arange(heads.shape[2])[None])


def _number_of_leading(values: Tensor) -> Tensor:
    """Return how many leading singular values reach `ENERGY` of the sum of squares, flattened."""
    share = (values**2).cumsum(-1) / (values**2).sum(-1, keepdim=True)
    return ((share < ENERGY).sum(-1) + 1).double().flatten()


# -- ablation ---------------------------------------------------------------------------------------------------------


def removals(
    model: nn.Module, validation: Sequence[Any], test: Sequence[Any], loss: Loss, seed: int = 0
) -> dict[str, Any]:
    """Measure the test loss without half of the heads: every half if there are at most `MOST_SETS`, else that many
    different ones, drawn at random; and the least important half.

    Importance is the mean absolute derivative of the loss with respect to a head's gate (Michel et al. 2019), on
    validation data.

    Args:
        model: the trained model.
        validation: batches on which importance is measured.
        test: batches on which the loss is measured.
        loss: loss of each sequence.
        seed: of the draw.

    Returns:
        `heads`, their number in all layers; `halves`, the number of sets that exist; the losses `whole`, `all` (without
        any head), `least` (without the least important half), and `half` (a list, without each of the sets).
    """
    ranking = hw.importance(model, validation, loss).ranking()[::-1]
    half = len(ranking) // 2
    sets = {f"half {number}": drawn for number, drawn in enumerate(_halves(sorted(ranking), seed))}
    ablation = hw.ablate(model, test, loss, units={"all": ranking, "least": ranking[:half], **sets})
    losses = {row.name: row.statistics["loss"].value for row in ablation.rows}
    return {
        "heads": len(ranking),
        "halves": math.comb(len(ranking), half),
        "whole": ablation.baseline.value,
        "all": losses["all"],
        "least": losses["least"],
        "half": [losses[name] for name in sets],
    }


def _halves(heads: list[Any], seed: int) -> list[list[Any]]:
    """Return all sets of half of the heads, or `MOST_SETS` different ones if there are more."""
    half = len(heads) // 2
    if math.comb(len(heads), half) <= MOST_SETS:
        return [list(chosen) for chosen in combinations(heads, half)]
    generator = random.Random(seed)
    drawn: set[tuple[Any, ...]] = set()
    while len(drawn) < MOST_SETS:
        drawn.add(tuple(sorted(generator.sample(heads, half))))
    return [list(chosen) for chosen in sorted(drawn)]
