"""Layout of the heads in an attention output, derived from how the model reshapes it for the output projection.

The input of the output projection has the features of all heads side by side. So the axes that a model merges with the
feature axis of the attention output are the heads; all other axes, such as sequences, windows or queries, are not.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from torch import Tensor

from headwise.intercept.axes import OTHER, Axes, Factor
from headwise.shapes import Float


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
        """Number of heads."""
        return prod(factor.size for factor in self.heads)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Size of the batch (the product of all batch axes), number of heads and number of queries, in this order."""
        sizes, _, (batch, heads, queries) = self._split(1)
        by_role = [prod(sizes[axis] for axis in axes) for axes in (batch, heads, queries)]
        return by_role[0], by_role[1], by_role[2]

    @property
    def is_usual(self) -> bool:
        """True if the axes of the tensor are `(batch, heads, queries, value_dim)` in this order."""
        heads = (Factor(1, 1, self.shape[1]),) if self.shape[1] > 1 else ()
        return len(self.shape) == 4 and (self.value_axis, self.query_axes, self.heads) == (3, (2,), heads)

    def by_head(self, tensor: Tensor) -> Tensor:
        """Return a tensor that has this layout with its axes rearranged to `(batch, heads, queries, value_dim)`. The
        last axis may have another size and meaning than the features of a head's output: for attention weights, it is
        the keys.
        """
        sizes, order, (batch, heads, queries) = self._split(tensor.shape[self.value_axis])
        shape = [prod(sizes[axis] for axis in axes) for axes in (batch, heads, queries)]
        return tensor.reshape(sizes).permute(order).reshape(*shape, tensor.shape[self.value_axis])

    def from_heads(self, tensor: Float[Tensor, "batch heads queries width"]) -> Tensor:
        """Return a tensor `(batch, heads, queries, width)` with its axes rearranged to this layout, the one of the
        model. This is the inverse of `by_head`.
        """
        sizes, order, _ = self._split(tensor.shape[-1])
        inverse = [order.index(axis) for axis in range(len(order))]
        shape = list(self.shape)
        shape[self.value_axis] = tensor.shape[-1]
        return tensor.reshape([sizes[axis] for axis in order]).permute(inverse).reshape(shape)

    def _split(self, width: int) -> tuple[list[int], list[int], tuple[list[int], list[int], list[int]]]:
        """Split each axis that contains heads together with other elements, so that heads have axes of their own.
        Return the sizes of the resulting axes, their order by role (batch, heads, queries, features), and lists of the
        axes of the batch, of the heads and of the queries. `width` is the size of the feature axis.
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
    """Return which axes of an attention output are the heads. They follow from a tensor that the output was reshaped
    to: its axes `features` contain the features of a head's output, and usually the heads. Return None if these axes do
    not contain all features of whole heads.

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
    if any(head.axis in remaining for head in heads) and _are_mixed(axes, features, remaining):
        return None
    return HeadLayout(tuple(shape), value_axis, remaining, heads)


def _are_mixed(axes: Axes, features: Collection[int], query_axes: tuple[int, ...]) -> bool:
    """Return True if some axis of a tensor, other than the axes `features`, contains queries together with something
    else. The latter may be heads that the model did not merge with the features.
    """
    origins = [{factor.axis for factor in axes[axis]} for axis in range(len(axes)) if axis not in features]
    return any(origin.intersection(query_axes) and len(origin) > 1 for origin in origins)


def merged_axis(axes: Axes, value_axis: int) -> int | None:
    """Return the axis of a tensor that contains the features of a head's output, merged with another axis of the
    attention output, such as the heads. Return None if there is none. `value_axis` is the axis of the features in the
    attention output.
    """
    for axis, factors in enumerate(axes):
        if {factor.axis for factor in factors} > {value_axis}:
            return axis
    return None
