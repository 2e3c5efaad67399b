"""Text data of the findings: the topics of Python's language reference, which come with Python itself.

A topic is a document. Its paragraphs of prose serve as sentences. Documents and sentences are drawn with a seed,
without duplicates, as `rules.md` states.
"""

import random
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

SEED = 0
DOCUMENTS, LENGTH, CHUNKS = 24, 64, 4
"""Number of documents, tokens of a sequence, and most sequences of a document."""

CHARACTERS, RUN = 1200, 12
"""Characters of a document that no other document may share, as runs of this number of words."""

SENTENCES, MOST_OF_TOPIC = 128, 4


class Sentence(NamedTuple):
    """A paragraph of prose, and the topic that it is from."""

    text: str
    topic: str


def documents() -> dict[str, str]:
    """Return `DOCUMENTS` topics of Python's language reference by name, in the order in which they were drawn. No two
    share `RUN` words in a row of their first `CHARACTERS` characters.
    """
    names = sorted(name for name in topics if len(topics[name]) >= CHARACTERS)
    drawn: dict[str, str] = {}
    seen: set[tuple[str, ...]] = set()
    for name in random.Random(SEED).sample(names, len(names)):
        runs = _runs(topics[name][:CHARACTERS])
        if len(drawn) < DOCUMENTS and not runs & seen:
            drawn[name] = topics[name]
            seen |= runs
    return drawn


def earlier_documents() -> dict[str, str]:
    """Return the topics that an earlier version of the report read, 256 tokens of each: the first 16 long ones."""
    names = sorted(name for name in topics if len(topics[name]) >= 2500)
    return {name: topics[name] for name in names[:16]}


def sentences() -> list[Sentence]:
    """Return `SENTENCES` different paragraphs of prose with one or a few sentences each, at most `MOST_OF_TOPIC` of one
    topic.
    """
    order, drawn, seen = random.Random(SEED), [], set()
    for name in order.sample(sorted(topics), len(topics)):
        new = [paragraph for paragraph in dict.fromkeys(_paragraphs(topics[name])) if paragraph not in seen]
        chosen = order.sample(new, min(MOST_OF_TOPIC, len(new)))
        seen.update(chosen)
        drawn += [Sentence(paragraph, name) for paragraph in chosen]
    return drawn[:SENTENCES]


def _runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `RUN` words of a text."""
    words = text.lower().split()
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a topic that are prose of 10 to 40 words and end with a full stop."""
    for block in text.split("\n\n"):
        words = block.split()
        plain = block[:1].isalpha() and not any(mark in block for mark in ("::=", ">>>", "***", "==="))
        if plain and 10 <= len(words) <= 40 and block.rstrip().endswith("."):
            yield " ".join(words)


def shuffled(ids: Tensor, keep: set[int], seed: int = SEED) -> Tensor:
    """Shuffle the tokens of each sequence, `(batch, length)`, with a fixed seed. The token ids in `keep` stay in their
    positions.
    """
    order = random.Random(seed)
    rows = []
    for row in ids.tolist():
        positions = [position for position, token in enumerate(row) if token not in keep]
        tokens = [row[position] for position in positions]
        order.shuffle(tokens)
        for position, token in zip(positions, tokens, strict=True):
            row[position] = token
        rows.append(row)
    return torch.tensor(rows)
