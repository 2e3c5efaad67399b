"""Attention weights of some query rows of a view, without the keys after the last visible one."""

from dataclasses import dataclass

from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.shapes import Bool, Float, Int


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
        if is_visible.eq(is_visible[:1]).all():
            is_visible = is_visible[:1]
        weights = row_block.weights[0].float().cpu()
        columns = (is_visible.any(0).any(0) | (weights != 0).any(0).any(0)).nonzero()
        stop = int(columns[-1]) + 1 if len(columns) else 1
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
