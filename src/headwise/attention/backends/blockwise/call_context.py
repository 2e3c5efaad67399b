"""Data about one attention call in addition to its tensors: tokens, special tokens, padding and positions.

All layers of a model see the same tokens and the same mask, so one `CallContext` serves all of them and caches what
follows from these.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.plan import PlannedBlock
from headwise.attention.backends.blockwise.tiles import Tile
from headwise.attention.backends.blockwise.visibility import TileVisibility, key_indices
from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Int

CACHED_CELLS = 2**22
"""Largest number of cells of equal tokens that a call context keeps for later layers."""


@dataclass(frozen=True, eq=False)
class CallContext:
    """Token ids, special tokens, padding and positions of one attention call. All layers of a model share one such
    object. It caches data that follow from the tokens and the mask, such as the visible keys, so that they are computed
    once for all layers.

    Attributes:
        token_ids: token ids of the keys; None if unknown.
        is_special: True at keys that are special tokens; None if unknown.
        real_queries: True at query rows that are not padding; only these count in statistics. None if none is padded.
        real_keys: True at keys that are not padding. None if none is padded.
        positions: grid whose positions of queries and keys the statistics use. It may have fewer keys than the call:
            further keys have no position. None for the positions of the call's own grid.
        first_keys: key of the first token of each sequence, `(batch, 1)`, or of each query row, `(batch, queries)`; -1
            where it is not among the keys. None for the first key that is not padding.
        left_out: names of the statistics that are not defined for this call.
        query_positions: number of the token of each query in its sequence or document, from 0, without padding; at
            padding, any number. None if unknown.
    """

    token_ids: Int[Tensor, "batch keys"] | None = None
    is_special: Bool[Tensor, "batch keys"] | None = None
    real_queries: Bool[Tensor, "batch queries"] | None = None
    real_keys: Bool[Tensor, "batch keys"] | None = None
    positions: Grid | None = None
    first_keys: Int[Tensor, "batch #queries"] | None = None
    left_out: frozenset[str] = frozenset()
    query_positions: Int[Tensor, "#batch queries"] | None = None

    @cached_property
    def is_repeat(self) -> Bool[Tensor, "batch keys"] | None:
        """True at keys whose token id occurs earlier in the same sequence too; None if the token ids are unknown."""
        ids = self.distinct_ids
        if ids is None:
            return None
        order = ids.argsort(dim=1, stable=True)
        sorted_ids = ids.gather(1, order)
        repeats = torch.zeros_like(order, dtype=torch.bool)
        repeats[:, 1:] = sorted_ids[:, 1:] == sorted_ids[:, :-1]
        return torch.zeros_like(repeats).scatter(1, order, repeats)

    def visibility(self, tile: Tile, grid: Grid) -> TileVisibility:
        """Return a `TileVisibility` with the visible keys, positions, padding and tokens of a tile, which is a
        rectangle of the score matrix. The `TileVisibility` is cached for later layers only if the tile has a mask that
        depends on nothing but the distance between query and key.
        """
        key = (tile.pattern, tile.block, tile.sequences.start, tile.sequences.stop)
        if tile.pattern is not None and key in self._visibilities:
            return self._visibilities[key]
        visibility = TileVisibility(
            tile,
            grid if self.positions is None else self.positions,
            real_queries=_select(tile, self.real_queries),
            real_keys=_select(tile, self.real_keys),
            is_special=_select(tile, self.is_special),
            is_repeat=_select(tile, self.is_repeat),
            first_keys=_select(tile, self.first_keys),
        )
        if tile.pattern is not None:
            visibility = self._visibilities[key] = visibility.without_mask()
        return visibility

    def copy_cells(
        self, sequence: int, positions: range, block: PlannedBlock, shift: int
    ) -> tuple[Int[Tensor, " cells"], Int[Tensor, " ends"]]:
        """Find the cells (pairs of query row and key column) in a block of one sequence's score matrix in which the key
        is `shift` tokens after an earlier occurrence of the query's token. `positions` are those of the block's
        queries. Return the flat indices of these cells, row by row, and the number of these cells before each row, with
        their total at the end.

        Args:
            sequence: index of the sequence in the batch.
            positions: positions of the block's query rows.
            block: the block.
            shift: 0 for the copies themselves, 1 for the tokens that follow them.

        Returns:
            The cells as flat indices `row * columns + column`, row by row; and the number of cells before each row,
            with their total at the end. Cached for later layers, up to `CACHED_CELLS` in all.
        """
        assert self.distinct_ids is not None
        key = (sequence, positions, tuple(block.spans), shift)
        if key in self._copy_cells:
            return self._copy_cells[key]
        ids = self.distinct_ids[sequence]
        rows = torch.arange(positions.start, positions.stop, device=ids.device)
        copied = key_indices(block, ids.device) - shift
        is_copy = ids[rows][:, None] == ids[copied.clamp(min=0)]
        is_copy &= (copied < rows[:, None]) & (copied >= 0)
        cells = is_copy.flatten().nonzero()[:, 0].int()
        result = (cells, F.pad(is_copy.sum(-1).cumsum(0), (1, 0)))
        if sum(len(cached) for cached, _ in self._copy_cells.values()) + len(cells) <= CACHED_CELLS:
            self._copy_cells[key] = result
        return result

    @cached_property
    def distinct_ids(self) -> Int[Tensor, "batch keys"] | None:
        """Token ids of the keys, with a different negative id at each padding token, so that padding is no copy of a
        token; None if the token ids are unknown.
        """
        if self.token_ids is None or self.real_keys is None:
            return self.token_ids
        numbers = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return torch.where(self.real_keys, self.token_ids, -1 - numbers)

    @cached_property
    def _visibilities(self) -> dict[Hashable, TileVisibility]:
        """Dictionary in which `visibility` caches its results, by three properties of a tile: its mask relative to its
        first row, its block of the score matrix, and its sequences.
        """
        return {}

    @cached_property
    def _copy_cells(self) -> dict[Hashable, tuple[Int[Tensor, " cells"], Int[Tensor, " ends"]]]:
        """Dictionary in which `copy_cells` caches its results, by sequence, query positions, key ranges and `shift`,
        the distance in tokens between the key and an earlier occurrence of the query's token.
        """
        return {}


def _select(tile: Tile, tensor: Tensor | None) -> Tensor | None:
    """Return the rows of a tensor `(batch, length)` for the sequences in a tile (a rectangle of the score matrix for
    some sequences and heads); None if the tensor is None.
    """
    return None if tensor is None else tensor[tile.sequences]
