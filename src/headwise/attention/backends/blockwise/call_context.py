"""What is known of a call of attention beside its tensors: its tokens, its padding, and who sees whom.

All of it is the same in every layer of a model, so what is found once is kept with what is known.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.plan import Block
from headwise.attention.backends.blockwise.tiles import Tile
from headwise.attention.masks.base import Grid
from headwise.shapes import Bool, Float, Int

KEPT_CELLS = 2**22
"""How many cells of equal tokens are kept for the next layer."""


@dataclass(frozen=True, eq=False)
class CallContext:
    """What is known of a call beside its tensors; None where it is not known.

    Attributes:
        tokens: token ids of the keys.
        special: True at keys that are special tokens.
        real: True at query rows that are not padding; the others do not count. In self-attention the first of these is
            the first token of its sequence.
    """

    tokens: Int[Tensor, "batch keys"] | None = None
    special: Bool[Tensor, "batch keys"] | None = None
    real: Bool[Tensor, "batch queries"] | None = None

    @cached_property
    def repeats(self) -> Bool[Tensor, "batch keys"] | None:
        """Which tokens have an earlier copy."""
        if self.tokens is None:
            return None
        order = self.tokens.argsort(dim=1, stable=True)
        ordered = self.tokens.gather(1, order)
        again = torch.zeros_like(order, dtype=torch.bool)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        return torch.zeros_like(again).scatter(1, order, again)

    @cached_property
    def _sights(self) -> dict[Hashable, "TileVisibility"]:
        return {}

    def sight(self, tile: Tile, grid: Grid) -> "TileVisibility":
        """Who sees what in a tile. All layers of a model ask for the same, where the mask goes by distance."""
        question = (tile.pattern, tile.block, tile.sequences.start, tile.sequences.stop)
        if tile.pattern is not None and question in self._sights:
            return self._sights[question]
        found = TileVisibility(tile, grid, _of(tile, self.real), _of(tile, self.special), _of(tile, self.repeats))
        if tile.pattern is not None:
            self._sights[question] = found.settled()
        return found

    @cached_property
    def _copies(self) -> dict[Hashable, tuple[Int[Tensor, " pairs"], Int[Tensor, " ends"]]]:
        return {}

    def copies(
        self, sequence: int, position: range, block: Block, shift: int
    ) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " ends"]]:
        """The cells of a block whose key stands `shift` tokens after an earlier copy of the row's token.

        They go row by row; how many there are up to each row, from 0 on, is returned beside them. All layers of a model
        ask for the same; up to `KEPT_CELLS` of them are kept.
        """
        assert self.tokens is not None
        question = (sequence, position, tuple(block.spans), shift)
        if question not in self._copies:
            tokens = self.tokens[sequence]
            rows = torch.arange(position.start, position.stop, device=tokens.device)
            columns = columns_of(block, tokens.device)
            copied = columns - shift
            alike = tokens[rows][:, None] == tokens[copied.clamp(min=0)]
            alike &= (copied < rows[:, None]) & (copied >= 0)
            cells = alike.flatten().nonzero()[:, 0].int()
            found = (cells, F.pad(alike.sum(-1).cumsum(0), (1, 0)))
            if sum(len(each) for each, _ in self._copies.values()) + len(cells) > KEPT_CELLS:
                return found
            self._copies[question] = found
        return self._copies[question]


@dataclass(eq=False)
class TileVisibility:
    """Who sees what in a tile: what the mask, the positions and the tokens say, whatever the scores are.

    Attributes:
        tile: which rows, sequences and keys.
        grid: of the whole call.
        real: of its sequences, which queries are not padding; None where all are real.
        special: of its sequences, which keys are special tokens, if that is known.
        repeats: of its sequences, which tokens have an earlier copy, if they are known.
    """

    tile: Tile
    grid: Grid
    real: Bool[Tensor, "sequences queries"] | None
    special: Bool[Tensor, "sequences keys"] | None
    repeats: Bool[Tensor, "sequences keys"] | None
    counted: dict[Hashable, Bool[Tensor, "statistics #batch #heads rows"]] = field(default_factory=dict)

    # -- which rows count ---------------------------------------------------------------------------------------------

    @cached_property
    def seen(self) -> Int[Tensor, "#batch #heads rows"]:
        """How many keys each row may attend to."""
        seen = torch.zeros(1, 1, len(self.tile.block.rows), dtype=torch.int64, device=self.grid.device)
        for columns, allowed in self._allowed:
            seen = seen + (len(columns) if allowed is None else allowed.sum(-1))
        return seen

    @cached_property
    def counts(self) -> Bool[Tensor, "#batch #heads rows"]:
        """Which rows count: those with a key that are not padding."""
        index = self.tile.block.rows
        return self.seen > 0 if self.real is None else (self.seen > 0) & self.real[:, None, index.start : index.stop]

    @cached_property
    def seen_by(self) -> Float[Tensor, "#batch #heads columns"]:
        """Of how many of the rows that count each key is seen."""
        counts, seen = self.counts.float(), []
        for columns, allowed in self._allowed:
            if allowed is None:
                seen.append(counts.sum(-1, keepdim=True).expand(*counts.shape[:2], len(columns)))
            else:
                seen.append((counts[..., None, :] @ allowed.float())[..., 0, :])
        sizes = torch.broadcast_shapes(*(each.shape[:2] for each in seen))  # type: ignore[no-untyped-call]
        return torch.cat([each.expand(*sizes, -1) for each in seen], -1)

    @cached_property
    def looks_back(self) -> bool:
        """Whether no row sees a key after its own, on an aligned grid."""
        position = self.position[0][:, None]
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
        """The parts of the tile, and which of their keys are allowed; None where all are."""
        hidden, offset, parts = {each.offset: each.ceiling for each in self.tile.hidden}, 0, []
        for columns, _ in self.tile.block.parts:
            ceiling = hidden.get(offset)
            parts.append((columns, None if ceiling is None else ceiling > 0))
            offset += len(columns)
        return parts

    def settled(self) -> "TileVisibility":
        """The same, with all found that asks the mask, and the mask let go."""
        for name in ("counts", "seen_by", *(["looks_back"] if self.grid.aligned else [])):
            getattr(self, name)
        del self._allowed
        self.tile = self.tile._replace(hidden=[], alive=None)
        return self

    # -- positions ----------------------------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> Int[Tensor, " columns"]:
        """The numbers of the keys."""
        return columns_of(self.tile.block, self.grid.device)

    @cached_property
    def position(self) -> Int[Tensor, "#batch rows"]:
        """Where the queries stand."""
        index = self.tile.block.rows
        i = torch.arange(index.start, index.stop, device=self.grid.device)[:, None]
        return self._here(self.grid.query_position(i)[..., 0])

    @cached_property
    def key_position(self) -> Int[Tensor, "#batch columns"]:
        """Where the keys stand."""
        return self._here(self.grid.key_position(self.columns[None])[..., 0, :])

    @cached_property
    def back(self) -> Int[Tensor, "#batch rows columns"]:
        """How many tokens before the query each key stands: 0 itself, 1 the previous, -1 the next."""
        return self.position[..., None] - self.key_position[:, None]

    def has(self, back: int) -> Bool[Tensor, "#batch 1 rows"]:
        """Which rows have a key that stands `back` tokens before the query and is no padding."""
        key = self.position - back
        there = (key >= 0) & (key <= self.last)
        if self.real is not None and self.grid.aligned and self.grid.queries == self.grid.keys:
            there = there & self.real[:, key[0].clamp(0, self.grid.keys - 1)]
        return there[:, None]

    @cached_property
    def has_copy(self) -> Bool[Tensor, "#batch 1 rows"] | None:
        """Which rows are of tokens that have an earlier copy; None where these are not known."""
        if self.repeats is None or not self.grid.aligned:
            return None
        position = self.position[0]
        return (self.repeats[:, position.clamp(min=0)] & (position >= 0))[:, None]

    @cached_property
    def first(self) -> Int[Tensor, "#batch"]:
        """The key that is the first token."""
        if not self.grid.aligned:
            return (self._all_positions == 0).int().argmax(-1)
        if self.real is None or self.grid.queries != self.grid.keys:
            return torch.zeros(1, dtype=torch.int64, device=self.grid.device)
        return self.real.int().argmax(-1)

    @cached_property
    def last(self) -> Int[Tensor, "#batch 1"]:
        """Where the last key stands."""
        return self._all_positions.amax(-1, keepdim=True)

    @property
    def _all_positions(self) -> Int[Tensor, "#batch keys"]:
        keys = torch.arange(self.grid.keys, device=self.grid.device)
        return self._here(self.grid.key_position(keys[None])[..., 0, :])

    def _here(self, positions: Int[Tensor, "*axes length"]) -> Int[Tensor, "#batch length"]:
        """Positions of the tile's sequences, with that axis."""
        flat = positions.reshape(-1, positions.shape[-1])
        return flat if len(flat) == 1 else flat[self.tile.sequences]

    # -- features of the keys, whose sums the product with the values brings ------------------------------------------

    @cached_property
    def ahead(self) -> Int[Tensor, " rows"]:
        """Where the queries stand, counted from their middle, on an aligned grid."""
        return self.position[0] - self._middle

    @cached_property
    def features(self) -> dict[str, Float[Tensor, "#batch columns"]]:
        """What statistics sum over keys, by name.

        A distance is linear in the key's position on either side of the query. Positions are counted from the middle of
        the rows, so that no two large numbers are subtracted. Where keys on both sides are seen, those before all rows
        and those after all rows are summed, and what lies between is taken as it is.
        """
        columns = self.columns
        found = {"first": columns == self.first[:, None]}
        if self.special is not None:
            found["special"] = self.special[:, columns]
        if self.grid.aligned:
            position, away = self.position[0], (columns - self._middle)[None]
            if self.looks_back:
                found["away"] = away
            else:
                for name, side in (("before", columns < position[0]), ("after", columns > position[-1])):
                    found |= {name: side[None], f"{name}, away": side * away}
        return {name: feature.float() for name, feature in found.items()}

    @cached_property
    def stacked_features(self) -> Float[Tensor, "#batch columns features"]:
        """The features side by side, an even number of columns."""
        batch = max(map(len, self.features.values()))
        features = [feature.expand(batch, -1) for feature in self.features.values()]
        if len(features) % 2:
            features.append(torch.zeros_like(features[0]))  # a product of odd width takes a sixth longer
        return torch.stack(features, -1)

    @property
    def _middle(self) -> Int[Tensor, ""]:
        return self.position[0][len(self.tile.block.rows) // 2]


def columns_of(block: Block, device: torch.device) -> Int[Tensor, " columns"]:
    """The numbers of the keys of a block."""
    return torch.cat([torch.arange(keys.start, keys.stop, device=device) for keys in block.spans])


def _of(tile: Tile, of_all: Bool[Tensor, "batch length"] | None) -> Bool[Tensor, "sequences length"] | None:
    """What is known of all sequences, of those of a tile."""
    return None if of_all is None else of_all[tile.sequences]
