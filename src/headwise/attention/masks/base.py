"""Base class of all masks, and the masks that consist of other masks: `&`, `|`, `~`, and one mask for each head.

A mask is a rule, not a matrix. A backend evaluates it for the block of scores that it works on, so the whole matrix
never exists. True means that the query attends to the key.

Users call the functions in `factories.py`. The other masks are in `kinds.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from headwise.attention.masks.grid import (
    MOST_RANGES,
    Coverage,
    Grid,
    Index,
    Ranges,
    constant_range,
    end_of_positions,
    intersect,
    stack_heads,
    subtract,
    within,
)
from headwise.errors import InputError
from headwise.shapes import Bool, Int


class Mask(ABC):
    """Rule that states for each query the keys it attends to. It is evaluated for one block of the score matrix at a
    time.

    A new mask must define the rule `allows`. The other methods have defaults that are correct for every mask.

    Attributes:
        depends_on_distance_only: True if the mask allows a query-key pair by the difference of their positions
            alone, in every sequence and head.
        is_constant: True if the mask is made of numbers alone, not of tensors, whose values may change, or functions.
    """

    depends_on_distance_only: ClassVar[bool] = False
    is_constant: ClassVar[bool] = False

    @abstractmethod
    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        """Return True where query row `i` attends to key `j` in sequence `b` and head `h`. The indices are those of a
        block, of shapes `(batch, 1, 1, 1)`, `(heads, 1, 1)`, `(rows, 1)` and `(1, columns)`. Axes along which the mask
        is constant may be missing in the result, or have size 1.

        FlexAttention compiles the same rule into its kernel, with single numbers as indices.

        A mask that goes by positions reads them from `grid.query_position(i, b)` and `grid.key_position(j, b)`.
        """

    def ranges(self, grid: Grid) -> Ranges | None:
        """Return the positions that each query attends to, as a few disjoint ranges, which may reach beyond the last
        position. Kernels read ranges instead of a boolean matrix. Return None if these positions are unknown, or cannot
        be stated as a few ranges; the base class returns None.
        """
        return None

    def hull(self, grid: Grid) -> Ranges | None:
        """Return ranges that contain all positions that each query attends to, and possibly further ones, for a mask
        that has no exact `ranges`. The base class returns None: every position may be allowed.
        """
        return None

    def few_ranges(self, grid: Grid) -> Ranges | None:
        """Return the ranges of positions that each query attends to, cut to the positions that exist in `grid`. Keys at
        position -1, which do not exist, are in no range. Return None if the ranges are unknown, or more than
        `MOST_RANGES`.
        """
        ranges = self.ranges(grid)
        ranges = None if ranges is None else within(ranges, grid)
        return None if ranges is None or len(ranges) > MOST_RANGES else ranges

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return EMPTY, FULL or PARTIAL: the mask allows none, all or some of the pairs of a query row in `rows` and a
        key in `columns`. PARTIAL also stands for unknown, since the pairs are not evaluated. The base class always
        returns PARTIAL.

        EMPTY and FULL are always right. Masks that go by positions
        decide only on a grid with default positions, where a range of rows or columns is a range of positions.
        """
        return Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the sizes or the device of the mask do not fit the scores that `grid` describes. The
        base class accepts every grid.
        """

    def for_sequence(self, index: int) -> "Mask":
        """Return the mask of sequence `index` alone, for scores with a batch of 1. By default it is this mask
        itself.
        """
        return self

    def for_head(self, index: int) -> "Mask":
        """Return the mask of head `index` alone, for scores of one head. By default it is this mask itself."""
        return self

    @property
    def stored_values(self) -> int:
        """Number of elements of the boolean matrices that the mask stores, and that `coverage` reads to find the
        visible blocks of the score matrix; 0 for a mask that follows from a rule.
        """
        return 0

    def natural_grid(self) -> Grid:
        """Return a `Grid` (the sizes of the scores) with the sizes that the mask itself prescribes. A size of 0, the
        default, stands for an axis that may have any size.
        """
        return Grid(0, 0, 0, 0)

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        """Return the mask as a boolean tensor for a range of query rows and of keys; by default for all of them."""
        self.check(grid)
        b, h = torch.arange(grid.batch, device=grid.device), torch.arange(grid.heads, device=grid.device)
        i, j = _indices(rows, grid.queries, grid.device), _indices(columns, grid.keys, grid.device)
        allowed = self.allows(grid, b[:, None, None, None], h[:, None, None], i[:, None], j[None, :])
        return with_batch_and_heads(allowed).expand(-1, -1, i.shape[0], j.shape[0])

    def picture(self, grid: Grid | None = None) -> str:
        """Return a drawing of the mask as text, with a row for each query: ■ where the query attends to a key, and ·
        elsewhere. Each sequence and head has a drawing of its own; if the mask is the same for all sequences, or for
        all heads, they share one. By default the sizes are those that the mask prescribes, and 6 queries and keys if it
        prescribes none.

        Raises:
            InputError: parts of the mask that fit no common grid, or tensors without values, on the meta device.
        """
        if grid is None:
            own = self.natural_grid()
            keys = own.keys or own.queries or 6
            grid = Grid(own.batch or 1, own.heads or 1, own.queries or keys, keys, own.device)
        block = self.block(grid)
        if block.is_meta:
            raise InputError("mask", expected="a mask with values", got="tensors on meta")
        drawings = block.flatten(0, 1).tolist()
        return "\n\n".join(
            "\n".join(" ".join("■" if attends else "·" for attends in row) for row in drawing) for drawing in drawings
        )

    def __str__(self) -> str:
        try:
            return self.picture()
        except InputError:
            return repr(self)

    def __and__(self, other: "Mask") -> "Mask":
        return And((self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return Or((self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not((self,))

    def __bool__(self) -> bool:
        raise InputError("mask", expected="&, | and ~ to combine masks", got="and, or, not, or a truth test")


def with_batch_and_heads(allowed: Bool[Tensor, "..."]) -> Bool[Tensor, "#batch #heads #rows #columns"]:
    """Return a boolean tensor that a mask has computed, with the axes that are missing at its front added in size 1, so
    that it has four axes.
    """
    return allowed[(None,) * (4 - allowed.ndim)]


def _indices(indices: range | None, count: int, device: torch.device) -> Int[Tensor, " indices"]:
    """Return the indices of a range as a tensor; None stands for the range from 0 to `count`.

    While compiling, `count` may be a symbol, from which no Python range can be made.
    """
    if indices is None:
        return torch.arange(count, device=device)
    return torch.arange(indices.start, indices.stop, device=device)


@dataclass(frozen=True)
class OfParts(Mask):
    """Base class of the masks that consist of other masks, such as `left & right`.

    Attributes:
        parts: the other masks.
    """

    parts: tuple[Mask, ...]

    @property
    def depends_on_distance_only(self) -> bool:  # type: ignore[override]
        """True if all parts (the masks that this mask combines) depend on the difference of query and key position
        alone.
        """
        return all(part.depends_on_distance_only for part in self.parts)

    @property
    def is_constant(self) -> bool:  # type: ignore[override]
        """True if all parts (the masks that this mask combines) are made of numbers alone, not of tensors or
        functions.
        """
        return all(part.is_constant for part in self.parts)

    @property
    def stored_values(self) -> int:
        return sum(part.stored_values for part in self.parts)

    def natural_grid(self) -> Grid:
        """Return a `Grid` with the largest score sizes that the parts, the masks that this mask combines, prescribe.
        Its device is the first device of a part that is not the CPU; otherwise the CPU.
        """
        grids = [part.natural_grid() for part in self.parts]
        batch, heads, queries, keys = (
            max(getattr(grid, axis) for grid in grids) for axis in ("batch", "heads", "queries", "keys")
        )
        device = next((grid.device for grid in grids if grid.device.type != "cpu"), torch.device("cpu"))
        return Grid(batch, heads, queries, keys, device)

    def with_parts(self, change: Callable[[Mask], Mask]) -> Mask:
        """Return a mask of the same class, in which each part (mask that it combines) is replaced by `change(part)`."""
        return type(self)(tuple(map(change, self.parts)))

    def check(self, grid: Grid) -> None:
        for part in self.parts:
            part.check(grid)

    def for_sequence(self, index: int) -> Mask:
        return self.with_parts(lambda part: part.for_sequence(index))

    def for_head(self, index: int) -> Mask:
        return self.with_parts(lambda part: part.for_head(index))


class Combined(OfParts):
    """Base class of the masks `left & right`, `left | right` and `~mask`, which combine the results of other masks for
    each pair of a query and a key.
    """

    @abstractmethod
    def combined(self, *allowed: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return True where the mask allows a query-key pair, given the results of its parts (the masks that it
        combines) for the same pairs.
        """

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return self.combined(*[part.allows(grid, b, h, i, j) for part in self.parts])

    def block(
        self, grid: Grid, rows: range | None = None, columns: range | None = None
    ) -> Bool[Tensor, "#batch #heads rows columns"]:
        # Stored parts are sliced: `allows` indexes them, which takes longer.
        return self.combined(*[part.block(grid, rows, columns) for part in self.parts])


