"""Padding of one attention call, derived from the mask that it received."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import InputError
from headwise.intercept.received_mask import MaskFacts, ReceivedMask
from headwise.shapes import Bool

HIDING = -1e4
"""Number in a padding mask to be added to scores, from which a token counts as hidden."""


class RealTokens(NamedTuple):
    """Masks that state which queries and keys of a self-attention call belong to real tokens, and not to padding.

    Attributes:
        queries: True at tokens whose query rows count; None for all.
        keys: True at tokens whose keys count; None for all.
        is_known: False if a mask shows padding, but it is unknown which of the tokens are.
    """

    queries: Bool[Tensor, "batch queries"] | None
    keys: Bool[Tensor, "batch queries"] | None
    is_known: bool = True


def real_by_mask(facts: MaskFacts, first: int, queries: int, batch: int) -> RealTokens:
    """Return, from the mask of a self-attention call, which of its queries and keys are not padding. A token is padding
    if no query may attend to the token's key. A query is also padding if it may attend to no key.

    If no row sees its own key, as in strictly causal masks, only rows that see no key are padding.

    Args:
        facts: facts about the mask.
        first: index of the key that belongs to the first query.
        queries: number of queries.
        batch: number of sequences.
    """
    own_is_seen = facts.is_seen[:, first : first + queries]
    sees_own = facts.sees_own if first == 0 else facts.sees_any
    if not bool(sees_own.any()):
        return RealTokens(none_if_all(facts.sees_any, batch), None)
    return RealTokens(none_if_all(facts.sees_any & own_is_seen, batch), none_if_all(own_is_seen, batch))


def real_by_causal_mask(facts: MaskFacts, queries: int, batch: int) -> RealTokens:
    """Return which queries of a self-attention call are not padding, if its first keys may not belong to tokens. Under
    a causal mask, the last key that a query may attend to is the key of its own token. A query is padding if no query
    may attend to that key. If the mask hides some key from all queries but is not causal, the result is marked as
    unknown.

    Args:
        facts: facts about the mask.
        queries: number of queries.
        batch: number of sequences.
    """
    real = RealTokens(none_if_all(facts.sees_any, batch), None)
    if bool(facts.is_seen.all()):
        return real
    first, is_causal = facts.own_key_of_first_row()
    if first is None or not is_causal or not 0 <= first <= facts.is_seen.shape[1] - queries:
        return real._replace(is_known=False)
    return real._replace(queries=none_if_all(facts.sees_any & facts.is_seen[:, first : first + queries], batch))


def argument_of_keys(argument: Tensor, dropped: int, first: int, queries: int) -> Tensor | None:
    """Return the columns of a module's padding mask `argument` that belong to the keys of a self-attention call, up to
    the key of the last query. Return None if the mask has too few columns.

    The argument has the tokens of the queries alone, or all tokens from the start of the sequences. These may include
    tokens whose keys a cache has dropped, and places of a static cache that are still empty. Or it has the latest
    tokens.

    Args:
        argument: the padding mask.
        dropped: number of tokens at the start of the sequences whose keys are not among those of the call.
        first: index of the key that belongs to the first query.
        queries: number of queries.
    """
    length = first + queries
    if argument.shape[1] == queries:
        return F.pad(argument, (first, 0), value=1)
    if argument.shape[1] >= dropped + length:
        return argument[:, dropped : dropped + length]
    return argument[:, -length:] if argument.shape[1] >= length else None


def meanings_of_argument(
    argument: Tensor, received: ReceivedMask, real: RealTokens, first: int
) -> list[Bool[Tensor, "batch length"]]:
    """Return the possible readings of `argument`, a module's padding mask in which True may mark either tokens or
    padding. Each reading is returned as a mask that is True at tokens. A reading is possible if, under the mask of the
    attention call, no token may attend to the key of padding. If both are possible, return only those that leave query
    tokens in every sequence.

    Args:
        argument: the padding mask `(batch, length)` of the tokens of the first keys.
        received: mask of the call.
        real: tokens that are not padding by the mask of the call.
        first: index of the key that belongs to the first query.
    """
    if _is_mask_of_scores(argument, received):
        return []
    is_true = argument > HIDING if argument.is_floating_point() and bool((argument < 0).any()) else argument != 0
    meanings = [meaning for meaning in (is_true, ~is_true) if bool(meaning.any(1).all())]
    consistent = [meaning for meaning in meanings if _is_consistent(meaning, received, real.queries, first)]
    if len(consistent) < 2:
        return consistent
    counted = (both(meaning[:, first:], real.queries) for meaning in consistent)
    return [
        meaning for meaning, rows in zip(consistent, counted, strict=True) if rows is not None and rows.any(1).all()
    ]


def _is_mask_of_scores(argument: Tensor, received: ReceivedMask) -> bool:
    """Return True if `argument`, which looks like a padding mask, is in fact the mask `(queries, keys)` of the
    attention call itself. Masks of the two kinds have the same shape if there are as many sequences as queries.
    """
    grid = received.grid
    if argument.shape != (grid.queries, grid.keys):
        return False
    visible = received.block(range(grid.queries))
    if visible.shape[0] > 1:
        return False
    hides = argument <= HIDING if argument.is_floating_point() else argument == 0
    return torch.equal(visible[0, 0], ~hides) or torch.equal(visible[0, 0], hides)


def _is_consistent(
    real: Bool[Tensor, "batch length"],
    received: ReceivedMask,
    real_queries: Bool[Tensor, "batch queries"] | None,
    first: int,
) -> bool:
    """Return True if, under the mask of an attention call, no query that is a token may attend to the key of padding.
    `real` is True at tokens and False at padding.
    """
    queries, length = both(real[:, first:], real_queries), real.shape[1]
    assert queries is not None
    for rows, visible in received.by_sequence():
        sees_padding = (visible[..., :length] & ~real[:, None, : visible.shape[-1]]).any(-1)
        counted = queries.any(1, keepdim=True) if received.has_equal_rows else queries[:, rows.start : rows.stop]
        if bool((sees_padding & counted).any()):
            return False
    return True


def require_hidden(stated: Bool[Tensor, "batch queries"], received: ReceivedMask | None, first: int, path: str) -> None:
    """Raise `InputError` if the user states that a token is padding, but a token that is not padding may attend to its
    key.

    Args:
        stated: True at the tokens of the queries that are not padding, as stated.
        received: mask of the call; None if it is unknown.
        first: index of the key that belongs to the first query.
        path: path of the module, for the error message.
    """
    if received is not None and not _is_consistent(F.pad(stated, (first, 0), value=True), received, None, first):
        raise InputError(
            "padding",
            expected="padding that is hidden from the tokens",
            got=f"padding that tokens attend to in {path}",
            remedy="state True at tokens and False at padding, and pass the model its mask",
        )


def none_if_all(real: Bool[Tensor, "#batch length"] | None, batch: int) -> Bool[Tensor, "batch length"] | None:
    """Return `real`, a mask that is True at tokens and False at padding, expanded to all sequences of the batch. Return
    None if it is True everywhere.
    """
    return None if real is None or bool(real.all()) else real.expand(batch, -1)


def both(one: Bool[Tensor, "*axes"] | None, other: Bool[Tensor, "*axes"] | None) -> Bool[Tensor, "*axes"] | None:
    """Return the logical AND of two boolean tensors. None stands for a tensor that is True everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def has_gap(is_real: Bool[Tensor, "batch length"]) -> bool:
    """Return True if some sequence has padding between its tokens. `is_real` is True at tokens and False at padding."""
    starts = is_real[:, 1:] & ~is_real[:, :-1]
    return bool((starts.sum(1) + is_real[:, 0] > 1).any())
