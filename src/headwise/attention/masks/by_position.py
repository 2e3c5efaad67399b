"""Masks that go by the positions of query and key alone: the same in every sequence and head, for any length."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headwise.attention.masks.base import Index, Mask
from headwise.attention.masks.grid import Coverage, Grid
from headwise.shapes import Bool, Int

MAX_DISTANCE = 2**62
"""Bound above every position and distance: a larger number limits nothing, and would overflow int64 arithmetic."""


class ByPosition(Mask):
    """Base class of masks that go by the positions of query and key alone; they define `allows_positions`."""

    @abstractmethod
    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where a query at the first position attends to a key at the second, for positions that broadcast,
        or that are single numbers.
        """

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "*#batch_heads #rows #columns"]:
        """Return True where a query row in `i` attends to a key in `j`. Position -1, which marks padding and empty
        slots of a cache, is compared like any other, except by `HasPosition`, which `attend` adds to hide them.
        """
        return self.allows_positions(grid.query_position(i), grid.key_position(j))

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return self.allows_positions(grid.position_of_query(b, i), grid.position_of_key(b, j))


@dataclass(frozen=True)
class Band(ByPosition):
    """Causal or sliding-window mask: the query at position p attends to the keys `{p - width + 1, ..., p + ahead}`; if
    `width` is None, to all keys up to `p + ahead`. With a dilation d above 1, it attends to
    `{p - (width - 1) d, ..., p - d, p, p + d, ..., p + ahead d}` instead.

    Attributes:
        width: number of keys up to the query's own, which is among them; None for all keys before the query.
        ahead: number of keys after the query.
        dilation: distance between neighbouring keys of the set.
    """

    width: int | None
    ahead: int = 0
    dilation: int = 1

    depends_on_distance_only: ClassVar[bool] = True

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where the key is in the window of the query: `width` keys up to the query's own (all of them if
        `width` is None) and `ahead` keys after it. Neighbouring keys of the window are `dilation` positions apart.
        """
        distance_back = query - key
        inside = distance_back >= -min(self.ahead * self.dilation, MAX_DISTANCE)
        if self.width is not None:
            inside = inside & (distance_back < min(self.width * self.dilation, MAX_DISTANCE))
        return inside if self.dilation == 1 else inside & (distance_back % min(self.dilation, MAX_DISTANCE) == 0)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: in none, all or some of a block's query-key pairs, the key is in the window of
        the query. PARTIAL may also mean unknown, as on a grid with explicit positions or with a dilation.
        """
        if not grid.uses_default_positions:
            return Coverage.PARTIAL
        # Every distance between the smallest and the largest occurs in the block: exact, without a dilation.
        smallest = rows.start + grid.offset - (columns.stop - 1)
        largest = rows.stop - 1 + grid.offset - columns.start
        first = -self.ahead * self.dilation
        last = float("inf") if self.width is None else (self.width - 1) * self.dilation
        if largest < first or smallest > last:
            return Coverage.EMPTY
        is_full = smallest >= first and largest <= last and self.dilation == 1
        return Coverage.FULL if is_full else Coverage.PARTIAL

    def __repr__(self) -> str:
        if self == Band(None):
            return "causal()"
        options = [(name, getattr(self, name), default) for name, default in (("ahead", 0), ("dilation", 1))]
        shown = [f"{name}={value}" for name, value, default in options if value != default]
        return f"window({', '.join([str(self.width), *shown])})"


@dataclass(frozen=True)
class Prefix(ByPosition):
    """Mask of the first keys: every query attends to the keys at positions `{0, ..., length - 1}`.

    Attributes:
        length: number of keys, the same in every sequence.
    """

    length: int

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where the key has a position below `length`; this is the same for all queries."""
        return key < min(self.length, MAX_DISTANCE)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: none, all or some of a block's keys are among the first `length` keys.
        PARTIAL may also mean unknown, on a grid with explicit positions.
        """
        if not grid.uses_default_positions:
            return Coverage.PARTIAL
        if columns.start >= self.length:
            return Coverage.EMPTY
        return Coverage.FULL if columns.stop <= self.length else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True)
class Chunked(ByPosition):
    """Mask of equal chunks: the query at position p attends to the keys k with `k // size == p // size`.

    Attributes:
        size: number of positions of a chunk.
    """

    size: int

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where query and key have positions in the same chunk of `size` positions. The chunks are
        `{0, ..., size - 1}`, `{size, ..., 2 size - 1}` and so on.
        """
        size = min(self.size, MAX_DISTANCE)
        return query // size == key // size

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: in none, all or some of a block's query-key pairs, query and key are in the
        same chunk. PARTIAL may also mean unknown, on a grid with explicit positions.
        """
        if not grid.uses_default_positions:
            return Coverage.PARTIAL
        query_chunks = range((rows.start + grid.offset) // self.size, (rows.stop - 1 + grid.offset) // self.size + 1)
        key_chunks = range(columns.start // self.size, (columns.stop - 1) // self.size + 1)
        if query_chunks.stop <= key_chunks.start or key_chunks.stop <= query_chunks.start:
            return Coverage.EMPTY
        return Coverage.FULL if len(query_chunks) == len(key_chunks) == 1 else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"chunked({self.size})"


@dataclass(frozen=True)
class HasPosition(ByPosition):
    """Mask that excludes empty slots and padding, which have position -1: a query attends to a key if the positions of
    both are 0 or more.

    A query at position -1 attends to no key. `attend` adds this mask wherever positions are explicit.
    """

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where both query and key have a position of 0 or more."""
        return (query >= 0) & (key >= 0)
