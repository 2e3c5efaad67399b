"""Text data of the findings: the topics of Python's language reference, which come with Python itself.

A topic is a document. Its paragraphs of prose serve as sentences.
"""

import random
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

SEQUENCES, LENGTH = 16, 256
SENTENCES = 128
LONG = 2500
"""Minimum number of characters of a topic. It ensures that the topic has at least `LENGTH` tokens."""


def documents() -> list[str]:
    """Return `SEQUENCES` long topics of Python's language reference, at equal distances in the alphabet."""
    long = [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG]
    return long[:: len(long) // SEQUENCES][:SEQUENCES]


def sentences() -> list[str]:
    """Return `SENTENCES` paragraphs of prose with one or a few sentences each, at equal distances over all topics."""
    paragraphs = [paragraph for name in sorted(topics) for paragraph in _paragraphs(topics[name])]
    return paragraphs[:: len(paragraphs) // SENTENCES][:SENTENCES]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a topic that are prose of 10 to 40 words and end with a full stop."""
    for block in text.split("\n\n"):
        words = block.split()
        plain = block[:1].isalpha() and not any(mark in block for mark in ("::=", ">>>", "***", "==="))
        if plain and 10 <= len(words) <= 40 and block.rstrip().endswith("."):
            yield " ".join(words)


def shuffled(ids: Tensor, keep: set[int], seed: int = 0) -> Tensor:
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
