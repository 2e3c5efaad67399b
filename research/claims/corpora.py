"""What the models are trained on: a real text, and two tasks that are generated.

The text is the reference of Python's language that comes with Python itself (`pydoc_data.topics`), byte by byte: no
tokenizer is in the way, and nothing is fetched. Everything generated is the same each time: it is drawn from a seed.
"""

from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

Batches = list[dict[str, Tensor]]

ROWS, LENGTH = 8, 64
"""Of a batch of text."""

SMALL = 48
"""Batches of the small data: 25 KB."""

KEYS, PAIRS, LOOKED = 16, 6, 32
"""Of the lookup task: symbols that are keys, and as many that are values; pairs in a sequence; sequences in a batch."""

SYMBOLS, OFFSETS, WINDOW, DRAWN = 16, 4, 16, 64
"""Of the relations task: symbols; tokens that are asked for at each place; length; sequences in a batch."""


@cache
def text() -> bytes:
    """All topics, in the order of their names."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@cache
def alphabet() -> bytes:
    """The bytes that occur."""
    return bytes(sorted(set(text())))


VOCABULARY = len(alphabet()) + 1
"""Bytes that occur, and one token more that masks."""
MASK = VOCABULARY - 1


def next_bytes(held_out: int, training: int | None = None) -> tuple[Batches, Batches]:
    """The text cut into rows, shuffled once: batches to train on, and to judge by, which are the same for any number.

    Args:
        held_out: batches to judge by.
        training: batches to train on; by default all that is left.
    """
    ids = torch.frombuffer(bytearray(text().translate(_numbered())), dtype=torch.uint8).long()
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    found = [{"input_ids": part.clone()} for part in rows.split(ROWS) if len(part) == ROWS]
    rest = found[held_out:]
    return rest if training is None else rest[:training], found[:held_out]


def _numbered() -> bytes:
    """For each byte its place in the alphabet."""
    return bytes(max(0, alphabet().find(bytes([byte]))) for byte in range(256))


def lookups(number: int, seed: int) -> Batches:
    """Pairs of a key and a value, each key once, then the same pairs in another order: `k v k v ... k v k v ...`.

    After a key of the second half its value can be known: by a head that finds the key's first occurrence and what
    followed it (an induction head, Olsson et al. 2022).
    """
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        keys = torch.stack([torch.randperm(KEYS, generator=drawn)[:PAIRS] for _ in range(LOOKED)])
        values = torch.randint(KEYS, 2 * KEYS, (LOOKED, PAIRS), generator=drawn)
        order = torch.stack([torch.randperm(PAIRS, generator=drawn) for _ in range(LOOKED)])
        halves = ((keys, values), (keys.gather(1, order), values.gather(1, order)))
        found.append({"input_ids": torch.cat([torch.stack(half, -1).flatten(1) for half in halves], 1)})
    return found


def symbols(number: int, seed: int) -> Batches:
    """Random symbols, all alike and independent of each other."""
    drawn = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(SYMBOLS, (DRAWN, WINDOW), generator=drawn)} for _ in range(number)]
