"""Ranges of keys that a matrix of booleans, or an additive mask, states: an exact run-length encoding of its rows."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.position_ranges import MOST_RANGES
from headwise.shapes import Bool, Int

HIDING = -1e30
"""Largest number of an additive mask that hides a key by its size alone: next to another key it has the weight 0, and
any attention score below 1e22 vanishes when it is added to such a number.
"""

ELEMENTS_AT_ONCE = 2**18
"""Number of elements of a mask that are read at once, so that intermediate results stay in the cache."""


class RunLengths(NamedTuple):
    """A mask as ranges of keys, or the reason that it is not read as ranges.

    Attributes:
        ranges: starts and stops of the visible keys of each query, int32; None with a reason.
        reason: what the mask is instead, in one sentence; None for ranges.
    """

    ranges: Int[Tensor, "#batch #heads #queries ranges 2"] | None
    reason: str | None = None


BIAS = RunLengths(None, "the mask adds other numbers to the scores than 0 and negative ones that hide keys")
MANY_RANGES = RunLengths(None, f"the mask shows some query more than {MOST_RANGES} ranges of keys")
FINITE_ROWS = RunLengths(None, "the mask hides all keys of a query by finite numbers, so the query attends uniformly")


@torch.no_grad()
def run_lengths(mask: Tensor, dtype: torch.dtype | None = None) -> RunLengths:
    """Return a boolean mask (True: attends) or an additive mask as ranges of keys, at most `MOST_RANGES` for each
    query. The ranges are exactly the visible keys. An additive mask is such ranges if it consists of 0, at visible
    keys, and of -inf or numbers up to `HIDING`. Axes along which the mask repeats have size 1 in the result.

    A row without a visible key is empty ranges. But if it has finite numbers, softmax is uniform over the keys with the
    largest one, and the mask is not ranges.

    Args:
        mask: the mask.
        dtype: dtype to which an additive mask is cast before it is read; by default its own.
    """
    for axis in range(3):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    rows = mask.flatten(0, 2)
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, rows.shape[1]))
    tables, widest = [], 1
    for part in torch.split(rows, at_once):
        visible = part
        if part.dtype != torch.bool:
            added = part if dtype is None else part.to(dtype)
            visible = added == 0
            if not bool((visible | (added <= HIDING)).all()):
                return BIAS
            if bool((~visible.any(-1) & (added.amax(-1) > -torch.inf)).any()):
                return FINITE_ROWS
        table = _edges(visible)
        if table is None:
            return MANY_RANGES
        tables.append(table)
        widest = max(widest, int((table[:, 1::2] > 0).sum(1).max()))
    ranges = torch.cat(tables)[:, : 2 * widest].int()
    return RunLengths(ranges.reshape(*mask.shape[:3], widest, 2))


def _edges(visible: Bool[Tensor, "rows keys"]) -> Int[Tensor, "rows edges"] | None:
    """Return the starts and stops of the runs of True in each row, in order, followed by zeros; None if a row has more
    than `MOST_RANGES` runs.
    """
    padded = F.pad(visible, (1, 1))
    row, key = (padded[:, 1:] ^ padded[:, :-1]).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(visible))
    if len(row) and int(counts.max()) > 2 * MOST_RANGES:
        return None
    number = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    table = key.new_zeros(len(visible), 2 * MOST_RANGES)
    table[row, number] = key
    return table
