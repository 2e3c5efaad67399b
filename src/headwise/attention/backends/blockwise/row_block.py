"""Query rows of some heads while blockwise attention has their scores in cache: the data that statistics read.

The weight of key j for row i is `powers_ij / normalizer_i`. Sums over keys are divided after the sum, not weight by
weight. Anything that needs a pass over the whole block is computed on first use and cached.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext, TileVisibility
from headwise.attention.backends.blockwise.tiles import Tile
from headwise.attention.masks.grid import Grid
from headwise.attention.tensors import RowsByHead, Stacked, StackedColumn, Values
from headwise.shapes import Float


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Attention weights of some query rows of some heads for the keys of one tile (rectangle of the score matrix), with
    sums and maxima of each row. The tensor `powers` has the unnormalized weights 2^(score - shift), with one shift per
    row. Dividing a power by the `normalizer` of its row gives the attention weight. The tile includes every key that
    its rows may attend to: keys outside of the tile have weight 0.

    Attributes:
        tile: the rows, sequences, heads and keys.
        call_context: tokens and padding of the call.
        visibility: visible keys and positions of the tile.
        powers: 2 to the power of each score, where scores are in units of ln 2 and shifted by one number for each row.
        power_score_sum: sum over keys of each power times its shifted score.
        power_sum: sum over keys of the powers; infinite in a row without a visible key.
        normalizer: divisor of each row's powers: `power_sum` plus the power of the head's sink.
        largest_power: largest power of each row.
        largest_score: largest score of each row, as it enters the softmax, in nats; None if unknown.
        largest_uncapped_score: the same before the softcap and without the bias; None if unknown, or without a softcap.
        out: output of each row, `(kv, stacked, value_dim)`; None if it was not computed.
        feature_products: sums over keys of the powers times each key feature; None if they were not computed.
        gram: `W_h^T W_h` for each head's slice of the output projection; None if unknown.
        values: values of all keys of the call; None if unknown.
    """

    tile: Tile
    grid: Grid
    call_context: CallContext
    visibility: TileVisibility
    powers: Stacked
    power_score_sum: StackedColumn
    power_sum: StackedColumn
    normalizer: StackedColumn
    largest_power: float | StackedColumn
    largest_score: StackedColumn | None = None
    largest_uncapped_score: StackedColumn | None = None
    out: Float[Tensor, "kv stacked value_dim"] | None = None
    feature_products: Float[Tensor, "kv stacked features"] | None = None
    gram: Float[Tensor, "heads value_dim value_dim"] | None = None
    values: Values | None = None

    @property
    def rows(self) -> range:
        """Range of the block's query rows, as indices into all queries of the attention call."""
        return self.tile.block.rows

    @property
    def sequences_and_heads(self) -> tuple[slice, slice]:
        """Slices of the batch axis and the head axis that select the block's sequences and heads from a tensor `(batch,
        heads, ...)`.
        """
        return self.tile.sequences, self.tile.heads

    def with_call_context(self, call_context: CallContext) -> "RowBlock":
        """Return a block with the same weights, in which the tokens, special tokens and padding of `call_context`
        replace those of this block.
        """
        if call_context is self.call_context:
            return self
        visibility = call_context.visibility(self.tile, self.grid)
        return replace(self, call_context=call_context, visibility=visibility, feature_products=None)

    # -- weights ------------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Float[Tensor, "batch heads rows columns"]:
        """Attention weight of each query row for each key column of the block, as a new tensor."""
        return self.tile.by_head(self.powers / self.normalizer)

    @cached_property
    def weight_per_power(self) -> RowsByHead:
        """Factor for each row that turns the unnormalized weights in `powers` into weights: 1 / `normalizer`."""
        return self._by_head(self.normalizer.reciprocal())

    @cached_property
    def weight_sum(self) -> RowsByHead:
        """Sum of each row's weights over its keys: 0 in a row without a visible key, otherwise 1 minus the weight of
        the head's attention sink. Talking heads, which mix the weights of heads, can change it.
        """
        return self._by_head(self.power_sum / self.normalizer).nan_to_num(0.0)

    @cached_property
    def largest_weight(self) -> RowsByHead:
        """Largest attention weight of each row over its keys."""
        return self._by_head(self.largest_power / self.normalizer)

    @cached_property
    def largest_content_weight(self) -> RowsByHead:
        """Largest attention weight of each row over the keys that are not special tokens; 0 in a row that may attend to
        no such key. Requires that special tokens are known.
        """
        is_special = self.visibility.is_special
        assert is_special is not None
        columns = is_special[:, self.visibility.key_indices]
        if not bool(columns.any()):
            return self.largest_weight
        powers = self.tile.by_head(self.powers).masked_fill(columns[:, None, None], 0.0)
        return powers.amax(-1) * self.weight_per_power

    @cached_property
    def entropy(self) -> RowsByHead:
        """Entropy -sum A ln A of each row's weights A over the keys, in nats; 0 in a row without a visible key."""
        # ln A is the score less the log of the normalizer: no logarithm of a weight that may be 0.
        mean_score = self._by_head(self.power_score_sum / self.normalizer)
        logarithm = self._by_head(self.normalizer.log2()).masked_fill(self.weight_per_power == 0, 0.0)
        return ((self.weight_sum * logarithm - mean_score) * math.log(2)).clamp(min=0.0)

    def weighted_sums(
        self, features: Float[Tensor, "#batch columns features"]
    ) -> Float[Tensor, "batch heads rows features"]:
        """Return the sum over keys of attention weight times feature, for each query row and each feature. A feature is
        a column of `features`: one number for each key.
        """
        sequences, heads, rows = self.tile.shape
        if len(features) == 1:
            product = self.powers @ features[0].to(self.powers.dtype)
        else:
            product = self.powers.reshape(sequences, heads * rows, -1) @ features.to(self.powers.dtype)
        return product.view(sequences, heads, rows, -1) * self.weight_per_power[..., None]

    def weight_at_lag(self, lag: int) -> RowsByHead:
        """Return each row's weight on the key `lag` positions before the query, or 0 if there is no such key."""
        if not self.visibility.grid.uses_default_positions:
            return (self.weights * (self.visibility.lags == lag)[:, None]).sum(-1)
        powers = torch.zeros_like(self.weight_per_power)
        first = self.rows.start + self.visibility.grid.offset - lag  # the key of the first row
        for keys, span in self.tile.spans(self.tile.by_head(self.powers)):
            diagonal = span.diagonal(first - keys.start, -2, -1)
            start = max(keys.start - first, 0)
            powers[..., start : start + diagonal.shape[-1]] += diagonal
        return powers * self.weight_per_power

    @property
    def weight_on_first(self) -> RowsByHead:
        """Each row's attention weight on the key of the first token of its sequence."""
        if "first" in self.visibility.key_features:
            return self.feature_sums["first"]
        is_first = self.visibility.key_indices == self.visibility.first_key[..., None]
        return (self.weights * is_first[:, None]).sum(-1)

    def weight_after_copies(self, shift: int) -> RowsByHead:
        """Return each row's summed weight on the keys that are `shift` tokens after an earlier occurrence of the
        query's token.
        """
        powers, sums = self.tile.by_head(self.powers), torch.zeros_like(self.weight_per_power)
        offset = self.visibility.grid.offset
        positions = range(self.rows.start + offset, self.rows.stop + offset)
        for number, sequence in enumerate(range(self.tile.sequences.start, self.tile.sequences.stop)):
            cells, ends = self.call_context.copy_cells(sequence, positions, self.tile.block, shift)
            on_copies = powers[number].flatten(1).index_select(1, cells)
            # In float64 the difference of two running sums is as good as a sum of its own, and much faster.
            running = F.pad(on_copies.double().cumsum(1), (1, 0)).index_select(1, ends)
            sums[number] = running.diff(dim=1)
        return sums * self.weight_per_power

    @cached_property
    def distance(self) -> RowsByHead:
        """Sum over keys of attention weight times distance |query position - key position|, for each row, in tokens."""
        if not self.visibility.grid.uses_default_positions:
            return (self.weights * self.visibility.lags.abs()[:, None]).sum(-1)
        # Positions are counted from the middle row, as those of the features.
        position, sums = self.visibility.query_positions[0] - self.visibility.middle, self.feature_sums
        if "position" in sums:
            return self.weight_sum * position - sums["position"]
        sides = (
            sums["before"] * position - sums["before, position"] + sums["after, position"] - sums["after"] * position
        )
        return sides + self._distance_between * self.weight_per_power

    @property
    def _distance_between(self) -> RowsByHead:
        """Sum of |query position - key position| times unnormalized weight, for each row, over the keys between the
        positions of the block's first and last row.
        """
        sums, position = torch.zeros_like(self.weight_per_power), self.visibility.query_positions[0]
        first, last = int(position[0]), int(position[-1])
        for keys, span in self.tile.spans(self.tile.by_head(self.powers)):
            between = range(max(first, keys.start), min(last + 1, keys.stop))
            if between:
                columns = torch.arange(between.start, between.stop, device=span.device)
                distance = (position[:, None] - columns).abs().to(span.dtype)
                sums += (span[..., between.start - keys.start : between.stop - keys.start] * distance).sum(-1)
        return sums

    @cached_property
    def received(self) -> tuple[Float[Tensor, "batch heads columns"], Float[Tensor, "batch heads columns"]]:
        """Attention that each key receives: the sum of the weights of all rows on it, and the number of rows that may
        attend to it. Both leave out rows that are padding or have no visible key.
        """
        row_factors = (self.weight_per_power * self.visibility.counted_rows)[..., None, :]
        received = row_factors @ self.tile.by_head(self.powers)
        return received[..., 0, :], self.visibility.rows_per_key.expand(*received.shape[:2], -1)

    @cached_property
    def feature_sums(self) -> dict[str, RowsByHead]:
        """Sum over keys of attention weight times feature, for each row and each feature by name. The features are
        those of `visibility.key_features`: numbers for each key, such as its position.
        """
        if self.feature_products is None:
            sums = self.weighted_sums(self.visibility.stacked_key_features)
        else:
            sums = self.tile.by_head(self.feature_products) * self.weight_per_power[..., None]
        return dict(zip(self.visibility.key_features, sums.unbind(-1), strict=False))

    def _by_head(self, column: StackedColumn) -> RowsByHead:
        """Return one number for each query row as `(batch, heads, rows)`. The argument has the stacked layout of
        `powers`, in which query heads with the same key/value head are joined.
        """
        return self.tile.by_head(column)[..., 0]


Observer = Callable[[RowBlock], None]
"""Function that is called with each row block; the tensors of the block are overwritten after it returns."""