class And(Combined):
    """Mask `left & right`: a query attends to the keys that both `left` and `right` allow."""

    def combined(self, *allowed: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        left, right = allowed
        return left & right

    def ranges(self, grid: Grid) -> Ranges | None:
        left, right = (part.few_ranges(grid) for part in self.parts)
        return None if left is None or right is None else intersect(left, right, grid)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        coverages = {part.coverage(grid, rows, columns) for part in self.parts}
        if Coverage.EMPTY in coverages:
            return Coverage.EMPTY
        return Coverage.FULL if coverages == {Coverage.FULL} else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"({' & '.join(map(repr, self.parts))})"


class Or(Combined):
    """Mask `left | right`: a query attends to the keys that `left` or `right` or both allow."""

    def combined(self, *allowed: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        left, right = allowed
        return left | right

    def ranges(self, grid: Grid) -> Ranges | None:
        left, right = (part.few_ranges(grid) for part in self.parts)
        return None if left is None or right is None else left + subtract(right, left, grid)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        coverages = {part.coverage(grid, rows, columns) for part in self.parts}
        if Coverage.FULL in coverages:
            return Coverage.FULL
        return Coverage.EMPTY if coverages == {Coverage.EMPTY} else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self.parts))})"


class Not(Combined):
    """Mask `~mask`: a query attends to all keys except those that `mask` allows."""

    def combined(self, *allowed: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        (hidden,) = allowed
        return ~hidden

    def ranges(self, grid: Grid) -> Ranges | None:
        hidden = self.parts[0].few_ranges(grid)
        everything = [constant_range(0, end_of_positions(grid), grid)]
        return None if hidden is None else subtract(everything, hidden, grid)

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        opposite = {Coverage.EMPTY: Coverage.FULL, Coverage.FULL: Coverage.EMPTY}
        coverage = self.parts[0].coverage(grid, rows, columns)
        return opposite.get(coverage, coverage)

    def __repr__(self) -> str:
        return f"~{self.parts[0]!r}"


class PerHead(OfParts):
    """Mask that consists of one mask for each head: a query of head h attends to the keys that mask h allows."""

    depends_on_distance_only = False

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        one_head = replace(grid, heads=1)
        masks = [self.for_head(head) for head in range(len(self.parts))]
        if h.ndim:  # the heads of a block, of which the first is 0
            first = h[:1]
            allowed = [with_batch_and_heads(mask.allows(one_head, b, first, i, j)) for mask in masks]
            return torch.cat(torch.broadcast_tensors(*allowed), dim=1)  # type: ignore[no-untyped-call]
        allows = masks[0].allows(one_head, b, h * 0, i, j) & (h == 0)
        for head, mask in enumerate(masks[1:], start=1):
            allows = allows | (mask.allows(one_head, b, h * 0, i, j) & (h == head))
        return allows

    def ranges(self, grid: Grid) -> Ranges | None:
        one_head = replace(grid, heads=1)
        of_heads = [self.for_head(head).few_ranges(one_head) for head in range(len(self.parts))]
        known = [ranges for ranges in of_heads if ranges is not None]
        if len(known) < len(of_heads):
            return None
        count = max(len(ranges) for ranges in known)
        padded = [ranges + [constant_range(0, 0, grid)] * (count - len(ranges)) for ranges in known]
        return [stack_heads([ranges[number] for ranges in padded]) for number in range(count)]

    def coverage(self, grid: Grid, rows: range, columns: range) -> Coverage:
        """Return the coverage of a block of the score matrix (EMPTY, PARTIAL or FULL: no, some or all pairs are
        allowed) if it is the same for all heads, otherwise PARTIAL.
        """
        coverages = {mask.coverage(grid, rows, columns) for mask in dict.fromkeys(self.parts)}
        return coverages.pop() if len(coverages) == 1 else Coverage.PARTIAL

    def check(self, grid: Grid) -> None:
        """Raise `InputError` unless the mask has one part (the mask of one head) for each head of the scores that
        `grid` describes, and each part fits these scores.
        """
        if len(self.parts) != grid.heads:
            raise InputError("per_head(masks)", expected=f"one for each of {grid.heads} heads", got=len(self.parts))
        super().check(replace(grid, heads=1))

    def for_head(self, index: int) -> Mask:
        own = index if len(self.parts) > 1 else 0  # one rule within the rule of a head
        return self.parts[own].for_head(index)

    def natural_grid(self) -> Grid:
        return replace(super().natural_grid(), heads=len(self.parts))

    def __repr__(self) -> str:
        return f"per_head({list(self.parts)})"
