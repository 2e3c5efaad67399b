"""Kinds of statistics: descriptions of how row blocks of one attention call add up to one number per head."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import TileVisibility
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.shapes import Bool, Float

Sums = tuple[Float[Tensor, "batch heads *more"], ...]
RowValues = Float[Tensor, "batch heads rows"]
CountedRows = Bool[Tensor, "*#batch_heads rows"]


@dataclass(frozen=True)
class Statistic:
    """Definition of a statistic of a head's attention weights that is not a mean of row values. For each row block
    (some query rows of a call) it computes sums; these are merged over the blocks, and each head's value is computed
    from the merged sums.

    Attributes:
        name: name of the statistic.
        unit: "nats", "tokens", "share", "norm" or "logit".
        contribute: function that returns a row block's sums, tensors `(batch, heads, ...)` of the same shapes for all
            blocks of a call; None if the call lacks something, such as token ids.
        value: function that returns each head's value `(batch, heads)` from the merged sums; NaN without any row.
        merge: function that merges two sums into one.
        start: number that does not change a sum that it is merged with.
        is_per_key: True if the last axis of the sums is the keys of the call.
        is_largest: True if the value over several sequences is the largest one, not the mean.
    """

    name: str
    unit: str
    contribute: Callable[[RowBlock], Sums | None]
    value: Callable[..., Float[Tensor, "batch heads"]]
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add
    start: float = 0.0
    is_per_key: bool = False
    is_largest: bool = False


@dataclass(frozen=True)
class MeanOfRows:
    """Definition of a statistic of a head's attention weights that has one value per query row. The head's value is the
    mean over the rows that are not padding, have a visible key, and for which the statistic is defined.

    Attributes:
        name: name of the statistic.
        unit: "nats", "tokens", "share", "norm" or "logit".
        measure: function that returns the value of each row of a row block; None if the call lacks something, such as
            token ids.
        counted: function that returns True for the rows of a tile in which the statistic has a meaning; None for all.
            Padding and rows without a visible key never count.
    """

    name: str
    unit: str
    measure: Callable[[RowBlock], RowValues | None]
    counted: Callable[[TileVisibility], CountedRows | None] = lambda _: None
