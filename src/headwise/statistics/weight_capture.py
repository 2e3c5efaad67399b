"""What is kept of the weights themselves, on demand, without the matrix: rows, columns, strongest keys, a picture."""

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

LARGEST = 128
"""The most rows and columns of a picture."""


@dataclass(frozen=True)
class WeightCapture:
    """What to keep of the weights of a call.

    Args:
        rows: these query rows, whole, by number; a negative one counts from the end.
        columns: these keys, of every row.
        top: so many of the strongest keys of every row.
        picture: each head's weights, pooled to so many rows and columns at most; 128 is the most.

    Raises:
        InputError: a number that is none, or too large a picture.
    """

    rows: Any = ()
    columns: Any = ()
    top: Any = 0
    picture: Any = 0

    def __post_init__(self) -> None:
        for name, numbers in (("rows", self.rows), ("columns", self.columns)):
            if not isinstance(numbers, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
                raise InputError(name, expected="a sequence of whole numbers", got=repr(numbers))
        whole_number("top", self.top, least=0)
        if whole_number("picture", self.picture, least=0) > LARGEST:
            raise InputError("picture", expected=f"a side of {LARGEST} or less", got=self.picture)


class CapturedWeights:
    """What was kept of one call; None where it was not asked for.

    Attributes:
        rows: the chosen rows, `(batch, heads, chosen, keys)`.
        columns: the chosen columns, `(batch, heads, queries, chosen)`.
        top_keys: the strongest keys of every row, strongest first, `(batch, heads, queries, top)`; -1 where a row sees
            fewer.
        top_weights: their weights; 0 where there is none.
        picture: the mean weight in every cell of a grid laid over the matrix, `(batch, heads, side, side)`.
    """

    rows: Float[Tensor, "batch heads chosen keys"] | None = None
    columns: Float[Tensor, "batch heads queries chosen"] | None = None
    top_keys: Int[Tensor, "batch heads queries top"] | None = None
    top_weights: Float[Tensor, "batch heads queries top"] | None = None
    picture: Float[Tensor, "batch heads side side"] | None = None

    def __init__(self, detail: WeightCapture, grid: Grid) -> None:
        """`add` fills it, from some rows at a time."""
        self._chosen_rows = _within("rows", detail.rows, grid.queries)
        self._chosen_columns = _within("columns", detail.columns, grid.keys)
        heads, device = (grid.batch, grid.heads), grid.device
        if detail.rows:
            self.rows = torch.zeros(*heads, len(detail.rows), grid.keys, device=device)
        if detail.columns:
            self.columns = torch.zeros(*heads, grid.queries, len(detail.columns), device=device)
        if detail.top:
            shape = (*heads, grid.queries, min(detail.top, grid.keys))
            self.top_keys = torch.full(shape, -1, device=device)
            self.top_weights = torch.zeros(shape, device=device)
        if detail.picture:
            sides = min(detail.picture, grid.queries), min(detail.picture, grid.keys)
            self.picture = torch.zeros(*heads, *sides, device=device)

    def add(self, rows: RowBlock) -> None:
        """Take in some rows."""
        weights, index, columns = rows.weights.float(), rows.rows, rows.visibility.key_indices
        of_call = rows.sequences_and_heads
        if self.rows is not None:
            for place, row in enumerate(self._chosen_rows):
                if row in index:
                    self.rows[(*of_call, place)][..., columns] = weights[:, :, row - index.start]
        if self.columns is not None:
            for place, column in enumerate(self._chosen_columns):
                here = weights[..., columns == column]
                if here.shape[-1]:
                    self.columns[(*of_call, slice(index.start, index.stop), place)] = here[..., 0]
        if self.top_keys is not None and self.top_weights is not None:
            top = weights.topk(min(self.top_keys.shape[-1], len(columns)), dim=-1)
            where = (*of_call, slice(index.start, index.stop), slice(0, top.values.shape[-1]))
            self.top_weights[where] = top.values
            self.top_keys[where] = columns[top.indices].masked_fill(top.values == 0, -1)
        if self.picture is not None:
            of_rows = torch.arange(index.start, index.stop, device=columns.device)
            down = _pooling(of_rows, rows.grid.queries, self.picture.shape[2])
            across = _pooling(columns, rows.grid.keys, self.picture.shape[3])
            self.picture[of_call] += down.mT @ (weights @ across)


def _pooling(numbers: Int[Tensor, " some"], length: int, side: int) -> Float[Tensor, "some side"]:
    """What takes values at these of `length` places to the mean of each of `side` parts of nearly the same size."""
    part = torch.arange(length, device=numbers.device) * side // length
    sizes = torch.bincount(part, minlength=side).float()
    return torch.nn.functional.one_hot(part[numbers], side).float() / sizes


def _within(name: str, numbers: Sequence[int], length: int) -> list[int]:
    """The numbers of a call that is so long, counted from its start."""
    for number in numbers:
        if not -length <= number < length:
            raise InputError(name, expected=f"numbers from {-length} to {length - 1}", got=number)
    return [number % length for number in numbers]
