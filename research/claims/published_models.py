"""Distances between the heads of two published models, and of the same models untrained."""

import random
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

import headwise as hw
from headwise.data.models import load
from research.claims.head_measures import distances, entropies, with_entropies

MODELS = ("minilm", "smollm2")
SEQUENCES, TOKENS = 16, 128
"""Number of documents that are read, and tokens of each."""

SEEDS = 2
"""Number of untrained models for each published model."""

SCALED_ON = 4
"""Number of documents on which the queries of an untrained model are scaled to the entropy of the trained one.
Distances are measured on the others."""

MIN_CHARACTERS = 1200
"""Shortest topic that is used: it has more tokens than are read of it."""


def documents(number: int, seed: int = 0) -> list[str]:
    """Return different topics of Python's language reference that are long enough, drawn with a seed."""
    long = [topics[name] for name in sorted(topics) if len(topics[name]) >= MIN_CHARACTERS]
    return random.Random(seed).sample(long, number)


def measure_published() -> dict[str, Any]:
    """Measure distances between heads by model and layer: trained, untrained, and untrained at the same entropy."""
    return {name: _measure(name) for name in MODELS}


def _measure(name: str) -> dict[str, Any]:
    loaded = load(name)
    texts = hw.Texts(documents(SCALED_ON + SEQUENCES), loaded.tokenizer, TOKENS, "truncate", batch=1)
    batches = list(texts)
    scaled_on, batches = batches[:SCALED_ON], batches[SCALED_ON:]
    results: dict[str, Any] = {
        "title": loaded.title,
        "documents": len(batches),
        "tokens": TOKENS,
        "trained": [distances(loaded.model, [batch]) for batch in batches],
        "entropy": {"trained": list(entropies(loaded.model, batches).values()), "untrained": [], "as sharp": []},
        "untrained": [],
        "as sharp": [],
    }
    for seed in range(SEEDS):
        untrained = _untrained(loaded.model, seed)
        sharp = with_entropies(untrained, entropies(loaded.model, scaled_on), scaled_on)
        for kind, model in (("untrained", untrained), ("as sharp", sharp)):
            results[kind].append([distances(model, [batch]) for batch in batches])
            results["entropy"][kind].append(list(entropies(model, batches).values()))
    return results


def _untrained(model: nn.Module, seed: int) -> nn.Module:
    """Return a model of the same configuration with freshly initialised weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        untrained = type(model)(model.config)
    return untrained.to(next(model.parameters()).dtype).eval()
