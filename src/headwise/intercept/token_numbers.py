"""Numbers of the tokens in the tensors of a running model, followed from a linear map to attention.

The tokens in the result of a linear map, such as the projection of the queries, are numbered from 1 in their order.
Every function that selects or reorders elements of the result is repeated with these numbers. They show if a model
attends to keys in another order than its queries, and which calls attend with parts of the same queries.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.axes import VIEWS
from headwise.intercept.compared_tokens import ComparedTokens, LinearMapCall, NumberedTokens
from headwise.intercept.contractions import (
    ADDED_PRODUCTS,
    CONVOLUTIONS,
    PRODUCTS,
    Contraction,
    Label,
    is_parameter,
)
from headwise.intercept.function_call import FunctionCall, tensors_among
from headwise.intercept.source_rules import CONCATENATIONS, PLACEMENTS, SELECTIONS
from headwise.intercept.tensor_map import TensorMap

_OTHER_NAMES = ("stack", "hstack", "vstack", "repeat", "repeat_interleave", "tile", "rot90", "copy_", "where")
REPEATED: frozenset[Callable[..., Any]] = (
    VIEWS
    | SELECTIONS
    | PLACEMENTS
    | CONCATENATIONS
    | {getattr(owner, name) for owner in (torch, Tensor) for name in _OTHER_NAMES if hasattr(owner, name)}
    | {F.pad}
)
"""Functions that select or reorder elements, which are repeated with the numbers of the tokens."""

REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.view_as_complex: lambda numbers: numbers[..., 0],
    torch.view_as_real: lambda numbers: numbers.unsqueeze(-1).expand(*numbers.shape, 2),
}
"""Functions that are repeated by another function of the numbers."""

SORTS: frozenset[Callable[..., Any]] = frozenset({torch.sort, Tensor.sort, torch.topk, Tensor.topk})
"""Functions that return sorted elements, and their indices."""


class TokenNumbers:
    """Record of which token each element of a tensor belongs to, for tensors of a running model. Tokens are numbered in
    the result of a linear map, such as the query projection. The numbers are followed through later functions until the
    next linear map.
    """

    def __init__(self) -> None:
        self._numbered: TensorMap[NumberedTokens] = TensorMap()
        self._counts: dict[tuple[Any, ...], Tensor] = {}

    def record(self, call: FunctionCall, result: Any) -> None:
        """Record the token numbers of the `result` of a function call. The result of a linear map gets new numbers. For
        any other function, the numbers of its first numbered argument are selected and reordered as the function does
        with the elements.
        """
        if call.function in PRODUCTS:
            axis = _axis_of_features(call, result)
            if axis is not None:
                self._number(result, axis)
            return
        known = [tensor for tensor in call.tensors if self._numbered.get(tensor)] if self._numbered else []
        if not known:
            return
        numbered = self._numbered.get(known[0])
        assert numbered is not None
        if call.function in REPEATED or call.function in REPLACED or call.function in SORTS:
            self._repeat(call, result, numbered.linear_map, max(tensor.numel() for tensor in known))
            return
        for tensor in tensors_among((result,)):
            if tensor.shape == known[0].shape:
                self._numbered.set(tensor, numbered)

    def discard(self, tensor: Tensor) -> None:
        """Discard the token numbers of a tensor."""
        self._numbered.discard(tensor)

    def compared(self, query: Tensor, key: Tensor, value: Tensor) -> ComparedTokens | None:
        """Return the token numbers of queries, keys and values, three tensors `(..., length, features)`, for each
        sequence and head. If there are fewer key heads than query heads, return the numbers of the first head. Return
        None if the numbers of queries or keys are unknown.
        """
        q, k, v = (self._numbered.get(tensor) for tensor in (query, key, value))
        if q is None or k is None:
            return None
        head = (0,) if query.ndim > 2 and query.shape[-3] != key.shape[-3] else ()
        place = (..., *head, slice(None), 0)
        values = None if v is None else v._replace(numbers=v.numbers[place])
        return ComparedTokens(q._replace(numbers=q.numbers[place]), k._replace(numbers=k.numbers[place]), values)

    def along(self, contraction: Contraction, operand: Tensor, label: Label | None) -> NumberedTokens | None:
        """Return the token numbers of `operand`, one factor of a product, along the axis with the given label. Axes
        that all factors share come before this axis; of other axes the first element is used. Return None if the
        numbers are unknown.
        """
        numbered, labels = self._numbered.get(operand), contraction.labels_of(operand)
        if numbered is None or not numbered.numbers.numel():
            return None
        shared = [each for each in contraction.result if each in contraction.shared_by_all and each != label]
        order = [labels.index(each) for each in (*shared, label)]
        others = [axis for axis in range(len(labels)) if axis not in order]
        numbers = numbered.numbers.permute(*others, *order)[(0,) * len(others)]
        return numbered._replace(numbers=numbers)

    def _number(self, tensor: Tensor, axis: int) -> None:
        """Number the tokens in the result of a linear map from 1. `axis` is the axis of features; all other axes are
        tokens.
        """
        shape = tuple(size for index, size in enumerate(tensor.shape) if index != axis)
        key = (*shape, tensor.device)
        if key not in self._counts:
            numbers = torch.arange(1, prod(shape) + 1, dtype=torch.int32, device=tensor.device)
            self._counts[key] = numbers.view(shape)
        numbers = self._counts[key].unsqueeze(axis).expand(tensor.shape)
        self._numbered.set(tensor, NumberedTokens(numbers, LinearMapCall(shape)))

    def _repeat(self, call: FunctionCall, result: Any, linear_map: LinearMapCall, largest: int) -> None:
        """Record the token numbers of the `result` of a function that selects or reorders elements. They stay unknown
        if an argument without numbers, such as cached keys, has more than `largest` elements.
        """
        has_indices = any(not tensor.is_floating_point() and not tensor.is_complex() for tensor in call.tensors)
        depend_on_data = has_indices or call.function in SORTS or _has_list(call.args[1:])
        before = (self._numbered.get(tensor) for tensor in call.tensors)
        depend_on_data |= any(each.depend_on_data for each in before if each is not None)

        def numbers_of(tensor: Tensor) -> Tensor | None:
            numbered = self._numbered.get(tensor)
            return None if numbered is None else numbered.numbers

        for tensor, numbers in numbers_after(call, result, numbers_of, largest):
            if numbers is None:
                self._numbered.discard(tensor)
            else:
                self._numbered.set(tensor, NumberedTokens(numbers, linear_map, depend_on_data))


def numbers_after(
    call: FunctionCall, result: Any, numbers_of: Callable[[Tensor], Tensor | None], largest: float
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors in the `result` of a function that selects or reorders elements, each with the numbers of its
    elements. To compute them, the call is repeated with numbers in place of elements. They are None if this fails.

    Args:
        call: the call.
        result: what the function returned.
        numbers_of: function that returns the numbers of the elements of a tensor; None if they are unknown.
        largest: number of elements from which the numbers of the result are unknown if they are those of an argument.
    """
    name = call.function.__name__
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))
    results = tensors_among((call.args[0] if is_in_place else result,))
    try:
        args, kwargs = (_numbers_among(each, numbers_of, largest) for each in (call.args, call.kwargs))
        if is_in_place:
            args = (args[0].clone(), *args[1:])
            call.function(*args, **kwargs)
            numbers = [args[0]]
        elif call.function in SORTS:
            numbers = [args[0].gather(_axis_of_sort(call), result[1])]
        else:
            numbers = _of_equal_parts(args, result) or tensors_among(
                (REPLACED.get(call.function, call.function)(*args, **kwargs),)
            )
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        numbers = []
    return [
        (tensor, numbers[index] if index < len(numbers) and numbers[index].shape == tensor.shape else None)
        for index, tensor in enumerate(results)
    ]


