"""Attention weights of some query rows of a view, without the keys after the last visible one."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.shapes import Bool, Float, Int


def largest(
    weights: Float[Tensor, "heads rows columns"], count: int
) -> tuple[Float[Tensor, "heads rows count"], Int[Tensor, "heads rows count"]]:
    """Return the `count` largest weights of each row, largest first, and their columns.

    The columns are split into groups. The largest weights are in the `count` groups with the largest maxima, so only
    these are sorted, which takes a fraction of the time of `topk` of all columns.
    """
    columns = weights.shape[-1]
    size = round((columns / count) ** 0.5)
    groups = columns // max(size, 1)
    if groups <= 2 * count:
        chosen = _columns_of_largest(weights, count)
        return weights.gather(-1, chosen), chosen
    maxima = weights[..., : size * groups].reshape(*weights.shape[:2], size, groups).amax(-2)
    of_groups = _columns_of_largest(maxima, count)
    candidates = (of_groups[..., None, :] + groups * torch.arange(size)[:, None]).flatten(-2)
    remaining = torch.arange(size * groups, columns).expand(*candidates.shape[:-1], -1)
    candidates = torch.cat([candidates, remaining], -1)
    chosen = candidates.gather(-1, _columns_of_largest(weights.gather(-1, candidates), count))
    return weights.gather(-1, chosen), chosen


def _columns_of_largest(values: Float[Tensor, "heads rows columns"], count: int) -> Int[Tensor, "heads rows count"]:
    """Return the columns of the `count` largest values of each row, largest first.

    numpy partitions integers, made of a value and its column, in a third of the time of `topk`.
    """
    columns = values.shape[-1]
    bits = values.contiguous().view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative numbers are in descending order
    pairs = ((ascending.long() << 32) | torch.arange(columns - 1, -1, -1)).numpy()
    pairs.partition(columns - count, axis=-1)
    top = torch.from_numpy(np.sort(pairs[..., columns - count :])[..., ::-1].copy())
    return columns - 1 - (top & 0xFFFFFFFF)


def _last_of(values: Tensor) -> int:
    """Return the number of columns up to the last one with a value that is True or not 0."""
    columns = values.any(0).any(0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 0


@dataclass(frozen=True, eq=False)
class VisibleWeights:
    """Attention weights of some query rows of some heads, on the CPU in float32. Keys after the last one that has a
    weight or is visible to one of these rows, such as later tokens in a decoder, are left out.

    Attributes:
        weights: the weights.
        heads: the heads.
        rows: the query rows.
        keys: index of the key of each column.
        is_visible: True where a row may attend to the key of a column; for one head if all heads have the same mask.
        all_keys: number of keys of the call.
    """

    weights: Float[Tensor, "heads rows columns"]
    heads: slice
    rows: range
    keys: Int[Tensor, " columns"]
    is_visible: Bool[Tensor, "#heads rows columns"]
    all_keys: int

    @staticmethod
    def of(row_block: RowBlock) -> "VisibleWeights":
        """Return the weights of a row block of a call with one sequence."""
        is_visible = row_block.tile.is_visible[0].cpu()
        if len(is_visible) > 1 and is_visible.eq(is_visible[:1]).all():
            is_visible = is_visible[:1]
        weights = row_block.weights[0].float().cpu()
        stop = max(_last_of(is_visible), 1)
        stop += _last_of(weights[..., stop:])  # weights that are not where the mask states that they are
        return VisibleWeights(
            weights[..., :stop],
            row_block.sequences_and_heads[1],
            row_block.rows,
            row_block.visibility.key_indices[:stop].cpu(),
            is_visible[..., :stop],
            row_block.grid.keys,
        )

    @property
    def most_visible_to_first_row(self) -> int:
        """Number of keys that the first of the rows may attend to, in the head where there are most."""
        return int(self.is_visible[:, 0].sum(-1).max())
