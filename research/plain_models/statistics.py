"""Statistics of one head over one sequence, as docs/watch.md defines them, from whole matrices in float64."""

import math

import torch
from torch import Tensor

from research.plain_models.truth import Sequence

POSITIONAL = ("distance", "self", "previous", "next")
"""Statistics that need the queries' positions among the keys."""


def statistics_of(sequence: Sequence, projection: Tensor | None, *, is_cross: bool) -> dict[str, float]:
    """Return the statistics of one head over one sequence; those that have no value are missing.

    Args:
        sequence: weights, values and positions.
        projection: the head's part of the output projection, `(value_dim, width)`; None without one.
        is_cross: True for cross-attention, in which queries have no positions among the keys.
    """
    weights = sequence.weights[sequence.counted]
    if not len(weights):
        return {}
    visible = sequence.visible[sequence.counted]
    rows = {"entropy": -torch.special.xlogy(weights, weights).sum(-1), "confidence": weights.amax(-1)}
    several = visible.sum(-1) > 1
    rows["evenness"] = rows["entropy"][several] / visible.sum(-1)[several].double().log()
    out = sequence.out[sequence.counted]
    rows["output_norm"] = out.norm(dim=-1)
    if projection is not None:
        rows["written_norm"] = (out @ projection).norm(dim=-1)
    is_token = _is_token(sequence, is_cross=is_cross)
    rows["first"] = _weight_of_first(weights, visible & is_token)
    if not is_cross:
        rows |= _positional(sequence, is_token)
    result = {name: float(values.mean()) for name, values in rows.items() if len(values)}
    counts = visible.sum(0)
    enough = (2 * counts >= counts.amax()) & (counts > 0)
    result["received"] = float((weights.sum(0)[enough] / counts[enough]).amax())
    return result


def _weight_of_first(weights: Tensor, visible: Tensor) -> Tensor:
    """Return for each row the weight of the first token of its document. Rows that see no token are left out."""
    first = _documents(visible)[visible.int().argmax(-1)]
    return weights.gather(1, first[:, None])[:, 0][visible.any(-1)]


def _documents(visible: Tensor) -> Tensor:
    """Return for each key the number of its document, the index of its first key. Two keys that some row sees belong to
    the same document.
    """
    document = torch.arange(visible.shape[1])
    for row in visible[visible.any(-1)]:
        joined = document[row].unique()
        document = torch.where(torch.isin(document, joined), joined.min(), document)
    return document


def _is_token(sequence: Sequence, *, is_cross: bool) -> Tensor:
    """Return True at keys that are tokens. In cross-attention, all are."""
    if sequence.key_tokens is None or is_cross or not bool((sequence.key_tokens >= 0).any()):
        return torch.ones(sequence.weights.shape[1], dtype=torch.bool)
    return sequence.key_tokens >= 0


def positions_of_queries(sequence: Sequence) -> Tensor | None:
    """Return the index of each counted query's own token among the keys; None if it is not among them."""
    if sequence.key_tokens is None or sequence.query_tokens is None:
        same = sequence.weights.shape[0] == sequence.weights.shape[1]
        return torch.arange(len(sequence.weights))[sequence.counted] if same else None
    is_own = sequence.query_tokens[sequence.counted][:, None] == sequence.key_tokens[None]
    return is_own.int().argmax(-1) if bool(is_own.any(-1).all()) else None


def _positional(sequence: Sequence, is_token: Tensor) -> dict[str, Tensor]:
    """Return the statistics that need positions, by row."""
    position = positions_of_queries(sequence)
    if position is None:
        return {}
    weights = sequence.weights[sequence.counted]
    keys = torch.arange(weights.shape[1])
    distance = (position[:, None] - keys[None]).abs()
    visible = sequence.visible[sequence.counted] & is_token
    document, is_seen = _documents(visible), visible.any(0)  # the document of a key that no row selects is unknown
    own = document[visible.int().argmax(-1)]
    rows = {"distance": (weights * distance * is_token).sum(-1)}
    for name, offset in (("self", 0), ("previous", 1), ("next", -1)):
        key = position - offset
        exists = (key >= 0) & (key < len(keys))
        neighbour = key.clamp(0, len(keys) - 1)
        exists &= is_token[neighbour] & ((document[neighbour] == own) | ~is_seen[neighbour])
        rows[name] = weights[exists].gather(1, key[exists][:, None])[:, 0]
    return rows


def mean_statistics(by_sequence: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each statistic over the sequences that have it."""
    names = {name for statistics in by_sequence for name in statistics}
    values = {name: [statistics[name] for statistics in by_sequence if name in statistics] for name in names}
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}
