"""What statistics read: some query rows of some heads, as attention over blocks has them in cache.

The weight of key j for row i is `powers_ij / total_i`. The division is put off: a sum over keys is divided, not each
weight. What needs a pass over the whole block is computed where it is first asked for, and shared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.attention.known import Known, Sight
from headwise.attention.masks import Grid
from headwise.attention.tiles import Tile
from headwise.shapes import Bool, Float, Int


@dataclass(eq=False)
class Rows:
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
    """

    tile: Tile
    grid: Grid
    powers: Float[Tensor, "kv stacked columns"]
    product: Float[Tensor, "kv stacked 1"]
    sum: Float[Tensor, "kv stacked 1"]
    total: Float[Tensor, "kv stacked 1"]
    largest_power: float | Float[Tensor, "kv stacked 1"]
    known: Known
    out: Float[Tensor, "kv stacked value_dim"] | None = None

    @property
    def index(self) -> range:
        """The numbers of the rows."""
        return self.tile.block.rows

    @property
    def where(self) -> tuple[slice, slice]:
        """Which sequences and heads of the call."""
        return self.tile.sequences, self.tile.heads

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
            product = self.powers @ features[0]
        else:
            product = self.powers.view(sequences, heads * rows, -1) @ features
        return product.view(sequences, heads, rows, -1) * self.share[..., None]

    def at(self, back: int) -> Float[Tensor, "batch heads rows"]:
        """The weight of the key that stands `back` tokens before the query: 0 itself, 1 the previous, -1 the next."""
        if not self.grid.aligned:
            return (self.weights * (self.back == back)[:, None]).sum(-1)
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
            cells = self.known.copies(sequence, position, self.tile.block, shift)
            there = powers[number].flatten(1).index_select(1, cells)
            found[number].index_add_(1, cells // powers.shape[-1], there)
        return found * self.share

    # -- positions ----------------------------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> Int[Tensor, " columns"]:
        """The numbers of the keys."""
        device = self.powers.device
        return torch.cat([torch.arange(keys.start, keys.stop, device=device) for keys in self.tile.block.spans])

    @cached_property
    def position(self) -> Int[Tensor, "#batch rows"]:
        """Where the queries stand."""
        i = torch.arange(self.index.start, self.index.stop, device=self.powers.device)[:, None]
        return self._here(self.grid.query_position(i)[..., 0])

    @cached_property
    def key_position(self) -> Int[Tensor, "#batch columns"]:
        """Where the keys stand."""
        return self._here(self.grid.key_position(self.columns[None])[..., 0, :])

    @cached_property
    def back(self) -> Int[Tensor, "#batch rows columns"]:
        """How many tokens before the query each key stands: 0 itself, 1 the previous, -1 the next."""
        return self.position[..., None] - self.key_position[:, None]

    @cached_property
    def first(self) -> Int[Tensor, "#batch"]:
        """The key that is the first token."""
        if not self.grid.aligned:
            keys = torch.arange(self.grid.keys, device=self.powers.device)
            return (self._here(self.grid.key_position(keys[None])[..., 0, :]) == 0).int().argmax(-1)
        if self.known.real is None or self.grid.queries != self.grid.keys:
            return torch.zeros(1, dtype=torch.int64, device=self.powers.device)
        return self.known.real[self.tile.sequences].int().argmax(-1)

    @cached_property
    def last(self) -> Int[Tensor, "#batch 1"]:
        """Where the last key stands."""
        keys = torch.arange(self.grid.keys, device=self.powers.device)
        return self._here(self.grid.key_position(keys[None])[..., 0, :]).amax(-1, keepdim=True)

    @cached_property
    def distance(self) -> Float[Tensor, "batch heads rows"]:
        """The sum of each row's weights times the distance of the key, tokens."""
        if not self.grid.aligned:
            return (self.weights * self.back.abs()[:, None]).sum(-1)
        ahead = (self.position[0] - self._middle).to(self.powers.dtype)
        along = self.along
        if "away" in along:
            return self.weight * ahead - along["away"]
        sides = along["before"] * ahead - along["before, away"] + along["after, away"] - along["after"] * ahead
        return sides + self._distance_between * self.share

    @property
    def _distance_between(self) -> Float[Tensor, "batch heads rows"]:
        """The part of the distances, not yet divided, of keys that stand where a row of the tile does."""
        found, position = torch.zeros_like(self.share), self.position[0]
        first, last = int(position[0]), int(position[-1])
        for keys, span in self.tile.spans(self.tile.by_head(self.powers)):
            between = range(max(first, keys.start), min(last + 1, keys.stop))
            if between:
                columns = torch.arange(between.start, between.stop, device=span.device)
                away = (position[:, None] - columns).abs().to(span.dtype)
                found += (span[..., between.start - keys.start : between.stop - keys.start] * away).sum(-1)
        return found

    # -- features of the keys, whose sums the product with the values brings ------------------------------------------

    @cached_property
    def features(self) -> dict[str, Float[Tensor, "#batch columns"]]:
        """What statistics sum over keys, by name.

        A distance is linear in the key's position on either side of the query. Positions are counted from the middle of
        the rows, so that no two large numbers are subtracted. Where keys on both sides are seen, those before all rows
        and those after all rows are summed, and what lies between is taken as it is.
        """
        columns, dtype = self.columns, self.powers.dtype
        found = {"first": columns == self.first[:, None]}
        if self.known.special is not None:
            found["special"] = self.known.special[self.tile.sequences][:, columns]
        if self.grid.aligned:
            position, away = self.position[0], (columns - self._middle)[None]
            if self.sight.looks_back:
                found["away"] = away
            else:
                for name, side in (("before", columns < position[0]), ("after", columns > position[-1])):
                    found |= {name: side[None], f"{name}, away": side * away}
        return {name: feature.to(dtype) for name, feature in found.items()}

    @cached_property
    def along(self) -> dict[str, Float[Tensor, "batch heads rows"]]:
        """The sums over keys of the weights times each of the features."""
        return dict(zip(self.features, self.sums(self.stacked_features).unbind(-1), strict=True))

    @property
    def stacked_features(self) -> Float[Tensor, "#batch columns features"]:
        """The features side by side."""
        batch = max(map(len, self.features.values()))
        return torch.stack([feature.expand(batch, -1) for feature in self.features.values()], -1)

    def receive(self, product: Float[Tensor, "kv stacked value_dim_and_features"], value_dim: int) -> None:
        """Take the output, and the sums of the features beside it, which are not yet divided."""
        self.out = product[..., :value_dim] / self.total
        sums = self.tile.by_head(product[..., value_dim:]) * self.share[..., None]
        if sums.shape[-1]:
            self.along = dict(zip(self.features, sums.unbind(-1), strict=True))

    @cached_property
    def _middle(self) -> Int[Tensor, ""]:
        return self.position[0][len(self.index) // 2]

    # -- which rows count ---------------------------------------------------------------------------------------------

    @cached_property
    def sight(self) -> Sight:
        """Who sees what, which the mask alone decides."""
        return self.known.sight(self.tile, self.grid)

    @property
    def seen(self) -> Int[Tensor, "#batch #heads rows"]:
        """How many keys each row may attend to."""
        return self.sight.seen

    @property
    def counts(self) -> Bool[Tensor, "#batch #heads rows"]:
        """Which rows count: those with a key that are not padding."""
        return self.sight.counts

    @cached_property
    def received(self) -> tuple[Float[Tensor, "batch heads columns"], Float[Tensor, "batch heads columns"]]:
        """What each key gets of the rows that count, and of how many of them it is seen."""
        received = (self.share * self.counts)[..., None, :] @ self.tile.by_head(self.powers)
        return received[..., 0, :], self.sight.seen_by.expand(*received.shape[:2], -1)

    # -- shapes -------------------------------------------------------------------------------------------------------

    def _by_head(self, column: Float[Tensor, "kv stacked 1"]) -> Float[Tensor, "batch heads rows"]:
        return self.tile.by_head(column)[..., 0]

    def _here(self, positions: Int[Tensor, "*axes length"]) -> Int[Tensor, "#batch length"]:
        """Positions of the tile's sequences, with that axis."""
        flat = positions.reshape(-1, positions.shape[-1])
        return flat if len(flat) == 1 else flat[self.tile.sequences]


Observer = Callable[[Rows], None]
"""Who is shown rows; what they hold is overwritten after it returns."""
