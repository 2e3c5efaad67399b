"""The masks that consist of no other masks: of positions, of sequences, of matrices and functions, and of ranges."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import (
    MAX_DISTANCE,
    Coverage,
    Grid,
    Index,
    Range,
    Ranges,
    elements,
    end_of_positions,
    query_positions,
    require_broadcast,
)
from headwise.attention.tensors import KeyPositions, KeyRanges
from headwise.checks import has_readable_values, has_values
from headwise.errors import InputError
from headwise.shapes import Bool, Int

# -- masks that go by positions alone: the same in every sequence and head, for any length ----------------------------


class ByPosition(Mask):
    """Base class of masks that depend on the positions of query and key alone. These masks treat position -1, which
    marks padding and empty slots of a cache, like any other position. `attend` hides keys at position -1 by an
    additional mask, `HasPosition`.

    Attributes:
        skips_positions: True if a query does not attend to all positions between its `edges`.
    """

    skips_positions: ClassVar[bool] = False

    @abstractmethod
    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where a query at position `query` attends to a key at position `key`; the two tensors
        broadcast.
        """

    def edges(self, position: Any) -> tuple[Any, Any] | None:
        """Return the first position that a query at `position` may attend to, and the one after the last. `position` is
        a number or a tensor. For a later query, neither result is lower. Return None if the two positions are unknown;
        the base class returns None.
        """
        return None

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return self.allows_positions(grid.query_position(i, b), grid.key_position(j, b))

    def ranges(self, grid: Grid) -> Ranges | None:
        return None if self.skips_positions else self.hull(grid)

    def hull(self, grid: Grid) -> Ranges | None:
        position = query_positions(grid)
        edges, zeros = self.edges(position), torch.zeros_like(position)
        return None if edges is None else [Range(edges[0] + zeros, edges[1] + zeros)]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: the mask allows none, all or some query-key pairs of a block. This follows
        from what the first and the last query row of the block may attend to. PARTIAL may also mean unknown, as on a
        grid with explicit positions.
        """
        if not grid.uses_default_positions:
            return Coverage.PARTIAL
        first, last = (self.edges(row + grid.offset) for row in (rows.start, rows.stop - 1))
        if first is None or last is None:
            return Coverage.PARTIAL
        (first_start, first_stop), (last_start, last_stop) = first, last
        if last_stop <= columns.start or first_start >= columns.stop:
            return Coverage.EMPTY
        is_full = last_start <= columns.start and columns.stop <= first_stop and not self.skips_positions
        return Coverage.FULL if is_full else Coverage.PARTIAL


@dataclass(frozen=True)
class Band(ByPosition):
    """Causal or sliding-window mask. The query at position p attends to the keys `{p - width + 1, ..., p + ahead}` or,
    if `width` is None, to all keys up to `p + ahead`.

    With a dilation d above 1, the query attends to the keys at

        p - (width - 1) d, ..., p - d, p, p + d, ..., p + ahead d

    or, if `width` is None, to all keys up to `p + ahead d` whose distance from p is a multiple of d.

    Attributes:
        width: number of keys up to the query's position, which is among them; None for all keys before the query.
        ahead: number of keys after the query's position.
        dilation: distance d between the positions of neighbouring keys to which a query attends.
    """

    width: int | None
    ahead: int = 0
    dilation: int = 1

    depends_on_distance_only: ClassVar[bool] = True
    is_constant: ClassVar[bool] = True

    @property
    def skips_positions(self) -> bool:  # type: ignore[override]
        """True if the window has a dilation above 1: a query then skips positions within its window."""
        return self.dilation != 1

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        distance_back = query - key
        inside = distance_back >= -min(self.ahead * self.dilation, MAX_DISTANCE)
        if self.width is not None:
            inside = inside & (distance_back < min(self.width * self.dilation, MAX_DISTANCE))
        return inside if self.dilation == 1 else inside & (distance_back % min(self.dilation, MAX_DISTANCE) == 0)

    def edges(self, position: Any) -> tuple[Any, Any]:
        stop = position + min(self.ahead * self.dilation, MAX_DISTANCE) + 1
        return 0 if self.width is None else position - min((self.width - 1) * self.dilation, MAX_DISTANCE), stop

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

    is_constant: ClassVar[bool] = True

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        return key < min(self.length, MAX_DISTANCE)

    def edges(self, position: Any) -> tuple[Any, Any]:
        return 0, min(self.length, MAX_DISTANCE)

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True)
class Chunked(ByPosition):
    """Mask of equal chunks: the query at position p attends to the keys k with `k // size == p // size`.

    Attributes:
        size: number of positions of a chunk.
    """

    size: int

    is_constant: ClassVar[bool] = True

    def allows_positions(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        size = min(self.size, MAX_DISTANCE)
        return query // size == key // size

    def edges(self, position: Any) -> tuple[Any, Any]:
        size = min(self.size, MAX_DISTANCE)
        start = position // size * size
        return start, start + size

    def __repr__(self) -> str:
        return f"chunked({self.size})"


@dataclass(frozen=True)
class HasPosition(Mask):
    """Mask that hides padding and empty slots of a cache, which have position -1. `attend` adds it to the caller's mask
    if positions are passed.
    """

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return (grid.query_position(i, b) >= 0) & (grid.key_position(j, b) >= 0)

    def ranges(self, grid: Grid) -> Ranges:
        exists = query_positions(grid) >= 0
        return [Range(torch.zeros_like(exists, dtype=torch.long), exists * end_of_positions(grid))]


# -- masks that may differ between the sequences of a batch ----------------------------------------------------------


class DeviceCopies:
    """Tensor of a mask, with its copies on other devices. Each copy is made only once, because copying from the CPU to
    a GPU in every attention call would make every call wait. The tensor must not change.
    """

    def __init__(self, tensor: Int[Tensor, "..."]) -> None:
        self._tensor = tensor
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Int[Tensor, "..."]:
        """Return the tensor on `device`; a copy is made at the first use. Do not call it while compiling or tracing: a
        copy would have no values.
        """
        if self._tensor.device == device:
            return self._tensor
        if device not in self._copies:
            with torch.inference_mode(False):  # later calls may need gradients
                self._copies[device] = self._tensor.to(device, non_blocking=True)
        return self._copies[device]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, without the copies, whose devices may not exist there."""
        return {"_tensor": self._tensor, "_copies": {}}


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Mask by the length of each sequence, which hides padding: every query of sequence b attends to the first
    `lengths[b]` keys of that sequence. With `side="left"`, where the padding comes first, it attends to the last
    `lengths[b]` keys.

    Attributes:
        lengths: number of keys for each sequence, `(batch,)`.
        side: side of the sequences at which the padding is, "right" or "left".
        bounded: whether a length above the number of keys is an error: True for padding, False for a prefix, which
            may be longer than the text so far.
        known_extremes: smallest and largest of `lengths`, if they were read when the mask was made; None otherwise.
    """

    lengths: Int[Tensor, " batch"]
    side: Literal["right", "left"]
    bounded: bool = True
    known_extremes: tuple[int, int] | None = None

    @property
    def _extremes(self) -> tuple[int, int] | None:
        """Smallest and largest of `lengths`, the numbers of real keys of the sequences. None if the lengths cannot be
        read, as on a GPU.
        """
        if torch.compiler.is_compiling():
            return None  # a comparison with the number of keys would fix it
        if self.known_extremes is None and has_readable_values(self.lengths):
            object.__setattr__(self, "known_extremes", extremes_of(self.lengths))
        return self.known_extremes

    @cached_property
    def _copies(self) -> DeviceCopies:
        """Copies of `lengths`, the numbers of real keys of the sequences, on the devices where the mask has been
        used.
        """
        return DeviceCopies(self.lengths)

    def lengths_on(self, device: torch.device) -> Int[Tensor, " batch"]:
        """Return `lengths`, the numbers of real keys of the sequences, on `device`. A copy on another device is made
        only once.
        """
        return self._copies.on(device) if has_values(self.lengths) else self.lengths.to(device)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        length = self.lengths_on(grid.device)[b]
        return grid.key_position(j, b) < length if self.side == "right" else j >= grid.keys - length

    def ranges(self, grid: Grid) -> Ranges:
        lengths = self.lengths_on(grid.device)[:, None, None]
        zeros, keys = torch.zeros_like(lengths), torch.full_like(lengths, grid.keys)
        return [Range(zeros, lengths) if self.side == "right" else Range(keys - lengths, keys)]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: none, all or some of a block's keys are real (not padding) over all sequences.
        PARTIAL may also mean unknown: with explicit positions, or if the lengths cannot be read.
        """
        extremes = self._extremes if grid.uses_default_positions else None
        if extremes is None:
            return Coverage.PARTIAL
        shortest, longest = extremes
        # Counted from the side of the real tokens, so that one comparison serves both sides.
        first, last = columns.start, columns.stop - 1
        if self.side == "left":
            first, last = grid.keys - 1 - last, grid.keys - 1 - first
        if first >= longest:
            return Coverage.EMPTY
        return Coverage.FULL if last < shortest else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` unless there is one length for each sequence of the scores that `grid` describes. If the
        mask is `bounded`, also raise it for a length above the number of keys. Padding on the left is refused if
        positions are passed.
        """
        if len(self.lengths) != grid.batch:
            raise InputError(
                "padding(lengths)", expected=f"one length for each of {grid.batch} sequences", got=len(self.lengths)
            )
        if self.side == "left" and not grid.uses_default_positions:
            raise InputError(
                "padding(side)", expected="'right' where keys have positions of their own, as in a cache", got="'left'"
            )
        extremes = self._extremes if self.bounded and grid.uses_default_positions else None
        if extremes is not None and extremes[1] > grid.keys:
            raise InputError("padding(lengths)", expected=f"lengths of 0 to {grid.keys} (the keys)", got=extremes[1])

    def for_sequence(self, index: int) -> Mask:
        return Padding(self.lengths[index : index + 1], self.side, self.bounded)

    def natural_grid(self) -> Grid:
        """Return a `Grid` (the sizes of the scores) with one sequence for each length, and as many keys as the largest
        length; 1 key if the lengths cannot be read.
        """
        extremes = self._extremes
        keys = 1 if extremes is None else extremes[1]
        return Grid(len(self.lengths), 0, 0, keys, _drawing_device(self.lengths))

    def __repr__(self) -> str:
        if not self.bounded:
            return f"prefix({_shown(self.lengths)})"
        return f"padding({_shown(self.lengths)}, side={self.side!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Mask of packed documents: a query attends to the keys of its own document. The query at position p attends to the
    keys k with `ids[k] == ids[p]`, where `ids` is the row of document ids of its sequence.

    A query whose position has no id, before the first or after the last key, attends to no key.

    Attributes:
        ids: document of each key, `(batch, keys)`, or `(1, keys)` for the same documents in every sequence.
        known_one_piece: True if the keys of every document are known to be adjacent, False if they are not, None if
            that was not read when the mask was made.
    """

    ids: KeyPositions
    known_one_piece: bool | None = None

    @property
    def is_one_piece_each(self) -> bool:
        """True if the keys of every document are known to be adjacent, so that a query attends to one range of keys."""
        if self.known_one_piece is None and has_readable_values(self.ids):
            object.__setattr__(self, "known_one_piece", are_one_piece_each(self.ids))
        return self.known_one_piece is True

    @cached_property
    def _copies(self) -> DeviceCopies:
        """Copies of the document ids on the devices where the mask has been used."""
        return DeviceCopies(self.ids)

    def ids_on(self, device: torch.device) -> KeyPositions:
        """Return the document ids on `device`. A copy on another device is made only once."""
        return self._copies.on(device) if has_values(self.ids) else self.ids.to(device)

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        ids, query, key = self.ids_on(grid.device), grid.query_position(i, b), grid.key_position(j, b)
        last = ids.shape[1] - 1
        if last < 0:
            return key < 0
        own, other = (elements(ids, b, position.clamp(0, last)) for position in (query, key))
        return (own == other) & ((query >= 0) & (query <= last) & (key <= last))  # positions often have no batch axis

    def ranges(self, grid: Grid) -> Ranges | None:
        return self.hull(grid) if self.is_one_piece_each else None

    def hull(self, grid: Grid) -> Ranges | None:
        """Return, for each query, the range of positions from the first to the last key of its document. Return None if
        there are no keys.
        """
        ids = self.ids_on(grid.device)
        if ids.shape[1] == 0:
            return None
        sorted_ids, order = ids.sort(dim=1, stable=True)
        index = torch.arange(ids.shape[1], device=grid.device).expand_as(ids)
        changes = sorted_ids.diff(dim=1) != 0
        first = torch.where(F.pad(changes, (1, 0), value=True), index, 0).cummax(1).values
        is_last = F.pad(changes, (0, 1), value=True)
        last = torch.where(is_last, index, ids.shape[1]).flip(1).cummin(1).values.flip(1)
        edges = (torch.empty_like(order).scatter(1, order, order.gather(1, each)) for each in (first, last))
        position = query_positions(grid)[:, 0]
        batch = max(len(ids), len(position))
        position = position.expand(batch, -1)
        exists = (position >= 0) & (position < ids.shape[1])
        position = position.clamp(0, ids.shape[1] - 1)
        start, end = (each.expand(batch, -1).gather(1, position)[:, None] for each in edges)
        return [Range(start, torch.where(exists[:, None], end + 1, 0))]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return the share of query-key pairs of a block that the mask allows. It is EMPTY if in every sequence the
        document ids of the queries are all smaller, or all larger, than those of the keys. It is FULL if all queries
        and keys have the same id, and otherwise PARTIAL. It is also PARTIAL if positions are explicit or ids cannot be
        read.
        """
        if not grid.uses_default_positions or not has_readable_values(self.ids):
            return Coverage.PARTIAL
        if not (rows and columns):
            return Coverage.EMPTY
        first, stop = max(rows.start + grid.offset, 0), rows.stop + grid.offset
        query_ids, key_ids = self.ids[:, first:stop], self.ids[:, columns.start : columns.stop]
        if stop <= 0 or bool(((query_ids.amin(1) > key_ids.amax(1)) | (query_ids.amax(1) < key_ids.amin(1))).all()):
            return Coverage.EMPTY
        is_one_segment = bool((query_ids == key_ids[:, :1]).all()) and bool((key_ids == key_ids[:, :1]).all())
        return Coverage.FULL if is_one_segment and rows.start + grid.offset >= 0 else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` unless there is one document id for each key, in one row for all sequences or in a row for
        each. If positions are passed, as by a cache with empty slots, there may be more or fewer ids than keys.
        """
        batch, keys = self.ids.shape
        if batch not in (1, grid.batch) or (grid.uses_default_positions and keys != grid.keys):
            raise InputError(
                "segments(ids)",
                expected=f"one id for each of {grid.keys} keys in 1 or {grid.batch} sequences",
                got=f"shape {(batch, keys)}",
            )

    def for_sequence(self, index: int) -> Mask:
        return self if self.ids.shape[0] == 1 else Segments(self.ids[index : index + 1], self.known_one_piece or None)

    def natural_grid(self) -> Grid:
        """Return a `Grid` (the sizes of the scores) with a key for each id and a sequence for each row of ids. With one
        row, the number of sequences is 0, which stands for any number.
        """
        batch, keys = self.ids.shape
        return Grid(batch if batch > 1 else 0, 0, 0, keys, _drawing_device(self.ids))

    def __repr__(self) -> str:
        return f"segments({_shown(self.ids)})"


def extremes_of(lengths: Int[Tensor, " batch"]) -> tuple[int, int]:
    """Return the smallest and the largest of the given lengths; (0, 0) if there are none. Reading them from a GPU waits
    for the GPU.
    """
    if not lengths.numel():
        return 0, 0
    shortest, longest = torch.stack(torch.aminmax(lengths)).cpu().tolist()
    return shortest, longest


def are_one_piece_each(ids: Int[Tensor, "batch keys"]) -> bool:
    """Return True if the keys of every document are adjacent. Reading the document ids from a GPU waits for the GPU."""
    if ids.is_cpu and bool((ids.diff(dim=1) >= 0).all()):
        return ids.shape[1] > 0  # ascending ids, as is usual, need no sorting
    pieces, documents = ((values.diff(dim=1) != 0).sum(1) for values in (ids, ids.sort(1).values))
    return ids.shape[1] > 0 and torch.equal(pieces, documents)


def _drawing_device(values: Int[Tensor, "..."]) -> torch.device:
    """Return the device on which `Mask.picture` evaluates a mask that stores `values`: the meta device if the values
    are on it, otherwise the CPU.
    """
    return values.device if values.is_meta else torch.device("cpu")


def _shown(values: Int[Tensor, "..."]) -> str:
    """Return a tensor's values as text for a `repr`, or its shape if the values cannot be read, as while compiling."""
    return str(values.tolist()) if has_readable_values(values) else f"<{' x '.join(map(str, values.shape))}>"


