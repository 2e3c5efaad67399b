"""Masks that may differ between the sequences of a batch: real lengths, and packed documents."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headwise.attention.masks.base import Index, Mask
from headwise.attention.masks.device_copies import DeviceCopies
from headwise.attention.masks.grid import Coverage, Grid
from headwise.checks import has_readable_values, has_values
from headwise.errors import InputError
from headwise.shapes import Bool, Int


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Mask of real lengths: every query of sequence b attends to the first `lengths[b]` keys of that sequence. With
    `side="left"`, where the padding comes first, it attends to the last `lengths[b]` keys.

    Attributes:
        lengths: number of keys for each sequence, `(batch,)`.
        side: of the padding.
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
        """Smallest and largest of `lengths`, the numbers of real keys of the sequences; None if they are unknown, since
        the lengths cannot be read, as on a GPU.
        """
        if torch.compiler.is_compiling():
            return None  # a comparison with the number of keys would fix it
        if self.known_extremes is None and has_readable_values(self.lengths):
            return self._read_extremes
        return self.known_extremes

    @cached_property
    def _read_extremes(self) -> tuple[int, int]:
        """Smallest and largest of `lengths`, read from the CPU."""
        return extremes_of(self.lengths)

    @cached_property
    def _copies(self) -> DeviceCopies:
        """The lengths on every device that the mask was used on."""
        return DeviceCopies(self.lengths)

    def lengths_on(self, device: torch.device) -> Int[Tensor, " batch"]:
        """Return the lengths on a device; a copy is made once."""
        return self._copies.on(device) if has_values(self.lengths) else self.lengths.to(device)

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch 1 1 columns"]:
        """Return a tensor that is True, for each sequence, at the keys in `j` that are real and not padding. Every
        query may attend to these.
        """
        lengths = self.lengths_on(grid.device)[:, None, None, None]
        return grid.key_position(j) < lengths if self.side == "right" else j >= grid.keys - lengths

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        length = self.lengths_on(grid.device)[b]
        return grid.position_of_key(b, j) < length if self.side == "right" else j >= grid.keys - length

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: none, all or some of a block's keys are real (not padding), counted over all
        sequences. PARTIAL may also mean unknown: on a grid with explicit positions, or if the extreme lengths are
        unknown, as while compiling.
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
        """Raise `InputError` unless the mask has one length for each sequence of the grid. Raise it also if
        the mask pads on the left and the grid has explicit positions. If the mask's attribute `bounded` is True, raise
        it also for a length above the grid's number of keys, unless the grid has explicit positions or the largest
        length is unknown, as while compiling. Such a length then counts as the number of keys.
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
        """Return the padding mask of sequence `index` alone, for a grid whose batch is 1."""
        return Padding(self.lengths[index : index + 1], self.side, self.bounded)

    def natural_grid(self) -> Grid:
        """Return a grid with one sequence for each length, and with the largest length as number of keys. It has 1 key
        if that is unknown, as while compiling.
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

    ids: Int[Tensor, "#batch keys"]
    known_one_piece: bool | None = None

    @property
    def is_one_piece_each(self) -> bool:
        """True if the keys of every document are known to be adjacent, so that a query attends to one range of keys."""
        if self.known_one_piece is None and has_readable_values(self.ids):
            return self._read_one_piece
        return self.known_one_piece is True

    @cached_property
    def _read_one_piece(self) -> bool:
        """True if the keys of every document are adjacent, read from the CPU."""
        return are_one_piece_each(self.ids)

    @cached_property
    def _copies(self) -> DeviceCopies:
        """The document ids on every device that the mask was used on."""
        return DeviceCopies(self.ids)

    def ids_on(self, device: torch.device) -> Int[Tensor, "#batch keys"]:
        """Return the document ids on a device; a copy is made once."""
        return self._copies.on(device) if has_values(self.ids) else self.ids.to(device)

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch 1 rows columns"]:
        """Return True where a query row in `i` and a key in `j` have positions with the same document id."""
        if 0 in (i.shape[0], j.shape[1], self.ids.shape[1]):
            return torch.zeros(1, 1, i.shape[0], j.shape[1], dtype=torch.bool, device=grid.device)
        query_positions, key_positions = grid.query_position(i), grid.key_position(j)
        query_ids, last = self._ids_at(query_positions.mT).mT, self.ids.shape[1] - 1
        has_ids = (query_positions >= 0) & (query_positions <= last) & (key_positions <= last)
        return (query_ids == self._ids_at(key_positions)) & has_ids

    def _ids_at(self, positions: Int[Tensor, "*#batch 1 count"]) -> Int[Tensor, "#batch 1 1 count"]:
        """Return the document id at each position in each sequence. A position before the first id or after the last
        one gets the nearest id.
        """
        ids = self.ids_on(positions.device)
        positions = positions.flatten(0, -2).clamp(0, ids.shape[1] - 1)
        # torch.take_along_dim would fix the lengths while compiling.
        batch = ids.shape[0] if positions.shape[0] == 1 else positions.shape[0]
        return ids.expand(batch, -1).gather(1, positions.expand(batch, -1))[:, None, None]

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        ids, query, key = self.ids_on(grid.device), grid.position_of_query(b, i), grid.position_of_key(b, j)
        sequence, last = b if len(ids) > 1 else b * 0, ids.shape[1] - 1
        if last < 0:
            return key < 0
        own, other = (ids[sequence, position.clamp(0, last)] for position in (query, key))
        return (own == other) & (query >= 0) & (query <= last) & (key <= last)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY for a block if, in every sequence, the document ids of the block's queries are all smaller, or
        all larger, than those of its keys. Return FULL if, in every sequence, all queries and keys of the block have
        the same id. Otherwise return PARTIAL, also for explicit positions and where ids cannot be read, as on a GPU
        and while compiling.
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
        """Raise `InputError` unless there is one document id for each key, in one row for all sequences or in one row
        for each. With explicit positions, the number of ids is not checked.
        """
        batch, keys = self.ids.shape
        # With explicit positions, as from a cache with empty slots, positions may run as far as there are ids.
        if batch not in (1, grid.batch) or (grid.uses_default_positions and keys != grid.keys):
            raise InputError(
                "segments(ids)",
                expected=f"one id for each of {grid.keys} keys in 1 or {grid.batch} sequences",
                got=f"shape {(batch, keys)}",
            )

    def for_sequence(self, index: int) -> Mask:
        """Return the document mask of sequence `index` alone, for a grid whose batch is 1."""
        return self if self.ids.shape[0] == 1 else Segments(self.ids[index : index + 1], self.known_one_piece or None)

    def natural_grid(self) -> Grid:
        """Return a grid with one sequence for each row of document ids and one key for each id of a row. If all
        sequences share one row, the number of sequences is 0, which stands for any number.
        """
        batch, keys = self.ids.shape
        return Grid(batch if batch > 1 else 0, 0, 0, keys, _drawing_device(self.ids))

    def __repr__(self) -> str:
        return f"segments({_shown(self.ids)})"


def extremes_of(lengths: Int[Tensor, " batch"]) -> tuple[int, int]:
    """Return the smallest and the largest of some lengths, (0, 0) if there are none, by reading their values."""
    if not lengths.numel():
        return 0, 0
    shortest, longest = torch.stack(torch.aminmax(lengths)).cpu().tolist()
    return shortest, longest


def are_one_piece_each(ids: Int[Tensor, "batch keys"]) -> bool:
    """Return True if the keys of every document are adjacent, by reading the document ids."""
    if ids.is_cpu and bool((ids.diff(dim=1) >= 0).all()):
        return ids.shape[1] > 0  # ascending ids, as is usual, need no sorting
    pieces, documents = ((values.diff(dim=1) != 0).sum(1) for values in (ids, ids.sort(1).values))
    return ids.shape[1] > 0 and torch.equal(pieces, documents)


def _drawing_device(values: Int[Tensor, "..."]) -> torch.device:
    """Return the device of the grid on which `Mask.picture` draws a mask that stores the tensor `values`: meta if this
    tensor is on meta, otherwise the CPU.
    """
    return values.device if values.is_meta else torch.device("cpu")


def _shown(values: Int[Tensor, "..."]) -> str:
    """Return a tensor's values as text for a `repr`, or its shape if the values cannot be read, as while compiling."""
    return str(values.tolist()) if has_readable_values(values) else f"<{' x '.join(map(str, values.shape))}>"
