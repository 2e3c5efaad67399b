"""Generated data: a lookup of pairs, and independent random symbols. They are drawn from a seed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.claims.corpora import Batches

KEYS, PAIRS, LOOKED = 16, 6, 32
"""Sizes of the lookup task: number of keys (and of values), pairs in a sequence, sequences in a batch."""

SYMBOLS, OFFSETS, WINDOW, DRAWN = 16, 4, 16, 64
"""Sizes of the relations task: number of symbols, slots at each position, length, sequences in a batch."""


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


def lookup_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of the values in the second half of each sequence, in nats: `(batch,)`."""
    ids = batch["input_ids"]
    half = ids.shape[1] // 2
    losses = F.cross_entropy(model(ids)[:, half::2].flatten(0, 1), ids[:, half + 1 :: 2].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def symbols(number: int, seed: int) -> Batches:
    """Generate batches of independent, uniformly distributed random symbols."""
    drawn = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(SYMBOLS, (DRAWN, WINDOW), generator=drawn)} for _ in range(number)]
