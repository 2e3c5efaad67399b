"""Emitter of row blocks: an observer of blockwise attention is called with each tile while its scores are in cache."""

from typing import NamedTuple

from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer, RowBlock
from headwise.attention.backends.blockwise.tiles import LOG2_E, Tile
from headwise.attention.backends.blockwise.visibility import TileVisibility
from headwise.attention.masks.grid import Grid
from headwise.shapes import Float


class RowBlockEmitter(NamedTuple):
    """Emitter of one attention call: makes a `RowBlock` (attention weights and row statistics) of each tile of the
    score matrix, and calls the observer, a function of the caller, with it.

    Attributes:
        observer: function that is called with each row block.
        call_context: tokens and padding of the call.
        grid: the score grid of the call.
        values: the values of the call.
    """

    observer: Observer
    call_context: CallContext
    grid: Grid
    values: Float[Tensor, "batch kv_heads keys value_dim"]

    def visibility(self, tile: Tile) -> TileVisibility:
        """Return the `TileVisibility` of a tile (a rectangle of the score matrix), an object with the visible keys,
        positions and key features of the tile.
        """
        return self.call_context.visibility(tile, self.grid)

    def emit(
        self,
        tile: Tile,
        *,
        powers: Float[Tensor, "kv stacked columns"],
        scores: Float[Tensor, "kv stacked columns"],
        power_sum: Float[Tensor, "kv stacked 1"],
        normalizer: Float[Tensor, "kv stacked 1"],
        largest_score: Float[Tensor, "kv stacked 1"],
        largest_uncapped_score: Float[Tensor, "kv stacked 1"] | None,
        product: Float[Tensor, "kv stacked value_dim_and_features"],
        value_dim: int,
    ) -> None:
        """Make the `RowBlock` (weights, output and row sums) of one tile, and call the observer with it. `powers` are
        the tile's unnormalized weights, and `power_sum` is their sum in each row. `product` is their
        product, after dropout, with the values and, if present, the key features. `scores` are the scores minus the
        row's largest one, and are overwritten.

        Args:
            tile: the tile.
            powers: 2 to the power of each score; the largest of each row is 1.
            scores: scores in units of ln 2, less the largest of each row.
            power_sum: sum of each row's powers.
            normalizer: the same with the power of the row's sink logit, if there is one.
            largest_score: largest score of each row, in units of ln 2.
            largest_uncapped_score: the same before the softcap and without the bias; None without a softcap.
            product: sums over keys of powers times values, followed by the sums of powers times key features.
            value_dim: features of a value.
        """
        power_score_sum = scores.mul_(powers).sum(-1, keepdim=True)
        self.observer(
            RowBlock(
                tile=tile,
                grid=self.grid,
                call_context=self.call_context,
                visibility=self.visibility(tile),
                powers=powers,
                power_score_sum=power_score_sum,
                power_sum=power_sum,
                normalizer=normalizer,
                largest_power=1.0,
                largest_score=largest_score / LOG2_E,
                largest_uncapped_score=None if largest_uncapped_score is None else largest_uncapped_score / LOG2_E,
                out=product[..., :value_dim] / normalizer,
                feature_products=product[..., value_dim:] if product.shape[-1] > value_dim else None,
                values=self.values,
            )
        )
