"""How far apart the heads of two real models are, against the same models untrained."""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

import headwise as hw
from headwise.data.models import load
from research.claims.looks import distances, entropies, sharpened
from research.claims.sizes import Size

SEEDS = 2
"""Untrained models of each."""
SHARPENED_ON = 2
"""Sequences on which an untrained model is made as sharp."""
LONG = 2500
"""Characters of a topic that has surely as many tokens as are read of it."""


def documents(number: int) -> list[str]:
    """Topics long enough, spread evenly over the alphabet."""
    long = [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG]
    return long[:: len(long) // number][:number]


def real_models(size: Size) -> dict[str, Any]:
    """By model and layer: distances in each sequence, trained; and of untrained models, as they are and as sharp."""
    return {name: _of(name, size) for name in size.models}


def _of(name: str, size: Size) -> dict[str, Any]:
    loaded = load(name)
    texts = hw.Texts(documents(size.sequences), loaded.tokenizer, size.tokens, "truncate", batch=1)
    batches = list(texts)
    some = batches[:SHARPENED_ON]
    goal = entropies(loaded.model, some)
    found: dict[str, Any] = {
        "title": loaded.title,
        "sequences": len(batches),
        "tokens": size.tokens,
        "trained": [distances(loaded.model, [batch]) for batch in batches],
        "entropy": list(goal.values()),
        "untrained": [],
        "as sharp": [],
        "entropy as sharp": [],
    }
    for seed in range(SEEDS):
        print(f"{name}: untrained, seed {seed}", flush=True)
        untrained = _untrained(loaded.model, seed)
        sharp = sharpened(untrained, goal, some)
        for kind, model in (("untrained", untrained), ("as sharp", sharp)):
            found[kind].append([distances(model, [batch]) for batch in batches])
        found["entropy as sharp"].append(list(entropies(sharp, some).values()))
    return found


def _untrained(model: nn.Module, seed: int) -> nn.Module:
    """A model of the same configuration with the weights it would have before training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = type(model)(model.config)
    return made.to(next(model.parameters()).dtype).eval()
