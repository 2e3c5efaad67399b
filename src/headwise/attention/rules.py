"""The masks a user writes: one rule each, to be combined with `&`, `|` and `~`.

>>> print(causal() & (window(2) | prefix(1)))
■ · · · · ·
■ ■ · · · ·
■ ■ ■ · · ·
■ · ■ ■ · ·
■ · · ■ ■ ·
■ · · · ■ ■
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.attention.masks import Coverage, Grid, Mask, four_dimensional, require_broadcast
from headwise.checks import whole_number
from headwise.errors import InputError
from headwise.shapes import Bool, Int


def causal() -> Mask:
    """Each query attends to its own position and those before it, aligned so that the last query sees all."""
    return Band(width=None, ahead=0)


def window(width: int | Sequence[int | None], *, ahead: int = 0, dilation: int = 1) -> Mask:
    """Each query attends to itself and the `width` - 1 keys before it: `width` keys.

    Args:
        width: keys, the query's own among them; or one number for each head, None for a head that sees all
            keys before it.
        ahead: keys after the query that it attends to as well; `window(w, ahead=w - 1)` looks as far both ways.
        dilation: distance between the keys that are seen, both ways (Beltagy et al. 2020, dilated window).

    Raises:
        InputError: numbers that are not whole, a width or dilation below 1, a negative `ahead`.
    """
    ahead = whole_number("window(ahead)", ahead, least=0)
    dilation = whole_number("window(dilation)", dilation, least=1)
    if not isinstance(width, Sequence):
        return Band(whole_number("window(width)", width, least=1), ahead, dilation)
    if not width:
        raise InputError("window(width)", expected="a number of keys for each head", got="none")
    widths = [None if each is None else whole_number("window(width)", each, least=1) for each in width]
    return per_head([Band(each, ahead, dilation) for each in widths])


def prefix(length: int | Sequence[int] | Tensor) -> Mask:
    """The first keys, for every query: `length` of them, or one number for each sequence.

    `causal() | prefix(n)` is the mask of a prefix language model; `causal() & (window(w) | prefix(4))` keeps four
    sink tokens beside a window (Xiao et al. 2023).
    """
    if not isinstance(length, Sequence | Tensor):
        return Prefix(whole_number("prefix(length)", length, least=0))
    return Padding(_lengths("prefix(length)", length), "right")


def padding(lengths: Sequence[int] | Tensor, side: Literal["right", "left"] = "right") -> Mask:
    """Sequence b of the batch holds `lengths[b]` keys; the rest, on `side`, is padding nobody attends to.

    Raises `InputError` when the lengths are not whole numbers of 0 or more in one dimension.
    """
    if side not in ("right", "left"):
        raise InputError("padding(side)", expected="'right' or 'left', where the padding is", got=repr(side))
    return Padding(_lengths("padding(lengths)", lengths), side)


def segments(ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Keys of the query's own segment: several documents packed into one row, none sees another.

    Args:
        ids: whole numbers, one for each key, `(batch, keys)`, or `(keys,)` where all sequences are cut alike. A
            query belongs to the segment of the key at its position.
    """
    ids = _whole_numbers("segments(ids)", ids, dimensions=(1, 2), shape="(keys,) or (batch, keys)")
    return Segments(ids if ids.ndim == 2 else ids[None])


def chunked(size: int) -> Mask:
    """Keys of the query's own chunk, where the positions are cut into chunks of `size`."""
    return Chunked(whole_number("chunked(size)", size, least=1))


def per_head(masks: Sequence[Mask]) -> Mask:
    """A mask of its own for each head, in order."""
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise InputError("per_head(masks)", expected="one Mask for each head", got=repr(masks))
    return PerHead(tuple(masks))


