"""The text of the findings: the topics of Python's language reference, which come with Python itself.

A topic is a document. Where sentences are wanted they are its paragraphs.
"""

import random
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

SEQUENCES, LENGTH = 16, 256
SENTENCES = 128
LONG = 2500
"""Characters of a topic that has surely as many tokens as are read of it."""


def documents() -> list[str]:
    """Return long topics of Python's language reference, spread over the alphabet."""
    long = [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG]
    return long[:: len(long) // SEQUENCES][:SEQUENCES]


def sentences() -> list[str]:
    """Return paragraphs of prose with one or a few sentences each, spread over the topics."""
    found = [each for name in sorted(topics) for each in _paragraphs(topics[name])]
    return found[:: len(found) // SENTENCES][:SENTENCES]


def _paragraphs(text: str) -> Iterator[str]:
    for block in text.split("\n\n"):
        words = block.split()
        plain = block[:1].isalpha() and not any(mark in block for mark in ("::=", ">>>", "***", "==="))
        if plain and 10 <= len(words) <= 40 and block.rstrip().endswith("."):
            yield " ".join(words)


def shuffled(ids: Tensor, keep: set[int], seed: int = 0) -> Tensor:
    """Shuffle the tokens of each sequence, `(batch, length)`; the tokens in `keep` stay in their positions."""
    order = random.Random(seed)
    rows = []
    for row in ids.tolist():
        places = [place for place, token in enumerate(row) if token not in keep]
        tokens = [row[place] for place in places]
        order.shuffle(tokens)
        for place, token in zip(places, tokens, strict=True):
            row[place] = token
        rows.append(row)
    return torch.tensor(rows)
