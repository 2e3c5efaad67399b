"""Padding of one attention call, derived from the mask that it received."""

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.intercept.mask_facts import MaskFacts
from headwise.intercept.received_mask import ReceivedMask
from headwise.shapes import Bool

HIDING = -1e4
"""Number in a padding mask to be added to scores, from which a token counts as hidden."""


class RealTokens(NamedTuple):
    """Tokens of the queries of a self-attention call that are not padding.

    Attributes:
        queries: True at tokens whose query rows count; None for all.
        keys: True at tokens whose keys count; None for all.
    """

    queries: Bool[Tensor, "batch queries"] | None
    keys: Bool[Tensor, "batch queries"] | None


def real_by_mask(facts: MaskFacts, first: int, queries: int, batch: int) -> RealTokens:
    """Return the tokens of the queries of a self-attention call that are not padding by its mask. A token is padding if
    no row sees its own key. Its query row does not count either if it sees no key.

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


def real_by_argument(
    argument: Tensor, received: ReceivedMask, real: RealTokens, first: int
) -> Bool[Tensor, "batch length"] | None:
    """Return True at tokens that are not padding by `argument`, a padding mask of the module around an attention call;
    None if the argument contradicts the mask that the call received. It contradicts that mask if a query that is not
    padding sees a key that is. True may stand for tokens or for padding: the meaning that does not contradict counts.

    Args:
        argument: the padding mask `(batch, length)` of the tokens of the first keys.
        received: mask of the call.
        real: tokens that are not padding by the mask of the call.
        first: index of the key that belongs to the first query.
    """
    if _is_mask_of_scores(argument, received):
        return None
    is_true = argument > HIDING if argument.is_floating_point() and bool((argument < 0).any()) else argument != 0
    meanings = [meaning for meaning in (is_true, ~is_true) if bool(meaning.any(1).all())]
    consistent = [meaning for meaning in meanings if _is_consistent(meaning, received, real.queries, first)]
    return consistent[0] if len(consistent) == 1 else None


def _is_mask_of_scores(argument: Tensor, received: ReceivedMask) -> bool:
    """Return True if `argument` is the mask `(queries, keys)` that the attention call received, for all sequences. It
    has the shape of a padding mask if the batch has as many sequences as tokens.
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
    """Return True if no query that is not padding sees a key that is, where `real` is True at tokens that are not."""
    queries, length = both(real[:, first:], real_queries), real.shape[1]
    assert queries is not None
    for rows, visible in received.by_sequence():
        sees_padding = (visible[..., :length] & ~real[:, None, : visible.shape[-1]]).any(-1)
        if bool((sees_padding & queries[:, rows.start : rows.stop]).any()):
            return False
    return True


def none_if_all(real: Bool[Tensor, "#batch length"] | None, batch: int) -> Bool[Tensor, "batch length"] | None:
    """Return `real`, which is True at tokens that are not padding, for each sequence of the batch; None if it is True
    everywhere.
    """
    return None if real is None or bool(real.all()) else real.expand(batch, -1)


def both(one: Bool[Tensor, "*axes"] | None, other: Bool[Tensor, "*axes"] | None) -> Bool[Tensor, "*axes"] | None:
    """Return True where both tensors are True; None stands for a tensor that is True everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def first_tokens_of_documents(facts: MaskFacts, real: Bool[Tensor, "#batch queries"] | None) -> torch.Tensor | None:
    """Return for each row the index of the first token of its document, if the mask of a call with as many queries as
    keys separates packed documents; otherwise None.

    A document starts at a token that sees no earlier key. The mask separates documents if no row sees a key of another
    document.
    """
    rows = torch.arange(facts.sees_any.shape[1], device=facts.sees_any.device)
    is_real = facts.sees_any if real is None else facts.sees_any & real
    is_start = (facts.first_visible == rows) & facts.sees_own & is_real
    if not bool((is_start.sum(1) > 1).any()) or bool((is_start == is_real).all()):
        return None
    start_of = torch.where(is_start, rows, -1).cummax(1).values
    number = is_start.cumsum(1)
    last = facts.last_visible.clamp(min=0)
    is_separate = (facts.first_visible >= start_of) & (number.gather(1, last.expand_as(number)) == number)
    return start_of if bool((is_separate | ~is_real).all()) else None
