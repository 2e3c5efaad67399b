"""Sequences of a data set that are long enough for an in-context learning score, without padding."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.data.batches import POSITIONAL, NumberedBatches, documents_of, iterate_batches
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.shapes import Int

ON_GPU = 8
"""Number of sequences in a batch on a GPU. On a CPU it is 1: larger batches are slower for each sequence there."""


class _Sequence(NamedTuple):
    """Token ids of the start of a sequence, and its document."""

    ids: Int[Tensor, " tokens"]
    document: int


class ChosenSequences(NamedTuple):
    """Sequences on which the score is measured.

    Attributes:
        data: batches of their token ids, all of the same length, with the document of each sequence.
        available: number of sequences of the data set that are long enough.
        short: number of sequences of the data set that are too short.
    """

    data: NumberedBatches
    available: int
    short: int


def choose_sequences(
    dataset: Texts | Iterable[Any], length: int, number: int, seed: int, *, batch_size: int
) -> ChosenSequences:
    """Draw sequences with at least `length` tokens from a data set, as many from different documents as possible, and
    return the first `length` tokens of each, in the order of the data.

    Raises:
        InputError: the batches have other arguments than token ids and their padding, padding is between tokens, or no
            sequence is long enough.
    """
    documents = documents_of(dataset)
    found, count, longest = [], 0, 0
    for ids in _sequences(dataset):
        document = count if documents is None else documents[count]
        count, longest = count + 1, max(longest, len(ids))
        if len(ids) >= length:
            found.append(_Sequence(ids[:length], document))
    if not found:
        got = "no sequence" if not count else f"{longest} in the longest one"
        remedy = "use longer texts, or smaller early= and late="
        raise InputError("dataset", expected=f"sequences of at least {length} tokens", got=got, remedy=remedy)
    order = random.Random(seed).sample(range(len(found)), len(found))
    earlier: Counter[int] = Counter()
    ranks = {}
    for index in order:
        ranks[index] = earlier[found[index].document]
        earlier[found[index].document] += 1
    chosen = sorted(sorted(order, key=lambda index: ranks[index])[:number])
    ids = torch.stack([found[index].ids for index in chosen])
    data = NumberedBatches(
        [{"input_ids": part} for part in torch.split(ids, batch_size)], [found[i].document for i in chosen]
    )
    return ChosenSequences(data, len(found), count - len(found))


def _sequences(dataset: Texts | Iterable[Any]) -> Iterator[Int[Tensor, " tokens"]]:
    """Yield the token ids of each sequence of a data set, without padding."""
    for batch in iterate_batches(dataset):
        name = POSITIONAL if POSITIONAL in batch else "input_ids"
        ids, mask = batch.get(name), batch.get("attention_mask")
        unknown = sorted(key for key in batch if key not in (name, "attention_mask"))
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or unknown:
            expected = "batches with input_ids (batch, length) and attention_mask alone"
            raise InputError("dataset", expected=expected, got=", ".join(batch))
        is_real = torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor):
            if mask.shape != ids.shape:
                expected = f"an attention_mask of the shape of input_ids, {tuple(ids.shape)}"
                raise InputError("dataset", expected=expected, got=tuple(mask.shape))
            is_real = mask.bool()
        for row, real in zip(ids.long().cpu(), is_real.cpu(), strict=True):
            places = real.nonzero()[:, 0]
            if len(places) and int(places[-1] - places[0]) >= len(places):
                raise InputError("dataset", expected="padding before or after the tokens", got="padding between tokens")
            yield row[places]