def where(rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """Any rule: `rule(batch, head, query, key) -> bool`, asked for one block at a time.

    It is called with index tensors that broadcast against each other, and answers for all their combinations.
    `query` is the position of the query among the keys, so `query >= key` is causal with a cache too.
    """
    if not callable(rule):
        raise InputError("where(rule)", expected="a function (batch, head, query, key) -> bool", got=repr(rule))
    return Where(rule)


def dense(values: Tensor) -> Mask:
    """A boolean mask given whole: `(queries, keys)` or `(batch, heads, queries, keys)`, 1 where all are alike.

    Raises `InputError` for another dtype or number of dimensions.
    """
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        got = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        added = isinstance(values, Tensor) and values.is_floating_point()
        remedy = "pass it as bias= to have it added to the scores" if added else "make it one with .bool()"
        raise InputError("mask", expected="a boolean tensor, True where a query attends", got=got, remedy=remedy)
    return Dense(four_dimensional("mask", values))


# -- the rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band(Mask):
    """Keys from `width` - 1 steps before the query (all before it, without a width) to `ahead` after it."""

    width: int | None
    ahead: int = 0
    dilation: int = 1

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "rows columns"]:
        back = i + grid.offset - j
        inside = back >= -self.ahead * self.dilation
        if self.width is not None:
            inside = inside & (back < self.width * self.dilation)
        return inside if self.dilation == 1 else inside & (back % self.dilation == 0)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        # Every distance between the nearest and the farthest occurs in the block: exact, without a dilation.
        nearest = rows.start + grid.offset - (columns.stop - 1)
        farthest = rows.stop - 1 + grid.offset - columns.start
        first = -self.ahead * self.dilation
        last = float("inf") if self.width is None else (self.width - 1) * self.dilation
        if farthest < first or nearest > last:
            return Coverage.EMPTY
        full = nearest >= first and farthest <= last and self.dilation == 1
        return Coverage.FULL if full else Coverage.PARTIAL

    def __repr__(self) -> str:
        if self == Band(None):
            return "causal()"
        options = [f"{name}={value}" for name, value, usual in self._options() if value != usual]
        return f"window({', '.join([str(self.width), *options])})"

    def _options(self) -> tuple[tuple[str, int, int], ...]:
        return ("ahead", self.ahead, 0), ("dilation", self.dilation, 1)


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` keys of every sequence."""

    length: int

    def allowed(self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]) -> Bool[Tensor, "1 columns"]:
        return j < self.length

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if columns.start >= self.length:
            return Coverage.EMPTY
        return Coverage.FULL if columns.stop <= self.length else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """The first (or, padded on the left, the last) `lengths[b]` keys of sequence b."""

    lengths: Int[Tensor, " batch"]
    side: Literal["right", "left"]

    @cached_property
    def _span(self) -> tuple[int, int]:
        """The shortest and the longest length: read once, since on a GPU reading them waits for it."""
        if not self.lengths.numel():
            return 0, 0
        return int(self.lengths.min()), int(self.lengths.max())

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch 1 1 columns"]:
        lengths = self.lengths.to(grid.device)[:, None, None, None]
        return j < lengths if self.side == "right" else j >= grid.keys - lengths

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        shortest, longest = self._span
        # Counted from the side where the tokens are, so that both sides read alike.
        first, last = columns.start, columns.stop - 1
        if self.side == "left":
            first, last = grid.keys - 1 - last, grid.keys - 1 - first
        if first >= longest:
            return Coverage.EMPTY
        return Coverage.FULL if last < shortest else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        if len(self.lengths) != grid.batch:
            raise InputError(
                "padding(lengths)", expected=f"one length for each of {grid.batch} sequences", got=len(self.lengths)
            )
        if self._span[1] > grid.keys:
            raise InputError("padding(lengths)", expected=f"lengths of 0 to {grid.keys} (the keys)", got=self._span[1])

    def extent(self) -> Grid:
        return Grid(len(self.lengths), 0, 0, self._span[1])

    def __repr__(self) -> str:
        return f"padding({self.lengths.tolist()}, side={self.side!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Keys whose id is that of the key at the query's position. A query before the first key has none."""

    ids: Int[Tensor, "#batch keys"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch 1 rows columns"]:
        ids = self.ids.to(grid.device)
        position = i + grid.offset
        own, other = ids[:, position.clamp(min=0)], ids[:, j]  # (batch, rows, 1), (batch, 1, columns)
        return ((own == other) & (position >= 0))[:, None]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        first = max(rows.start + grid.offset, 0)
        own, other = self.ids[:, first : rows.stop + grid.offset], self.ids[:, columns.start : columns.stop]
        if rows.stop + grid.offset <= 0 or bool(((own.amin(1) > other.amax(1)) | (own.amax(1) < other.amin(1))).all()):
            return Coverage.EMPTY
        alike = bool((own == other[:, :1]).all()) and bool((other == other[:, :1]).all())
        return Coverage.FULL if alike and rows.start + grid.offset >= 0 else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        batch, keys = self.ids.shape
        if batch not in (1, grid.batch) or keys != grid.keys:
            raise InputError(
                "segments(ids)",
                expected=f"one id for each of {grid.keys} keys in 1 or {grid.batch} sequences",
                got=f"shape {(batch, keys)}",
            )

    def extent(self) -> Grid:
        return Grid(self.ids.shape[0] if self.ids.shape[0] > 1 else 0, 0, 0, self.ids.shape[1])

    def __repr__(self) -> str:
        return f"segments({self.ids.tolist()})"


@dataclass(frozen=True)
class Chunked(Mask):
    """Keys of the query's own chunk."""

    size: int

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "rows columns"]:
        return (i + grid.offset) // self.size == j // self.size

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        own = range((rows.start + grid.offset) // self.size, (rows.stop - 1 + grid.offset) // self.size + 1)
        other = range(columns.start // self.size, (columns.stop - 1) // self.size + 1)
        if own.stop <= other.start or other.stop <= own.start:
            return Coverage.EMPTY
        return Coverage.FULL if len(own) == len(other) == 1 else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"chunked({self.size})"


@dataclass(frozen=True)
class PerHead(Mask):
    """The masks of the heads, one after the other."""

    masks: tuple[Mask, ...]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch heads rows columns"]:
        blocks = [mask.allowed(grid, i, j) for mask in self.masks]
        whole = [block[(None,) * (4 - block.ndim)].expand(-1, -1, i.shape[0], j.shape[1]) for block in blocks]
        batch = max(block.shape[0] for block in whole)
        return torch.cat([block.expand(batch, -1, -1, -1) for block in whole], dim=1)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        found = {mask.coverage(grid, rows, columns) for mask in self.masks}
        return found.pop() if len(found) == 1 else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        if len(self.masks) != grid.heads:
            raise InputError("per_head(masks)", expected=f"one for each of {grid.heads} heads", got=len(self.masks))
        for mask in self.masks:
            mask.check(Grid(grid.batch, 1, grid.queries, grid.keys, grid.device))

    def extent(self) -> Grid:
        extents = [mask.extent() for mask in self.masks]
        batch, queries, keys = (max(getattr(e, axis) for e in extents) for axis in ("batch", "queries", "keys"))
        return Grid(batch, len(self.masks), queries, keys)

    def __repr__(self) -> str:
        return f"per_head({list(self.masks)})"


@dataclass(frozen=True)
class Where(Mask):
    """A rule given as a function."""

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "batch heads rows columns"]:
        batch = torch.arange(grid.batch, device=grid.device)[:, None, None, None]
        head = torch.arange(grid.heads, device=grid.device)[:, None, None]
        allowed = self.rule(batch, head, i + grid.offset, j)
        whole = (grid.batch, grid.heads, i.shape[0], j.shape[1])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("where(rule)", expected="a function that returns a boolean tensor", got=got)
        try:
            return allowed.expand(whole)
        except RuntimeError:
            raise InputError(
                "where(rule)", expected=f"a result that broadcasts to {whole}", got=tuple(allowed.shape)
            ) from None

    def __repr__(self) -> str:
        return f"where({getattr(self.rule, '__name__', repr(self.rule))})"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean matrix, given whole."""

    values: Bool[Tensor, "batch heads queries keys"]

    def allowed(
        self, grid: Grid, i: Int[Tensor, "rows 1"], j: Int[Tensor, "1 columns"]
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        return self.values.expand(-1, -1, grid.queries, grid.keys)[..., i, j]

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        self.check(grid)  # then a slice, where the general way would gather
        rows = range(grid.queries) if rows is None else rows
        columns = range(grid.keys) if columns is None else columns
        values = self.values.expand(-1, -1, grid.queries, grid.keys)
        return values[..., rows.start : rows.stop, columns.start : columns.stop]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        if torch.compiler.is_compiling() or self.values.is_meta:
            return Coverage.PARTIAL  # the values are not there to be looked at
        block = self.block(grid, rows, columns)
        if not block.any():
            return Coverage.EMPTY
        return Coverage.FULL if block.all() else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        require_broadcast("mask", self.values, grid)

    def extent(self) -> Grid:
        batch, heads, queries, keys = (size if size > 1 else 0 for size in self.values.shape)
        return Grid(batch, heads, queries, keys, self.values.device)

    def __repr__(self) -> str:
        return f"dense(<{' x '.join(map(str, self.values.shape))}>)"


# -- checks of what a user writes -----------------------------------------------------------------------------


def _whole_numbers(argument: str, values: Any, *, dimensions: tuple[int, ...], shape: str) -> Int[Tensor, "..."]:
    """The values as a tensor of int64 of its own, which no later change of the caller's reaches."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(argument, expected=f"whole numbers, {shape}", got=repr(values)) from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.ndim not in dimensions:
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise InputError(argument, expected=f"whole numbers, {shape}", got=got)
    return tensor.to(torch.int64, copy=True)


def _lengths(argument: str, lengths: Any) -> Int[Tensor, " batch"]:
    tensor = _whole_numbers(argument, lengths, dimensions=(1,), shape="one for each sequence")
    if (tensor < 0).any():
        raise InputError(argument, expected="lengths of 0 or more", got=int(tensor.min()))
    return tensor
