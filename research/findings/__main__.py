"""Measure the importance of the heads of two real models; `research.findings.report` writes the report from it.

    python -m research.findings [--only smollm2] [--only minilm]

`rules.md` states what is measured and how it is judged. You can stop a run and start it again: it resumes.
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.data.batches import NumberedBatches
from headwise.data.models import LoadedModel, load
from headwise.data.random_repeats import TOKENS
from research.findings.control_sets import FEWER, SETS, with_controls
from research.findings.data import CHUNKS, LENGTH, Sentence, documents, earlier_documents, sentences, shuffled
from research.findings.noise import noise_similarities
from research.findings.raw_results import save_once, similarities, statistics_of_sequences

RESULTS = Path(__file__).parent / "results"
STEPS_ON = {"smollm2": 2, "minilm": 32}
"""Number of sequences on which integrated gradients are measured."""

EARLIER_LENGTH = 256
"""Number of tokens of each document in the earlier version of the report."""

SETS_ON = 12
"""Number of documents on which random sets are measured."""


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------


def smollm2() -> None:
    """Measure SmolLM2: the effect of each head, its first-order prediction, and the effect of the induction heads."""
    loaded = load("smollm2", "causal")
    model, folder = loaded.model, RESULTS / "smollm2"
    texts = hw.Texts(list(documents().values()), loaded.tokenizer, LENGTH, "truncate", batch=8)
    common: dict[str, Any] = {"progress": True, "title": loaded.title}
    repeats = hw.random_repeats(len(loaded.tokenizer), avoid=loaded.tokenizer.all_special_ids)
    profile = measure_profile(loaded, chunks(loaded), folder, repeats)
    hw.ablate(model, texts, hw.next_token_loss, out=folder / "heads", **common)
    few = hw.Texts(texts.source, loaded.tokenizer, LENGTH, "truncate", batch=4)
    hw.importance(model, few, hw.next_token_loss, out=folder / "gradients", **common)
    heads = [(head.layer, head.head) for head in profile.heads]
    for name, replacement, number in (
        ("repeated-zero", hw.replacements.zero(), SETS),
        ("repeated-mean", hw.replacements.mean(texts), FEWER),
    ):
        sets = with_controls(profile.roles()["induction"], heads, number)
        of_sets: dict[str, Any] = {"units": sets, "replacement": replacement, **common}
        hw.ablate(model, [{"input_ids": repeats}], repeated_loss, out=folder / name, **of_sets)
    sets = with_controls(profile.roles()["induction"], heads, FEWER)
    half = hw.Texts(texts.source, loaded.tokenizer, LENGTH, "truncate", batch=12, limit=SETS_ON)
    hw.ablate(model, half, hw.next_token_loss, out=folder / "text-zero", units=sets, **common)
    save_once(folder / "similarities.json", lambda: {"model": similarities(model, texts)})
    earlier = hw.Texts(list(earlier_documents().values()), loaded.tokenizer, EARLIER_LENGTH, "truncate", batch=4)
    hw.ablate(model, earlier, hw.next_token_loss, out=folder / "earlier", units={"0.7": [(0, 7)]}, **common)
    first = hw.Texts(texts.source, loaded.tokenizer, LENGTH, "truncate", batch=2, limit=STEPS_ON["smollm2"])
    hw.importance(model, first, hw.next_token_loss, "integrated", out=folder / "integrated", **common)


def chunks(loaded: LoadedModel) -> NumberedBatches:
    """Return the first tokens of each document in `CHUNKS` sequences of `LENGTH` tokens, with the document of each."""
    batches, numbers = [], []
    for number, text in enumerate(documents().values()):
        ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"][: CHUNKS * LENGTH])
        rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        batches.append({"input_ids": rows, "attention_mask": torch.ones_like(rows)})
        numbers += [number] * len(rows)
    return NumberedBatches(batches, numbers)


def repeated_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss in nats on the repetitions of random tokens, without their first occurrence: `(batch,)`."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)[:, TOKENS:].mean(1)


# -- MiniLM -----------------------------------------------------------------------------------------------------------


def minilm() -> None:
    """Measure MiniLM: the effect of each head on sentence embeddings, and on their sensitivity to word order."""
    loaded = load("minilm")
    model, folder = loaded.model, RESULTS / "minilm"
    drawn = sentences()
    texts = numbered(drawn, loaded)
    common: dict[str, Any] = {"progress": True, "title": loaded.title}
    measure_profile(loaded, texts, folder, True)
    hw.ablate(model, texts, hw.EmbeddingDistance(), out=folder / "heads", **common)
    special = set(loaded.tokenizer.all_special_ids)
    pairs = [{**batch, "shuffled": shuffled(batch["input_ids"], special)} for batch in texts]
    hw.ablate(model, NumberedBatches(pairs, texts.documents), order_distance, out=folder / "order", **common)
    few = numbered(drawn[: STEPS_ON["minilm"]], loaded)
    hw.importance(model, few, hw.EmbeddingDistance(), "integrated", out=folder / "integrated", **common)
    torch.manual_seed(0)
    untrained = type(model)(model.config).eval()
    sizes = {"few": numbered(drawn[:4], loaded), "all": texts}
    save_once(
        folder / "similarities.json",
        lambda: {
            "model": similarities(model, texts),
            **{f"random weights, {name}": similarities(untrained, data) for name, data in sizes.items()},
        },
    )


def numbered(drawn: list[Sentence], loaded: LoadedModel) -> NumberedBatches:
    """Return batches of sentences, with the topic of each as its document."""
    texts = hw.Texts([sentence.text for sentence in drawn], loaded.tokenizer, batch=16)
    topics = list(dict.fromkeys(sentence.topic for sentence in drawn))
    documents_of_sentences = [topics.index(sentence.topic) for sentence in drawn]
    return NumberedBatches(list(texts), [documents_of_sentences[index] for index in texts.document_numbers()])


def order_distance(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return 1 - cosine between the embeddings of a sentence and of its shuffled tokens: `(batch,)`."""
    original, permuted = (model(input_ids=batch[name]).last_hidden_state.mean(1) for name in ("input_ids", "shuffled"))
    return 1.0 - F.cosine_similarity(original, permuted, dim=-1)


# -- both -------------------------------------------------------------------------------------------------------------


def measure_profile(loaded: LoadedModel, data: NumberedBatches, folder: Path, repeats: Tensor | bool) -> hw.Profile:
    """Profile the heads of a model on batches, save the table, and the entropy of every head on every sequence."""
    special = sorted(loaded.tokenizer.all_special_ids)
    options: dict[str, Any] = {"special": special, "repeats": repeats, "progress": True, "title": loaded.title}
    profile = hw.profile(loaded.model, data, out=folder / "profile", **options)
    save_once(
        folder / "profile" / "entropies.json", lambda: statistics_of_sequences(loaded.model, data, special, "entropy")
    )
    return profile


def noise() -> None:
    """Measure the similarity of heads whose outputs are independent noise."""
    save_once(RESULTS / "noise" / "similarities.json", noise_similarities)


MODELS = {"minilm": minilm, "smollm2": smollm2, "noise": noise}


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
