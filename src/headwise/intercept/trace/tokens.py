"""Tokens of the queries, keys and values of attention, and their ids.

The tokens in the result of a linear map, such as the projection of the queries, are numbered from 1 in their order.
Every function that selects or reorders elements of the result is repeated with these numbers. They show if a model
attends to keys in another order than its queries, and which calls attend with parts of the same queries. Token ids are
those that the model looks up in its tables of embeddings.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.trace.axes import VIEWS
from headwise.intercept.trace.functions import (
    ADDED_PRODUCTS,
    ASSIGNMENT,
    CONCATENATIONS,
    CONSTANTS,
    CONVOLUTIONS,
    PLACEMENTS,
    PRODUCTS,
    SELECTIONS,
    Contraction,
    FunctionCall,
    Label,
    TensorMap,
    contraction_of,
    functions_named,
    is_parameter,
    overwritten_tensors,
    share_memory,
    tensors_among,
)
from headwise.intercept.trace.modules import RunningModule, named_arguments
from headwise.intercept.unreadable_tensors import has_no_numbers
from headwise.shapes import Int

REPEATED = (VIEWS | SELECTIONS | PLACEMENTS | CONCATENATIONS | {F.pad, F.embedding, torch.embedding}) | functions_named(
    *("stack", "hstack", "vstack", "repeat", "repeat_interleave", "tile", "rot90", "copy_", "where")
)
"""Functions that select or reorder elements, which are repeated with the numbers of the tokens."""

_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.view_as_complex: lambda numbers: numbers[..., 0],
    torch.view_as_real: lambda numbers: numbers.unsqueeze(-1).expand(*numbers.shape, 2),
}
"""Functions that are repeated by another function of the numbers."""

SORTS = functions_named("sort", "topk")
"""Functions that return sorted elements, and their indices."""


# -- numbers of tokens ------------------------------------------------------------------------------------------------


class LinearMapCall:
    """One call of a linear map, such as the query projection. The tokens in its result are numbered from 1, so that
    they can be recognised after later functions reorder or select them.

    Attributes:
        shape: axes of the tokens, such as `(batch, length)`. If the results of several maps are concatenated, these are
            the axes of all of them.
        parts: the maps whose results are concatenated, in the order of the numbers; otherwise this map alone.
        looked_up: for each token, in order, the number of the looked-up token id that it belongs to; None if unknown.
    """

    def __init__(self, shape: tuple[int, ...], mapped: Tensor | None = None, parts: Sequence["LinearMapCall"] = ()):
        self.shape = shape
        self.looked_up: NumberedTokens | None = None
        self._mapped = None if mapped is None else weakref.ref(mapped)
        self._parts = tuple(parts)

    @property
    def parts(self) -> tuple["LinearMapCall", ...]:
        return self._parts or (self,)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(part.size for part in self._parts) if self._parts else prod(self.shape)

    @property
    def mapped(self) -> Tensor | None:
        """The tensor with which the linear map was called; None if it is unknown, or does not exist any more."""
        return None if self._mapped is None else self._mapped()


class NumberedTokens(NamedTuple):
    """For each element of one tensor, the number of the token that it belongs to. Tokens are numbered in the result of
    the last linear map from which the tensor was computed.

    Attributes:
        numbers: number of the token of each element; 0 where it has none, or it is unknown.
        linear_map: the linear map in whose result the tokens are numbered.
        depend_on_data: True if the elements were selected or reordered by numbers that may differ in another call of
            the model, such as an index that sorts.
        are_sums: True if elements may be sums over several tokens, whose first number they have.
    """

    numbers: Int[Tensor, "*shape"]
    linear_map: LinearMapCall
    depend_on_data: bool = False
    are_sums: bool = False

    def differ_from(self, others: "NumberedTokens") -> bool:
        """Return True if, at some index, the elements of this object and of `others` are known to belong to tokens with
        different numbers. Return False if the results of the two linear maps have different axes, so that the numbers
        cannot be compared.
        """
        one, other = self.numbers, others.numbers
        if self.linear_map.shape != others.linear_map.shape or one is other or one.shape != other.shape:
            return False
        return bool(((one != other) & (one != 0) & (other != 0)).any())


class ComparedTokens(NamedTuple):
    """Token numbers of the queries, keys and values of one attention call, as tensors `(..., length)`. A token number
    is not a token id: it is the place of a token in the result of a linear map, such as the query projection, counted
    from 1 over all sequences. Comparing token numbers shows whether query i and key i belong to the same token, and
    whether the model has reordered the queries after their projection, or divided them among several attention calls.

    Attributes:
        queries: token numbers of the queries.
        keys: token numbers of the keys.
        values: token numbers of the values; None if they are unknown.
    """

    queries: NumberedTokens
    keys: NumberedTokens
    values: NumberedTokens | None = None

    @property
    def has_reordered_queries(self) -> bool:
        """True if the queries are known to be in another order than in the result of the query projection."""
        numbers = self.queries.numbers
        return bool(((numbers[..., 1:] < numbers[..., :-1]) & (numbers[..., 1:] > 0)).any())

    @property
    def differ(self) -> bool:
        """True if, for some index i, query i and key i, or key i and value i, are known to have different tokens."""
        return self.queries.differ_from(self.keys) or self._values_differ

    def tensors_of_keys(self, given: Iterable[Any]) -> list[Tensor]:
        """Return the tensors in `given` from which the keys were computed, without those that are equal to a tensor
        from which the queries were computed.
        """
        if has_no_numbers():
            return []
        of_queries, of_keys = ([each.mapped for each in side.linear_map.parts] for side in (self.queries, self.keys))
        return [
            tensor
            for tensor in tensors_among(given)
            if any(each is tensor for each in of_keys) and not tensor.is_meta
            if not any(each is tensor or (each is not None and torch.equal(each, tensor)) for each in of_queries)
        ]

    @property
    def _values_differ(self) -> bool:
        return self.values is not None and self.keys.differ_from(self.values)

    def own_key_of_first_query(self) -> int | None:
        """Return the index of the key that belongs to the same token as the first query. Return None if the keys are
        not known to be successive tokens, or the queries to be a contiguous part of these tokens in the same order.
        """
        queries, keys = self.queries.numbers, self.keys.numbers
        if self.queries.linear_map.shape != self.keys.linear_map.shape or queries.shape[:-1] != keys.shape[:-1]:
            return None
        first = int((queries[..., 0] - keys[..., 0]).flatten()[0])
        successive = keys[..., :1] + torch.arange(keys.shape[-1], dtype=keys.dtype, device=keys.device)
        is_known = first >= 0 and bool((keys > 0).all()) and torch.equal(keys, successive)
        own = keys[..., max(first, 0) : first + queries.shape[-1]]
        return first if is_known and torch.equal(queries, own) and not self._values_differ else None

    def has_queries_of(self, other: "ComparedTokens") -> bool:
        """Return True if this attention call and `other` have some queries in common: queries that the same call of the
        query projection computed for the same tokens.
        """
        queries, others = self.queries.numbers, other.queries.numbers
        if self.queries.linear_map is not other.queries.linear_map:
            return False
        return bool(torch.isin(queries[queries > 0], others[others > 0]).any())

    def is_other_part(self, other: "ComparedTokens") -> bool:
        """Return True if this attention call and `other` compute attention for different parts of the same queries.
        They have no query in common, but their queries come from the same call of the query projection, and both attend
        to the same first key.
        """
        of_both = ((self.queries, other.queries), (self.keys, other.keys))
        if any(one.linear_map is not another.linear_map for one, another in of_both):
            return False
        first, first_of_other = self.keys.numbers[..., 0], other.keys.numbers[..., 0]
        if not torch.equal(first, first_of_other) or not bool((first > 0).all()):
            return False
        queries, others = self.queries.numbers, other.queries.numbers
        return bool((queries > 0).all()) and not bool(torch.isin(queries.flatten(), others.flatten()).any())


class TokenNumbers:
    """Record of which token each element of a tensor belongs to, for tensors of a running model. Tokens are numbered in
    the result of a linear map, such as the query projection. The numbers are followed through later functions until the
    next linear map.
    """

    def __init__(self) -> None:
        self._numbered: TensorMap[NumberedTokens] = TensorMap()
        self._counts: dict[tuple[Any, ...], Tensor] = {}

    def record(self, call: FunctionCall, result: Any) -> None:
        """Record which token each element of the `result` of a function call belongs to, as token numbers. In the
        result of a linear map, tokens are numbered anew from 1, along all axes except that of the features. For any
        other function, the numbers of its first numbered argument are selected and reordered as the function does with
        the elements.
        """
        if call.function in PRODUCTS:
            axis = _axis_of_features(call, result)
            if axis is not None:
                shape = tuple(size for index, size in enumerate(result.shape) if index != axis)
                key = (*shape, result.device)
                if key not in self._counts:
                    numbers = torch.arange(1, prod(shape) + 1, dtype=torch.int32, device=result.device)
                    self._counts[key] = numbers.view(shape)
                numbers = self._counts[key].unsqueeze(axis).expand(result.shape)
                mapped = next((tensor for tensor in call.tensors if not is_parameter(tensor)), None)
                self._numbered.set(result, NumberedTokens(numbers, LinearMapCall(shape, mapped)))
            elif self._numbered and isinstance(result, Tensor):
                self._mix(call, result)
            return
        known = [tensor for tensor in call.tensors if self._numbered.get(tensor)] if self._numbered else []
        if not known:
            return
        if call.function in REPEATED or call.function in _REPLACED or call.function in SORTS:
            self._repeat(call, result, known)
            return
        numbered = self._numbered.get(known[0])
        for tensor in tensors_among((result,)):
            if tensor.shape == known[0].shape and numbered is not None:
                self._numbered.set(tensor, numbered)

    def of(self, tensor: Tensor) -> NumberedTokens | None:
        """Return the token number of each element of a tensor; None if they are unknown."""
        return self._numbered.get(tensor)

    def are_summed(self, tensor: Tensor, axes: Sequence[int], *, is_trusted: bool) -> bool:
        """Return True if a product that sums over these axes of `tensor` may sum over tokens, and not only over
        features. If it is unknown which token each element belongs to, only the last axis counts as features. It must
        also be the last one in memory, unless the product `is_trusted` to be a linear map.
        """
        numbered = self._numbered.get(tensor)
        if numbered is None:
            is_last = is_trusted or (tensor.layout is torch.strided and tensor.stride(-1) == 1)
            return tensor.ndim - 1 not in axes or not is_last
        numbers = numbered.numbers
        return any(numbers.stride(axis) and _are_several(numbers, axis) for axis in axes)

    def discard(self, tensor: Tensor) -> None:
        """Discard the token numbers of a tensor, which state the token that each element belongs to."""
        self._numbered.discard(tensor)

    def move(self, tensor: Tensor, other: Tensor) -> None:
        """Store the token numbers of `tensor` for the tensor `other` instead."""
        self._numbered.move(tensor, other)

    def compared(self, query: Tensor, key: Tensor, value: Tensor) -> ComparedTokens | None:
        """Return the token numbers (which token each element belongs to) of queries, keys and values, for each sequence
        and head. The three tensors are `(..., length, features)`. If there are fewer key heads than query heads, return
        the numbers of the first head. Return None if the numbers of queries or keys are unknown.
        """
        q, k, v = (self._numbered.get(tensor) for tensor in (query, key, value))
        if q is None or k is None:
            return None
        head = (0,) if query.ndim > 2 and query.shape[-3] != key.shape[-3] else ()
        place = (..., *head, slice(None), 0)
        values = None if v is None else v._replace(numbers=v.numbers[place])
        return ComparedTokens(q._replace(numbers=q.numbers[place]), k._replace(numbers=k.numbers[place]), values)

    def along(self, contraction: Contraction, operand: Tensor, label: Label | None) -> NumberedTokens | None:
        """Return the token numbers (which token each element belongs to) of `operand`, one factor of a product, along
        the axis with the given label. Axes that all factors share come before this axis; of other axes the first
        element is used. Return None if the numbers are unknown.
        """
        numbered, labels = self._numbered.get(operand), contraction.labels_of(operand)
        if numbered is None or not numbered.numbers.numel():
            return None
        shared = [each for each in contraction.result if each in contraction.shared_by_all and each != label]
        order = [labels.index(each) for each in (*shared, label)]
        others = [axis for axis in range(len(labels)) if axis not in order]
        numbers = numbered.numbers.permute(*others, *order)[(0,) * len(others)]
        return numbered._replace(numbers=numbers)

    def _mix(self, call: FunctionCall, result: Tensor) -> None:
        """Record the token numbers of the `result` of a product that sums over tokens, as where a matrix reorders them.
        Each element then belongs to several tokens, and has the number of the first one. So reordered tokens are not
        taken for tokens in their original order.
        """
        contraction = contraction_of(call.function, call.args, call.kwargs)
        operands = () if contraction is None else zip(contraction.operands, contraction.labels, strict=True)
        for operand, labels in operands:
            numbered = self._numbered.get(operand)
            if numbered is None or contraction is None or not operand.numel():
                continue
            summed = [axis for axis, label in enumerate(labels) if label is None or label in contraction.summed]
            if all(numbered.numbers.stride(axis) == 0 for axis in summed if operand.shape[axis] > 1):
                continue
            first = numbered.numbers.permute(*summed, *(axis for axis in range(operand.ndim) if axis not in summed))
            left = [label for axis, label in enumerate(labels) if axis not in summed]
            order = [left.index(label) for label in contraction.result if label in left]
            first = first[(0,) * len(summed)].permute(order)
            for axis, label in enumerate(contraction.result):
                first = first if label in left else first.unsqueeze(axis)
            mixed = NumberedTokens(first.expand(result.shape), numbered.linear_map, are_sums=True)
            self._numbered.set(result, mixed)
            return

    def _repeat(self, call: FunctionCall, result: Any, known: list[Tensor]) -> None:
        """Record the token numbers of the `result` of a function that selects or reorders elements of `known`. They
        stay unknown if an argument without numbers, such as cached keys, has more elements than the largest tensor in
        `known`.
        """
        before = [numbered for tensor in known if (numbered := self._numbered.get(tensor)) is not None]
        has_indices = any(not tensor.is_floating_point() and not tensor.is_complex() for tensor in call.tensors)
        has_indices |= any(isinstance(each, list) and each and isinstance(each[0], int) for each in call.args[1:])
        depend_on_data = has_indices or call.function in SORTS or any(each.depend_on_data for each in before)
        joined = _joined_maps(before, call)
        linear_map = before[0].linear_map if joined is None else joined.linear_map
        are_sums = any(each.are_sums for each in before)

        def numbers_of(tensor: Tensor) -> Tensor | None:
            numbered = self._numbered.get(tensor)
            if numbered is None or joined is None:
                return None if numbered is None else numbered.numbers
            return numbered.numbers + joined.firsts.get(numbered.linear_map, 0) * (numbered.numbers > 0)

        for tensor, numbers in numbers_after(call, result, numbers_of, max(tensor.numel() for tensor in known)):
            if numbers is None:
                self._numbered.discard(tensor)
            else:
                self._numbered.set(tensor, NumberedTokens(numbers, linear_map, depend_on_data, are_sums))


class LookedUpTokens(TokenNumbers):
    """Record of which looked-up token id each element of a tensor belongs to, for tensors of a running model. The ids
    are numbered from 1 where their embeddings are looked up. The numbers are followed to the next linear map, and from
    there by the numbers of the tokens in its result.
    """

    def start(self, embeddings: Tensor, ids: Tensor) -> None:
        """Number the tokens in the `embeddings` of the token `ids`."""
        if embeddings.shape[:-1] == ids.shape:
            numbers = torch.arange(1, ids.numel() + 1, dtype=torch.int32, device=embeddings.device)
            numbers = numbers.view(ids.shape).unsqueeze(-1).expand(embeddings.shape)
            self._numbered.set(embeddings, NumberedTokens(numbers, LinearMapCall(tuple(ids.shape))))

    def record_after(self, call: FunctionCall, result: Any, tokens: TokenNumbers) -> None:
        """Record which looked-up token id each element of the `result` of a function call belongs to. If the function
        is a linear map of features, store it for the map. It is unknown if a token belongs to several ids. `tokens` has
        the numbers of the tokens in the result of the map.
        """
        if call.function not in PRODUCTS:
            self.record(call, result)
            numbers = [known.numbers for tensor in call.tensors if (known := self.of(tensor)) is not None]
            if call.function not in REPEATED and not all(torch.equal(each, numbers[0]) for each in numbers[1:]):
                for tensor in tensors_among((result,)):
                    self.discard(tensor)
            return
        axis, mapped = _axis_of_features(call, result), tokens.of(result) if isinstance(result, Tensor) else None
        if axis is None or mapped is None:
            return
        before = call.tensors[call.function in ADDED_PRODUCTS]
        if before.ndim == result.ndim and all(
            before.shape[index] == size for index, size in enumerate(result.shape) if index != axis
        ):
            known, numbered = self.of(before), tokens.of(before)
            if known is None and numbered is not None:
                known = self.looked_up_by(numbered)
            if known is not None and _repeats(known.numbers, known.numbers.narrow(axis, 0, 1)):
                mapped.linear_map.looked_up = known._replace(numbers=known.numbers.select(axis, 0).flatten())

    @staticmethod
    def looked_up_by(tokens: NumberedTokens) -> NumberedTokens | None:
        """Return the numbers of the looked-up token ids to which `tokens` belong, which are numbered in the result of a
        linear map. Return None if they are unknown.
        """
        known = tokens.linear_map.looked_up
        if known is None or tokens.are_sums:
            return None
        if bool((tokens.numbers > known.numbers.numel()).any()):  # numbers of several linear maps
            return None
        numbers = F.pad(known.numbers, (1, 0))[tokens.numbers.long()]
        return NumberedTokens(numbers, known.linear_map, known.depend_on_data or tokens.depend_on_data)


class _JoinedMaps(NamedTuple):
    """Several linear maps whose results the model concatenates. Tokens in results of different maps count as different
    tokens.

    Attributes:
        linear_map: stands for all of them.
        firsts: number of the tokens of the maps before, for each of them.
    """

    linear_map: LinearMapCall
    firsts: dict[LinearMapCall, int]


def _joined_maps(parts: list[NumberedTokens], call: FunctionCall) -> _JoinedMaps | None:
    """Return the linear maps whose results a function call concatenates along tokens; `parts` has their token numbers.
    Return None if there is only one map, or if the call concatenates features of the same tokens.
    """
    parts = [each for each in parts if each.numbers.numel()]
    maps = list(dict.fromkeys(each.linear_map for each in parts))
    axis = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis", 0))
    if call.function not in CONCATENATIONS or len(maps) < 2 or axis in (-1, parts[0].numbers.ndim - 1):
        return None
    first = parts[0].numbers.narrow(axis, 0, 1)
    if all(each.numbers.shape[axis] > 1 and _repeats(each.numbers, first) for each in parts):
        return None
    firsts = dict(zip(maps, accumulate((each.size for each in maps), initial=0), strict=False))
    parts_of_all = [part for each in maps for part in each.parts]
    return _JoinedMaps(LinearMapCall(tuple(size for each in maps for size in each.shape), parts=parts_of_all), firsts)


def _are_several(numbers: Tensor, axis: int) -> bool:
    """Return True if elements along an axis are known to belong to different tokens; 0 stands for an unknown token."""
    largest = numbers.amax(axis, keepdim=True)
    return bool(((numbers != largest) & (numbers > 0)).any())


def _repeats(numbers: Tensor, once: Tensor) -> bool:
    """Return True if `numbers` repeat the numbers `once` along an axis."""
    return numbers.ndim == once.ndim and bool((numbers == once).all())


def numbers_after(
    call: FunctionCall, result: Any, numbers_of: Callable[[Tensor], Tensor | None], largest: int | float
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors in the `result` of a function that selects or reorders elements, each with the numbers of its
    elements, such as token numbers. To compute the numbers, the call is repeated with numbers in place of elements.
    They are None if this fails.

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
        args, kwargs = (_numbers_among(each, numbers_of, largest) for each in _without_values(call))
        if is_in_place:
            args = (args[0].clone(), *args[1:])
            call.function(*args, **kwargs)
            numbers = [args[0]]
        elif call.function in SORTS:
            position = 2 if call.function in {torch.topk, Tensor.topk} else 1
            axis = call.args[position] if len(call.args) > position else call.kwargs.get("dim", -1)
            numbers = [args[0].gather(int(axis), result[1])]
        else:
            repeated = _REPLACED.get(call.function, call.function)
            numbers = _of_equal_parts(args, result) or tensors_among((repeated(*args, **kwargs),))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        numbers = []
    return [
        (tensor, numbers[index] if index < len(numbers) and numbers[index].shape == tensor.shape else None)
        for index, tensor in enumerate(results)
    ]


def _without_values(call: FunctionCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function call with 0, which stands for an unknown token, in place of single values that
    the function writes to elements of its result.
    """
    positions, kwargs = _WRITTEN_VALUES.get(call.function, ()), dict(call.kwargs)
    args = tuple(0 if index in positions and _is_value(each) else each for index, each in enumerate(call.args))
    for name in ("other", "value") if positions else ():
        if _is_value(kwargs.get(name)):
            kwargs[name] = 0
    return args, kwargs


