"""Capture of attention weights without the whole matrix: some rows, some columns, strongest keys, a pooled picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.checks import whole_number
from headwise.errors import InputError
from headwise.shapes import Float, Int

LARGEST_PICTURE = 128
"""Largest number of rows and columns of a picture."""


@dataclass(frozen=True)
class WeightCapture:
    """Settings that select which attention weights of one call to store: whole query rows, whole key columns, the
    largest weights of each row, and a picture (the weight matrix reduced to a smaller size by averaging). The weights
    are stored in a `CapturedWeights`.

    Args:
        rows: query rows to keep whole, by index; negative indices count from the end.
        columns: keys to keep in every row, by index.
        top: number of strongest keys to keep of every row.
        picture: largest number of rows and columns of each head's pooled weights, up to 128; 0 for no picture.

    Raises:
        InputError: an index or number that is not a whole number, or a picture that is too large.
    """

    rows: Any = ()
    columns: Any = ()
    top: Any = 0
    picture: Any = 0

    def __post_init__(self) -> None:
        for name, indices in (("rows", self.rows), ("columns", self.columns)):
            if not isinstance(indices, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
                raise InputError(name, expected="a sequence of whole numbers", got=repr(indices))
        whole_number("top", self.top, least=0)
        if whole_number("picture", self.picture, least=0) > LARGEST_PICTURE:
            raise InputError("picture", expected=f"a side of {LARGEST_PICTURE} or less", got=self.picture)


class CapturedWeights:
    """Stored attention weights of one call, for all sequences and heads, as selected by a `WeightCapture`. There is one
    attribute for each kind of selection, such as whole query rows; it is None if nothing of that kind was selected.

    Attributes:
        rows: the chosen rows, `(batch, heads, chosen, keys)`.
        columns: the chosen columns, `(batch, heads, queries, chosen)`.
        top_keys: indices of every row's strongest keys, strongest first, `(batch, heads, queries, top)`; -1 in rows
            that see fewer keys.
        top_weights: weights of these keys; 0 where there is no key.
        picture: mean weight in each cell of a grid over the matrix, `(batch, heads, picture rows, picture columns)`.
    """

    rows: Float[Tensor, "batch heads chosen keys"] | None = None
    columns: Float[Tensor, "batch heads queries chosen"] | None = None
    top_keys: Int[Tensor, "batch heads queries top"] | None = None
    top_weights: Float[Tensor, "batch heads queries top"] | None = None
    picture: Float[Tensor, "batch heads side side"] | None = None

    def __init__(self, capture: WeightCapture, grid: Grid) -> None:
        """Allocate zeros for the chosen weights of a call with the sizes of `grid`; `add` fills them."""
        self._row_indices = _nonnegative("rows", capture.rows, grid.queries)
        self._column_indices = _nonnegative("columns", capture.columns, grid.keys)
        batch_and_heads, device = (grid.batch, grid.heads), grid.device
        if capture.rows:
            self.rows = torch.zeros(*batch_and_heads, len(capture.rows), grid.keys, device=device)
        if capture.columns:
            self.columns = torch.zeros(*batch_and_heads, grid.queries, len(capture.columns), device=device)
        if capture.top:
            shape = (*batch_and_heads, grid.queries, min(capture.top, grid.keys))
            self.top_keys = torch.full(shape, -1, device=device)
            self.top_weights = torch.zeros(shape, device=device)
        if capture.picture:
            sides = min(capture.picture, grid.queries), min(capture.picture, grid.keys)
            self.picture = torch.zeros(*batch_and_heads, *sides, device=device)

    def add(self, row_block: RowBlock) -> None:
        """Store the selected weights of one row block (some query rows of a call), and add its part of the picture."""
        weights, rows, keys = row_block.weights.float(), row_block.rows, row_block.visibility.key_indices
        part = row_block.sequences_and_heads
        if self.rows is not None:
            for place, row in enumerate(self._row_indices):
                if row in rows:
                    self.rows[(*part, place)][..., keys] = weights[:, :, row - rows.start]
        if self.columns is not None:
            for place, column in enumerate(self._column_indices):
                of_column = weights[..., keys == column]
                if of_column.shape[-1]:
                    self.columns[(*part, slice(rows.start, rows.stop), place)] = of_column[..., 0]
        if self.top_keys is not None and self.top_weights is not None:
            top = weights.topk(min(self.top_keys.shape[-1], len(keys)), dim=-1)
            where = (*part, slice(rows.start, rows.stop), slice(0, top.values.shape[-1]))
            self.top_weights[where] = top.values
            self.top_keys[where] = keys[top.indices].masked_fill(top.values == 0, -1)
        if self.picture is not None:
            row_indices = torch.arange(rows.start, rows.stop, device=keys.device)
            pool_rows = _pooling_matrix(row_indices, row_block.grid.queries, self.picture.shape[2])
            pool_keys = _pooling_matrix(keys, row_block.grid.keys, self.picture.shape[3])
            self.picture[part] += pool_rows.mT @ (weights @ pool_keys)


def _pooling_matrix(indices: Int[Tensor, " chosen"], length: int, side: int) -> Float[Tensor, "chosen side"]:
    """Return some rows, at `indices`, of a matrix that averages an axis: by a product with the matrix, `length` entries
    become the means of `side` nearly equal parts. Entry (i, p) is 1 / (size of part p) if index i is in part p,
    otherwise 0.
    """
    part = torch.arange(length, device=indices.device) * side // length
    sizes = torch.bincount(part, minlength=side).float()
    return torch.nn.functional.one_hot(part[indices], side).float() / sizes


def _nonnegative(name: str, indices: Sequence[int], length: int) -> list[int]:
    """Return indices on an axis of `length` entries, with negative ones converted to count from the start. Raise
    `InputError` for an index outside of the axis.
    """
    for index in indices:
        if not -length <= index < length:
            raise InputError(name, expected=f"numbers from {-length} to {length - 1}", got=index)
    return [index % length for index in indices]