def _numbers_among(argument: Any, numbers_of: Callable[[Tensor], Tensor | None], largest: float) -> Any:
    """Return an argument of a function call with numbers in place of tensor elements. Elements of unknown numbers
    become 0.

    Raises:
        ValueError: a tensor without numbers has more elements than `largest`.
    """
    if isinstance(argument, dict):
        return {name: _numbers_among(each, numbers_of, largest) for name, each in argument.items()}
    if isinstance(argument, list | tuple):
        return type(argument)([_numbers_among(each, numbers_of, largest) for each in argument])
    if not isinstance(argument, Tensor) or not (argument.is_floating_point() or argument.is_complex()):
        return argument
    numbers = numbers_of(argument)
    if numbers is not None:
        return numbers
    if argument.numel() > largest:
        raise ValueError
    return torch.zeros((), dtype=torch.int32, device=argument.device).expand(argument.shape)


def _has_list(arguments: Iterable[Any]) -> bool:
    """Return True if a list of numbers, which may be indices, is among the arguments of a function."""
    return any(isinstance(each, list) and each and isinstance(each[0], int) for each in arguments)


def _axis_of_features(call: FunctionCall, result: Any) -> int | None:
    """Return the axis of the features in the `result` of a linear map. Return None if the call is another kind of
    product.
    """
    tensors = call.tensors
    if not isinstance(result, Tensor) or type(result) is not Tensor or result.is_meta or result.is_nested:
        return None
    if call.function in CONVOLUTIONS:
        return result.ndim - tensors[1].ndim + 1
    if call.function is F.linear:
        return result.ndim - 1
    factors = tensors[call.function in ADDED_PRODUCTS :]
    if call.function is torch.einsum or len(factors) < 2:
        return None
    return result.ndim - 1 if factors[1].ndim == 2 and is_parameter(factors[1]) else None


def _of_equal_parts(args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """Return the token numbers of a tensor that concatenates features of the same tokens. The numbers are stored once
    for all features, not copied. Return an empty list if the call did something else.
    """
    parts = args[0]
    if not isinstance(parts, list | tuple) or any(part.stride(-1) or part.ndim != result.ndim for part in parts):
        return []
    first = parts[0][..., :1]
    is_equal = result.shape[:-1] == first.shape[:-1] and all(torch.equal(first, part[..., :1]) for part in parts)
    return [first.expand(result.shape)] if is_equal else []


def _axis_of_sort(call: FunctionCall) -> int:
    """Return the axis along which a call of `sort` or `topk` sorts."""
    position = 2 if call.function in {torch.topk, Tensor.topk} else 1
    axis = call.args[position] if len(call.args) > position else call.kwargs.get("dim", -1)
    return int(axis)
