"""What is known of a call of attention beside its tensors: its tokens, its padding, and who sees whom.

All of it is the same in every layer of a model, so what is found once is kept with what is known.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.attention.blocks import Block
from headwise.attention.masks import Grid
from headwise.attention.tiles import Tile
from headwise.shapes import Bool, Float, Int

KEPT_CELLS = 2**22
"""How many cells of equal tokens are kept for the next layer."""


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a call beside its tensors; None where it is not known.

    Attributes:
        tokens: token ids of the keys.
        special: True at keys that are special tokens.
        real: True at query rows that are not padding; the others do not count. In self-attention the first of these is
            the first token of its sequence.
        gram: `W_h W_h^T` of each head's slice of the output projection, which maps `(value_dim)` to the model's width.
    """

    tokens: Int[Tensor, "batch keys"] | None = None
    special: Bool[Tensor, "batch keys"] | None = None
    real: Bool[Tensor, "batch queries"] | None = None
    gram: Float[Tensor, "heads value_dim value_dim"] | None = None

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
    def _sights(self) -> dict[Hashable, "Sight"]:
        return {}

    def sight(self, tile: Tile, grid: Grid) -> "Sight":
        """Who sees what in a tile. All layers of a model ask for the same, where the mask goes by distance."""
        if tile.pattern is None:
            return Sight(tile, grid, self.real)
        question = (
            tile.pattern,
            tile.block,
            None if self.real is None else (tile.sequences.start, tile.sequences.stop),
        )
        if question not in self._sights:
            self._sights[question] = Sight(tile, grid, self.real).settled()
        return self._sights[question]

    @cached_property
    def _copies(self) -> dict[Hashable, Int[Tensor, " pairs"]]:
        return {}

    def copies(self, sequence: int, position: range, block: Block, shift: int) -> Int[Tensor, " pairs"]:
        """The cells of a block, row by row, whose key stands `shift` tokens after an earlier copy of the row's token.

        All layers of a model ask for the same; up to `KEPT_CELLS` of them are kept.
        """
        assert self.tokens is not None
        question = (sequence, position, tuple(block.spans), shift)
        if question not in self._copies:
            tokens = self.tokens[sequence]
            rows = torch.arange(position.start, position.stop, device=tokens.device)
            columns = torch.cat([torch.arange(keys.start, keys.stop, device=tokens.device) for keys in block.spans])
            copied = columns - shift
            alike = tokens[rows][:, None] == tokens[copied.clamp(min=0)]
            cells = (alike & (copied < rows[:, None]) & (copied >= 0)).flatten().nonzero()[:, 0]
            if sum(map(len, self._copies.values())) + len(cells) > KEPT_CELLS:
                return cells
            self._copies[question] = cells
        return self._copies[question]


@dataclass(eq=False)
class Sight:
    """Who sees what in a tile: what the mask alone decides, and which rows are padding.

    Attributes:
        tile: which rows and keys.
        grid: of the whole call.
        real: True at query rows that are not padding; None where all are real.
    """

    tile: Tile
    grid: Grid
    real: Bool[Tensor, "batch queries"] | None

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
        here = None if self.real is None else self.real[self.tile.sequences, None, index.start : index.stop]
        return self.seen > 0 if here is None else (self.seen > 0) & here

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
        index, device = self.tile.block.rows, self.grid.device
        first, last = index.start + self.grid.offset, index.stop + self.grid.offset
        position = torch.arange(first, last, device=device)[:, None]
        for columns, allowed in self._allowed:
            if columns.stop - 1 <= first:
                continue
            keys = torch.arange(columns.start, columns.stop, device=device)
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

    def settled(self) -> "Sight":
        """The same, with everything found and the masks let go."""
        for name in ("seen", "counts", "seen_by", *(["looks_back"] if self.grid.aligned else [])):
            getattr(self, name)
        del self._allowed
        return self