# -- masks of any form ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Mask stored as a boolean tensor: in sequence b and head h, query i attends to key j where `values[b, h, i, j]` is
    True.

    Attributes:
        values: `(batch, heads, queries, keys)`, 1 on an axis along which the mask is constant.
    """

    values: Bool[Tensor, "batch heads queries keys"]

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return elements(self.values, b, h, i, j)

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """Return a view of the stored values for a range of query rows and of keys; by default for all of them."""
        self.check(grid)
        values = self.values.expand(-1, -1, grid.queries, grid.keys)
        if rows is not None:
            values = values[:, :, rows.start : rows.stop]
        return values if columns is None else values[..., columns.start : columns.stop]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: none, all or some of the stored values of a block are True. PARTIAL may also
        mean that the values cannot be read.
        """
        if not has_readable_values(self.values):
            return Coverage.PARTIAL
        block = self.block(grid, rows, columns)
        if not block.any():
            return Coverage.EMPTY
        return Coverage.FULL if block.all() else Coverage.PARTIAL

    @property
    def stored_values(self) -> int:
        return self.values.numel()

    def check(self, grid: Grid) -> None:
        """Raise `InputError` unless the stored tensor broadcasts to the scores that `grid` describes, and is on the
        grid's device.
        """
        require_broadcast("mask", self.values, grid)

    def for_sequence(self, index: int) -> Mask:
        return self if self.values.shape[0] == 1 else Dense(self.values[index : index + 1])

    def for_head(self, index: int) -> Mask:
        return self if self.values.shape[1] == 1 else Dense(self.values[:, index : index + 1])

    def natural_grid(self) -> Grid:
        """Return a `Grid` with the sizes and the device of the stored tensor. An axis of size 1 gets size 0, which
        stands for any size.
        """
        batch, heads, queries, keys = (size if size > 1 else 0 for size in self.values.shape)
        return Grid(batch, heads, queries, keys, self.values.device)

    def __repr__(self) -> str:
        return f"dense(<{' x '.join(map(str, self.values.shape))}>)"


