"""Use of an attention output by a function: which axes are features, and whether it is linear in the output."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.attention_output import AttentionOutput
from headwise.intercept.axes import OTHER, VIEWS, Axes, Factor, axes_after, moves_elements, other_axis
from headwise.intercept.contractions import CONVOLUTIONS, PRODUCTS, contraction_of, is_parameter
from headwise.intercept.element_places import keeps_places, repeated
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.head_layout import HeadLayout, merged_layout
from headwise.intercept.score_products import CONCATENATIONS
from headwise.intercept.session import current_session
from headwise.intercept.undropped import DROPOUT_NAMES
from headwise.intercept.unreadable_tensors import has_no_numbers

PRODUCTS_IN_PLACE = frozenset({"mul_", "__imul__", "multiply_", "div_", "__itruediv__", "divide_", "neg_"})
"""Names of functions that overwrite a tensor by its product with another one."""

SUMS_IN_PLACE = frozenset({"add_", "__iadd__", "sub_", "__isub__"})
"""Names of functions that overwrite a tensor by its sum with another one."""


ASSIGNMENTS_IN_PLACE = frozenset({"__setitem__", "masked_fill_", "index_fill_", "index_copy_", "index_put_"})
"""Names of functions that overwrite some elements of a tensor by others, so that a second call changes nothing."""

STACKS: frozenset[Callable[..., Any]] = frozenset({torch.stack, torch.hstack, torch.vstack, torch.dstack})
"""Functions that put several tensors next to each other along a new axis."""

SUMS: frozenset[Callable[..., Any]] = frozenset({torch.sum, Tensor.sum, torch.mean, Tensor.mean})
"""Functions that add up the elements of a tensor along axes."""


@dataclass(frozen=True, eq=False)
class FollowedOutput:
    """Record of a tensor that was computed from an attention output, and how it was computed.

    Attributes:
        output: the attention output.
        axes: axes of the tensor, as factors of the axes of the output.
        rearranged: function that computes the tensor from the output; None if the output was changed before, or if more
            was done to it than to rearrange its elements.
        is_linear: True if the tensor is the output times factors that do not depend on the output, so that a factor of
            the output is one of the tensor.
        is_written: True if the model wrote the output into the tensor by an assignment to an index.
    """

    output: AttentionOutput
    axes: Axes
    rearranged: Callable[[Tensor], Tensor] | None
    is_linear: bool = True
    is_written: bool = False

    def changed(self) -> Tensor | None:
        """Return this tensor with the interceptors' changes of the attention output. Return None if there are no
        changes, or if the tensor already contains them.
        """
        if self.rearranged is None or not self.output.may_change:
            return None
        changed = self.output.changed()
        return None if changed is None else self.rearranged(changed)


def layout_of(followed: FollowedOutput, features: list[int]) -> HeadLayout | None:
    """Return the layout of the heads in an attention output, if the axes `features` of a tensor computed from it are
    the features of all heads. Return None if they are not.
    """
    output = followed.output
    return merged_layout(followed.axes, features, output.shape, output.axes.value, output.axes.queries)


def features_of(call: FunctionCall, tensor: Tensor, followed: FollowedOutput) -> list[int] | None:
    """Return the axes of `tensor` that a function call uses as the features of all heads, such as the axis that a
    linear layer maps. Return None if the function uses no axes in this way.
    """
    axes, output, is_map = followed.axes, followed.output, False
    if call.function in CONCATENATIONS:
        features = [_axis_of(call, tensor.ndim)]
    elif call.function in PRODUCTS:
        contraction = contraction_of(call.function, call.args, call.kwargs)
        if contraction is None or not any(operand is tensor for operand in contraction.operands):
            return None
        others = [operand for operand in contraction.operands if operand is not tensor]
        is_map = call.function is F.linear or call.function in CONVOLUTIONS
        if not is_map and not all(is_parameter(other) or other.ndim == 2 < tensor.ndim for other in others):
            return None
        labels = contraction.labels_of(tensor)
        if len(contraction.shared_by_all) > 0:  # another map for each head
            return None
        features = [axis for axis, label in enumerate(labels) if label in contraction.summed]
    else:
        return None
    origins = {factor.axis for axis in features for factor in axes[axis]}
    has_one_value = output.shape[output.axes.value] == 1 and (is_map or features == [tensor.ndim - 1])
    is_of_values = output.axes.value in origins or has_one_value
    is_of_queries = call.function not in CONCATENATIONS and bool(origins.intersection(output.axes.queries))
    return features if is_of_values or is_of_queries else None


def may_hide_heads(followed: FollowedOutput, features: list[int]) -> bool:
    """Return True if a tensor may have an axis of heads that the model merges with the values later. Such an axis
    contains no queries, is not the first one, and is not among `features`.
    """
    others = [factors for axis, factors in enumerate(followed.axes) if axis and axis not in features]
    queries = set(followed.output.axes.queries)
    return any(factors and not queries.intersection(factor.axis for factor in factors) for factors in others)


def is_part(followed: FollowedOutput, layout: HeadLayout | None = None) -> bool:
    """Return True if a tensor contains all values of an attention output, but only some elements of another axis, which
    may be the heads. Axes of queries cannot be the heads; nor can the first axis, if another axis is known to be the
    heads.

    Args:
        followed: the tensor.
        layout: layout of the heads; None if it is unknown.
    """
    output, factors = followed.output, [factor for factors in followed.axes for factor in factors]
    if any(factor.axis == OTHER for factor in factors):
        return False
    covered = [prod(factor.size for factor in factors if factor.axis == axis) for axis in range(len(output.shape))]
    first = 0 if layout is None or layout.head_count == 1 else 1
    lacks = [axis for axis in range(first, len(covered)) if covered[axis] < output.shape[axis]]
    return output.axes.value not in lacks and not set(lacks) <= set(output.axes.queries)


def is_multiplied(call: FunctionCall, tensor: Tensor, followed: FollowedOutput) -> bool:
    """Return True if a function multiplies an attention output with another activation, and sums over the output's
    queries or values. Products of several matrices of attention weights are an example.
    """
    if call.function not in PRODUCTS:
        return False
    contraction = contraction_of(call.function, call.args, call.kwargs)
    if contraction is None or not any(operand is tensor for operand in contraction.operands):
        return False
    if any(is_parameter(operand) for operand in contraction.operands):
        return False
    output = followed.output
    for label, factors in zip(contraction.labels_of(tensor), followed.axes, strict=True):
        origins = {factor.axis for factor in factors}
        is_of_rows = bool(origins.intersection(output.axes.queries)) or origins == {output.axes.value}
        if label in contraction.summed and is_of_rows:
            return True
    return False


def sums_stack(call: FunctionCall, tensor: Tensor, followed: FollowedOutput) -> bool:
    """Return True if a function call sums a tensor over an axis along which several tensors were joined, as by
    `torch.stack`, and keeps the axis of the values. The attention output from which the tensor was computed does not
    have the joining axis itself.
    """
    if call.function in SUMS:
        dims = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis"))
        dims = range(tensor.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
        summed = {dim % tensor.ndim for dim in dims}
    elif call.function in PRODUCTS:
        contraction = contraction_of(call.function, call.args, call.kwargs)
        if contraction is None or not any(operand is tensor for operand in contraction.operands):
            return False
        labels = contraction.labels_of(tensor)
        summed = {axis for axis, label in enumerate(labels) if label in contraction.summed}
    else:
        return False
    of_sum = {factor.axis for axis in summed for factor in followed.axes[axis]}
    kept = {factor.axis for axis in range(tensor.ndim) if axis not in summed for factor in followed.axes[axis]}
    return OTHER in of_sum and followed.output.axes.value in kept


def axes_after_function(
    call: FunctionCall, followed: FollowedOutput, argument: Tensor, result: Any
) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that contain the values of an attention output. Each comes
    with its axes, written as parts of the output's axes. `argument` is the argument that was computed from the output.
    """
    if call.function in CONCATENATIONS and result.ndim == argument.ndim:
        return [(result, _concatenated(followed.axes, _axis_of(call, argument.ndim), result))]
    if call.function is torch.stack and result.ndim == argument.ndim + 1:
        axis = _axis_of(call, result.ndim)
        return [(result, (*followed.axes[:axis], other_axis(result.shape[axis]), *followed.axes[axis:]))]
    if call.function not in PRODUCTS:
        known = axes_after(call, followed.axes, argument, result)
        if call.function in VIEWS and not moves_elements(call):
            return known
        results = list(result) if isinstance(result, list | tuple) else [result]
        numbers = [next(i for i, each in enumerate(results) if each is tensor) for tensor, _ in known]
        is_one = isinstance(result, Tensor)
        return [
            (tensor, _in_place(call, followed, argument, tensor, axes, None if is_one else number))
            for number, (tensor, axes) in zip(numbers, known, strict=True)
        ]
    contraction = contraction_of(call.function, call.args, call.kwargs)
    if contraction is None or not any(operand is argument for operand in contraction.operands):
        return []
    factors = dict(zip(contraction.labels_of(argument), followed.axes, strict=True))
    axes = tuple(
        factors[label] if label in factors else other_axis(size)
        for label, size in zip(contraction.result, result.shape, strict=True)
    )
    has_values = any(factor.axis == followed.output.axes.value for factors in axes for factor in factors)
    return [(result, axes)] if has_values else []


