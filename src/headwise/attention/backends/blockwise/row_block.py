"""What statistics read: some query rows of some heads, as attention over blocks has them in cache.

The weight of key j for row i is `powers_ij / total_i`. The division is put off: a sum over keys is divided, not each
weight. What needs a pass over the whole block is computed where it is first asked for, and shared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext, TileVisibility
from headwise.attention.backends.blockwise.tiles import Tile
from headwise.attention.masks.base import Grid
from headwise.shapes import Float


@dataclass(eq=False)
class RowBlock:
    """Some query rows of some heads, over the keys that their tile holds; the other keys have weight 0.

    Attributes:
        tile: which rows, sequences, heads and keys.
        grid: of the whole call.
        powers: two to the scores, these in powers of two and less the same number in all of a row.
        product: the sum of each row's powers times those scores.
        sum: of each row's powers; infinite in a row without a key.
        total: what a row is divided by: the sum, and its head's sink.
        largest_power: the largest of each row.
        known: what is known of the tokens.
        out: the output of each row; None where it was not computed.
        gram: `W_h^T W_h` of each head's slice of the output projection; None where it is not known.
    """

    tile: Tile
    grid: Grid
    powers: Float[Tensor, "kv stacked columns"]
    product: Float[Tensor, "kv stacked 1"]
    sum: Float[Tensor, "kv stacked 1"]
    total: Float[Tensor, "kv stacked 1"]
    largest_power: float | Float[Tensor, "kv stacked 1"]
    known: CallContext
    out: Float[Tensor, "kv stacked value_dim"] | None = None
    gram: Float[Tensor, "heads value_dim value_dim"] | None = None

    @property
    def index(self) -> range:
        """The numbers of the rows."""
        return self.tile.block.rows

    @property
    def where(self) -> tuple[slice, slice]:
        """Which sequences and heads of the call."""
        return self.tile.sequences, self.tile.heads

    @cached_property
    def sight(self) -> TileVisibility:
        """Who sees what, which is known without the scores."""
        return self.known.sight(self.tile, self.grid)

    # -- weights ------------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Float[Tensor, "batch heads rows columns"]:
        """The weights themselves, in a copy."""
        return self.tile.by_head(self.powers / self.total)

    @cached_property
    def share(self) -> Float[Tensor, "batch heads rows"]:
        """What a power is worth in each row: 1 / total."""
        return self._by_head(self.total.reciprocal())

    @cached_property
    def weight(self) -> Float[Tensor, "batch heads rows"]:
        """The sum of each row's weights: 1, less what its head's sink takes; 0 in a row without a key."""
        return self._by_head(self.sum / self.total).nan_to_num(0.0)

    @cached_property
    def largest(self) -> Float[Tensor, "batch heads rows"]:
        """The largest weight of each row."""
        return self._by_head(self.largest_power / self.total)

    @cached_property
    def entropy(self) -> Float[Tensor, "batch heads rows"]:
        """-sum A ln A, nats; 0 in a row without a key."""
        # ln A is s - ln l: no logarithm of a weight that may be 0.
        mean = self._by_head(self.product / self.total)
        logarithm = self._by_head(self.total.log2()).masked_fill(self.share == 0, 0.0)
        return ((self.weight * logarithm - mean) * math.log(2)).clamp(min=0.0)

    def sums(self, features: Float[Tensor, "#batch columns features"]) -> Float[Tensor, "batch heads rows features"]:
        """The sums over keys of the weights times these features of the keys."""
        sequences, heads, rows = self.tile.shape
        if len(features) == 1:
            product = self.powers @ features[0].to(self.powers.dtype)
        else:
            product = self.powers.view(sequences, heads * rows, -1) @ features.to(self.powers.dtype)
        return product.view(sequences, heads, rows, -1) * self.share[..., None]

    def at(self, back: int) -> Float[Tensor, "batch heads rows"]:
        """The weight of the key that stands `back` tokens before the query: 0 itself, 1 the previous, -1 the next."""
        if not self.grid.aligned:
            return (self.weights * (self.sight.back == back)[:, None]).sum(-1)
        found = torch.zeros_like(self.share)
        first = self.index.start + self.grid.offset - back  # the key of the first row
        for keys, span in self.tile.spans(self.tile.by_head(self.powers)):
            diagonal = span.diagonal(first - keys.start, -2, -1)
            start = max(keys.start - first, 0)
            found[..., start : start + diagonal.shape[-1]] += diagonal
        return found * self.share

    def on_copies(self, shift: int) -> Float[Tensor, "batch heads rows"]:
        """The sum of each row's weights on keys that stand `shift` tokens after an earlier copy of the row's token."""
        powers, found = self.tile.by_head(self.powers), torch.zeros_like(self.share)
        position = range(self.index.start + self.grid.offset, self.index.stop + self.grid.offset)
        for number, sequence in enumerate(range(self.tile.sequences.start, self.tile.sequences.stop)):
            cells, ends = self.known.copies(sequence, position, self.tile.block, shift)
            there = powers[number].flatten(1).index_select(1, cells)
            # In float64 the difference of two running sums is as good as a sum of its own, and much faster.
            running = F.pad(there.double().cumsum(1), (1, 0)).index_select(1, ends)
            found[number] = running.diff(dim=1)
        return found * self.share

    @cached_property
    def distance(self) -> Float[Tensor, "batch heads rows"]:
        """The sum of each row's weights times the distance of the key, tokens."""
        if not self.grid.aligned:
            return (self.weights * self.sight.back.abs()[:, None]).sum(-1)
        ahead, along = self.sight.ahead, self.along
        if "away" in along:
            return self.weight * ahead - along["away"]
        sides = along["before"] * ahead - along["before, away"] + along["after, away"] - along["after"] * ahead
        return sides + self._distance_between * self.share

    @property
    def _distance_between(self) -> Float[Tensor, "batch heads rows"]:
        """The part of the distances, not yet divided, of keys that stand where a row of the tile does."""
        found, position = torch.zeros_like(self.share), self.sight.position[0]
        first, last = int(position[0]), int(position[-1])
        for keys, span in self.tile.spans(self.tile.by_head(self.powers)):
            between = range(max(first, keys.start), min(last + 1, keys.stop))
            if between:
                columns = torch.arange(between.start, between.stop, device=span.device)
                away = (position[:, None] - columns).abs().to(span.dtype)
                found += (span[..., between.start - keys.start : between.stop - keys.start] * away).sum(-1)
        return found

    @cached_property
    def received(self) -> tuple[Float[Tensor, "batch heads columns"], Float[Tensor, "batch heads columns"]]:
        """What each key gets of the rows that count, and of how many of them it is seen."""
        received = (self.share * self.sight.counts)[..., None, :] @ self.tile.by_head(self.powers)
        return received[..., 0, :], self.sight.seen_by.expand(*received.shape[:2], -1)

    # -- sums over keys that the product with the values brings -------------------------------------------------------

    @cached_property
    def along(self) -> dict[str, Float[Tensor, "batch heads rows"]]:
        """The sums over keys of the weights times each of the features that `sight` has of the keys."""
        return dict(zip(self.sight.features, self.sums(self.sight.stacked_features).unbind(-1), strict=False))

    def receive(self, product: Float[Tensor, "kv stacked value_dim_and_features"], value_dim: int) -> None:
        """Take the output, and the sums of the features beside it, which are not yet divided."""
        self.out = product[..., :value_dim] / self.total
        sums = self.tile.by_head(product[..., value_dim:]) * self.share[..., None]
        if sums.shape[-1]:
            self.along = dict(zip(self.sight.features, sums.unbind(-1), strict=False))

    # -- shapes -------------------------------------------------------------------------------------------------------

    def _by_head(self, column: Float[Tensor, "kv stacked 1"]) -> Float[Tensor, "batch heads rows"]:
        return self.tile.by_head(column)[..., 0]


Observer = Callable[[RowBlock], None]
"""Who is shown rows; what they hold is overwritten after it returns."""
