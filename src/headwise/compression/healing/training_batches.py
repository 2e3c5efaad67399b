"""Batches of a training: all of a data set in a new random order in each epoch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from headwise.checks import whole_number
from headwise.data.batches import digest_of, iterate_batches
from headwise.data.texts import Texts
from headwise.errors import InputError

SEED_OF_EPOCH = 2**31
"""Distance of the seeds of consecutive epochs, larger than any seed."""


class TrainingBatches:
    """Batches of a data set by the number of the step. Each epoch uses all sequences of `Texts` once, grouped to
    batches anew; other data keep their batches. The order depends on the seed and the epoch alone, so that a resumed
    training continues with the same batches.

    Args:
        data: `Texts`, or batches, which are read once.
        batch: sequences per batch, for `Texts`; None for that of the texts.
        seed: seed of the order.

    Attributes:
        digest: hash of the content.

    Raises:
        InputError: there is no batch, or `batch` is used with other data than `Texts`.
    """

    def __init__(self, data: Any, batch: int | None, seed: int) -> None:
        if batch is not None and not isinstance(data, Texts):
            raise InputError("batch", expected="None for data that are batches already", got=batch)
        self._seed, self._texts = seed, data if isinstance(data, Texts) else None
        if self._texts is not None and batch is not None:
            self._texts = _with_sequences(replace(data, batch=whole_number("batch", batch, least=1)), data.sequences)
        self._batches = list(iterate_batches(data if self._texts is None else self._texts))
        if not self._batches:
            raise InputError("data", expected="at least one batch", got="none")
        self.digest = digest_of(part for each in self._batches for name in sorted(each) for part in (name, each[name]))
        self._epoch: tuple[int, list[dict[str, Any]]] = (-1, [])

    def at(self, step: int) -> Mapping[str, Any]:
        """Return the batch of a step, counted from 0."""
        epoch, place = divmod(step, len(self._batches))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._in_epoch(epoch))
        return self._epoch[1][place]

    def _in_epoch(self, epoch: int) -> list[dict[str, Any]]:
        """Return all batches in the order of an epoch."""
        generator = torch.Generator().manual_seed(self._seed + epoch * SEED_OF_EPOCH)
        batches = self._batches
        if self._texts is not None:
            sequences = self._texts.sequences
            order = torch.randperm(len(sequences), generator=generator).tolist()
            batches = list(_with_sequences(replace(self._texts), [sequences[index] for index in order]))
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _with_sequences(texts: Texts, sequences: list[Any]) -> Texts:
    """Return texts whose sequences are these, instead of those in their source."""
    vars(texts)["sequences"] = sequences  # where `cached_property` keeps them
    return texts
