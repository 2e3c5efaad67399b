"""Axes of a tensor that a model reshapes, as parts of the axes of an earlier tensor, and where the heads are in them.

The tensor is not read. A function that returns a view is applied to an empty tensor of the same shape, and the strides
of the result show how it rearranged the axes. The input of the output projection has the features of all heads side by
side. So the axes that a model merges with the features of an attention output are the heads; all other axes, such as
sequences, windows or queries, are not.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.trace.functions import Contraction, FunctionCall, functions_named
from headwise.shapes import Float

OTHER = -1
"""Number in place of an axis, for elements that are not one-to-one those of an axis of the original tensor."""

_VIEW_NAMES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "unsqueeze", "squeeze"),
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "expand", "expand_as"),
    *("broadcast_to", "narrow", "select", "unbind", "chunk", "split", "split_with_sizes", "tensor_split", "unfold"),
    "__getitem__",
)

VIEWS = functions_named(*_VIEW_NAMES) | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
"""Functions that only rearrange or select the elements of a tensor."""

VIEWS_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("unsqueeze", "squeeze", "transpose", "t", "swapaxes", "swapdims", "as_strided")
}
"""Functions that change the axes of a tensor in place, and those that return a view with the changed axes."""

MOVES = functions_named(
    *("flip", "fliplr", "flipud", "rot90", "roll", "index_select", "gather", "take_along_dim", "channel_shuffle")
) | {F.channel_shuffle}
"""Functions that move elements of a tensor along an axis, in an order that may depend on another argument."""


class Factor(NamedTuple):
    """Part of one axis of an original tensor, such as one of the axes into which a reshape splits that axis. An element
    with index `i` along the original axis has index `(i // stride) % size` along this part.

    Attributes:
        axis: number of the axis in the original tensor; `OTHER` if the elements are not those of one axis.
        stride: distance of neighbours along the axis.
        size: number of elements; at least 2.
    """

    axis: int
    stride: int
    size: int


class OutputAxes(NamedTuple):
    """Roles of the axes of an attention output as the model computes it: which axis has the features of a head's
    output, and which axes have the queries.

    Attributes:
        value: index of the axis of features, those of the value vectors.
        queries: indices of the axes of queries; heads may be merged with them.
    """

    value: int
    queries: tuple[int, ...]


Axes = tuple[tuple[Factor, ...], ...]
"""Factors of each axis of a tensor, those that change slowest first; an axis of size 1 has none."""


def axes_of(shape: torch.Size) -> Axes:
    """Return the axes of a tensor of this shape that was not reshaped."""
    return tuple((Factor(axis, 1, size),) if size > 1 else () for axis, size in enumerate(shape))


def axes_after(call: FunctionCall, axes: Axes, before: Tensor, result: Any) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that contain elements of its argument `before`, each with
    its axes. `axes` are the axes of `before`. All axes are stated as parts of the axes of one earlier tensor, such as
    the attention output from which `before` was computed. Empty tensors and tensors with unknown axes are left out.
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
    """Return True if some axis of the result of a view function, such as `reshape`, cannot be stated as a product of
    parts of the `axes` of its argument `before`.
    """
    if not before.numel():
        return False
    views = () if _selects_by_tensor(call) else _empty_views(call, before)
    return not views or any(view.numel() and axes_of_view(axes, view) is None for view in views)


def _empty_views(call: FunctionCall, before: Tensor) -> list[Tensor]:
    """Repeat a view function with an empty tensor of the shape of `before`, and return the resulting views."""
    views = call.as_function_of(before)(torch.empty(before.shape, device="meta"))
    return list(views) if isinstance(views, list | tuple) else [views]


def moves_elements(call: FunctionCall) -> bool:
    """Return True if a function may move elements along an axis, as `flip` does, or an index that is a tensor."""
    return call.function in MOVES or (call.function is Tensor.__getitem__ and _selects_by_tensor(call))


def _selects_by_tensor(call: FunctionCall) -> bool:
    """Return True if a call indexes a tensor by tensors or lists, so that its result is a copy, not a view."""
    indices = call.args[1] if call.function is Tensor.__getitem__ else ()
    return any(isinstance(each, Tensor | list) for each in (indices if isinstance(indices, tuple) else (indices,)))


def _aligned(axes: Axes, before: Tensor, after: Tensor) -> Axes | None:
    """Return the axes of `after`, a tensor computed from `before` with these `axes`. Axes are paired from the last one
    on: a pair of equal size is the same axis, and any other axis of `after` is new. Return None if `after` has fewer
    axes.
    """
    if after.ndim < before.ndim:
        return None
    missing = after.ndim - before.ndim
    return tuple(
        axes[axis - missing] if axis >= missing and before.shape[axis - missing] == size else other_axis(size)
        for axis, size in enumerate(after.shape)
    )


def axes_of_product(product: Contraction, tensor: Tensor, axes: Axes, result: Tensor) -> Axes:
    """Return the axes of the `result` of a product of `tensor`, whose axes are `axes`, with other tensors."""
    factors = dict(zip(product.labels_of(tensor), axes, strict=True))
    return tuple(
        factors[label] if label in factors else other_axis(size)
        for label, size in zip(product.result, result.shape, strict=True)
    )


def axes_of_view(axes: Axes, view: Tensor) -> Axes | None:
    """Return the axes of `view`, a view of a contiguous tensor with these `axes`. Each axis is stated as a product of
    factors (parts of axes). Return None if an axis is no such product, for example one with every second of 7 elements.
    """
    places: list[tuple[int, Factor]] = []  # distance in memory between neighbours of each factor, fastest first
    place = 1
    for factor in reversed([factor for axis in axes for factor in axis]):
        places.append((place, factor))
        place *= factor.size
    result = [_factors_between(places, size, stride) for size, stride in zip(view.shape, view.stride(), strict=True)]
    return None if None in result else tuple(factors for factors in result if factors is not None)


def _factors_between(places: list[tuple[int, Factor]], size: int, stride: int) -> tuple[Factor, ...] | None:
    """Return the factors (parts of axes of a tensor) whose product is one axis of a view, with this `size` and
    `stride`. Return None if there are none. `places` lists all factors of the tensor, the one that changes fastest
    first, each after the distance of its neighbours in memory.
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
    """Return the factors (parts of axes) that describe an axis of this size which corresponds to no axis of the
    original tensor.
    """
    return (Factor(OTHER, 1, size),) if size > 1 else ()


