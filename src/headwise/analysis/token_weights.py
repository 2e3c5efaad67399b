"""Attention weights between the tokens of a passage for each head: pooled tiles, and all weights or the largest."""

from collections import defaultdict

import torch
from torch import Tensor

from headwise.analysis.visible_weights import VisibleWeights, largest
from headwise.page.contents import AllWeights, HeadAttention, LargestWeights, VisibleKeys
from headwise.page.page_json import LISTED_KEYS
from headwise.shapes import Bool, Float, Int

TILES = 64
"""Largest number of rows and columns of a head's tiles."""


class TokenWeights:
    """Attention weights between the tokens of a passage for each head, added up from blocks of query rows: pooled
    tiles, the visible keys, and all weights of a short passage or the largest weights of each query of a long one.

    Args:
        heads: number of heads.
        queries: number of query tokens.
        keys: number of key tokens.
        keeps_all: True to keep all weights.
        known_runs: visible keys of other calls over the same tokens, which this object adds to.
    """

    def __init__(self, heads: int, queries: int, keys: int, keeps_all: bool, known_runs: "KnownRuns") -> None:
        self.queries, self.keys, self._known_runs = queries, keys, known_runs
        rows, columns = min(queries, TILES), min(keys, TILES)
        self._row_of = torch.arange(queries) * rows // queries
        self._column_of = torch.arange(keys) * columns // keys
        self._tiles = torch.zeros(heads, rows, columns)
        self._all = torch.zeros(heads, queries, keys) if keeps_all else None
        listed = min(LISTED_KEYS, keys)
        self._largest = torch.zeros(heads, queries, listed)
        self._largest_keys = torch.zeros(heads, queries, listed, dtype=torch.int32)
        self._totals = torch.zeros(heads, queries)
        self._runs: dict[int, dict[int, _Runs]] = defaultdict(dict)

    def add(self, block: VisibleWeights) -> None:
        """Add the attention weights of some query rows, for some of the heads."""
        weights, heads, rows, keys = block.weights, block.heads, block.rows, block.keys
        selected = slice(rows.start, rows.stop)
        self._totals[heads, selected] = weights.sum(-1)
        self._add_to_tiles(heads, selected, keys, weights)
        if self._all is not None:
            self._all[heads, selected, keys] = weights
        else:
            count = min(LISTED_KEYS, len(keys))
            self._largest[heads, selected, :count], columns = largest(weights, count)
            self._largest_keys[heads, selected, :count] = keys.int()[columns]
        runs = self._known_runs.of(block)
        for place, head in enumerate(range(self._tiles.shape[0])[heads]):
            self._runs[head][rows.start] = runs[place if len(runs) > 1 else 0]

    def _add_to_tiles(
        self, heads: slice, rows: slice, keys: Int[Tensor, " columns"], weights: Float[Tensor, "part rows columns"]
    ) -> None:
        """Add the weights of some query rows to the tiles: means over queries of sums over keys."""
        first, last = int(self._row_of[rows.start]), int(self._row_of[rows.stop - 1])
        # Rows are contiguous in memory: summed first, they leave few numbers to be summed over columns.
        by_row = weights.new_zeros(len(weights), last + 1 - first, weights.shape[-1])
        by_row.index_add_(1, self._row_of[rows] - first, weights)
        by_row /= torch.bincount(self._row_of)[first : last + 1, None]
        self._tiles[heads, first : last + 1] += torch.zeros(*by_row.shape[:2], self._tiles.shape[2]).index_add_(
            2, self._column_of[keys], by_row
        )

    def of_head(self, head: int, queries: int, keys: int) -> HeadAttention:
        """Return the attention of one head, after all rows were added.

        Args:
            head: index of the head.
            queries: index of the passage's side with the queries.
            keys: index of the side with the keys.
        """
        weights: AllWeights | LargestWeights
        if self._all is not None:
            weights = AllWeights(self._all[head])
        else:
            weights = LargestWeights(self._largest_keys[head], self._largest[head], self._totals[head])
        return HeadAttention(queries, keys, self.keys, self._tiles[head], weights, self._visible(head))

    def _visible(self, head: int) -> VisibleKeys:
        """Return the visible keys of each query of a head. Queries that were not added see none."""
        counts, starts, stops = torch.zeros(self.queries, dtype=torch.int64), [], []
        for first_row, runs in sorted(self._runs[head].items()):
            counts[first_row : first_row + len(runs.counts)] = runs.counts
            starts.append(runs.starts)
            stops.append(runs.stops)
        empty = torch.zeros(0, dtype=torch.int64)
        return VisibleKeys(counts, torch.cat([empty, *starts]), torch.cat([empty, *stops]))


class _Runs:
    """Runs of neighbouring visible keys of some queries.

    Attributes:
        counts: number of runs of each query.
        starts: first key of each run.
        stops: key after the last one of each run.
    """

    def __init__(self, is_visible: Bool[Tensor, "rows columns"], keys: Int[Tensor, " columns"], length: int) -> None:
        padded = torch.zeros(len(is_visible), length + 2, dtype=torch.int8)
        padded[:, keys + 1] = is_visible.to(torch.int8)
        change = padded.diff()
        starts, stops = (change == 1).nonzero(), (change == -1).nonzero()
        self.counts = torch.bincount(starts[:, 0], minlength=len(is_visible))
        self.starts, self.stops = starts[:, 1], stops[:, 1]


class KnownRuns:
    """Runs of visible keys of row blocks. Most layers of a model have the same mask, so the runs of the latest block of
    the same rows are used again if its mask is equal.
    """

    def __init__(self) -> None:
        self._latest: dict[range, tuple[Tensor, Tensor, list[_Runs]]] = {}

    def of(self, block: VisibleWeights) -> list[_Runs]:
        """Return the runs of visible keys of some query rows for each head, or once if all heads have the same."""
        latest = self._latest.get(block.rows)
        if latest is not None and torch.equal(latest[0], block.is_visible) and torch.equal(latest[1], block.keys):
            return latest[2]
        runs = [_Runs(of_head, block.keys, block.all_keys) for of_head in block.is_visible]
        self._latest[block.rows] = block.is_visible, block.keys, runs
        return runs