@dataclass(frozen=True)
class MaskRule(Mask):
    """Mask computed by a function: in sequence b and head h, the query at position q attends to the key at position k
    where `rule(b, h, q, k)` is True.

    Attributes:
        rule: function of the indices of sequence and head and the positions of query and key.
        first_sequence: index that `rule` receives for the first sequence of the grid.
        first_head: index that `rule` receives for the first head of the grid.
    """

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    first_sequence: int = 0
    first_head: int = 0

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        """Return the result of the function `rule` for a block of query rows and keys. Raise `InputError` unless it is
        a boolean tensor that broadcasts to the shape of the block.
        """
        positions = grid.query_position(i, b), grid.key_position(j, b)
        allowed = self.rule(b + self.first_sequence, h + self.first_head, *positions)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("mask_rule(rule)", expected="a function that returns a boolean tensor", got=got)
        if i.ndim == 0:
            return allowed
        shape = (grid.batch, grid.heads, i.shape[0], j.shape[1])
        try:
            return allowed.expand(shape)
        except RuntimeError:
            expected = f"a result that broadcasts to {shape}"
            raise InputError("mask_rule(rule)", expected=expected, got=tuple(allowed.shape)) from None

    def for_sequence(self, index: int) -> Mask:
        """Return the mask of sequence `index` alone. The function `rule` still receives `index` as the number of the
        sequence, not 0.
        """
        return MaskRule(self.rule, self.first_sequence + index, self.first_head)

    def for_head(self, index: int) -> Mask:
        """Return the mask of head `index` alone. The function `rule` still receives `index` as the number of the head,
        not 0.
        """
        return MaskRule(self.rule, self.first_sequence, self.first_head + index)

    def __repr__(self) -> str:
        return f"mask_rule({getattr(self.rule, '__name__', repr(self.rule))})"


