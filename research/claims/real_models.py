"""Distances between the heads of two real models, and of the same models untrained."""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

import headwise as hw
from headwise.data.models import load
from research.claims.head_measures import distances, entropies, with_entropies
from research.claims.sizes import Size

SEEDS = 2
"""Number of untrained models for each real model."""
SCALED_ON = 2
"""Number of sequences on which the queries of an untrained model are scaled to the entropy of the trained one."""
MIN_CHARACTERS = 2500
"""Shortest topic that is used: it has more tokens than are read of it."""


def documents(number: int) -> list[str]:
    """Return long topics of Python's language reference, spread over the alphabet."""
    long = [topics[name] for name in sorted(topics) if len(topics[name]) >= MIN_CHARACTERS]
    return long[:: len(long) // number][:number]


def real_models(size: Size) -> dict[str, Any]:
    """Measure distances between heads by model and layer: trained, untrained, and untrained at the same entropy."""
    return {name: _measure(name, size) for name in size.models}


def _measure(name: str, size: Size) -> dict[str, Any]:
    loaded = load(name)
    texts = hw.Texts(documents(size.sequences), loaded.tokenizer, size.tokens, "truncate", batch=1)
    batches = list(texts)
    scaled_on = batches[:SCALED_ON]
    targets = entropies(loaded.model, scaled_on)
    results: dict[str, Any] = {
        "title": loaded.title,
        "sequences": len(batches),
        "tokens": size.tokens,
        "trained": [distances(loaded.model, [batch]) for batch in batches],
        "entropy": list(targets.values()),
        "untrained": [],
        "as sharp": [],
        "entropy as sharp": [],
    }
    for seed in range(SEEDS):
        print(f"{name}: untrained, seed {seed}", flush=True)
        untrained = _untrained(loaded.model, seed)
        sharp = with_entropies(untrained, targets, scaled_on)
        for kind, model in (("untrained", untrained), ("as sharp", sharp)):
            results[kind].append([distances(model, [batch]) for batch in batches])
        results["entropy as sharp"].append(list(entropies(sharp, scaled_on).values()))
    return results


def _untrained(model: nn.Module, seed: int) -> nn.Module:
    """Return a model of the same configuration with freshly initialised weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        untrained = type(model)(model.config)
    return untrained.to(next(model.parameters()).dtype).eval()
