"""Jensen-Shannon distance between the attention weights of two heads, without the whole attention matrix."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.shapes import Bool, Float


class _HeadRows(NamedTuple):
    """Attention weights of consecutive heads in the query rows of one tile (part of the score matrix computed at once),
    and a mask of the rows to compare.

    Attributes:
        heads: the heads.
        weights: their attention weights.
        counted: True at rows that count: not padding, and with at least one visible key.
    """

    heads: slice
    weights: Float[Tensor, "batch heads rows columns"]
    counted: Bool[Tensor, "batch heads rows"]

    def from_head(self, index: int) -> "_HeadRows":
        """Return the attention weights and the mask of the same query rows for fewer heads: the heads from position
        `index` on.
        """
        heads = slice(self.heads.start + index, self.heads.stop)
        return _HeadRows(heads, self.weights[:, index:], self.counted[:, index:])


class WeightDistances:
    """Running mean, over query rows, of the Jensen-Shannon distance between the attention weights of every two heads of
    an attention site (a module's self- or cross-attention).

    A tile may hold the weights of some heads only. Tiles of the same rows are kept until tiles of other rows arrive.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self._sums, self._counts = torch.zeros(2, heads, heads, dtype=torch.float64, device=device)
        self._current_rows: Any = None
        self._tiles: list[_HeadRows] = []

    def add(self, rows: RowBlock) -> None:
        """Add to the running mean the Jensen-Shannon distances between the attention weights of every two heads in a
        block of query rows. Add also the distances between these heads and heads whose blocks of the same rows arrived
        earlier.
        """
        tile = rows.tile
        current_rows = (tile.block.rows, tuple(tile.block.spans), tile.sequences.start, tile.sequences.stop)
        if current_rows != self._current_rows:
            self._current_rows, self._tiles = current_rows, []
        new = _HeadRows(tile.heads, rows.weights, rows.visibility.counted_rows.expand(tile.shape))
        for index in range(new.weights.shape[1]):
            for earlier in self._tiles:
                self._compare(new, index, earlier)
            self._compare(new, index, new.from_head(index + 1))
        self._tiles.append(new)

    def finish_call(self) -> None:
        """Release the attention weights that are kept for comparison with further heads, after the last block of rows
        of an attention call.
        """
        self._current_rows, self._tiles = None, []

    def _compare(self, rows: _HeadRows, index: int, others: _HeadRows) -> None:
        """Add the Jensen-Shannon distances between the attention weights of one head (at position `index` of `rows`)
        and of each head in `others` to the sums. Only query rows that are not padding and have a visible key, for both
        heads, count.
        """
        p, q = rows.weights[:, index, None], others.weights
        # With p = m (1 + t) and q = m (1 - t), numbers that are nearly equal are not subtracted.
        total = p + q
        limit = 1.0 - torch.finfo(total.dtype).eps
        t = ((p - q) / total).nan_to_num_(0.0).clamp_(-limit, limit)
        divergence = ((1 + t) * t.log1p() + (1 - t) * t.neg().log1p()).mul_(total).sum(-1) / 4
        counted = rows.counted[:, index, None] & others.counted
        pairs = rows.heads.start + index, others.heads
        self._sums[pairs] += divergence.clamp_(min=0.0).sqrt_().masked_fill_(~counted, 0.0).double().sum((0, 2))
        self._counts[pairs] += counted.sum((0, 2))

    @property
    def mean(self) -> Float[Tensor, "heads heads"]:
        """Mean over query rows of the Jensen-Shannon distance between the attention weights of every two heads, in the
        square root of nats. It is NaN for two heads that were not compared in any row, and 0 for a head and itself.
        """
        distances: Tensor = (self._sums + self._sums.mT) / (self._counts + self._counts.mT)
        return distances.fill_diagonal_(0.0)