_WRITTEN_VALUES = {**dict.fromkeys(functions_named("where"), (1, 2)), **dict.fromkeys(ASSIGNMENT, (2,)), F.pad: (3,)}
"""Positions of arguments that may be single values, which a function writes to elements of its result."""


def _is_value(argument: Any) -> bool:
    return isinstance(argument, int | float) or (isinstance(argument, Tensor) and not argument.ndim)


def _numbers_among(argument: Any, numbers_of: Callable[[Tensor], Tensor | None], largest: int | float) -> Any:
    """Return an argument of a function call in which each tensor of floating-point or complex numbers is replaced by
    the numbers of its elements, such as token numbers. Elements whose numbers are unknown become 0.

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


def _axis_of_features(call: FunctionCall, result: Any) -> int | None:
    """Return the axis of the features in the `result` of a linear map; None if the call is another kind of product."""
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


# -- ids of tokens ----------------------------------------------------------------------------------------------------

TOKENS_UNKNOWN = (
    "it is unknown which tokens the queries of these modules stand for, since the model changes, reorders or divides "
    "its input_ids, so statistics that need token ids are left out"
)
"""Reason for modules whose token ids are unknown."""

INTEGERS = frozenset({torch.int64, torch.int32})
"""Types of token ids."""

_KEEPING_PLACES = (VIEWS - SELECTIONS) | functions_named("where", "copy_")
"""Functions that select or rearrange elements, but keep the order of tokens."""

_KEEPING_NAMES = frozenset(
    {"to", "type", "type_as", "long", "int", "clone", "contiguous", "detach", "masked_fill", "masked_fill_"}
    | {"index_fill", "index_fill_", "fill_", "masked_scatter", "masked_scatter_"}
)
"""Names of functions whose results have the ids of their arguments, or other ids, but no numbers computed from ids."""


class CallTokens(NamedTuple):
    """Token ids that belong to the queries of one attention call, as far as they are known.

    Attributes:
        ids: ids of the tokens of the queries, or of all tokens so far; None if there are none, or if they are unknown.
        are_unknown: True if the model reads token ids, but it is unknown which of them the queries stand for.
        are_moved: True if the tokens have other places than in the arguments of the model.
    """

    ids: Tensor | None
    are_unknown: bool = False
    are_moved: bool = False


class _Derived(NamedTuple):
    """Record of the earlier tensors from which a model computed a tensor of integers, such as token ids.

    Attributes:
        roots: tensors from which it was computed, such as an argument of the model.
        is_moved: True if elements may be at other places.
        is_computed: True if it may have other numbers than ids, such as hashes of them.
    """

    roots: tuple[Tensor, ...]
    is_moved: bool = False
    is_computed: bool = False


class _Lookup(NamedTuple):
    """One lookup of token ids in a table of embeddings.

    Attributes:
        ids: the ids.
        derived: how they were computed from arguments of the model.
        source: source of the embeddings, a bit that tensors computed from them have.
        is_argument: True if the tensor of ids is the argument itself, perhaps in another shape.
    """

    ids: Tensor
    derived: _Derived
    source: int
    is_argument: bool


class LookedUpIds:
    """Record of the token ids that a running model looks up in tables of embeddings.

    Attributes:
        tokens: numbers of the looked-up ids in later tensors.
    """

    def __init__(self) -> None:
        self.tokens = LookedUpTokens()
        self._derived: TensorMap[_Derived] = TensorMap()
        self._lookups: list[_Lookup] = []
        self._are_overwritten = False

    def record(
        self,
        call: FunctionCall,
        integers: list[Tensor],
        result: Any,
        module_calls: Sequence[RunningModule],
        is_table: Callable[[Tensor], bool],
        mark: Callable[[Tensor, object], int],
    ) -> None:
        """Record a function call that looks up token ids, or computes integers from others.

        Args:
            call: the call.
            integers: tensors of integers among its arguments.
            result: what it returned.
            module_calls: the running modules.
            is_table: function that returns True if a tensor depends on parameters and buffers alone.
            mark: function that adds a named source to a tensor, and returns it as a bit.
        """
        if call.function in CONSTANTS or any(tensor.is_meta for tensor in integers):
            return
        roots = [root for each in self._lookups for root in each.derived.roots]
        self._are_overwritten |= any(share_memory(each, root) for each in overwritten_tensors(call) for root in roots)
        ids = _looked_up(call, integers, is_table)
        if ids is not None and isinstance(result, Tensor):
            if self._are_ids([ids], module_calls):
                same = [number for number, each in enumerate(self._lookups) if _are_equal(each.ids, ids)]
                source = mark(result, ("ids", same[0] if same else len(self._lookups)))
                derived = self._of(ids)
                is_argument = any(_is_same_memory(ids, root) for root in derived.roots)
                if is_argument:
                    self.tokens.start(result, ids)
                if not same:
                    self._lookups.append(_Lookup(ids.detach().clone(), derived, source, is_argument))
            return
        written = call.args[0] if call.function is Tensor.__setitem__ else result
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if isinstance(tensor, Tensor) and tensor.dtype in INTEGERS:
                self._derived.set(tensor, self._after(call, integers, module_calls))

    def move(self, tensor: Tensor, other: Tensor) -> None:
        """Record that the tensor `other` was computed from token ids in the same way as `tensor`."""
        self.tokens.move(tensor, other)
        if tensor.dtype in INTEGERS:
            self._derived.set(other, self._of(tensor))

    def are_read_by(self, content: int) -> bool:
        """Return True if a tensor with the sources `content` depends on token ids that the model has looked up in a
        table of embeddings.
        """
        return any(each.source & content for each in self._lookups)

    @property
    def are_of_arguments(self) -> bool:
        """True if all ids that were looked up are arguments of the model, unchanged before and after. Other ids may be
        equal to those of an argument in one call, and differ in the next.
        """
        return not self._are_overwritten and all(each.is_argument for each in self._lookups)

    def of_call(
        self, argument: Tensor | None, content: int | None, sizes: tuple[int, int], given: int, reorderings: int
    ) -> CallTokens:
        """Return the token ids of an attention call: those that the model has looked up for its queries.

        If these are computed from the argument and differ from it in every token, but stand for the same tokens, as
        hashes do, return the argument.

        Args:
            argument: ids that the model around the attention was called with; None if there were none.
            content: sources of the queries; None if they are unknown.
            sizes: number of the sequences of the call, and of its queries.
            given: sources of the argument.
            reorderings: sources that are another order of tokens.
        """
        if argument is None or content is None:
            return CallTokens(argument, argument is None and self.are_read_by(content or 0))
        roots = self._of(argument).roots
        of_argument = [each for each in self._lookups if any(a is b for a in each.derived.roots for b in roots)]
        read = [each for each in of_argument if each.source & content]
        if not of_argument and content & given:
            return CallTokens(argument)
        fits = len(argument) == sizes[0] and argument.shape[1] >= sizes[1]
        if not read or content & reorderings:
            return CallTokens(None, fits or bool(read), bool(read))
        others = [each for each in read if not _are_of_argument(each.ids, argument)]
        if not others or _are_parts(read, argument) or _are_names(others, argument, len(read) > len(others)):
            return CallTokens(argument)
        ids, (_, is_moved, is_computed), *_ = others[0]
        if len(read) > 1 or is_computed or ids.ndim != 2:
            return CallTokens(None, fits, True)
        return CallTokens(ids, fits and (len(ids) != sizes[0] or ids.shape[1] < sizes[1]), is_moved)

    def order_of(self, queries: NumberedTokens, argument: Tensor) -> tuple[bool, bool]:
        """Return two values: True if queries are known to belong to the token ids in `argument` in another order, and
        True if this depends on numbers that may differ in the next call of the model. `queries` are the numbers of the
        queries of all sequences and heads.
        """
        found, shape = self.tokens.looked_up_by(queries), argument.shape
        if found is None or found.linear_map.size != argument.numel():
            return False, False
        numbers = found.numbers
        if numbers.ndim < 2 or (len(numbers), numbers.shape[-1]) != shape:
            return False, False
        own = torch.arange(1, argument.numel() + 1, device=numbers.device).view(
            len(numbers), *(1,) * (numbers.ndim - 2), -1
        )
        return bool(((numbers != own) & (numbers > 0)).any()), found.depend_on_data

    def _of(self, tensor: Tensor) -> _Derived:
        return self._derived.get(tensor) or _Derived((tensor,))  # an argument or a constant

    def _are_ids(self, tensors: Sequence[Tensor], module_calls: Sequence[RunningModule]) -> bool:
        """Return True if some of `tensors` were computed from the token ids with which a running module was called."""
        arguments = [named_arguments(module_call.arguments) for module_call in module_calls]
        ids = [value for each in arguments for name, value in each.items() if name.endswith("input_ids")]
        return any(root is value for tensor in tensors for root in self._of(tensor).roots for value in ids)

    def _after(self, call: FunctionCall, integers: list[Tensor], module_calls: Sequence[RunningModule]) -> _Derived:
        """Return a record of how the result of a function call was computed from `integers`, which are among its
        arguments: from which ids, and if these were moved or changed.
        """
        function, first = call.function, call.tensors[0]
        is_view = (function in VIEWS or function in SELECTIONS) and first is integers[0]
        content, indices = (integers[:1], integers[1:]) if is_view else (integers, [])
        is_remapped = (
            function in SELECTIONS and not self._are_ids(content, module_calls) and self._are_ids(indices, module_calls)
        )
        before = [self._of(each) for each in (*content, *(indices if is_remapped else []))]
        keeps = function in REPEATED or function in SORTS or getattr(function, "__name__", "") in _KEEPING_NAMES
        is_moved = function in SORTS or (function in REPEATED and function not in _KEEPING_PLACES)
        if is_remapped or (function in PLACEMENTS and call.tensors[-1] is first):  # by a table, or by a mask
            is_moved = False
        return _Derived(
            tuple({id(root): root for each in before for root in each.roots}.values()),
            is_moved or any(each.is_moved for each in before),
            is_remapped or not keeps or any(each.is_computed for each in before),
        )


def _looked_up(call: FunctionCall, integers: list[Tensor], is_table: Callable[[Tensor], bool]) -> Tensor | None:
    """Return the ids that a function call looks up in a table of embeddings. Return None if it does something else."""
    function, tensors = call.function, call.tensors
    if function in {F.embedding, torch.embedding, F.one_hot}:
        return integers[0]
    if function not in {Tensor.__getitem__, torch.index_select, Tensor.index_select} or len(tensors) != 2:
        return None
    table, ids = tensors
    is_whole = function is not Tensor.__getitem__ or call.args[1] is ids
    return ids if is_whole and table.is_floating_point() and table.ndim == 2 and is_table(table) else None


def _is_same_memory(ids: Tensor, argument: Tensor) -> bool:
    """Return True if two tensors have the same elements of one memory in the same order, perhaps in other shapes."""
    are_dense = ids.is_contiguous() and argument.is_contiguous() and ids.numel() == argument.numel()
    has_same_layout = are_dense or (ids.shape, ids.stride()) == (argument.shape, argument.stride())
    return has_same_layout and ids.dtype == argument.dtype and ids.data_ptr() == argument.data_ptr()


def _are_equal(ids: Tensor, others: Tensor) -> bool:
    return ids.shape == others.shape and ids.device == others.device and bool((ids == others).all())


def _are_of_argument(ids: Tensor, argument: Tensor) -> bool:
    """Return True if the token `ids` are the same as those in `argument`, perhaps in another shape."""
    if ids.numel() != argument.numel():
        return False
    return (ids.ndim == 2 and _are_equal(ids.T, argument)) or _are_equal(ids.reshape(argument.shape), argument)


def _are_parts(lookups: list[_Lookup], argument: Tensor) -> bool:
    """Return True if the token ids of `lookups`, concatenated, are the same as those in `argument`."""
    if any(each.ids.ndim != 2 or len(each.ids) != len(argument) for each in lookups):
        return False
    return _are_equal(torch.cat([each.ids.to(argument) for each in lookups], 1), argument)


def _are_names(lookups: list[_Lookup], argument: Tensor, are_known: bool) -> bool:
    """Return True if the ids of `lookups` were computed by the model and stand for the same tokens as `argument`, as
    hashes or ids with an offset do. Taken together, they must be equal for equal tokens, and different for different
    ones. If a single lookup has some ids of the argument, the model has changed the others: return False. `are_known`
    is True if the model also looks up the ids of the argument, so that the computed ones may be any numbers.
    """
    if not all(each.derived.is_computed for each in lookups):
        return False
    if are_known or any(each.derived.is_moved or each.ids.shape != argument.shape for each in lookups):
        return are_known
    names = argument.flatten()[None]
    looked_up = torch.stack([each.ids.flatten() for each in lookups]).to(argument)
    if len(lookups) == 1 and bool((looked_up == names).any()):
        return False
    counts = {torch.unique(each, dim=1).shape[1] for each in (names, looked_up, torch.cat([names, looked_up]))}
    return len(counts) == 1
