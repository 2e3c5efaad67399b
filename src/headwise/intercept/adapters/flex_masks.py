"""Functions that a model passes to FlexAttention, evaluated for blocks of queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid, Index
from headwise.intercept.adapters.engine import UnreadableCall
from headwise.shapes import Bool, Int


def over_block(function: Callable[..., Tensor], *indices: Int[Tensor, " _"], scores: Tensor | None = None) -> Tensor:
    """Return the results of a `mask_mod` or `score_mod` for all combinations of the indices of sequences, heads,
    queries and keys, as `(sequences, heads, queries, keys)`. The function receives single indices, as in FlexAttention,
    and with `scores`, the score of each combination in front of them.

    Raises:
        UnreadableCall: the function cannot be evaluated in this way, as with conditions that depend on values.
    """
    mapped = function
    for axis in (3, 2, 1, 0):
        dims = [0 if other == axis else None for other in range(4)]
        mapped = torch.vmap(mapped, in_dims=tuple(dims if scores is None else [0, *dims]))
    try:
        return mapped(*(indices if scores is None else (scores, *indices)))
    except (RuntimeError, TypeError, IndexError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnreadableCall(f"with {name}, which cannot be evaluated for a block ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True, eq=False)
class FlexMask(Mask):
    """Mask computed by a `mask_mod` of FlexAttention, from the indices of query rows and keys, not their positions.

    Attributes:
        rule: the function.
        first_sequence: index that the function receives for the first sequence of the grid.
        first_head: index that the function receives for the first head of the grid.
    """

    rule: Callable[..., Any]
    first_sequence: int = 0
    first_head: int = 0

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return over_block(
            self.rule, b.flatten() + self.first_sequence, h.flatten() + self.first_head, i.flatten(), j.flatten()
        )

    def for_sequence(self, index: int) -> Mask:
        return FlexMask(self.rule, self.first_sequence + index, self.first_head)

    def for_head(self, index: int) -> Mask:
        return FlexMask(self.rule, self.first_sequence, self.first_head + index)
