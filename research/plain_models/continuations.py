"""Attention calls of one run that attend to values of the call before, as models with recurrence do: one sequence."""

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from research.plain_models.statistics import positions_of_queries
from research.plain_models.truth import Attention, Sequence


def joined(attentions: Iterable[Attention]) -> list[Attention]:
    """Return the attention calls of one site in several runs, each with the calls of the same run that continue its
    sequences.
    """
    result: list[Attention] = []
    for attention in attentions:
        # In a run, operator calls have increasing numbers.
        before = result[-1] if result and result[-1].number < attention.number else None
        continued = None if before is None else _continued(before, attention)
        if continued is None:
            result.append(attention)
        else:
            result[-1] = continued
    return result


def has_other_keys(attention: Attention, earlier: Iterable[Attention]) -> bool:
    """Return True if some keys of an attention call come from the input of the model, but neither from the tokens that
    its other keys come from nor from `earlier` calls of the same site. Learned keys are equal in all sequences.
    Hidden keys do not count.
    """
    sequences = attention.heads[0] if attention.heads else []
    known = [sequence.values for other in earlier for head in other.heads for sequence in head]
    for sequence in sequences:
        if sequence.key_tokens is None or not bool((sequence.key_tokens >= 0).any()):
            continue
        others = [other.values for other in sequences if other is not sequence and len(other.values)]
        is_seen = sequence.visible[sequence.counted].any(0)
        for value in sequence.values[is_seen & (sequence.key_tokens < 0)]:
            is_learned = not others or all(_is_among(value, values) for values in others)
            if not is_learned and not any(_is_among(value, values) for values in known):
                return True
    return False


def _is_among(value: Tensor, values: Tensor) -> bool:
    """Return True if one of some values is equal to `value`."""
    return bool((values == value).all(-1).any())


def _continued(before: Attention, after: Attention) -> Attention | None:
    """Return two attention calls as one, if the sequences of the first one continue in the second; otherwise None."""
    if before.reason or after.reason or [len(head) for head in before.heads] != [len(head) for head in after.heads]:
        return None
    heads = []
    for of_before, of_after in zip(before.heads, after.heads, strict=True):
        sequences = [_joined_rows(*pair) for pair in zip(of_before, of_after, strict=True)]
        if None in sequences:
            return None
        heads.append([sequence for sequence in sequences if sequence is not None])
    return replace(before, number=after.number, heads=heads)


def _joined_rows(before: Sequence, after: Sequence) -> Sequence | None:
    """Return the rows of two calls as one sequence, if the second has a new value for each of its rows, after the last
    values of the first call; otherwise None.
    """
    known, new = len(before.values), len(after.weights)
    start = known - (len(after.values) - new)
    if not 0 <= start < known or not torch.equal(after.values[:-new], before.values[start:]):
        return None

    def rows(of_before: Tensor, of_after: Tensor) -> Tensor:
        return torch.cat([F.pad(of_before, (0, new)), F.pad(of_after, (start, 0))])

    keys = torch.arange(known + new)
    queries = torch.full((len(before.weights) + len(after.weights),), -2)
    own = positions_of_queries(before), positions_of_queries(after)
    counted = torch.cat([before.counted, after.counted])
    if own[0] is not None and own[1] is not None:
        queries[counted] = torch.cat([own[0], own[1] + start])
    if before.key_tokens is not None and after.key_tokens is not None:
        keys[torch.cat([before.key_tokens, after.key_tokens[-new:]]) < 0] = -1
    return Sequence(
        rows(before.weights, after.weights),
        rows(before.visible, after.visible),
        counted,
        torch.cat([before.values, after.values[-new:]]),
        torch.cat([before.out, after.out]),
        keys,
        queries,
    )
