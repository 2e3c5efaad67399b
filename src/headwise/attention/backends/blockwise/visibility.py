"""Facts about one tile that follow from mask, positions and tokens alone: the keys that each row may attend to.

None of it depends on the scores, so all layers of a model can share it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.plan import PlannedBlock
from headwise.attention.backends.blockwise.tiles import Tile
from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class TileVisibility:
    """Data about one tile (rectangle of the score matrix) that follow from mask, positions and tokens alone: the keys
    that each row may attend to, the rows that count in statistics, positions, and features of the keys. Each is
    computed on first use.

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
        """Return the result of `compute()`, which is called only when `key` is used for the first time; this object
        stores the result.
        """
        if key not in self._cache:
            self._cache[key] = compute()
        value: Tensor = self._cache[key]
        return value

    def without_mask(self) -> "TileVisibility":
        """Return a copy of this object that does not keep the tile's mask in memory. The properties that depend on the
        mask are computed first and stored in the copy.
        """
        names = [
            "visible_keys",
            "counted_rows",
            "rows_per_key",
            *(["is_backward_only"] if self.grid.uses_default_positions else []),
        ]
        computed = {name: getattr(self, name) for name in names}
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
        """True if no row of the tile may attend to a key after its own position. Requires default positions, that is, a
        call to which no explicit positions were passed.
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
        """Pairs of a range of key columns of the tile and a boolean mask, which is True where a row may attend to a
        key. The mask is None if all rows may attend to all keys of the range.
        """
        bounds_at, offset, parts = dict(self.tile.ceilings), 0, []
        for columns, _ in self.tile.block.parts:
            bounds = bounds_at.get(offset)
            parts.append((columns, None if bounds is None else bounds > 0))
            offset += len(columns)
        return parts

    # -- positions ----------------------------------------------------------------------------------------------------

    @cached_property
    def key_indices(self) -> Int[Tensor, " columns"]:
        """Index of the key that each column of the tile stands for."""
        return key_indices(self.tile.block, self.grid.device)

    @cached_property
    def query_positions(self) -> Int[Tensor, "#batch rows"]:
        """Position of each row's query in its sequence."""
        rows = self.tile.block.rows
        return self._of_tile(
            self.grid.query_position(torch.arange(rows.start, rows.stop, device=self.grid.device)[None])
        )

    @cached_property
    def key_positions(self) -> Int[Tensor, "#batch columns"]:
        """Position of each column's key in its sequence."""
        return self._of_tile(self.grid.key_position(self.key_indices[None]))

    @cached_property
    def lags(self) -> Int[Tensor, "#batch rows columns"]:
        """Query position minus key position: 0 for the query's own token, 1 for the previous one, -1 for the next."""
        return self.query_positions[..., None] - self.key_positions[:, None]

    def has_key_at_lag(self, lag: int) -> Bool[Tensor, "#batch 1 rows"]:
        """Return True at query rows for which a key is `lag` positions before the query (after it if `lag` is
        negative), is not padding, and belongs to the same document.
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
        """True at query rows whose token occurs earlier in the sequence. None if token ids are unknown, or if the
        caller passed explicit positions.
        """
        if self.is_repeat is None or not self.grid.uses_default_positions:
            return None
        position = self.query_positions[0]
        return (self.is_repeat[:, position.clamp(min=0)] & (position >= 0))[:, None]

    @cached_property
    def first_key(self) -> Int[Tensor, "#batch #rows"]:
        """Index of the key of the first token, for each sequence or for each row; -1 where that token is not among the
        keys. By default it is the key at position 0 or, with default positions, the first key that is not padding.
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
    def _all_key_positions(self) -> Int[Tensor, "#batch keys"]:
        """Positions of all keys of the call, not only those of the tile, for the tile's sequences."""
        keys = torch.arange(self.grid.keys, device=self.grid.device)
        return self._of_tile(self.grid.key_position(keys[None]))

    def _of_tile(self, positions: Int[Tensor, "#batch length"]) -> Int[Tensor, "#batch length"]:
        """Return positions for the tile's sequences only. `positions` has one row for each sequence of the batch, or a
        single row that all sequences share, which is returned unchanged.
        """
        return positions if len(positions) == 1 else positions[self.tile.sequences]

    # -- features of the keys, which the product with the values sums over the keys -----------------------------------

    @cached_property
    def centred_positions(self) -> Int[Tensor, " rows"]:
        """Position of each query row minus that of the tile's middle row. Requires default positions, that is, a call
        to which no explicit positions were passed.
        """
        return self.query_positions[0] - self._middle

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
            position, centred = self.query_positions[0], (columns - self._middle)[None]
            if self.is_backward_only:
                features["position"] = centred
            else:
                after = (columns > position[-1]) & (columns < self.grid.keys)
                for name, side in (("before", columns < position[0]), ("after", after)):
                    features |= {name: side[None], f"{name}, position": side * centred}
        return {name: feature.float() for name, feature in features.items()}

    @cached_property
    def stacked_key_features(self) -> Float[Tensor, "#batch columns features"]:
        """All `key_features` as columns of one tensor. If the number of features is odd, a column of zeros is added at
        the end.
        """
        if not self.key_features:
            return torch.zeros(1, self.tile.block.width, 2, device=self.grid.device)
        batch = max(map(len, self.key_features.values()))
        features = [feature.expand(batch, -1) for feature in self.key_features.values()]
        if len(features) % 2:
            features.append(torch.zeros_like(features[0]))  # a product of odd width takes a sixth longer
        return torch.stack(features, -1)

    @property
    def _middle(self) -> Int[Tensor, ""]:
        """Position of the query in the tile's middle row."""
        return self.query_positions[0][len(self.tile.block.rows) // 2]


def key_indices(block: PlannedBlock, device: torch.device) -> Int[Tensor, " columns"]:
    """Return the index of the key that each column of a planned block stands for, in order."""
    return torch.cat([torch.arange(keys.start, keys.stop, device=device) for keys in block.spans])