def _in_place(
    call: FunctionCall, followed: FollowedOutput, argument: Tensor, result: Tensor, axes: Axes, number: int | None
) -> Axes:
    """Return the `axes` of the `result` of a function that may move or mix elements. An axis along which it does so is
    marked as unrelated to the attention output. Axes of queries are never marked, since the output projection is the
    same for all queries.

    Args:
        call: call of the function.
        followed: the argument, which was computed from an attention output.
        argument: the argument.
        result: tensor that the function computed.
        axes: axes of the result, if the function moves nothing.
        number: number of the tensor among the results; None if the function computes one tensor.
    """
    queries, kept = set(followed.output.axes.queries), list(axes)
    for axis, factors in enumerate(axes):
        if {factor.axis for factor in factors} <= queries | {OTHER}:
            continue
        if not keeps_places(call, argument, number, axis - result.ndim):
            kept[axis] = other_axis(result.shape[axis])
    return tuple(kept)


def _concatenated(axes: Axes, axis: int, result: Tensor) -> Axes:
    """Return the axes of the `result` of a concatenation along `axis`, from the `axes` of one of the concatenated
    tensors. The result has the same kind of elements along `axis` (queries, heads or sequences), but more of them.
    """
    origins, size = {factor.axis for factor in axes[axis]}, result.shape[axis]
    longer = (Factor(origins.pop(), 1, size),) if len(origins) == 1 and size > 1 else other_axis(size)
    return (*axes[:axis], longer, *axes[axis + 1 :])