@dataclass(frozen=True)
class HeadLayout:
    """Layout of an attention output as a model computes it: which axes of the tensor, or parts of axes, are the heads,
    the queries, and the features of a head's output. All other axes are batch axes, such as sequences or windows.

    Attributes:
        shape: shape of the attention output.
        value_axis: axis of the features of a head's output, which are the features of the value vectors.
        query_axes: axes of the queries; they may also contain heads.
        heads: axes, or parts of axes, along which the heads are numbered, the one that changes slowest first.
    """

    shape: tuple[int, ...]
    value_axis: int
    query_axes: tuple[int, ...]
    heads: tuple[Factor, ...]

    @property
    def head_count(self) -> int:
        """Number of heads in the attention output whose axes this object describes."""
        return prod(factor.size for factor in self.heads)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Size of the batch (the product of all batch axes), number of heads and number of queries."""
        sizes, _, (batch, heads, queries) = self._split(1)
        by_role = [prod(sizes[axis] for axis in axes) for axes in (batch, heads, queries)]
        return by_role[0], by_role[1], by_role[2]

    @property
    def is_usual(self) -> bool:
        """True if the axes of the tensor are `(batch, heads, queries, value_dim)` in this order."""
        heads = (Factor(1, 1, self.shape[1]),) if self.shape[1] > 1 else ()
        return len(self.shape) == 4 and (self.value_axis, self.query_axes, self.heads) == (3, (2,), heads)

    def by_head(self, tensor: Tensor) -> Tensor:
        """Rearrange the axes of a tensor with this layout (its axes of heads, queries and features) to
        `(batch, heads, queries, value_dim)`, and return it. The last axis may have another size and meaning: for
        attention weights, it is the keys.
        """
        sizes, order, (batch, heads, queries) = self._split(tensor.shape[self.value_axis])
        shape = [prod(sizes[axis] for axis in axes) for axes in (batch, heads, queries)]
        return tensor.reshape(sizes).permute(order).reshape(*shape, tensor.shape[self.value_axis])

    def from_heads(self, tensor: Float[Tensor, "batch heads queries width"]) -> Tensor:
        """Rearrange a tensor `(batch, heads, queries, width)` to this layout (the axes of an attention output as the
        model computes it), and return it.
        """
        sizes, order, _ = self._split(tensor.shape[-1])
        inverse = [order.index(axis) for axis in range(len(order))]
        shape = list(self.shape)
        shape[self.value_axis] = tensor.shape[-1]
        return tensor.reshape([sizes[axis] for axis in order]).permute(inverse).reshape(shape)

    def _split(self, width: int) -> tuple[list[int], list[int], tuple[list[int], list[int], list[int]]]:
        """Split each axis that contains heads together with other elements. Return the sizes of the resulting axes,
        their order by role (batch, heads, queries, features), and the axes of the batch, of the heads and of the
        queries. `width` is the size of the feature axis.
        """
        sizes: list[int] = []
        batch: list[int] = []
        queries: list[int] = []
        head_axes: dict[Factor, int] = {}
        for axis, size in enumerate(self.shape):
            others = queries if axis in self.query_axes else batch
            remaining = size
            for factor in sorted((head for head in self.heads if head.axis == axis), key=lambda each: -each.stride):
                others.append(len(sizes))
                sizes.append(remaining // (factor.size * factor.stride))
                head_axes[factor] = len(sizes)
                sizes.append(factor.size)
                remaining = factor.stride
            if axis == self.value_axis:
                value_axis = len(sizes)
                sizes.append(width)
            else:
                others.append(len(sizes))
                sizes.append(remaining)
        heads = [head_axes[factor] for factor in self.heads]
        return sizes, [*batch, *heads, *queries, value_axis], (batch, heads, queries)


def merged_layout(
    axes: Axes, features: Collection[int], shape: torch.Size, value_axis: int, query_axes: tuple[int, ...]
) -> HeadLayout | None:
    """Return the layout of an attention output: which of its axes are the heads. The model has reshaped the output to a
    tensor with these `axes`, and the axes `features` of this tensor are the features of a head's output, usually merged
    with the heads. Return None if the axes `features` do not contain all features of whole heads.

    Args:
        axes: axes of the tensor that the output has become.
        features: those of its axes that are features.
        shape: shape of the attention output.
        value_axis: axis of the features of a head's output, in the attention output.
        query_axes: axes of the queries, in the attention output.
    """
    factors = list(chain.from_iterable(axes[axis] for axis in features))
    everything = list(chain.from_iterable(axes))
    heads = tuple(factor for factor in factors if factor.axis != value_axis)

    def size_along(axis: int, counted: Iterable[Factor]) -> int:
        return prod(factor.size for factor in counted if factor.axis == axis)

    if size_along(value_axis, factors) != shape[value_axis]:
        return None
    if any(head.axis == OTHER or size_along(head.axis, everything) != shape[head.axis] for head in heads):
        return None
    remaining = tuple(axis for axis in query_axes if shape[axis] <= 1 or size_along(axis, heads) < shape[axis])
    if not remaining:  # attention between heads or channels
        return None
    others = [{factor.axis for factor in axes[axis]} for axis in range(len(axes)) if axis not in features]
    are_mixed = any(origin.intersection(remaining) and len(origin) > 1 for origin in others)
    if are_mixed and any(head.axis in remaining for head in heads):  # the mixture may have further heads
        return None
    return HeadLayout(tuple(shape), value_axis, remaining, heads)


def merged_axis(axes: Axes, value_axis: int) -> int | None:
    """Return the axis of a reshaped attention output in which the features of a head's output are merged with another
    axis of the output, such as the heads. Return None if there is no such axis.
    """
    for axis, factors in enumerate(axes):
        if {factor.axis for factor in factors} > {value_axis}:
            return axis
    return None