@dataclass(frozen=True, eq=False)
class InRanges(Mask):
    """Mask stored as ranges of keys: each query attends to the keys in its own ranges. The ranges are a tensor of
    starts and stops.

    Attributes:
        key_ranges: start and stop of each range; a range whose stop is not above its start has no key.
    """

    key_ranges: KeyRanges

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        inside = j < 0
        for number in range(self.key_ranges.shape[3]):
            start, stop = (elements(self.key_ranges, b, h, i, number, edge) for edge in (0, 1))
            inside = inside | ((j >= start) & (j < stop))
        return inside

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY if no key of a block is in the ranges of its rows. Return FULL if each row has a range that
        contains all keys of the block. Return PARTIAL otherwise, or if the ranges cannot be read, as on a GPU.
        """
        if not has_readable_values(self.key_ranges):
            return Coverage.PARTIAL
        starts, stops = self.key_ranges[:, :, rows.start : rows.stop].unbind(-1)
        if ((starts <= columns.start) & (stops >= columns.stop)).any(-1).all():
            return Coverage.FULL
        has_key = (starts < columns.stop) & (stops > columns.start) & (starts < stops)
        return Coverage.PARTIAL if has_key.any() else Coverage.EMPTY

    def for_sequence(self, index: int) -> Mask:
        return self if len(self.key_ranges) == 1 else InRanges(self.key_ranges[index : index + 1])

    def for_head(self, index: int) -> Mask:
        return self if self.key_ranges.shape[1] == 1 else InRanges(self.key_ranges[:, index : index + 1])


def mask_of_keys(ranges: Int[Tensor, "..."] | None, matrix: Bool[Tensor, "..."] | None) -> Mask | None:
    """Return the mask under which a query attends to the keys in its `ranges` at which `matrix` is True. If one
    argument is None, it excludes no key; if both are None, return None.
    """
    if ranges is None:
        return None if matrix is None else Dense(matrix)
    return InRanges(ranges) if matrix is None else InRanges(ranges) & Dense(matrix)


@dataclass(frozen=True, eq=False)
class InSequences(Mask):
    """Mask of packed sequences: a query attends only to keys of its own sequence. The attribute `mask` may exclude some
    of these keys, by the positions of query and key within the sequence. In a sequence, the number of queries may
    differ from the number of keys.

    Attributes:
        query_sequences: number of the sequence of each query.
        key_sequences: number of the sequence of each key.
        query_positions: position of each query within its sequence.
        key_positions: position of each key within its sequence.
        mask: rule that goes by positions alone; None if a query attends to its whole sequence.
    """

    query_sequences: Int[Tensor, " queries"]
    key_sequences: Int[Tensor, " keys"]
    query_positions: Int[Tensor, "1 queries"]
    key_positions: Int[Tensor, "1 keys"]
    mask: Mask | None

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        is_shared = self.query_sequences[i] == self.key_sequences[j]
        if self.mask is None:
            return is_shared
        by_position = replace(grid, query_positions=self.query_positions, key_positions=self.key_positions)
        return is_shared & self.mask.allows(by_position, b, h, i, j)

    def for_head(self, index: int) -> Mask:
        return self if self.mask is None else replace(self, mask=self.mask.for_head(index))
