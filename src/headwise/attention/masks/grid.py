"""Score grid that a mask is evaluated on, its positions, and tensors that have the shape of such a grid."""

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Int

Index = Int[Tensor, "..."]
"""Indices or positions of sequences, heads, query rows or keys: tensors that broadcast, or single numbers."""


@dataclass(frozen=True)
class Grid:
    """Sizes of the score tensor `(batch, heads, queries, keys)`, its device, and the positions of queries and keys.

    By default key j is at position j, and query i at position `i + keys - queries`, so that the last query is aligned
    with the last key. A cache passes positions of its own, where keys have been dropped, where slots are empty, or
    where sequences have different lengths. Position -1 marks an empty slot or padding.

    Attributes:
        batch: number of sequences.
        heads: number of query heads.
        queries: number of query rows.
        keys: number of keys.
        device: of the blocks of a mask.
        query_positions: `(batch, queries)` or `(1, queries)`; None for the default.
        key_positions: `(batch, keys)` or `(1, keys)`; None for the default.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device = torch.device("cpu")
    query_positions: Int[Tensor, "#batch queries"] | None = field(default=None, compare=False)
    key_positions: Int[Tensor, "#batch keys"] | None = field(default=None, compare=False)

    @property
    def offset(self) -> int:
        """Default position of query row 0, `keys - queries`; negative when there are more queries than keys."""
        return self.keys - self.queries

    @property
    def uses_default_positions(self) -> bool:
        """True if no positions were passed: key j is then at position j, and the last query is aligned with the last
        key.
        """
        return self.query_positions is None and self.key_positions is None

    def query_position(self, i: Index, b: Index | None = None) -> Index:
        """Return the position of query row `i` in sequence `b`, for indices that broadcast or are single numbers. By
        default return the positions of the rows `(1, rows)` in all sequences, `(#batch, rows)`.
        """
        if self.query_positions is None:
            return i + self.offset
        return self.query_positions[:, i[0]] if b is None else elements(self.query_positions, b, i)

    def key_position(self, j: Index, b: Index | None = None) -> Index:
        """Return the position of key `j` in sequence `b`, for indices that broadcast or are single numbers. By default
        return the positions of the keys `(1, columns)` in all sequences, `(#batch, columns)`.
        """
        if self.key_positions is None:
            return j
        return self.key_positions[:, j[0]] if b is None else elements(self.key_positions, b, j)


class Coverage(Enum):
    """Share of the query-key pairs of a block that a mask allows: none (EMPTY), all (FULL), or some (PARTIAL).

    PARTIAL may also mean that the share is unknown without evaluating the block.
    """

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


def elements(values: Tensor, *indices: Index | int) -> Tensor:
    """Return the elements of a stored tensor at indices that broadcast or are single numbers, one for each axis. An
    axis of size 1 repeats: its element stands for every index, and the result has no axis for it.
    """
    return values[tuple(n if size != 1 else 0 for n, size in zip(indices, values.shape, strict=True))]


def with_four_axes(name: str, values: Tensor) -> Tensor:
    """Return a mask or bias as a tensor of four axes: `(queries, keys)` becomes `(1, 1, queries, keys)`, and four axes
    stay unchanged. Raises `InputError` for another number of axes; with 3 it would be unclear which axis is missing.
    """
    if values.ndim == 2:
        return values[None, None]
    if values.ndim != 4:
        raise InputError(
            name,
            expected="2 dimensions (queries, keys) or 4 (batch, heads, queries, keys)",
            got=f"{values.ndim} dimensions {tuple(values.shape)}",
            remedy="unsqueeze the batch or the head axis" if values.ndim == 3 else None,
        )
    return values


def require_broadcast(name: str, values: Tensor, grid: Grid) -> None:
    """Raise `InputError` unless `values`, a tensor of four axes, broadcasts to `(batch, heads, queries, keys)` of the
    grid and is on the grid's device.
    """
    sizes = (grid.batch, grid.heads, grid.queries, grid.keys)
    if any(size not in (1, wanted) for size, wanted in zip(values.shape, sizes, strict=True)):
        raise InputError(
            name,
            expected=f"a shape that broadcasts to (batch, heads, queries, keys) = {sizes}",
            got=tuple(values.shape),
            remedy="a padding mask (batch, keys) goes in as mask[:, None, None, :]"
            if tuple(values.shape) == (1, 1, grid.batch, grid.keys)
            else None,
        )
    if values.device != grid.device:
        raise InputError(name, expected=f"a tensor on {grid.device} like q", got=values.device)
