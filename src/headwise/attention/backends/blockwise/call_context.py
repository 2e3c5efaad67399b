"""Data about one attention call in addition to its tensors: tokens, special tokens, padding and positions, and what
follows from them and from the mask for one tile, such as the keys that each row may attend to.

None of it depends on the scores. All layers of a model see the same tokens and the same mask, so one `CallContext`
serves all of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.tiles import PlannedBlock, Tile
from headwise.attention.masks.grid import Grid
from headwise.attention.tensors import KeyPositions, QueryPositions
from headwise.shapes import Bool, Float, Int

CACHED_CELLS = 2**22
"""Largest number of cells of equal tokens that a call context keeps for later layers."""


@dataclass(frozen=True, eq=False)
class TileVisibility:
    """Data about one tile (rectangle of the score matrix) that depend on mask, positions and tokens, not on scores.
    Examples are the visible keys of each query row, the query rows that statistics include, and the positions of
    queries and keys. Each property is computed on first use.

    A key is visible to a row if the mask lets the row attend to it. A row counts in statistics if it is not padding
    and at least one key is visible to it.

    Attributes:
        tile: the tile: its rows, sequences, heads and keys.
        grid: grid with the positions of all queries and keys of the call. Further keys of the call have no position.
        real_queries: True at queries that are not padding, for the tile's sequences; None if none is padded.
        real_keys: True at keys that are not padding, for the tile's sequences; None if none is padded.
        is_special: True at keys that are special tokens, for the tile's sequences; None if unknown.
        is_repeat: True at keys whose token occurs earlier in the sequence; None if the tokens are unknown.
        first_keys: key of the first token of each sequence or row; None for the first key that is not padding.
    """

    tile: Tile
    grid: Grid
    real_queries: Bool[Tensor, "sequences queries"] | None
    real_keys: Bool[Tensor, "sequences keys"] | None
    is_special: Bool[Tensor, "sequences keys"] | None
    is_repeat: Bool[Tensor, "sequences keys"] | None
    first_keys: Int[Tensor, "sequences #queries"] | None
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute()` that is stored under `key`. `compute` is called only if nothing is stored
        there yet.
        """
        if key not in self._cache:
            self._cache[key] = compute()
        value: Tensor = self._cache[key]
        return value

    def without_mask(self) -> "TileVisibility":
        """Return a copy that does not keep the tile's mask in memory. The properties that depend on the mask are
        computed first, and stored in the copy.
        """
        names = ("visible_keys", "counted_rows", "rows_per_key", "is_backward_only")
        computed = {name: getattr(self, name) for name in names[: 4 if self.grid.uses_default_positions else 3]}
        copy = replace(self, tile=self.tile._replace(ceilings=[], has_key=None))
        vars(copy).update(computed)  # fills the cached properties of the copy
        return copy

    # -- visible keys and counted rows --------------------------------------------------------------------------------

    @cached_property
    def visible_keys(self) -> Int[Tensor, "#batch #heads rows"]:
        """Number of keys of the tile that each query row may attend to."""
        count = torch.zeros(1, 1, len(self.tile.block.rows), dtype=torch.int64, device=self.grid.device)
        for columns, allowed in self._allowed:
            count = count + (len(columns) if allowed is None else allowed.sum(-1))
        return count

    @cached_property
    def counted_rows(self) -> Bool[Tensor, "#batch #heads rows"]:
        """True at query rows that statistics include: those that are not padding and have at least one visible key."""
        rows, has_key = self.tile.block.rows, self.visible_keys > 0
        return has_key if self.real_queries is None else has_key & self.real_queries[:, None, rows.start : rows.stop]

    @cached_property
    def rows_per_key(self) -> Float[Tensor, "#batch #heads columns"]:
        """For each key of the tile, the number of query rows that may attend to it and are not padding."""
        counted, numbers = self.counted_rows.float(), []
        for columns, allowed in self._allowed:
            if allowed is None:
                numbers.append(counted.sum(-1, keepdim=True).expand(*counted.shape[:2], len(columns)))
            else:
                numbers.append((counted[..., None, :] @ allowed.float())[..., 0, :])
        sizes = torch.broadcast_shapes(*(number.shape[:2] for number in numbers))  # type: ignore[no-untyped-call]
        return torch.cat([number.expand(*sizes, -1) for number in numbers], -1)

    @cached_property
    def is_backward_only(self) -> bool:
        """True if no query row of the tile may attend to a key after the query's own position. The result is correct
        only if the caller of attention passed no positions.
        """
        position = self.query_positions[0][:, None]
        first = int(position[0])
        for columns, allowed in self._allowed:
            if columns.stop - 1 <= first:
                continue
            keys = torch.arange(columns.start, columns.stop, device=self.grid.device)
            if allowed is None or bool((allowed & (keys > position)).any()):
                return False
        return True

    @cached_property
    def _allowed(self) -> list[tuple[range, Bool[Tensor, "#batch #heads rows columns"] | None]]:
        """Ranges of key columns of the tile, each with a boolean mask: True where a query row of the tile may attend to
        a key of the range. A mask of None stands for all keys. This is the result of `Tile.visible_parts`, computed
        once.
        """
        return list(self.tile.visible_parts())

    # -- positions ----------------------------------------------------------------------------------------------------

    @cached_property
    def key_indices(self) -> Int[Tensor, " columns"]:
        """Index of the key in each column of the tile, counted among all keys of the attention call."""
        return key_indices(self.tile.block, self.grid.device)

    @cached_property
    def query_positions(self) -> Int[Tensor, "#batch rows"]:
        """Position of the query of each row of this tile (rectangle of the score matrix) in the query's sequence."""
        rows = self.tile.block.rows
        return self._of_tile(
            self.grid.query_position(torch.arange(rows.start, rows.stop, device=self.grid.device)[None])
        )

    @cached_property
    def key_positions(self) -> Int[Tensor, "#batch columns"]:
        """Position of the key of each column of this tile (rectangle of the score matrix) in the key's sequence."""
        return self._of_tile(self.grid.key_position(self.key_indices[None]))

    @cached_property
    def lags(self) -> Int[Tensor, "#batch rows columns"]:
        """Query position minus key position, for each query row and key column of the tile: 0 for the query's own
        token, 1 for the previous one, -1 for the next.
        """
        return self.query_positions[..., None] - self.key_positions[:, None]

    def has_key_at_lag(self, lag: int) -> Bool[Tensor, "#batch 1 rows"]:
        """Return a tensor that is True at query rows with a key `lag` positions before the query, which is not padding
        and belongs to the query's document. A negative `lag` stands for positions after the query.
        """
        wanted = self.query_positions - lag
        if not self.grid.uses_default_positions:
            ordered = self._all_key_positions.sort(-1).values
            batch = max(len(ordered), len(wanted))
            ordered, wanted = (tensor.expand(batch, -1).contiguous() for tensor in (ordered, wanted))
            nearest = torch.searchsorted(ordered, wanted).clamp(max=ordered.shape[-1] - 1)
            return ((ordered.gather(-1, nearest) == wanted) & (wanted >= 0))[:, None]
        exists = (wanted >= 0) & (wanted < self.grid.keys)
        if self.real_keys is not None:
            exists = exists & self.real_keys[:, wanted[0].clamp(0, self.grid.keys - 1)]
        if self.first_keys is not None and self.first_keys.shape[1] == self.grid.keys > 1:  # of each row
            own, other = (
                self.first_keys[:, each[0].clamp(0, self.grid.keys - 1)] for each in (self.query_positions, wanted)
            )
            exists = exists & (own == other)
        return exists[:, None]

    @cached_property
    def has_earlier_copy(self) -> Bool[Tensor, "#batch 1 rows"] | None:
        """True at query rows whose token occurs earlier in the sequence. None if the token ids are unknown, or if the
        caller passed positions.
        """
        if self.is_repeat is None or not self.grid.uses_default_positions:
            return None
        position = self.query_positions[0]
        return (self.is_repeat[:, position.clamp(min=0)] & (position >= 0))[:, None]

    @cached_property
    def first_key(self) -> Int[Tensor, "#batch #rows"]:
        """Index of the key of each sequence's first token, one number for each sequence or for each query row; -1 where
        that token is not among the keys. If the attribute `first_keys` is None, the first token is the one at position
        0 or, with default positions, the first that is not padding.
        """
        if self.first_keys is not None:
            rows = self.tile.block.rows
            return self.first_keys if self.first_keys.shape[1] == 1 else self.first_keys[:, rows.start : rows.stop]
        if not self.grid.uses_default_positions:
            is_first = self._all_key_positions == 0
            return is_first.int().argmax(-1, keepdim=True).masked_fill(~is_first.any(-1, keepdim=True), -1)
        if self.real_keys is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=self.grid.device)
        return self.real_keys.int().argmax(-1, keepdim=True)

    @property
    def _all_key_positions(self) -> KeyPositions:
        """Positions of all keys of the call, not only those of the tile, for the tile's sequences."""
        keys = torch.arange(self.grid.keys, device=self.grid.device)
        return self._of_tile(self.grid.key_position(keys[None]))

    def _of_tile(self, positions: Int[Tensor, "#all length"]) -> Int[Tensor, "#batch length"]:
        """Return the rows of `positions` that belong to the tile's sequences. A single row, which all sequences share,
        is returned unchanged.
        """
        return positions if len(positions) == 1 else positions[self.tile.sequences]

    # -- features of the keys, which the product with the values sums over the keys -----------------------------------

    @cached_property
    def key_features(self) -> dict[str, Float[Tensor, "#batch columns"]]:
        """Features of the keys, by name. Each has one number for each key column, such as its position, or 1 at special
        tokens and 0 elsewhere. Statistics sum a feature over keys, multiplied by the attention weight.

        On either side of the query its distance to a key is linear in the key's position, so sums of positions give
        sums of distances. Positions are counted from the middle row, so that no two large numbers are subtracted.
        If a row may attend to keys on both sides, keys before all rows and keys after all rows have features of their
        own, and the distances of the keys between are summed one by one.
        """
        columns = self.key_indices
        features = {"first": columns == self.first_key} if self.first_key.shape[1] == 1 else {}
        if self.is_special is not None:
            features["special"] = self.is_special[:, columns]
        if self.grid.uses_default_positions:
            position, centred = self.query_positions[0], (columns - self.middle)[None]
            if self.is_backward_only:
                features["position"] = centred
            else:
                after = (columns > position[-1]) & (columns < self.grid.keys)
                for name, side in (("before", columns < position[0]), ("after", after)):
                    features |= {name: side[None], f"{name}, position": side * centred}
        return {name: feature.float() for name, feature in features.items()}

    @cached_property
    def stacked_key_features(self) -> Float[Tensor, "#batch columns features"]:
        """All `key_features` (numbers for each key, such as its position) as columns of one tensor. A column of zeros
        is added if their number is odd.
        """
        if not self.key_features:
            return torch.zeros(1, self.tile.block.width, 2, device=self.grid.device)
        batch = max(map(len, self.key_features.values()))
        features = [feature.expand(batch, -1) for feature in self.key_features.values()]
        if len(features) % 2:
            features.append(torch.zeros_like(features[0]))  # a product of odd width takes a sixth longer
        return torch.stack(features, -1)

    @property
    def middle(self) -> Int[Tensor, ""]:
        """Position of the query in the tile's middle row."""
        return self.query_positions[0][len(self.tile.block.rows) // 2]


def key_indices(block: PlannedBlock, device: torch.device) -> Int[Tensor, " columns"]:
    """Return the index of the key in each column of a block. A block is some query rows of the score matrix, with the
    ranges of keys that these rows attend to.
    """
    return torch.cat([torch.arange(keys.start, keys.stop, device=device) for keys in block.spans])


@dataclass(frozen=True, eq=False)
class CallContext:
    """Token ids, special tokens, padding and positions of one attention call. Layers of a model whose calls have the
    same inputs share one `CallContext`. It caches data that follow from the tokens and the mask, such as the visible
    keys, so that they are computed once for all layers.

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
    query_positions: QueryPositions | None = None
    _visibilities: dict[Hashable, TileVisibility] = field(default_factory=dict, init=False, repr=False)
    _copy_cells: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def is_repeat(self) -> Bool[Tensor, "batch keys"] | None:
        """True at keys whose token id occurs earlier in the same sequence; None if the token ids are unknown."""
        ids = self.distinct_ids
        if ids is None:
            return None
        order = ids.argsort(dim=1, stable=True)
        sorted_ids = ids.gather(1, order)
        repeats = torch.zeros_like(order, dtype=torch.bool)
        repeats[:, 1:] = sorted_ids[:, 1:] == sorted_ids[:, :-1]
        return torch.zeros_like(repeats).scatter(1, order, repeats)

    def visibility(self, tile: Tile, grid: Grid) -> TileVisibility:
        """Return the `TileVisibility` of a tile (rectangle of the score matrix), with its visible keys and positions.
        It is cached for later layers if the tile's mask depends only on the distance between query and key.
        """
        key = (tile.pattern, tile.block, tile.sequences.start, tile.sequences.stop)
        if tile.pattern is not None and key in self._visibilities:
            return self._visibilities[key]
        of_call = (self.real_queries, self.real_keys, self.is_special, self.is_repeat, self.first_keys)
        of_sequences: Any = (None if each is None else each[tile.sequences] for each in of_call)
        visibility = TileVisibility(tile, grid if self.positions is None else self.positions, *of_sequences)
        if tile.pattern is not None:
            visibility = self._visibilities[key] = visibility.without_mask()
        return visibility

    def copy_cells(
        self, sequence: int, positions: range, block: PlannedBlock, shift: int
    ) -> tuple[Int[Tensor, " cells"], Int[Tensor, " ends"]]:
        """Find all query-key pairs of a block whose key is `shift` tokens after an earlier occurrence of the query's
        token. Return the flat index `row * columns + column` of each pair, in order. Also return the number of pairs
        before each row, followed by the number of all pairs. Up to `CACHED_CELLS` pairs are cached for later layers.
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
        """Token ids of the keys, in which each padding token has a negative id of its own, so that it equals no other
        token. None if the token ids are unknown.
        """
        if self.token_ids is None or self.real_keys is None:
            return self.token_ids
        numbers = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return torch.where(self.real_keys, self.token_ids, -1 - numbers)
