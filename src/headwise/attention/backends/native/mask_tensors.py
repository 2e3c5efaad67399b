"""Mask tensors as ranges of keys, the form in which kernels read masks."""

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.native import library
from headwise.attention.masks.grid import MOST_RANGES
from headwise.shapes import Int


class MaskRanges(NamedTuple):
    """Ranges of keys that each query attends to, read from a mask tensor and stored as int32 starts and stops. If the
    mask cannot be stated as ranges, `ranges` is None, and `reason` is a sentence that says why.
    """

    ranges: Int[Tensor, "#batch #heads #queries ranges 2"] | None
    reason: str | None = None


MANY_RANGES = MaskRanges(None, f"the mask shows some query more than {MOST_RANGES} ranges of keys")
FINITE_ROWS = MaskRanges(None, "the mask hides all keys of a query by finite numbers, so the query attends uniformly")
BIAS = MaskRanges(None, "the mask adds other numbers to the scores than 0 and negative ones that hide keys")
REFUSALS = (None, MANY_RANGES, FINITE_ROWS, BIAS)
"""Results for masks that are not ranges, by the number that the native operator returns. It returns 0 for ranges."""


def mask_ranges(mask: Tensor, dtype: torch.dtype | None = None) -> MaskRanges:
    """Convert a mask tensor `(batch, heads, queries, keys)` to ranges that contain exactly the visible keys of each
    query, at most `MOST_RANGES` of them. A boolean mask is True at visible keys. An additive mask, in float32 or
    bfloat16, is cast to `dtype`, and has ranges only if it is 0 at visible keys, and -inf or at most -1e30 at all
    others: next to another key, such a key has the weight 0. Axes along which the mask repeats, except that of the
    keys, have size 1 in the result.

    A row without a visible key is empty ranges. But if it has finite numbers, softmax is uniform over the keys with the
    largest one, and the mask is not ranges.
    """
    ranges, number = library.operator("mask_ranges")(mask.detach(), dtype == torch.bfloat16)
    return REFUSALS[number] or MaskRanges(ranges)
