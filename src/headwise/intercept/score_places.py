"""Places of attention scores and weights: for each element, the query and the key that it belongs to.

A product of queries and keys numbers its rows and its columns. Functions that select or reorder elements are repeated
with these numbers, from the product of queries and keys to the product of the weights with the values.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.compared_tokens import NumberedTokens
from headwise.intercept.contractions import PRODUCTS, contraction_of
from headwise.intercept.element_places import ASSIGNMENT, keeps_places
from headwise.intercept.function_call import FunctionCall, tensors_among
from headwise.intercept.session import current_session
from headwise.intercept.source_rules import PLACEMENTS
from headwise.intercept.token_numbers import REPEATED, SORTS, numbers_after

_WHERE: frozenset[Any] = frozenset({torch.where, Tensor.where})
"""Functions that select elements of two tensors, but keep them at their places."""


class Places(NamedTuple):
    """Places of the elements of one tensor along one axis of a product of queries and keys.

    Attributes:
        numbers: number of the place of each element; numbers below `first` stand for unknown places.
        first: number of the first place; numbers are unique among all products.
        size: number of places of the product along the axis.
    """

    numbers: Tensor
    first: int
    size: int


class Order(NamedTuple):
    """Order of the queries or the keys along an axis of scores or weights.

    Attributes:
        places: place of each of them in the product, from 1, or 0 if it has none; None if all are at their own places.
        is_known: False if the order is unknown, or differs between sequences or heads.
        is_common: False if the order differs along the other axis, so that each query has another order of its keys.
    """

    places: Tensor | None = None
    is_known: bool = True
    is_common: bool = True

    def of(self, tokens: NumberedTokens) -> NumberedTokens | None:
        """Return `tokens`, those of the queries or the keys in the product, in this order. Return None if this order
        is unknown.
        """
        if not self.is_known or self.places is None:
            return tokens if self.is_known else None
        numbers = F.pad(tokens.numbers, (1, 0))
        fits = int(self.places.amax()) < numbers.shape[-1]
        return tokens._replace(numbers=numbers[..., self.places]) if fits else None


def order_along(places: Places | None, along: Sequence[int], across: Sequence[int]) -> Order:
    """Return the order of the queries, or of the keys, in a tensor of scores or weights.

    Args:
        places: places of the elements of the tensor along the axis of the queries or the keys in their product.
        along: axes of the tensor that are the same axis.
        across: axes of the tensor that are the other one, the keys or the queries.
    """
    if places is None:
        return Order(is_known=False)
    numbers = places.numbers
    for axis, stride in enumerate(numbers.stride()):
        numbers = numbers if stride or axis in along else numbers.narrow(axis, 0, 1)  # repetitions
    numbers = numbers - (places.first - 1)
    numbers = numbers.where((numbers > 0) & (numbers <= places.size), 0).long()
    own = numbers.amax(tuple(across), keepdim=True) if across else numbers
    is_common = bool(((numbers == own) | (numbers == 0)).all())
    others = [axis for axis in range(own.ndim) if axis not in along]
    own = own.permute(*others, *along).reshape(prod(own.shape[axis] for axis in others), -1)
    if not is_common or not bool((own == own[:1]).all()):
        return Order(is_known=False, is_common=is_common)
    places_in_order, is_whole = torch.arange(1, places.size + 1, device=own.device), own.shape[1] % places.size == 0
    for axis in (0, 1) if is_whole else ():  # the axis may be merged with another one, such as the heads
        split = own[0].view((-1, places.size) if axis == 0 else (places.size, -1))
        if bool((split == places_in_order.unsqueeze(axis)).all()):
            return Order()
    return Order(own[0])


def number_places(scores: Tensor, axes: Iterable[int]) -> None:
    """Number the places of `scores`, the result of a product, along each of the `axes`."""
    places, attention = {}, current_session().attention
    for axis in axes:
        first, size = attention.next_place, scores.shape[axis]
        numbers = torch.arange(first, first + size, device=scores.device)
        numbers = numbers.view([size if other == axis else 1 for other in range(scores.ndim)])
        places[axis] = Places(numbers.expand(scores.shape), first, size)
        attention.next_place += size
    attention.places.set(scores, places)


def places_of(tensor: Tensor) -> dict[int, Places]:
    """Return the places of the elements of a tensor along each axis of a product of queries and keys."""
    return current_session().attention.places.get(tensor) or {}


def follow_places(call: FunctionCall, result: Any) -> None:
    """Record the places of the elements in the `result` of a function call, if they are known for an argument. If
    several products are added, such as those of queries with keys and with shifted positions, these are the places in
    the one that was not rearranged.
    """
    session = current_session()
    known = [tensor for tensor in call.tensors if places_of(tensor)] if session.attention.places else []
    if not known:
        return
    first, function = min(known, key=_are_rearranged), call.function
    places = places_of(first)
    is_target = function in PLACEMENTS and len(known) == 1 and first is call.args[0]  # such as a mask by an index
    is_target |= function in _WHERE and len(known) == 1
    repeats = (function in REPEATED or function in SORTS) and not is_target
    kept: list[Tensor] = []
    if not repeats and function not in PRODUCTS and all(_agree(places, places_of(each)) for each in known):
        kept = _results_in_place(call, first, result, is_kept=is_target)
    after: dict[int, tuple[Tensor, dict[int, Places]]] = {}
    for axis, before in places.items():
        numbers: list[tuple[Tensor, Tensor | None]] = [(tensor, before.numbers.expand(tensor.shape)) for tensor in kept]
        if repeats:
            numbers = numbers_after(call, result, partial(_numbers_of, axis), torch.inf)
        elif function in PRODUCTS and isinstance(result, Tensor):
            numbers = [(result, _numbers_of_product(call, first, before.numbers, result))]
        for tensor, each in numbers:
            of_tensor = after.setdefault(id(tensor), (tensor, {}))[1]
            of_tensor |= {} if each is None else {axis: before._replace(numbers=each)}
    for tensor, of_tensor in after.values():
        is_comparison = function not in PRODUCTS or len(of_tensor) == len(places)
        session.attention.places.set(tensor, of_tensor if is_comparison else {})


def _are_rearranged(tensor: Tensor) -> bool:
    """Return True if the numbers of the places of a tensor are no longer those of a product, repeated over axes."""
    return any(sum(map(bool, each.numbers.stride())) > 1 for each in places_of(tensor).values())


def _agree(places: dict[int, Places], others: dict[int, Places]) -> bool:
    """Return True unless the elements of two tensors are known to come from other places of the same product."""
    for axis, one in places.items():
        other = others.get(axis)
        if other is None or other.first != one.first or other.numbers is one.numbers:
            continue
        if not torch.equal(*torch.broadcast_tensors(one.numbers, other.numbers)):  # type: ignore[no-untyped-call]
            return False
    return True


def _numbers_of(axis: int, tensor: Tensor) -> Tensor | None:
    """Return the numbers of the elements of a tensor along one `axis` of the product; None if they are unknown."""
    places = places_of(tensor).get(axis)
    return None if places is None else places.numbers


def _results_in_place(call: FunctionCall, before: Tensor, result: Any, *, is_kept: bool) -> list[Tensor]:
    """Return the tensors in the `result` of a function call whose elements are at the places of those of `before`, an
    argument. `is_kept` is True if this is known.
    """
    tensors = [call.args[0]] if call.function in ASSIGNMENT else tensors_among((result,))
    return [
        tensor
        for index, tensor in enumerate(tensors)
        # A comparison with a threshold has other values, but is no score.
        if tensor.is_floating_point() and tensor.numel() and _broadcasts(before.shape, tensor.shape)
        if is_kept
        or all(
            keeps_places(call, before, index if isinstance(result, list | tuple) else None, axis - before.ndim)
            for axis in range(before.ndim)
        )
    ]


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    """Return True if a tensor of a `shape` can be expanded to the `other` shape."""
    return len(shape) <= len(other) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(other), strict=False))


def _numbers_of_product(call: FunctionCall, before: Tensor, numbers: Tensor | None, result: Tensor) -> Tensor | None:
    """Return the numbers of the elements in a product of scores or weights with a parameter, such as one that mixes
    heads. Return None if the product sums over the numbered axis, or if a convolution changes its length.
    """
    contraction = contraction_of(call.function, call.args, call.kwargs)
    if numbers is None or not result.numel() or contraction is None or not contraction.multiplies(before):
        return None
    labels = contraction.labels_of(before)
    for axis, label in enumerate(labels):
        if label not in contraction.result:
            first = numbers.narrow(axis, 0, 1)
            if numbers.stride(axis) and not torch.equal(first.expand(numbers.shape), numbers):
                return None
            numbers = first
    kept = [axis for axis, label in enumerate(labels) if label in contraction.result]
    others = [axis for axis in range(len(labels)) if axis not in kept]
    numbers = numbers.permute(*others, *kept)[(0,) * len(others)]
    order = sorted(range(len(kept)), key=lambda index: contraction.result.index(labels[kept[index]]))
    numbers = numbers.permute(order)
    for axis, label in enumerate(contraction.result):
        numbers = numbers if label in labels else numbers.unsqueeze(axis)
    return numbers.expand(result.shape) if _broadcasts(numbers.shape, result.shape) else None
