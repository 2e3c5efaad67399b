"""Statistics of the heads of one sequence, computed from whole matrices of weights as docs/watch.md defines them."""

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-38
"""Weights between 0 and this are too small to say whether a mask hid the key: such a mask adds about -100."""

POSITIONAL = ("distance", "self", "previous", "next", "duplicate", "induction")
OF_VISIBLE = ("evenness", "received")
"""Statistics that depend on the number of visible keys or rows."""


@dataclass(frozen=True)
class Sequence:
    """Attention of all heads in one sequence.

    Attributes:
        weights: `(heads, queries, keys)`, float64.
        outputs: `(heads, queries, value_dim)`; None if unknown.
        rows: True for the queries that are tokens, `(queries,)`.
        keys: True for the keys that are tokens, `(keys,)`.
        tokens: token id of each key in self-attention; None if unknown or in cross-attention.
        offset: query i is key i + offset; None if queries and keys have no common positions.
    """

    weights: Tensor
    outputs: Tensor | None
    rows: Tensor
    keys: Tensor
    tokens: Tensor | None
    offset: int | None


def statistics(sequence: Sequence, special: set[int], projections: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Return every statistic of every head `(heads,)`, NaN where a head has no row for it.

    Args:
        sequence: attention of all heads.
        special: ids of special tokens.
        projections: for each head, its slice of the output projection, `(value_dim, width)`.
    """
    weights, keys = sequence.weights, int(sequence.keys.sum())
    visible = (weights > 0) & sequence.keys
    counted = sequence.rows & visible.any(-1)
    count = visible.sum(-1)
    entropy = torch.special.entr(weights).sum(-1)
    first = _first_keys(visible, sequence.keys, sequence.offset)
    result = {
        "entropy": _mean(entropy, counted),
        "evenness": _mean(entropy / count.clamp(min=2).double().log(), counted & (count > 1)),
        "confidence": _mean(weights.amax(-1), counted),
        "first": _mean(weights.gather(-1, first.expand(len(weights), -1)[..., None])[..., 0], counted),
        "received": _received(weights, visible, counted),
    }
    if not keys:
        return result
    if sequence.offset is not None:
        result |= _of_positions(weights, counted, sequence.keys, sequence.offset, first)
    if sequence.tokens is not None:
        is_special = torch.tensor([int(token) in special for token in sequence.tokens])
        result["special"] = _mean(weights[..., is_special].sum(-1), counted)
        result["confidence_content"] = _mean(torch.where(is_special, 0.0, weights).amax(-1), counted)
        if sequence.offset == 0:
            result |= _of_copies(weights, counted, sequence.tokens, sequence.keys, first)
    if sequence.outputs is not None:
        result["output_norm"] = _mean(sequence.outputs.norm(dim=-1), counted)
        if projections is not None:
            written = [head @ matrix for head, matrix in zip(sequence.outputs, projections, strict=True)]
            result["written_norm"] = _mean(torch.stack(written).norm(dim=-1), counted)
    return result


def _mean(values: Tensor, rows: Tensor) -> Tensor:
    """Return the mean of `values (heads, queries)` over the rows that are True."""
    return torch.where(rows, values, 0.0).sum(-1) / rows.sum(-1)


def _first_keys(visible: Tensor, keys: Tensor, offset: int | None) -> Tensor:
    """Return for each query the first key of its group, `(queries,)`. Tokens are in one group if a chain of visible
    keys connects them, as in a document that is packed with others. Without common positions, keys are in one group if
    a chain of queries that see them connects them, as keys of one picture. Cached keys are one group.
    """
    queries, first = visible.shape[-2], int(keys.int().argmax())
    sees = visible.any(0)
    if offset is None:
        reach = (sees.T.double() @ sees.double() > 0) | torch.eye(len(keys), dtype=torch.bool)
    elif offset != 0 or queries != len(keys):
        return torch.full((queries,), first)
    else:
        reach = sees | sees.T | torch.eye(queries, dtype=torch.bool)
    for _ in range(len(keys).bit_length()):
        reach = (reach.double() @ reach.double()) > 0
    first_of_group = (reach & keys).int().argmax(-1)
    return first_of_group[sees.int().argmax(-1)] if offset is None else first_of_group


def _received(weights: Tensor, visible: Tensor, counted: Tensor) -> Tensor:
    """Return the largest mean weight of a key over the rows that may see it; keys that few rows see do not count."""
    seen_by = (visible & counted[..., None]).sum(-2)
    means = torch.where(counted[..., None], weights, 0.0).sum(-2) / seen_by
    most = seen_by.amax(-1, keepdim=True)
    largest = means.masked_fill((2 * seen_by < most) | (seen_by == 0), -torch.inf).amax(-1)
    return largest.masked_fill(most[..., 0] == 0, torch.nan)


def _of_positions(weights: Tensor, counted: Tensor, keys: Tensor, offset: int, group: Tensor) -> dict[str, Tensor]:
    """Return the distance, and the weights on neighbours of the same group, where `group` is that of each query."""
    length = weights.shape[-1]
    query = torch.arange(weights.shape[-2])
    position = query + offset
    gap = (position[:, None] - torch.arange(length)).abs()
    result = {"distance": _mean((weights * gap).sum(-1), counted)}
    for name, lag in (("self", 0), ("previous", 1), ("next", -1)):
        key = position - lag
        exists = (key >= 0) & (key < length)
        key = key.clamp(0, length - 1)
        if offset == 0:
            exists &= group == group[key]
        result[name] = _mean(weights[:, query, key], counted & exists & keys[key])
    return result


def _of_copies(weights: Tensor, counted: Tensor, tokens: Tensor, keys: Tensor, group: Tensor) -> dict[str, Tensor]:
    """Return the weights on earlier copies of the query's token in its group, and on the tokens after them."""
    length = len(tokens)
    position = torch.arange(length)
    copy = (tokens[:, None] == tokens) & (position < position[:, None]) & keys & (group[:, None] == group)
    after = torch.zeros_like(copy)
    after[:, 1:] = copy[:, :-1]
    has = counted & copy.any(-1)
    return {
        "duplicate": _mean((weights * copy).sum(-1), has),
        "induction": _mean((weights * after).sum(-1), has),
    }


def is_visibility_certain(weights: Tensor) -> bool:
    """Return whether no weight is so small that a mask may or may not have hidden its key."""
    return not bool(((weights > 0) & (weights < TINY)).any())
