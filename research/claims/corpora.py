"""Training data: a real text, and two generated tasks.

The text is the language reference that comes with Python (`pydoc_data.topics`), read byte by byte. It needs no
tokenizer and no download. The generated tasks are drawn from a seed and are the same each time.
"""

from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

Batches = list[dict[str, Tensor]]

ROWS, LENGTH = 8, 64
"""Sequences in a batch of text, and bytes in a sequence."""

SMALL = 48
"""Number of training batches of the study on little data: 25 KB."""

KEYS, PAIRS, LOOKED = 16, 6, 32
"""Sizes of the lookup task: number of keys (and of values), pairs in a sequence, sequences in a batch."""

SYMBOLS, OFFSETS, WINDOW, DRAWN = 16, 4, 16, 64
"""Sizes of the relations task: number of symbols, slots at each position, length, sequences in a batch."""


@cache
def text() -> bytes:
    """Return all topics in the order of their names, as bytes."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@cache
def alphabet() -> bytes:
    """Return the bytes that occur in the text, sorted."""
    return bytes(sorted(set(text())))


VOCABULARY = len(alphabet()) + 1
"""Number of bytes that occur, and one more token, the mask."""
MASK = VOCABULARY - 1


def next_bytes(held_out: int, training: int | None = None) -> tuple[Batches, Batches]:
    """Cut the text into rows, shuffle them once, and return training and held-out batches.

    The held-out batches are the same for any number of training batches.

    Args:
        held_out: number of held-out batches.
        training: number of training batches; by default all that remain.
    """
    ids = torch.frombuffer(bytearray(text().translate(_translation())), dtype=torch.uint8).long()
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    batches = [{"input_ids": part.clone()} for part in rows.split(ROWS) if len(part) == ROWS]
    remaining = batches[held_out:]
    return remaining if training is None else remaining[:training], batches[:held_out]


def _translation() -> bytes:
    """Return a table that translates each byte to its index in the alphabet."""
    return bytes(max(0, alphabet().find(bytes([byte]))) for byte in range(256))


def lookups(number: int, seed: int) -> Batches:
    """Generate batches of key-value pairs, followed by the same pairs in another order: `k v k v ... k v k v ...`.

    Each key occurs once in each half. An induction head (Olsson et al. 2022) can predict the values of the second half:
    it attends to the token that followed the first occurrence of the key.
    """
    drawn = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(number):
        keys = torch.stack([torch.randperm(KEYS, generator=drawn)[:PAIRS] for _ in range(LOOKED)])
        values = torch.randint(KEYS, 2 * KEYS, (LOOKED, PAIRS), generator=drawn)
        order = torch.stack([torch.randperm(PAIRS, generator=drawn) for _ in range(LOOKED)])
        halves = ((keys, values), (keys.gather(1, order), values.gather(1, order)))
        batches.append({"input_ids": torch.cat([torch.stack(half, -1).flatten(1) for half in halves], 1)})
    return batches


def symbols(number: int, seed: int) -> Batches:
    """Generate batches of independent, uniformly distributed random symbols."""
    drawn = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(SYMBOLS, (DRAWN, WINDOW), generator=drawn)} for _ in range(number)]
