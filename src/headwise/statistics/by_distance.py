"""Attention by the distance between query and key: a histogram of each head, from which shares and quantiles follow.

The histogram has one number per distance, so memory grows with the length of the sequences.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.shapes import Float, Int
from headwise.statistics.tally import FurtherStatistics, FurtherSums, HeadSlices, MeasuredRows, Values

NO_DISTANCES = (
    "queries and keys of these modules have no known positions in the same sequence, so their attention by distance is "
    "left out (see docs/distances.md)"
)
"""Reason for modules without distances."""

FIRST_DROPPED = (
    "the first tokens of some sequences are no longer among the keys of these modules, so their attention by distance "
    "is left out (see docs/distances.md)"
)
"""Reason for modules whose cache drops keys."""

WITHIN_DISTANCES = (0, *(2**power for power in range(31)))
"""Distances at which the share of attention within the distance is measured."""

ROUNDING = 1e-6
"""Largest difference from a quantile that counts as rounding of the sums of weights."""


WITH_FIRST = "_with_first"
"""Suffix of the name of a statistic in which attention on the first tokens counts as within any distance."""


def quantile_name(quantile: float) -> str:
    """Return the name of a statistic: the smallest distance within which a head has the share `quantile` of its
    attention. The name is `distance_90` for 0.9.
    """
    return f"distance_{100 * quantile:g}"


@dataclass(frozen=True)
class DistanceStatistics(FurtherStatistics):
    """Statistics of how far a head attends: the smallest distances within which it has the shares `quantiles` of its
    attention, and its shares within fixed distances. If `first` is above 0, a second version of each statistic has the
    suffix `_with_first`. It counts attention on the first `first` tokens of a sequence as within any distance.
    """

    quantiles: tuple[float, ...]
    first: int
    measured: frozenset[str] | None = frozenset({"entropy", "output_norm"})
    """The statistics by which weights and outputs that are not finite are recognised."""

    @property
    def names(self) -> tuple[str, ...]:
        suffixes = ("", WITH_FIRST) if self.first else ("",)
        return tuple(name + suffix for suffix in suffixes for name in (*map(quantile_name, self.quantiles), "within"))

    def start(self, grid: Grid, context: CallContext, slices: HeadSlices | None = None) -> "DistanceSums | str":
        """Return empty sums of attention weights by distance, for one attention call. If the statistics cannot be
        computed, return the reason as text: distances between queries and keys are unknown, or first tokens that are
        needed are no longer cached.
        """
        if "distance" in context.left_out:
            return NO_DISTANCES
        if self.first and context.first_keys is not None and bool((context.first_keys < 0).any()):
            return FIRST_DROPPED
        return DistanceSums(self, grid.batch, grid.heads)


@dataclass
class DistanceSums(FurtherSums):
    """Sums of attention weights over query rows, by the distance between query and key. For each distance 0, 1, 2, ...,
    the `histogram` has two sums: of the weights on all keys, and of the weights on the first tokens only. Keys without
    a position are left out.
    """

    statistics: DistanceStatistics
    batch: int
    heads: int
    histogram: Float[Tensor, "all_and_first batch heads distances"] | None = field(default=None, repr=False)
    needs_weights = True

    def add(self, measured: MeasuredRows, row_block: RowBlock | None) -> None:
        assert row_block is not None
        visibility = row_block.visibility
        factors = (row_block.weight_per_power * visibility.counted_rows)[..., None]
        weights = row_block.tile.by_head(row_block.powers) * factors
        if visibility.grid.uses_default_positions:
            sums = _sums_of_diagonals(row_block, weights)
        else:
            sums = _sums_by_lag(weights, visibility.lags, visibility.key_positions >= 0)
        of_first = torch.zeros_like(sums[..., :1])
        if self.statistics.first:
            of_first = _sums_of_first(row_block, weights, self.statistics.first)
        part = torch.stack(_padded(sums, of_first))
        if self.histogram is None:
            self.histogram = part.new_zeros(2, self.batch, self.heads, 1)
        self.histogram, part = _padded(self.histogram, part)
        self.histogram[:, measured.sequences, measured.heads] += part

    def merge(self, other: "DistanceSums") -> None:
        if other.histogram is not None:
            own = other.histogram.new_zeros(1) if self.histogram is None else self.histogram
            own, further = _padded(own, other.histogram)
            self.histogram = own + further

    def values(self) -> Values:
        """Return the statistics of each sequence and head by name. For each of the `quantiles`, this is the smallest
        distance within which a head has that share of its attention. In addition, "within" has the head's share of
        attention within each of the distances `WITHIN_DISTANCES`. It has one value per head and distance; the values of
        one head are adjacent.
        """
        if self.histogram is None:
            return {}
        on_all, on_first = self.histogram
        total = on_all.sum(-1, keepdim=True)
        found: Values = {}
        for suffix in ("", WITH_FIRST) if self.statistics.first else ("",):
            within = on_all.cumsum(-1)
            if suffix:
                within = (on_all - on_first).cumsum(-1) + on_first.sum(-1, keepdim=True)
            shares = within / total
            is_value = (total > 0)[..., 0]
            for quantile in self.statistics.quantiles:
                distance = (shares < quantile - ROUNDING).sum(-1).double()
                found[quantile_name(quantile) + suffix] = distance, is_value
            at = torch.tensor(WITHIN_DISTANCES, device=shares.device).clamp(max=shares.shape[-1] - 1)
            at_distances = shares[..., at].flatten(1)
            found["within" + suffix] = at_distances, is_value.repeat_interleave(len(WITHIN_DISTANCES), 1)
        return found


def _padded(one: Tensor, other: Tensor) -> list[Tensor]:
    """Return two tensors with equal last axes: the shorter one is padded with zeros at the end."""
    size = max(one.shape[-1], other.shape[-1])
    return [F.pad(each, (0, size - each.shape[-1])) for each in (one, other)]


def _sums_of_diagonals(
    row_block: RowBlock, weights: Float[Tensor, "batch heads rows columns"]
) -> Float[Tensor, "batch heads distances"]:
    """Return, for each distance between query and key, the sum of the attention weights at this distance. The positions
    of rows and keys must ascend one by one, so that weights at the same distance are on a diagonal.
    """
    visibility = row_block.visibility
    rows, last = weights.shape[2], int(visibility.query_positions[0, -1])
    sums = weights.new_zeros(*weights.shape[:2], max(last, visibility.grid.keys) + 1, dtype=torch.float64)
    for keys, span in row_block.tile.spans(weights):
        columns = min(keys.stop, visibility.grid.keys) - keys.start  # further keys have no position
        if columns < 1:
            continue
        # Each row is one longer than the width of the view, so that a row begins one place after the row above it.
        skewed = F.pad(span[..., :columns].flip(-1), (0, rows)).flatten(2)[..., :-rows]
        diagonals = skewed.view(*skewed.shape[:2], rows, columns + rows - 1).sum(2).double()
        lag = last - rows + 1 - (keys.start + columns - 1)  # of the first diagonal: query position minus key position
        before = max(0, min(-lag, diagonals.shape[-1]))  # diagonals of keys after the query
        sums[..., 1 - lag - before : 1 - lag] += diagonals[..., :before].flip(-1)
        sums[..., lag + before : lag + diagonals.shape[-1]] += diagonals[..., before:]
    return sums


def _sums_by_lag(
    weights: Float[Tensor, "batch heads rows columns"],
    lags: Int[Tensor, "#batch rows columns"],
    has_position: Tensor,
) -> Float[Tensor, "batch heads distances"]:
    """Return, for each distance between query and key, the sum of the attention weights at this distance. The positions
    may have any order. `lags` has the signed distances. Keys for which `has_position` is False are left out.
    """
    distances = lags.abs().expand(len(weights), -1, -1).masked_fill(~has_position[:, None], 0)
    counted = weights.double().masked_fill(~has_position[:, None, None], 0.0).flatten(2)
    sums = counted.new_zeros(*counted.shape[:2], int(distances.max()) + 1)
    return sums.scatter_add(-1, distances.flatten(1)[:, None].expand_as(counted), counted)


def _sums_of_first(
    row_block: RowBlock, weights: Float[Tensor, "batch heads rows columns"], first: int
) -> Float[Tensor, "batch heads distances"]:
    """Return, for each distance between query and key, the sum of the attention weights at this distance. Only keys
    that are among the first `first` tokens of a sequence are included.
    """
    visibility = row_block.visibility
    if visibility.grid.uses_default_positions:
        number = visibility.key_indices - visibility.first_key[..., None]  # (batch, rows or 1, columns)
        is_first = (number >= 0) & (number < first) & (visibility.key_indices < visibility.grid.keys)
    else:
        number = visibility.key_positions[:, None]
        is_first = (number >= 0) & (number < first)
    columns = is_first.flatten(0, 1).any(0).nonzero()[:, 0]
    if not len(columns):
        return weights.new_zeros(*weights.shape[:2], 1, dtype=torch.float64)
    chosen = weights[..., columns] * is_first[..., columns][:, None]
    lags = visibility.lags[..., columns]
    return _sums_by_lag(chosen, lags, torch.ones_like(lags[:, 0], dtype=torch.bool))
