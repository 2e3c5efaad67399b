"""Marked numbers in the factors of products: which elements of a softmax or of a projection arrive where."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from research.plain_models.dispatcher import Operation, aten

STEP = 1 / 1024
"""Difference between the factors of two successive rows."""


@dataclass
class Product:
    """A product of weights and values.

    Attributes:
        operation: the operator call in the plain run.
        rows: index of the softmax's row, for each row of the product, `(batch, rows)`.
        keys: index of the softmax's key, for each row and each element of the sum, `(batch, rows, keys)`.
        is_second: True if the weights are the second factor.
    """

    operation: Operation
    rows: Tensor
    keys: Tensor
    is_second: bool

    @property
    def weights(self) -> Tensor:
        """Weights `(batch, rows, keys)`."""
        return batched(self.operation.factors[1]).mT if self.is_second else batched(self.operation.factors[0])

    @property
    def values(self) -> Tensor:
        """Values `(batch, keys, value_dim)`."""
        return batched(self.operation.factors[0]).mT if self.is_second else batched(self.operation.factors[1])

    @property
    def out(self) -> Tensor:
        """Product `(batch, rows, value_dim)`."""
        return batched(self.operation.result).mT if self.is_second else batched(self.operation.result)

    def scaled(self, factors: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies each row of the product by its number in `factors (batch, rows)`."""
        by_row = factors[..., None].mT if self.is_second else factors[..., None]
        return lambda result: result * by_row.view(*result.shape[:-2], *by_row.shape[-2:]).to(result.dtype)


def batched(matrix: Tensor) -> Tensor:
    """Return a matrix, or several, with a batch axis."""
    return matrix if matrix.ndim == 3 else matrix[None]


def inner(tensor: Tensor, dim: int) -> int:
    """Return the number of elements between two neighbours along `dim`."""
    return int(torch.tensor(tensor.shape[dim + 1 :]).prod())


def row_indices(shape: torch.Size, dim: int) -> Tensor:
    """Return for each element of a tensor of this shape the index of its row along `dim`."""
    rows = torch.Size([*shape[:dim], 1, *shape[dim + 1 :]])
    return torch.arange(rows.numel()).view(rows).expand(shape).flatten()


def marks_in(factor: Tensor, size: int, *, unique: bool = True) -> Tensor | None:
    """Return a tensor that consists of the marks 1 to `size` and zeros as integers, with 0 at other elements; None if
    less than half of it are marks.
    """
    numbers = factor.double()
    nearest = numbers.nan_to_num(0.0).round()
    tolerance = 1e-6 if factor.dtype == torch.float64 else 1e-2
    is_mark = ((numbers - nearest).abs() <= tolerance) & (nearest >= 1) & (nearest <= size)
    if bool((~is_mark & (numbers != 0)).any()) and unique:
        return None
    marks = torch.where(is_mark, nearest, 0).long()
    present = marks[marks > 0]
    if len(present) < max(2, marks.numel() // 4) or (unique and len(present.unique()) < min(size, len(present)) // 4):
        return None
    if not unique and not bool(is_mark.flatten(0, -2).all(-1).any()):
        return None
    return marks


def tokens_first(operation: Operation) -> Tensor:
    """Return the first factor of a product as `(tokens, columns)`."""
    factor = operation.factors[0]
    return (
        factor.movedim(1, -1).flatten(0, -2)
        if operation.operator is aten.convolution.default
        else factor.flatten(0, -2)
    )


def token_of_element(operation: Operation) -> Tensor:
    """Return for each element of a product's result its token."""
    shape = operation.result.shape
    axis = 1 if operation.operator is aten.convolution.default else len(shape) - 1
    return row_indices(shape, axis)


def rows_by_ratio(before: Tensor, after: Tensor, count: int) -> Tensor | None:
    """Return the row number that the ratio of two tensors tells for each element, -1 where they are equal; None if the
    ratio of an element is that of no row.
    """
    index = (after / before - 2) / STEP
    is_changed = ~torch.isclose(after, before, rtol=1e-9, atol=0)
    nearest = index.nan_to_num(-1.0, posinf=-1.0, neginf=-1.0).round()
    tolerance = 1e-3 if before.dtype == torch.float64 else 0.2
    is_row = ((index - nearest).abs() < tolerance) & (nearest >= 0) & (nearest < count)
    if bool((is_changed & ~is_row & (before.abs() > 1e-12)).any()):
        return None
    return torch.where(is_changed & is_row, nearest, -1).long()


def matrix_of(operation: Operation) -> Tensor | None:
    """Return the matrix by which a product multiplies its first factor, `(columns, width)`; None for several."""
    matrix = operation.factors[1].double()
    if operation.operator is aten.convolution.default:
        is_pointwise = matrix[0, 0].numel() == 1 and matrix.shape[1] == operation.factors[0].shape[1]
        return matrix.flatten(1).mT if is_pointwise else None
    return matrix if matrix.ndim == 2 else None


def zeroed_columns(columns: tuple[int, ...], operation: Operation) -> Callable[[Tensor], Tensor]:
    """Return the function that zeroes these columns of a product's first factor."""
    axis = 1 if operation.operator is aten.convolution.default else -1
    return lambda factor: factor.index_fill(axis, torch.tensor(columns), 0.0)


def hidden_rows(softmax: Operation) -> Tensor:
    """Return for each row of a softmax whether its scores hide all keys by large negative numbers or NaN results."""
    scores = softmax.factors[0].movedim(softmax.dim, -1).flatten(0, -2)
    return (scores.amax(-1) <= -1e4) | softmax.result.movedim(softmax.dim, -1).flatten(0, -2).isnan().all(-1)


def underflowing_keys(softmax: Operation) -> Tensor:
    """Return for each row and key of a softmax whether its weight is 0 in the dtype of the softmax only, and not in
    float64.
    """
    scores, weights = (
        tensor.movedim(softmax.dim, -1).flatten(0, -2) for tensor in (softmax.factors[0], softmax.result)
    )
    return (weights == 0) & (scores.double().softmax(-1) > 0)
