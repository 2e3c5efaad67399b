"""Additive masks of other libraries, which hide keys with large negative numbers instead of -inf."""

import torch
from torch import Tensor

from headwise.shapes import Bool, Float

HIDING_DIFFERENCE = 1e4
"""A key is hidden if the mask adds this much less to its score than to another key's: no score makes up for it."""


def with_infinite(added: Float[Tensor, "*batch keys"]) -> Float[Tensor, "*batch keys"]:
    """Return a copy of `added`, a mask whose numbers are added to the scores, with -inf at every hidden key. A key is
    hidden if its number is at least 1e4 less than the largest number in the same query row. All keys of a row are
    hidden if all numbers of the row are at most half the dtype's most negative finite number.
    """
    hidden = (added <= added.amax(-1, keepdim=True) - HIDING_DIFFERENCE) | hides_all_keys(added)
    return added.masked_fill(hidden, -torch.inf)


def hides_all_keys(added: Float[Tensor, "*batch keys"]) -> Bool[Tensor, "*batch 1"]:
    """Return, for each row of an additive mask, True if the row hides every key: all its numbers are at most half the
    most negative finite number of the dtype.

    Libraries write the smallest number of a dtype to hide a key, possibly added to another mask.
    """
    return added.amax(-1, keepdim=True) <= torch.finfo(added.dtype).min / 2


def fill_hidden_rows_as_torch(
    out: Float[Tensor, "batch heads queries value_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return the head outputs `out`, with torch's result in those query rows where an additive `mask` hides every key
    by a large finite negative number. Torch's softmax attends uniformly there, so the result is the mean of all values
    `v`; headwise itself outputs 0. Other rows, and all rows under any other mask, are unchanged.

    A finite number that is added to all scores of a row cancels in torch's softmax: the row attends uniformly to all
    keys. Some models read such rows.
    """
    if mask is None or not mask.is_floating_point():
        return out
    rows = hides_all_keys(mask) & (mask.amax(-1, keepdim=True) > -torch.inf)
    if not bool(rows.any()):
        return out
    return torch.where(rows, v.mean(-2, keepdim=True).repeat_interleave(out.shape[1] // v.shape[1], 1), out)
