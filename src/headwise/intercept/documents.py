"""Packed documents in one sequence, recognised by the mask of an attention call: no query sees another document."""

import torch
from torch import Tensor

from headwise.intercept.received_mask import MaskFacts, ReceivedMask
from headwise.shapes import Bool, Int


def first_tokens_of_documents(
    received: ReceivedMask, facts: MaskFacts, real: Bool[Tensor, "#batch queries"] | None, keys: int
) -> Int[Tensor, "#batch queries"] | None:
    """Return, for each query row, the index of the first key of the row's document. Return None if the mask of the call
    does not separate documents (packed in one sequence) in any sequence.

    Documents are contiguous, or groups of rows that see the same keys, as in shifted windows.

    Args:
        received: the mask.
        facts: facts about it.
        real: True at query rows that are not padding; None if all are not.
        keys: number of keys.
    """
    if facts.selects_keys:
        return None
    counted = facts.sees_any if real is None else facts.sees_any & real
    first = facts.first_visible.masked_fill(~counted, keys)
    if bool(((first == first.amin(1, keepdim=True)) | ~counted).all()):
        return None  # in each sequence, all rows see the same first key
    is_grouped = _share_no_key(received, first, counted)
    starts, is_separated = facts.is_seen.int().argmax(1, keepdim=True), is_grouped
    if counted.shape[1] == keys:
        is_start = _starts_of_contiguous(facts, counted)
        rows = torch.arange(keys, device=counted.device)
        starts = torch.where(is_start, rows, -1).cummax(1).values.clamp(min=0)
        is_separated = is_grouped | (is_start.sum(1) > 1)
    if not bool(is_separated.any()):
        return None
    return torch.where(is_grouped[:, None], facts.first_visible, starts)


def ids_by_document(
    tokens: Int[Tensor, "batch keys"] | None, first_keys: Int[Tensor, "batch #queries"] | None
) -> Int[Tensor, "batch keys"] | None:
    """Return the token ids, changed so that tokens of different documents never have the same id. `first_keys` is the
    index of the first key of each token's document; if its shape is not that of `tokens`, there is a single document.
    """
    if tokens is None or first_keys is None or first_keys.shape != tokens.shape or tokens.shape[1] < 2:
        return tokens
    return torch.where(tokens < 0, tokens, tokens + (tokens.amax() + 1) * first_keys)


def _starts_of_contiguous(facts: MaskFacts, counted: Bool[Tensor, "#batch queries"]) -> Bool[Tensor, "#batch queries"]:
    """Return True at each query row that starts a contiguous document (packed with others in one sequence). Row i
    starts one if no row before it sees key i or a later key, and neither row i nor any later row sees a key before key
    i.

    Args:
        facts: facts about the mask of a call with as many queries as keys.
        counted: True at rows that see a key and are not padding.
    """
    count = counted.shape[1]
    rows = torch.arange(count, device=counted.device)
    last_before = torch.where(counted, facts.last_visible, -1).cummax(1).values.roll(1, 1)
    last_before[:, 0] = -1
    first_after = torch.where(counted, facts.first_visible, count).flip(1).cummin(1).values.flip(1)
    return counted & (last_before < rows) & (first_after >= rows)


def _share_no_key(
    received: ReceivedMask, first: Int[Tensor, "#batch queries"], counted: Bool[Tensor, "#batch queries"]
) -> Bool[Tensor, " #batch"]:
    """Return True for each sequence in which rows of different groups never see the same key. A group consists of the
    rows with the same number in `first`, the first key that the row sees. Only rows where `counted` is True are
    compared.
    """
    smallest, largest = [], []
    for rows, visible in received.by_sequence():
        of_rows, is_counted = (tensor[:, rows.start : rows.stop, None] for tensor in (first, counted))
        smallest.append(torch.where(visible & is_counted, of_rows, 2**62).amin(1))
        largest.append(torch.where(visible & is_counted, of_rows, -1).amax(1))
    low, high = torch.stack(smallest).amin(0), torch.stack(largest).amax(0)
    return ((low == high) | (high < 0)).all(1)
