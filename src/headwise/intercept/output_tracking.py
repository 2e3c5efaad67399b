"""Attention outputs, followed by the identity of tensors from attention to their use, such as the output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from headwise.intercept.attention_output import (
    HEADS_SEPARATE,
    HEADS_UNKNOWN,
    MULTIPLIED,
    NOT_OVER_KEYS,
    AttentionOutput,
)
from headwise.intercept.axes import VIEWS, Axes, Factor, axes_after, axes_of, other_axis
from headwise.intercept.call_stack import call_stack
from headwise.intercept.contractions import CONVOLUTIONS, PRODUCTS, contraction_of, is_parameter
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.head_layout import HeadLayout, merged_axis, merged_layout
from headwise.intercept.score_products import CONCATENATIONS
from headwise.intercept.softmax_weights import COPIES

REARRANGEMENTS = VIEWS | COPIES
"""Functions after which a change of the output can still be made, by repeating them with the changed output."""


@dataclass(frozen=True, eq=False)
class _Followed:
    """A tensor that was computed from an attention output.

    Attributes:
        output: the attention output.
        axes: axes of the tensor, as factors of the axes of the output.
        rearranged: function that computes the tensor from the output; None if the output was changed before, or if more
            was done to it than to rearrange its elements.
    """

    output: AttentionOutput
    axes: Axes
    rearranged: Callable[[Tensor], Tensor] | None


def hold(output: AttentionOutput, tensor: Tensor) -> Tensor:
    """Return the `tensor` of an attention output, which is followed from then on to its use. Inside of torch's
    `F.multi_head_attention_forward`, where the layout of the heads is known, report the call to the interceptors at
    once, and return the tensor as changed by them.
    """
    heads = call_stack.torch_attention_heads
    if heads is None:
        call_stack.attention.pending.append(output)
        followed = _Followed(output, axes_of(tensor.shape), lambda other: other)
        call_stack.attention.outputs.set(tensor, [*(call_stack.attention.outputs.get(tensor) or ()), followed])
        return tensor
    *others, queries, value = range(tensor.ndim)
    axis_of_heads = (Factor(others[-1], 1, heads),) if heads > 1 else ()
    output.establish(HeadLayout(tuple(tensor.shape), value, (queries,), axis_of_heads))
    changed = output.changed()
    output.finish()
    return tensor if changed is None else changed


def before_function(call: FunctionCall) -> FunctionCall:
    """Handle a function call whose arguments may be attention outputs, before the function runs. If the function does
    more than rearrange an output, take note of how it uses the output, and return the call with the output as changed
    by the interceptors.
    """
    if not call_stack.attention.outputs or call.function in REARRANGEMENTS:
        return call
    if call.function in CONCATENATIONS:
        _refuse_concatenated_heads(call)
    for tensor in list(call.tensors()):
        for followed in call_stack.attention.outputs.get(tensor) or ():
            features = _features(call, tensor, followed)
            if _is_multiplied(call, tensor, followed):
                followed.output.refuse(MULTIPLIED)
            elif features is not None and not followed.output.is_reported:
                _establish(followed, features)
            changed = _changed(followed)
            if changed is not None:
                _follow_changed(changed, tensor, followed)
                call = call.replaced(tensor, changed)
    return call


def after_function(call: FunctionCall, result: Any) -> None:
    """Record the `result` of a function whose arguments may be attention outputs, if it contains the same elements,
    perhaps rearranged or scaled.
    """
    if not call_stack.attention.outputs:
        return
    by_result: dict[int, tuple[Tensor, list[_Followed]]] = {}
    for argument in call.tensors():
        for followed in call_stack.attention.outputs.get(argument) or ():
            tensors = _axes_after(call, followed, argument, result)
            followed.output.is_lost |= not tensors and call.function in VIEWS
            for index, (tensor, axes) in enumerate(tensors):
                rearranged = _rearranged(call, argument, followed, index if isinstance(result, list | tuple) else None)
                after = _Followed(followed.output, axes, rearranged)
                by_result.setdefault(id(tensor), (tensor, []))[1].append(after)
                axis = merged_axis(axes, followed.output.axes.value)
                if axis is not None:
                    layout = _layout(after, [axis])
                    followed.output.is_lost |= layout is None
                    followed.output.merged = layout or followed.output.merged
    for tensor, all_followed in by_result.values():
        call_stack.attention.outputs.set(tensor, all_followed)


def report_established() -> None:
    """Report the attention calls whose heads are established to the interceptors. Calls that may be one of several
    heads wait for the end of the module.
    """
    call_stack.attention.pending = [
        output
        for output in call_stack.attention.pending
        if output.may_be_one_head or not (output.is_established and output.finish())
    ]


def on_module_end(result: Any) -> Any:
    """Report the attention calls of ended modules to the interceptors. Return the `result` of the module that has just
    ended, with the attention outputs in it as changed by the interceptors; None if there are no changes.
    """
    if not call_stack.attention.pending and not call_stack.attention.outputs:
        return None
    is_last = not call_stack.module_calls
    changed = with_changes(result, is_last=is_last)
    running = {id(module_call) for module_call in call_stack.module_calls}
    call_stack.attention.pending = [
        output
        for output in call_stack.attention.pending
        if id(output.module_calls[-1]) in running or not output.finish(is_last=is_last)
    ]
    return changed


def with_changes(tensors: Any, *, is_last: bool = False) -> Any:
    """Return `tensors`, the arguments or the result of a module, with the attention outputs in which the heads are
    merged as changed by the interceptors; None if there are no changes.

    Args:
        tensors: tensors in tuples, lists, dicts or other containers.
        is_last: True at the end of the model, after which nothing more can be learnt about an output.
    """
    if not call_stack.attention.outputs:
        return None
    leaves, structure = pytree.tree_flatten(tensors)
    changed = [_changed_leaf(leaf, is_last) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_unchanged = all(new is old for new, old in zip(changed, leaves, strict=True))
    return None if is_unchanged else pytree.tree_unflatten(changed, structure)


def _changed_leaf(tensor: Tensor, is_last: bool) -> Tensor:
    """Return a tensor that a module returns, as changed by the interceptors if it is an attention output in which the
    heads are merged, or if nothing more can be learnt about it.
    """
    for followed in call_stack.attention.outputs.get(tensor) or ():
        is_merged = merged_axis(followed.axes, followed.output.axes.value) is not None
        changed = _changed(followed) if is_merged or is_last else None
        if changed is not None:
            _follow_changed(changed, tensor, followed)
            return changed
    return tensor


def _follow_changed(changed: Tensor, tensor: Tensor, followed: _Followed) -> None:
    """Follow the tensor `changed`, which takes the place of `tensor` with changed attention outputs."""
    call_stack.attention.outputs.set(changed, [_Followed(followed.output, followed.axes, None)])
    call_stack.lineage.set(changed, call_stack.lineage.origin(tensor, call_stack.module_calls))


def _changed(followed: _Followed) -> Tensor | None:
    """Return a tensor with the elements of an attention output as changed by the interceptors; None if the tensor
    contains these changes already, or if there are none.
    """
    if followed.rearranged is None or not followed.output.may_change:
        return None
    changed = followed.output.changed()
    return None if changed is None else followed.rearranged(changed)


def _layout(followed: _Followed, features: list[int]) -> HeadLayout | None:
    """Return the layout of the heads if these axes of a tensor are the features of all heads; None if they are not."""
    output = followed.output
    return merged_layout(followed.axes, features, output.shape, output.axes.value, output.axes.queries)


def _may_hide_heads(followed: _Followed, features: list[int]) -> bool:
    """Return True if a tensor has an axis, other than the features and the first one, that contains no queries: it may
    be an axis of heads that the model merges with the values later.
    """
    others = [factors for axis, factors in enumerate(followed.axes) if axis and axis not in features]
    queries = set(followed.output.axes.queries)
    return any(factors and not queries.intersection(factor.axis for factor in factors) for factors in others)


def _features(call: FunctionCall, tensor: Tensor, followed: _Followed) -> list[int] | None:
    """Return the axes of a tensor that a function call uses as features of all heads, such as the axis that a linear
    layer maps. Return None if the function does not show which axes are features.
    """
    axes, output, is_map = followed.axes, followed.output, False
    if call.function in CONCATENATIONS:
        features = [_concatenated_axis(call, tensor)]
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


def _establish(followed: _Followed, features: list[int]) -> None:
    """Establish the layout of an attention output, as the model shows it by a function that uses these axes of a
    followed tensor as features; or refuse the output.
    """
    output, layout = followed.output, _layout(followed, features)
    if layout is not None:
        output.establish(layout, may_hide_heads=_may_hide_heads(followed, features))
        _refuse_separate_heads(output)
    elif any(factor.axis == output.axes.value for axis in features for factor in followed.axes[axis]):
        output.refuse(HEADS_UNKNOWN)
    else:
        output.refuse(NOT_OVER_KEYS)


def _refuse_concatenated_heads(call: FunctionCall) -> None:
    """Refuse attention outputs that a call of a function concatenates along the features, if they are parts of one
    output or outputs of several attention calls of one module: they are heads, or groups of heads.
    """
    outputs: list[AttentionOutput] = []
    for tensor in call.tensors():
        for followed in call_stack.attention.outputs.get(tensor) or ():
            if _features(call, tensor, followed) is None:
                continue
            output = followed.output
            others = [each for each in outputs if each is output or output.is_other_head_of(each, as_features=True)]
            for each in [output, *others] if others else ():
                each.refuse(HEADS_SEPARATE)
            outputs.append(output)


def _refuse_separate_heads(output: AttentionOutput) -> None:
    """Refuse an attention output whose layout is established, and the others that may be further heads of its module,
    if there are any.
    """
    pending = call_stack.attention.pending
    others = [each for each in pending if each is not output and output.is_other_head_of(each, as_features=False)]
    for each in [output, *others] if others else ():
        each.refuse(HEADS_SEPARATE)


def _is_multiplied(call: FunctionCall, tensor: Tensor, followed: _Followed) -> bool:
    """Return True if a function call sums products of an attention output and another activation over the queries or
    the values of the output, as in products of several matrices of attention weights.
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


