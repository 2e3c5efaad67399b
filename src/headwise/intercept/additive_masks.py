"""Additive masks of other libraries, which hide keys with large negative numbers instead of -inf."""

import torch
from torch import Tensor

from headwise.shapes import Bool, Float

HIDING_DIFFERENCE = 5e3
"""A key is hidden if a mask adds at least this much less to its score than to another key's: its weight is then 0 in
every dtype, since no score makes up for it. Libraries write -10000, which is -9984 in bfloat16, or lower numbers.
"""

CERTAIN_DIFFERENCE = 1e6
"""A difference that is no bias, such as one for each token of distance, but hides a key."""


def with_infinite(added: Float[Tensor, "*batch rows keys"]) -> Float[Tensor, "*batch rows keys"]:
    """Return a copy of `added` with -inf at every hidden key. `added` is an additive mask, or scores with such a mask.
    A key is hidden if its number is far below the largest number in the same query row. All keys of a row are hidden if
    all its numbers are far below 0.
    """
    hidden = _is_far_below(added, added.amax(-1, keepdim=True), -1) | hides_all_keys(added)
    return added.masked_fill(hidden, -torch.inf)


def hides_all_keys(added: Float[Tensor, "*batch rows keys"]) -> Bool[Tensor, "*batch rows 1"]:
    """Return True for each row of `added` that hides every key, that is whose numbers are all far below 0. `added` is
    an additive mask, or scores with such a mask.
    """
    return _is_far_below(added.amax(-1, keepdim=True), torch.zeros_like(added[..., :1, :1]), -2)


def _is_far_below(numbers: Tensor, reference: Tensor, dim: int) -> Bool[Tensor, "*shape"]:
    """Return True where a number in an additive mask, or in scores with such a mask, is so far below `reference` that
    its key must be hidden: at least 5000 below. If any number along axis `dim` is near this limit, as with a bias that
    grows with distance, the limit is 1000000 below.
    """
    difference = (numbers - reference).to(torch.promote_types(numbers.dtype, torch.float32))
    is_below = difference <= -HIDING_DIFFERENCE
    is_near = (difference + HIDING_DIFFERENCE).abs() < HIDING_DIFFERENCE / 2
    return (is_below & ~is_near.any(dim, keepdim=True)) | (difference <= -CERTAIN_DIFFERENCE)


def is_uniform_where_hidden(mask: Tensor | None) -> bool:
    """Return True if torch's softmax is uniform in every row where `mask` hides all keys by finite numbers. That is the
    case if the numbers of the row are equal, and so large in magnitude that adding the scores does not change them.
    Also return True if there is no such row, as in boolean masks.
    """
    if mask is None or not mask.is_floating_point():
        return True
    largest = mask.amax(-1, keepdim=True)
    is_hidden = hides_all_keys(mask) & (largest > -torch.inf)
    if not bool(is_hidden.any()):
        return True
    is_uniform = (largest <= torch.finfo(mask.dtype).min / 2) & (mask.amin(-1, keepdim=True) == largest)
    return bool((is_uniform | ~is_hidden).all())


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
