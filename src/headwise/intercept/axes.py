"""Axes of a tensor that a model reshapes: which axes of the original tensor each of them consists of.

The tensor is not read. A function that returns a view is applied to an empty tensor of the same shape, and the strides
of the result show how it rearranged the axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.function_call import FunctionCall

OTHER = -1
"""Number in place of an axis, for elements that are not one-to-one those of an axis of the original tensor."""

_VIEW_NAMES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze"),
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "expand", "expand_as"),
    *("broadcast_to", "narrow", "select", "unbind", "chunk", "split", "tensor_split", "unfold", "__getitem__"),
)

VIEWS: frozenset[Callable[..., Any]] = frozenset(
    [getattr(owner, name) for owner in (torch, Tensor) for name in _VIEW_NAMES if hasattr(owner, name)]
    + [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
)
"""Functions that only rearrange or select the elements of a tensor."""


_MOVING_NAMES = ("flip", "fliplr", "flipud", "rot90", "roll", "index_select", "gather", "take_along_dim")

MOVES: frozenset[Callable[..., Any]] = frozenset(
    [getattr(owner, name) for owner in (torch, Tensor) for name in _MOVING_NAMES if hasattr(owner, name)]
    + [torch.channel_shuffle, F.channel_shuffle]
)
"""Functions that move elements of a tensor along an axis, in an order that may depend on another argument."""


class Factor(NamedTuple):
    """Part of one axis of an original tensor, such as one of the axes into which a reshape splits it. An element with
    index `i` along the original axis has index `(i // stride) % size` along this part.

    Attributes:
        axis: number of the axis in the original tensor; `OTHER` if the elements are not those of one axis.
        stride: distance of neighbours along the axis.
        size: number of elements; at least 2.
    """

    axis: int
    stride: int
    size: int


Axes = tuple[tuple[Factor, ...], ...]
"""Factors of each axis of a tensor, those that change slowest first; an axis of size 1 has none."""


def axes_of(shape: torch.Size) -> Axes:
    """Return the axes of a tensor of this shape that was not reshaped. Each axis consists of one factor (part of an
    axis), the axis itself.
    """
    return tuple((Factor(axis, 1, size),) if size > 1 else () for axis, size in enumerate(shape))


def axes_after(call: FunctionCall, axes: Axes, before: Tensor, result: Any) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that contain elements of its argument `before`, each with
    its axes. `axes` describes the axes of `before` by those of an earlier tensor, from which it was made, such as an
    attention output. The axes of each result are described by those of the same earlier tensor. The list leaves out
    empty tensors, and those with unknown axes.

    Args:
        call: the call.
        axes: axes of `before`.
        before: tensor that the function was called with.
        result: what the function returned.
    """
    if not before.numel():
        return []
    results = result if isinstance(result, list | tuple) else [result]
    if call.function in VIEWS and not _selects_by_tensor(call):
        all_axes = [axes_of_view(axes, view) if view.numel() else None for view in _empty_views(call, before)]
    else:
        tensors = [each if isinstance(each, Tensor) and each.numel() else None for each in results]
        all_axes = [None if each is None else _aligned(axes, before, each) for each in tensors]
    return [(tensor, known) for tensor, known in zip(results, all_axes, strict=True) if known is not None]


def has_unknown_axes(call: FunctionCall, axes: Axes, before: Tensor) -> bool:
    """Return True if the axes after a call of a view function, such as `reshape`, are unknown: they cannot be written
    as products of parts of the `axes` of its argument `before`.
    """
    if not before.numel():
        return False
    views = () if _selects_by_tensor(call) else _empty_views(call, before)
    return not views or any(view.numel() and axes_of_view(axes, view) is None for view in views)


def _empty_views(call: FunctionCall, before: Tensor) -> list[Tensor]:
    """Repeat the call of a view function on a tensor without data (on the meta device) with the shape of the argument
    `before`. Return the resulting views, whose shapes and strides show how the function rearranges axes.
    """
    views = call.as_function_of(before)(torch.empty(before.shape, device="meta"))
    return list(views) if isinstance(views, list | tuple) else [views]


def moves_elements(call: FunctionCall) -> bool:
    """Return True if a function call may move elements of a tensor along an axis, as `flip` or an index with a tensor
    does.
    """
    return call.function in MOVES or (call.function is Tensor.__getitem__ and _selects_by_tensor(call))


def _selects_by_tensor(call: FunctionCall) -> bool:
    """Return True if a call indexes a tensor by other tensors or by lists, so that its result is a copy, not a view."""
    indices = call.args[1] if call.function is Tensor.__getitem__ else ()
    return any(isinstance(each, Tensor | list) for each in (indices if isinstance(indices, tuple) else (indices,)))


def _aligned(axes: Axes, before: Tensor, after: Tensor) -> Axes | None:
    """Return the axes of `after`, a tensor computed from `before`, whose axes are `axes`. The axes of both are paired
    from the last one. An axis of unchanged size stays the same; any other is marked as new. Return None if `after` has
    fewer axes than `before`.
    """
    if after.ndim < before.ndim:
        return None
    missing = after.ndim - before.ndim
    return tuple(
        axes[axis - missing] if axis >= missing and before.shape[axis - missing] == size else other_axis(size)
        for axis, size in enumerate(after.shape)
    )


def axes_of_view(axes: Axes, view: Tensor) -> Axes | None:
    """Return the axes of `view`, a view of a contiguous tensor with these `axes`, each as a product of factors (such as
    batch and heads). Return None if some axis is not such a product, for example one that contains every second
    element.
    """
    places: list[tuple[int, Factor]] = []  # distance in memory between neighbours of each factor, fastest first
    place = 1
    for factor in reversed([factor for axis in axes for factor in axis]):
        places.append((place, factor))
        place *= factor.size
    result = [_factors_between(places, size, stride) for size, stride in zip(view.shape, view.stride(), strict=True)]
    return None if None in result else tuple(factors for factors in result if factors is not None)


def _factors_between(places: list[tuple[int, Factor]], size: int, stride: int) -> tuple[Factor, ...] | None:
    """Return the factors (parts of axes of a contiguous tensor) that make up one axis of a view of this tensor. Return
    None if no factors describe the axis, for example if it contains every second element.

    Args:
        places: each factor of the tensor after the distance of its neighbours in memory, fastest first.
        size: elements of the axis.
        stride: distance of its neighbours in memory.
    """
    if size == 1 or not stride:  # an axis of stride 0 was expanded
        return other_axis(size)
    factors: list[Factor] = []
    for place, factor in places:
        skipped = max(1, stride // place)
        if size == 1 or skipped >= factor.size:
            continue
        if factor.size % skipped or (stride > place and stride % place):
            return None
        available = factor.size // skipped
        taken = min(available, size)
        if size % taken:
            return None
        factors.append(Factor(factor.axis, factor.stride * skipped, taken))
        size //= taken
        stride = place * factor.size
    return None if size > 1 else tuple(reversed(factors))


def other_axis(size: int) -> tuple[Factor, ...]:
    """Return the factors (parts) of an axis of this size that corresponds to no axis of the original tensor, the one
    whose axes are followed, such as an attention output.
    """
    return (Factor(OTHER, 1, size),) if size > 1 else ()
