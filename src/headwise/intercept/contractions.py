"""Products of tensors, written as in Einstein notation whatever function computes them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.intercept.function_call import FunctionCall

BMM = torch.bmm
"""Torch's own function, also while another one replaces it."""

MATMULS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, BMM, Tensor.bmm, torch.mm, Tensor.mm, torch.linalg.matmul}
)
ADDED_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, Tensor.baddbmm_, Tensor.addmm_}
)
CONVOLUTIONS: frozenset[Callable[..., Any]] = frozenset(
    {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
)


def multiplied_and_summed(left: Tensor, right: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return the sum of the product of two tensors over the axes `dims`, as models write it by `*` and `sum`."""
    return (left * right).sum(tuple(dims), keepdim=keepdim)


PRODUCTS = MATMULS | ADDED_PRODUCTS | CONVOLUTIONS | {Tensor.__rmatmul__, F.linear, torch.einsum, multiplied_and_summed}
"""Functions that sum products of two or more tensors over an axis."""

Label = str | int
"""Name of an axis in a product; the same in all tensors that share the axis."""


class Contraction(NamedTuple):
    """Product of tensors, as in Einstein notation: the products are summed over all axes that the result does not have.

    Attributes:
        operands: the multiplied tensors.
        labels: labels of the axes of each operand; None for an axis of size 1 that is broadcast.
        result: labels of the axes of the result.
    """

    operands: tuple[Tensor, ...]
    labels: tuple[tuple[Label | None, ...], ...]
    result: tuple[Label, ...]

    def labels_of(self, tensor: Tensor) -> tuple[Label | None, ...]:
        """Return the labels (names as in Einstein notation) of the axes of `tensor`, one of the multiplied tensors."""
        return next(labels for operand, labels in zip(self.operands, self.labels, strict=True) if operand is tensor)

    def multiplies(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is one of the multiplied tensors."""
        return any(operand is tensor for operand in self.operands)

    @property
    def summed(self) -> set[Label | None]:
        """Labels (names as in Einstein notation) of the axes over which the products are summed."""
        return {label for labels in self.labels for label in labels} - set(self.result) - {None}

    @property
    def shared_by_all(self) -> set[Label]:
        """Labels (names as in Einstein notation) of the axes that the result and all multiplied tensors have."""
        return {label for label in self.result if all(label in labels for labels in self.labels)}


def contraction_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Contraction | None:
    """Return the product of tensors that a call of `function` computes, with a label for every axis as in Einstein
    notation. Return None if the function computes no such product, or if its arguments cannot be interpreted.
    """
    if function is torch.einsum:
        return _einsum(*args)
    if function is multiplied_and_summed:
        return _multiplied_and_summed(*args)
    operands = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if function is F.linear and len(operands) > 1:
        x, weight = operands[:2]
        rows: tuple[Label, ...] = tuple(range(x.ndim - 1))
        return Contraction((x, weight), ((*rows, "in"), ("out", "in")[-weight.ndim :]), (*rows, "out"))
    if function in CONVOLUTIONS and len(operands) > 1:
        x, weight = operands[:2]
        batch: tuple[Label, ...] = ("batch",)[: x.ndim - weight.ndim + 1]
        space: tuple[Label, ...] = tuple(range(weight.ndim - 2))
        kernel = tuple(f"kernel {axis}" for axis in space)
        return Contraction((x, weight), ((*batch, "in", *space), ("out", "in", *kernel)), (*batch, "out", *space))
    if function in ADDED_PRODUCTS:
        operands = operands[1:]
    elif function is Tensor.__rmatmul__:
        operands.reverse()
    elif function not in MATMULS:
        return None
    return _matmul(*operands[:2]) if len(operands) > 1 else None


def adds_to_product(call: FunctionCall) -> bool:
    """Return True if a call of one of the functions in `PRODUCTS` adds another tensor to the product, such as a bias,
    or multiplies it by a factor.
    """
    function, kwargs = call.function, call.kwargs
    if function in ADDED_PRODUCTS:
        added = call.tensors[0]
        is_written = "out" in kwargs or function.__name__.endswith("_") or added.is_meta
        adds = kwargs.get("beta", 1) != 0 and (is_written or bool((added != 0).any()))
        return adds or kwargs.get("alpha", 1) != 1
    return (function is F.linear or function in CONVOLUTIONS) and len(call.tensors) > 2


def _matmul(left: Tensor, right: Tensor) -> Contraction | None:
    """Return the product that `torch.matmul` computes of two matrices, batches of matrices, or vectors, with labelled
    axes.
    """
    rank = max(left.ndim, right.ndim) - 2

    def batch(tensor: Tensor) -> tuple[Label | None, ...]:
        sizes = tensor.shape[:-2]
        return tuple(rank - len(sizes) + axis if size > 1 else None for axis, size in enumerate(sizes))

    if not left.ndim or not right.ndim:
        return None
    rows: tuple[Label, ...] = ("left",) if left.ndim > 1 else ()
    columns: tuple[Label, ...] = ("right",) if right.ndim > 1 else ()
    labels = (*batch(left), *rows, "summed"), (*batch(right), "summed", *columns)
    return Contraction((left, right), labels, (*range(rank), *rows, *columns))


def _multiplied_and_summed(left: Tensor, right: Tensor, dims: Sequence[int], keepdim: bool) -> Contraction:
    """Return the product that `multiplied_and_summed` computes, with labelled axes. Axes that are expanded have no
    label, like those of size 1.
    """
    rank = max(left.ndim, right.ndim)
    summed = {dim % rank for dim in dims}

    def labels(tensor: Tensor) -> tuple[Label | None, ...]:
        first = rank - tensor.ndim
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        return tuple(first + axis if size > 1 and stride else None for axis, (size, stride) in enumerate(axes))

    result: list[Label] = [f"kept {axis}" if axis in summed else axis for axis in range(rank)]
    return Contraction(
        (left, right),
        (labels(left), labels(right)),
        tuple(label for axis, label in enumerate(result) if keepdim or axis not in summed),
    )


def _einsum(equation: Any, *arguments: Any) -> Contraction | None:
    """Return the product that `torch.einsum` computes, with labelled axes. Return None if the equation is not a string,
    or repeats a letter in one term.
    """
    operands = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list | tuple) else arguments
    if not isinstance(equation, str):
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != len(operands) or any(
        len(set(term.replace(".", ""))) != len(term.replace(".", "")) for term in inputs
    ):
        return None
    letters = terms.replace(",", "").replace(".", "")
    dots = "..." if "." in terms else ""
    result = result if arrow else dots + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    labels = [_expanded(term, operand.ndim, operand.shape) for term, operand in zip(inputs, operands, strict=True)]
    most = max(operand.ndim - len(term.replace(".", "")) for term, operand in zip(inputs, operands, strict=True))
    return Contraction(tuple(operands), tuple(labels), _expanded(result, len(result.replace(".", "")) + most))  # type: ignore[arg-type]


def _expanded(term: str, ndim: int, shape: Sequence[int] | None = None) -> tuple[Label | None, ...]:
    """Return the labels of the axes in one term of an einsum equation. A letter is a label. An ellipsis stands for
    several axes, whose labels are the numbers ..., -2, -1. If such an axis has size 1 in `shape`, its label is None,
    since it is broadcast.
    """
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    numbers: list[Label | None] = [-position for position in range(count, 0, -1)]
    if shape is not None:
        numbers = [None if shape[len(before) + i] == 1 else number for i, number in enumerate(numbers)]
    return (*before, *numbers, *after)


def is_parameter(tensor: Tensor) -> bool:
    """Return True for a parameter of a module, and for a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
