"""Measure the importance of the heads of two real models; `research.findings.report` writes the report from it.

    python -m research.findings [--only smollm2] [--only minilm]

You can stop a run and start it again: it resumes. On 2 cores SmolLM2 takes about an hour.
"""

import argparse
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.data.models import load
from headwise.data.random_repeats import TOKENS
from research.findings.data import LENGTH, documents, sentences, shuffled

RESULTS = Path(__file__).parent / "results"
CONTROLS = 20
"""Number of random control sets of each kind."""

Heads = list[tuple[int, int]]


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------


def smollm2() -> None:
    """Measure SmolLM2: the effect of each head, its first-order prediction, and the effect of the induction heads."""
    loaded = load("smollm2", "causal")
    model, folder = loaded.model, RESULTS / "smollm2"
    texts = hw.Texts(documents(), loaded.tokenizer, LENGTH, "truncate", batch=16)
    common: dict[str, Any] = {"progress": True, "title": loaded.title}
    hw.ablate(model, texts, hw.next_token_loss, out=folder, **common)
    few = hw.Texts(documents(), loaded.tokenizer, LENGTH, "truncate", batch=4)  # the graph of a batch of 16 takes 10 GB
    hw.importance(model, few, hw.next_token_loss, out=folder, force=True, **common)
    profile = hw.profile(model, texts, out=folder, **common)
    sets = with_controls(profile.roles()["induction"], profile)
    repeats = hw.random_repeats(len(loaded.tokenizer), avoid=loaded.tokenizer.all_special_ids)
    for name, replacement in (("zero", hw.replacements.zero()), ("mean", hw.replacements.mean(texts))):
        of_sets: dict[str, Any] = {"units": sets, "replacement": replacement, **common}
        hw.ablate(model, [{"input_ids": repeats}], repeated_loss, out=folder / f"repeated-{name}", **of_sets)
    hw.ablate(model, texts, hw.next_token_loss, out=folder / "text-zero", units=sets, **common)


def repeated_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss in nats on the repetitions of random tokens, without their first occurrence: `(batch,)`."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)[:, TOKENS:].mean(1)


def with_controls(heads: Heads, profile: hw.Profile) -> dict[str, Heads]:
    """Return the given heads as "induction", and random control sets of as many other heads: `CONTROLS` sets from all
    layers, and `CONTROLS` sets with as many heads in each layer.
    """
    others = [(head.layer, head.head) for head in profile.heads if (head.layer, head.head) not in heads]
    generator = random.Random(0)
    sets = {"induction": heads}
    for number in range(CONTROLS):
        sets[f"anywhere {number}"] = sorted(generator.sample(others, len(heads)))
        same_layers = []
        for layer in sorted({layer for layer, _ in heads}):
            in_layer = [head for head in others if head[0] == layer]
            same_layers += generator.sample(in_layer, min(len(in_layer), sum(other == layer for other, _ in heads)))
        sets[f"same layers {number}"] = same_layers
    return sets


# -- MiniLM -----------------------------------------------------------------------------------------------------------


def minilm() -> None:
    """Measure MiniLM: the effect of each head on sentence embeddings, and on their sensitivity to word order."""
    loaded = load("minilm")
    model, folder = loaded.model, RESULTS / "minilm"
    texts = hw.Texts(sentences(), loaded.tokenizer, batch=16)
    common: dict[str, Any] = {"progress": True, "title": loaded.title}
    hw.ablate(model, texts, hw.EmbeddingDistance(), out=folder, **common)
    hw.profile(model, texts, out=folder, **common)
    special = set(loaded.tokenizer.all_special_ids)
    pairs = [{**batch, "shuffled": shuffled(batch["input_ids"], special)} for batch in texts]
    hw.ablate(model, pairs, order_distance, out=folder / "order", **common)


def order_distance(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return 1 - cosine between the embeddings of a sentence and of its shuffled tokens: `(batch,)`."""
    original, permuted = (model(input_ids=batch[name]).last_hidden_state.mean(1) for name in ("input_ids", "shuffled"))
    return 1.0 - F.cosine_similarity(original, permuted, dim=-1)


MODELS = {"minilm": minilm, "smollm2": smollm2}


def main() -> None:
    """Measure both models, or those that `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="measure only this model; may be repeated")
    parser.add_argument("--force", action="store_true", help="repeat measurements that already have results")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.only or MODELS:
        if options.force:
            shutil.rmtree(RESULTS / name, ignore_errors=True)
        MODELS[name]()


if __name__ == "__main__":
    main()