def concatenates(call: FunctionCall, tensor: Tensor, followed: FollowedOutput, axis: int) -> bool:
    """Return True if a concatenation joins `tensor` with others along the axis that corresponds to `axis` of the
    attention output.
    """
    return any(factor.axis == axis for factor in followed.axes[_axis_of(call, tensor.ndim)])


def _axis_of(call: FunctionCall, axes: int) -> int:
    """Return the axis along which a function call concatenates or stacks tensors, as a number from 0. `axes` is the
    number of axes of its result.
    """
    dim: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis", 0))
    return dim % axes


def is_linear(call: FunctionCall, outputs: list[tuple[Tensor, AttentionOutput]], result: Any) -> bool:
    """Return True if scaling the attention outputs among the arguments scales the `result` of a function call by the
    same factor. To test this, the call is repeated with the outputs times -2. Norms, logarithms and sums with other
    tensors are not linear. Return False if the test is not possible.

    Args:
        call: the call.
        outputs: arguments of the call that were computed from attention outputs, with these outputs.
        result: what the function returned.
    """
    tensors, name = [tensor for tensor, _ in outputs], getattr(call.function, "__name__", "")
    others = [other for other in call.tensors if not any(other is tensor for tensor in tensors)]
    if any(_depends_on(other, *pair) for other in others for pair in outputs):
        return False
    if name in DROPOUT_NAMES:
        return True
    if any(result is tensor for tensor in tensors) and name not in ASSIGNMENTS_IN_PLACE:
        is_sum = name in SUMS_IN_PLACE and not others and len({id(tensor) for tensor in tensors}) > 1
        return is_sum or (name in PRODUCTS_IN_PLACE and len({id(tensor) for tensor in tensors}) == 1)
    if not isinstance(result, Tensor) or result.is_meta or "out" in call.kwargs or has_no_numbers():
        return False
    scaled, *others_scaled = {id(tensor): tensor for tensor in tensors}.values()
    repeated_call = call
    for tensor in others_scaled:
        repeated_call = repeated_call.replaced(tensor, tensor.detach() * -2)
    result = result.detach()
    difference = repeated(repeated_call, scaled, scaled.detach() * -2, None) + 2 * result
    largest, most = (each.abs().nan_to_num().amax() for each in (difference, result))
    return bool(largest <= torch.finfo(result.dtype).eps ** 0.5 * most)


def _depends_on(other: Tensor, tensor: Tensor, output: AttentionOutput) -> bool:
    """Return True if the tensor `other` depends on the same attention output from which `tensor` was computed."""
    session = current_session()
    lineage, module_calls = session.lineage, session.module_calls
    before = output.origins.q.sources | output.origins.v.sources
    of_output = lineage.origin(tensor, module_calls).sources & ~before & lineage.mixing
    return bool(lineage.origin(other, module_calls).sources & of_output)


def may_contain_heads(followed: FollowedOutput, features: list[int]) -> bool:
    """Return True if the axes `features` of a tensor may contain heads of an attention output, although it is unknown
    which part of these axes is the heads. Two conditions must be true. First, the axes contain the values of the
    output. Second, other axes still contain queries, or the axes `features` also contain elements of another tensor,
    as after stacking several outputs.
    """
    output, origins = followed.output, [{factor.axis for factor in factors} for factors in followed.axes]
    of_features = set[int]().union(*(origins[axis] for axis in features))
    of_others = set[int]().union(*(each for axis, each in enumerate(origins) if axis not in features))
    has_queries_left = bool(of_others.intersection(output.axes.queries))
    return output.axes.value in of_features and (has_queries_left or OTHER in of_features)


def is_joined(followed: FollowedOutput, features: list[int]) -> bool:
    """Return True if the axes `features` of a tensor contain the values of an attention output and further features,
    which were concatenated with them.
    """
    value, factors = followed.output.axes.value, [factor for axis in features for factor in followed.axes[axis]]
    return prod(factor.size for factor in factors if factor.axis == value) > followed.output.shape[value]