def _axes_after(call: FunctionCall, followed: _Followed, argument: Tensor, result: Any) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that contain the values of an attention output, which is an
    `argument` of the call, each with its axes.
    """
    if call.function in CONCATENATIONS and result.ndim == argument.ndim:
        return [(result, _concatenated(followed.axes, _concatenated_axis(call, argument), result))]
    if call.function not in PRODUCTS:
        return axes_after(call, followed.axes, argument, result)
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


def _concatenated_axis(call: FunctionCall, tensor: Tensor) -> int:
    """Return the axis along which a call concatenates tensors, one of which is `tensor`."""
    dim: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis", 0))
    return dim % tensor.ndim


def _concatenated(axes: Axes, axis: int, result: Tensor) -> Axes:
    """Return the axes of the `result` of a concatenation along `axis`, from those of one of the concatenated tensors.
    The longer axis is that of the same queries, heads or sequences, and more of them.
    """
    origins, size = {factor.axis for factor in axes[axis]}, result.shape[axis]
    longer = (Factor(origins.pop(), 1, size),) if len(origins) == 1 and size > 1 else other_axis(size)
    return (*axes[:axis], longer, *axes[axis + 1 :])


def _rearranged(
    call: FunctionCall, argument: Tensor, followed: _Followed, index: int | None
) -> Callable[[Tensor], Tensor] | None:
    """Return the function that computes the result of a function call from an attention output; None if the call does
    more than rearrange it.

    Args:
        call: the call.
        argument: its argument that is computed from the output.
        followed: how that argument is computed.
        index: number of the tensor among the results; None if the function returns one tensor.
    """
    before = followed.rearranged
    if before is None or call.function not in REARRANGEMENTS:
        return None
    repeat = call.as_function_of(argument)

    def rearranged(tensor: Tensor) -> Tensor:
        result = repeat(before(tensor))
        after: Tensor = result if index is None else result[index]
        return after

    return rearranged
