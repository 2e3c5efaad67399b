"""Attention outputs, followed by the identity of tensors from attention to their use, such as the output projection."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from headwise.intercept.trace.axes import (
    OTHER,
    VIEWS,
    Axes,
    Factor,
    HeadLayout,
    OutputAxes,
    axes_after,
    axes_of,
    axes_of_product,
    has_unknown_axes,
    merged_axis,
    merged_layout,
    moves_elements,
    other_axis,
)
from headwise.intercept.trace.functions import (
    ASSIGNMENT,
    CONCATENATIONS,
    CONSTANTS,
    CONVOLUTIONS,
    PRODUCTS,
    FunctionCall,
    are_nested_deeply,
    functions_named,
    is_parameter,
    overwritten_tensor,
    product_with,
    share_memory,
    written_by,
)
from headwise.intercept.trace.lineage import CallOrigins
from headwise.intercept.trace.refusals import (
    ADDED,
    CHANGED_IN_PLACE,
    HEADS_SEPARATE,
    HEADS_UNKNOWN,
    MULTIPLIED,
    NEVER_CHANGED,
    NO_QUERIES,
    NOT_LINEAR,
    NOT_OVER_KEYS,
    RESCALED,
)
from headwise.intercept.trace.scores import keeps_places, may_project, repeated
from headwise.intercept.trace.state import AttentionOutput, FollowedOutput, current_trace
from headwise.intercept.trace.tokens import INTEGERS
from headwise.intercept.trace.weights import COPIES
from headwise.intercept.undropped import DROPOUT_NAMES
from headwise.intercept.unreadable_tensors import has_no_numbers

REARRANGEMENTS = VIEWS | COPIES
"""Functions after which a change of the output can still be made, by repeating them with the changed output."""

_PRODUCTS_IN_PLACE = frozenset({"mul_", "__imul__", "multiply_", "div_", "__itruediv__", "divide_", "neg_"})
_SUMS_IN_PLACE = frozenset({"add_", "__iadd__", "sub_", "__isub__"})
_ASSIGNMENTS_IN_PLACE = frozenset({"__setitem__", "masked_fill_", "index_fill_", "index_copy_", "index_put_"})
"""Functions that overwrite some elements of a tensor by others, so that a second call changes nothing."""

_RESHAPING_IN_PLACE = frozenset(
    {"transpose_", "t_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "resize_as_", "as_strided_"}
)
_STACKS = functions_named("stack", "hstack", "vstack", "dstack")
_SUMS = functions_named("sum", "mean")

Arguments = list[tuple[Tensor, FollowedOutput]]
"""Arguments of a function call that were computed from attention outputs, each with how it was computed."""


def hold(output: AttentionOutput, tensor: Tensor) -> Tensor:
    """Start to follow an attention output through later functions, and return its `tensor`. Inside torch's
    `F.multi_head_attention_forward`, where the layout of the heads is known, report the attention call to the
    interceptors at once. Then return the tensor with their changes.
    """
    trace = current_trace()
    heads = trace.torch_attention_heads
    if heads is None:
        trace.attention.pending.append(output)
        trace.attention.may_change |= output.may_change
        followed = FollowedOutput(output, axes_of(tensor.shape), lambda other: other)
        trace.attention.outputs.set(tensor, [*_followed(tensor), followed])
        return tensor
    *others, queries, value = range(tensor.ndim)
    axis_of_heads = (Factor(others[-1], 1, heads),) if heads > 1 else ()
    output.establish(HeadLayout(tuple(tensor.shape), value, (queries,), axis_of_heads))
    changed = output.changed()
    output.finish()
    return tensor if changed is None else changed


def follow_reported(out: Tensor, axes: OutputAxes, origins: CallOrigins, number: int | None) -> None:
    """Follow the output of an attention call that was already reported to the interceptors. The report is withdrawn if
    the model adds the output to another one, or reorders its heads, before the output projection. `origins` are the
    sources of the queries, keys and values. `number` is the number of the attention call within the call of the model,
    as recorded for a plan; None if it is not recorded.
    """
    trace = current_trace()
    trace.lineage.set_attended(out, origins)
    others = [axis for axis in range(1, out.ndim) if axis not in (axes.value, *axes.queries)]
    axis_of_heads = others[0] if len(others) == 1 else None
    output = AttentionOutput(None, out, axes, trace.module_calls[:], origins, axis_of_heads, number)
    trace.attention.outputs.set(out, [FollowedOutput(output, axes_of(out.shape), None)])


def follow_log_sums(out: Tensor, log_sums: list[Tensor]) -> None:
    """Follow the further results of the attention call that has computed the output `out`, such as the log-sum-exp of
    its scores. The call is excluded from the results if the model multiplies the output with a function of these, as
    for sinks: the weights of the call are then not those of the heads.
    """
    source = current_trace().lineage.mark(log_sums)
    for followed in _followed(out):
        followed.output.log_sums |= source


def lose_outputs() -> None:
    """Record that the attention outputs computed so far cannot be followed any further. This function is called inside
    function transforms such as `torch.vmap`, where the model works with other tensor objects.
    """
    for output in current_trace().attention.pending:
        output.is_lost = True


def refuse_multiplied(*tensors: Tensor) -> None:
    """Exclude attention outputs from the results if they are among `tensors`, the inputs of another attention call:
    they are then only factors in the computation of that call. Outputs whose heads are already established are not
    excluded.
    """
    for tensor in tensors:
        for followed in _followed(tensor):
            if not followed.output.is_established:
                followed.output.refuse(MULTIPLIED)


def report_established() -> None:
    """Report to the interceptors all attention calls whose axis of heads is now established. A call that may be only
    one of several heads of a module is not reported before the module ends.
    """
    attention = current_trace().attention
    attention.pending = [
        output
        for output in attention.pending
        if output.may_be_one_head or not (output.is_established and output.finish())
    ]


def _followed(tensor: Tensor) -> list[FollowedOutput]:
    return current_trace().attention.outputs.get(tensor) or []


# -- before a function ------------------------------------------------------------------------------------------------


def before_function(call: FunctionCall) -> FunctionCall:
    """Process the arguments of a torch function before the model calls it. If an argument is an attention output, and
    the function does more than rearrange this output, record how the function uses it: a linear map, for example, shows
    which axes are the heads. Return the call. If an interceptor changes the attention output, the changed tensor
    replaces the output in the arguments of the returned call.
    """
    if not current_trace().attention.outputs or (call.function in REARRANGEMENTS and not _loses_changes(call)):
        return call
    _before_overwriting(call)
    if call.function in CONCATENATIONS:
        _refuse_concatenated_heads(call)
    for tensor in call.tensors:
        for followed in _followed(tensor):
            if followed.output.log_sums and _depends_on_log_sums(call, followed.output):
                followed.output.refuse(RESCALED)
            features = _features_of(call, tensor, followed)
            if features is not None and call.function not in CONCATENATIONS:
                followed.output.on_projected([other for other in call.tensors if is_parameter(other)])
            if _is_multiplied(call, tensor, followed) and not followed.output.is_established:
                followed.output.refuse(MULTIPLIED)
            elif features is not None and not followed.output.is_reported:
                _establish(followed, features)
            elif features is not None and followed.output.may_change and not followed.is_linear:
                followed.output.refuse(NOT_LINEAR)  # an earlier use of the output was linear
            changed = followed.changed()
            if changed is not None:
                _follow_changed(changed, tensor, followed)
                call = call.replaced(tensor, changed)
    return call


def _depends_on_log_sums(call: FunctionCall, output: AttentionOutput) -> bool:
    """Return True if an argument of a function call, other than an attention output, depends on the log-sum-exp of the
    scores of this attention output.
    """
    trace = current_trace()
    others = [tensor for tensor in call.tensors if not _followed(tensor)]
    return any(trace.lineage.origin(other, trace.module_calls).sources & output.log_sums for other in others)


def _loses_changes(call: FunctionCall) -> bool:
    """Return True if a function such as `reshape` rearranges an attention output in a way that cannot be followed. An
    interceptor must then change the output before this call.
    """
    if call.function not in VIEWS or not call.tensors:
        return False
    tensor = call.tensors[0]
    return any(each.output.may_change and has_unknown_axes(call, each.axes, tensor) for each in _followed(tensor))


def _before_overwriting(call: FunctionCall) -> None:
    """If a function call is about to overwrite an attention output in place, first write the interceptors' changes into
    this output, since the model keeps using the same tensor. If the model may also use a view of a part of the output's
    memory, exclude the output from the results.
    """
    written, outputs = overwritten_tensor(call), current_trace().attention.outputs
    for followed in [] if written is None else list(_followed(written)):
        assert written is not None
        followed.output.on_overwritten(written)
        if getattr(call.function, "__name__", "") in _RESHAPING_IN_PLACE:
            followed.output.refuse(HEADS_UNKNOWN)
            continue
        changed = followed.changed()
        if changed is None:
            continue
        aliases = [(other, records) for other, records in outputs.items() if share_memory(other, written)]
        if any(other.numel() != written.numel() for other, _ in aliases):
            followed.output.refuse(CHANGED_IN_PLACE)
            continue
        with current_trace().paused():
            written.copy_(changed)
        for other, records in aliases:
            is_changed = [each.output is followed.output for each in records]
            pairs = zip(records, is_changed, strict=True)
            outputs.set(other, [replace(each, rearranged=None) if now else each for each, now in pairs])


def _refuse_concatenated_heads(call: FunctionCall) -> None:
    """Exclude attention outputs from the results if a function call concatenates them as features and each may be a
    single head or a group of heads. They may be heads if they are parts of one output, or outputs of several attention
    calls in one module call. Also exclude an output that was already reported if parts of it are concatenated along its
    heads, since the order of the heads may then change.
    """
    outputs: list[AttentionOutput] = []
    reported: list[tuple[AttentionOutput, bool]] = []
    for tensor in call.tensors:
        for followed in _followed(tensor):
            output = followed.output
            if output.axis_of_heads is not None:
                joined = followed.axes[_axis_of(call, tensor.ndim)]
                joins_heads = any(factor.axis == output.axis_of_heads for factor in joined)
                if any(each is output and (joins_heads or other) for each, other in reported):
                    output.refuse(HEADS_UNKNOWN)
                reported.append((output, joins_heads))
            if output.is_reported or _features_of(call, tensor, followed) is None:
                continue
            others = [each for each in outputs if each is output or output.is_other_head_of(each, as_features=True)]
            for each in [output, *others] if others else ():
                each.refuse(HEADS_SEPARATE)
            outputs.append(output)


def _features_of(call: FunctionCall, tensor: Tensor, followed: FollowedOutput) -> list[int] | None:
    """Return the axes of `tensor` that a function call uses as the features of all heads, such as the axis that a
    linear layer maps. Return None if the function uses no axes in this way.
    """
    output, is_map = followed.output, call.function is F.linear or call.function in CONVOLUTIONS
    if call.function in CONCATENATIONS:
        features = [_axis_of(call, tensor.ndim)]
    else:
        product = product_with(call, tensor)
        if product is None:
            return None
        others = [operand for operand in product.operands if operand is not tensor]
        if not is_map and not all(is_parameter(other) or other.ndim == 2 < tensor.ndim for other in others):
            return None
        if product.shared_by_all:  # another map for each head
            return None
        features = [axis for axis, label in enumerate(product.labels_of(tensor)) if label in product.summed]
    origins = {factor.axis for axis in features for factor in followed.axes[axis]}
    has_one_value = output.shape[output.axes.value] == 1 and (is_map or features == [tensor.ndim - 1])
    is_of_values = output.axes.value in origins or has_one_value
    is_of_queries = call.function not in CONCATENATIONS and bool(origins.intersection(output.axes.queries))
    return features if is_of_values or is_of_queries else None


def _is_multiplied(call: FunctionCall, tensor: Tensor, followed: FollowedOutput) -> bool:
    """Return True if a function multiplies an attention output with another activation, and sums over the output's
    queries or values. Products of several matrices of attention weights are an example.
    """
    product, output = product_with(call, tensor), followed.output
    if product is None or any(map(is_parameter, product.operands)):
        return False
    summed = [
        {factor.axis for factor in factors}
        for label, factors in zip(product.labels_of(tensor), followed.axes, strict=True)
        if label in product.summed
    ]
    return any(origins.intersection(output.axes.queries) or origins == {output.axes.value} for origins in summed)


def _establish(followed: FollowedOutput, features: list[int]) -> None:
    """Set the layout of the heads of an attention output, since the model has just used the axes `features` of a tensor
    as the features of all heads. `followed` states how this tensor was computed from the output. If the layout is
    contradictory or unknown, exclude the attention call from the results.
    """
    output, layout, pending = followed.output, _layout_of(followed, features), current_trace().attention.pending
    others = [each for each in pending if each is not output]
    factors = [factor for axis in features for factor in followed.axes[axis]]
    if output.may_change and not followed.is_linear:
        output.refuse(NOT_LINEAR)
    elif layout is not None:
        further = [axis for axis in range(1, len(followed.axes)) if axis not in features]
        of_further = [{factor.axis for factor in followed.axes[axis]} for axis in further]
        # Another axis may be heads that are merged with the values later: it has no queries.
        may_hide = layout.head_count == 1 and any(each and each.isdisjoint(output.axes.queries) for each in of_further)
        output.establish(layout, may_hide_heads=may_hide or _is_part(followed, layout))
        others = [each for each in others if output.is_other_head_of(each, as_features=False)]
        for each in [output, *others] if others else ():
            each.refuse(HEADS_SEPARATE)
    elif output.is_established and _is_joined(output, factors):
        return  # the function that joined it with other features has shown the layout
    elif _may_contain_heads(followed, features):
        output.refuse(HEADS_SEPARATE if any(map(output.is_other_call_of, others)) else HEADS_UNKNOWN)
    else:
        output.refuse(NOT_OVER_KEYS if output.axes.queries else NO_QUERIES)


def _layout_of(followed: FollowedOutput, features: list[int]) -> HeadLayout | None:
    output = followed.output
    return merged_layout(followed.axes, features, output.shape, output.axes.value, output.axes.queries)


def _is_joined(output: AttentionOutput, factors: list[Factor]) -> bool:
    """Return True if axes of a tensor contain the values of an attention output together with further features, which
    were concatenated with the values. `factors` are these axes, as parts of the output's axes. Return False if the
    model has since merged them with another axis, which may be the heads.
    """
    value = output.axes.value
    of_others = {factor.axis for factor in factors} - {value, OTHER}
    of_values = prod(factor.size for factor in factors if factor.axis == value)
    return of_values > output.shape[value] and of_others == output.established_axes


def _may_contain_heads(followed: FollowedOutput, features: list[int]) -> bool:
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


def _is_part(followed: FollowedOutput, layout: HeadLayout | None = None) -> bool:
    """Return True if a tensor contains all values of an attention output, but only some elements of another axis, which
    may be the heads. Axes of queries are never the heads. If `layout` states that another axis is the heads, the first
    axis is not the heads.
    """
    output, factors = followed.output, [factor for factors in followed.axes for factor in factors]
    if any(factor.axis == OTHER for factor in factors):
        return False
    covered = [prod(factor.size for factor in factors if factor.axis == axis) for axis in range(len(output.shape))]
    first = 0 if layout is None or layout.head_count == 1 else 1
    lacks = [axis for axis in range(first, len(covered)) if covered[axis] < output.shape[axis]]
    return output.axes.value not in lacks and not set(lacks) <= set(output.axes.queries)


# -- after a function -------------------------------------------------------------------------------------------------


def after_function(call: FunctionCall, result: Any) -> None:
    """Follow attention outputs through a function call of the model. If the `result` contains elements of an output,
    perhaps rearranged or scaled, it is recorded as computed from that output.
    """
    outputs = current_trace().attention.outputs
    if not outputs or call.function in CONSTANTS:
        return
    result, written = written_by(call, result), overwritten_tensor(call)
    if isinstance(result, Tensor) and result.dtype == torch.bool:  # a comparison
        return
    arguments = [
        (argument, followed)
        for position, argument in enumerate(call.tensors)
        if not position or call.function not in VIEWS  # `expand_as` uses only the shape of another tensor
        for followed in _followed(argument)
    ]
    _refuse_added(call, arguments)
    by_result: dict[int, tuple[Tensor, list[FollowedOutput]]] = {}
    for argument, followed in arguments:
        output, tensors = followed.output, _axes_after(call, followed, argument, result)
        is_in_another = written is not None and written is not argument  # perhaps in a view of it
        output.is_lost |= is_in_another or (not tensors and argument.numel() > 0)
        loses_values = _loses(output.axes.value, followed, tensors)
        if call.function in ASSIGNMENT and loses_values:
            continue
        loses_heads = output.axis_of_heads is not None and _loses(output.axis_of_heads, followed, tensors)
        if (loses_heads or (loses_values and not output.is_reported)) and _may_move(call, argument, tensors):
            output.refuse(HEADS_UNKNOWN)
        is_linear = bool(tensors) and followed.is_linear and _keeps_factors(call, output, arguments, result)
        for index, (tensor, axes) in enumerate(tensors):
            number = index if isinstance(result, list | tuple) else None
            rearranged = _rearranged(call, argument, followed, number)
            after = FollowedOutput(output, axes, rearranged, is_linear, call.function in ASSIGNMENT)
            by_result.setdefault(id(tensor), (tensor, []))[1].append(after)
            axis = merged_axis(axes, output.axes.value)
            if axis is not None:  # the values are merged with another axis, which is probably the heads
                layout = _layout_of(after, [axis])
                output.is_lost |= layout is None
                output.merged = layout or output.merged
    for tensor, all_followed in by_result.values():
        outputs.set(tensor, all_followed)


def _loses(axis: int, followed: FollowedOutput, tensors: list[tuple[Tensor, Axes]]) -> bool:
    """Return True if a function call removes an `axis` of an attention output: its argument, described by `followed`,
    has the axis, and none of `tensors`, the results that can be followed, has it. Return False if no result can be
    followed.
    """

    def is_in(axes: Axes) -> bool:
        return any(factor.axis == axis for factors in axes for factor in factors)

    return bool(tensors) and is_in(followed.axes) and not any(is_in(axes) for _, axes in tensors)


def _may_move(call: FunctionCall, argument: Tensor, tensors: list[tuple[Tensor, Axes]]) -> bool:
    """Return True if a function moves elements along an axis, or returns a tensor of the same shape with a possibly
    changed order.
    """
    is_same_shape = all(tensor.shape == argument.shape for tensor, _ in tensors)
    return moves_elements(call) or (is_same_shape and call.function not in VIEWS and not may_project(call))


def _keeps_factors(call: FunctionCall, output: AttentionOutput, arguments: Arguments, result: Any) -> bool:
    """Return True if scaling an attention output by a factor scales the `result` of a function call by the same factor.
    Outputs of the same layer among the `arguments` are scaled together. Return True without a test if no interceptor
    may change the output.
    """
    if not output.may_change or call.function in REARRANGEMENTS | CONCATENATIONS:
        return True
    if call.function in ASSIGNMENT and all(argument is not call.args[0] for argument, _ in arguments):
        return True
    return _is_linear(
        call, [(argument, each.output) for argument, each in arguments if each.output.is_of_layer(output)], result
    )


def _rearranged(
    call: FunctionCall, argument: Tensor, followed: FollowedOutput, number: int | None
) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes a result of this call from the original attention output. `number` is the index
    of the result; None if there is only one. Return None if some function on the way from the output did more than
    rearrange elements, or if no interceptor may change the output.
    """
    before = followed.rearranged
    if before is None or not followed.output.may_change or call.function not in REARRANGEMENTS:
        return None
    repeat = call.as_function_of(argument)

    def rearranged(tensor: Tensor) -> Tensor:
        result = repeat(before(tensor))
        after: Tensor = result if number is None else result[number]
        return after

    return rearranged


def _axes_after(
    call: FunctionCall, followed: FollowedOutput, argument: Tensor, result: Any
) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that contain the values of an attention output. Each comes
    with its axes, written as parts of the output's axes. `argument` is the argument that was computed from the output.

    An axis along which the function may move or mix elements is marked as unrelated to the output. Axes of queries are
    never marked, since the output projection is the same for all queries. If the function selects by a tensor, numbers
    in the tensor decide this.
    """
    current_trace().lineage.depends_on_indices |= any(each.dtype in INTEGERS for each in call.tensors)
    queries = set(followed.output.axes.queries)
    if call.function in CONCATENATIONS and result.ndim == argument.ndim:
        return [(result, _concatenated(followed.axes, _axis_of(call, argument.ndim), result))]
    if call.function is torch.stack and result.ndim == argument.ndim + 1:
        axis = _axis_of(call, result.ndim)
        return [(result, (*followed.axes[:axis], other_axis(result.shape[axis]), *followed.axes[axis:]))]
    if call.function in PRODUCTS:
        product = product_with(call, argument)
        if product is None:
            return []
        axes = axes_of_product(product, argument, followed.axes, result)
        has_values = any(factor.axis == followed.output.axes.value for factors in axes for factor in factors)
        return [(result, axes)] if has_values else []
    known = axes_after(call, followed.axes, argument, result)
    if call.function in VIEWS and not moves_elements(call):
        return known

    def axes_in_place(tensor: Tensor, axes: Axes) -> Axes:
        is_one = isinstance(result, Tensor)
        number = None if is_one else next(index for index, each in enumerate(result) if each is tensor)
        return tuple(
            factors
            if {factor.axis for factor in factors} <= queries | {OTHER}
            or keeps_places(call, argument, number, axis - tensor.ndim)
            else other_axis(tensor.shape[axis])
            for axis, factors in enumerate(axes)
        )

    return [(tensor, axes_in_place(tensor, axes)) for tensor, axes in known]


def _concatenated(axes: Axes, axis: int, result: Tensor) -> Axes:
    """Return the axes of the `result` of a concatenation along `axis`, from the `axes` of one of the concatenated
    tensors. The result has the same kind of elements along `axis` (queries, heads or sequences), but more of them.
    """
    origins, size = {factor.axis for factor in axes[axis]}, result.shape[axis]
    longer = (Factor(origins.pop(), 1, size),) if len(origins) == 1 and size > 1 else other_axis(size)
    return (*axes[:axis], longer, *axes[axis + 1 :])


def _axis_of(call: FunctionCall, axes: int) -> int:
    """Return the axis, counted from 0, along which a function call concatenates or stacks tensors. `axes` is the number
    of axes of the result.
    """
    dim: int = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis", 0))
    return dim % axes


def _refuse_added(call: FunctionCall, arguments: Arguments) -> None:
    """Exclude attention outputs from the results if a function call adds them to each other, or selects elements from
    several of them, before the output projection. Their heads then share columns of the projection, so that no head can
    be observed alone. The same rule applies to parts of one output.
    """
    is_in_parts = call.function in ASSIGNMENT and all(
        each.is_written and any(factor.axis == OTHER for factors in each.axes for factor in factors)
        for tensor, each in arguments
        if tensor is call.args[0]
    )
    are_apart = is_in_parts or call.function in CONCATENATIONS | _STACKS | PRODUCTS
    for (tensor, followed), (other_tensor, other) in combinations(arguments, 2):
        is_projected = followed.output.is_projected or other.output.is_projected
        if tensor is other_tensor:
            are_added = not is_projected and _sums_stack(call, tensor, followed)
        else:
            is_same = followed.output is other.output
            are_parts = is_same and not is_projected and (_is_part(followed) or _is_part(other))
            are_added = not are_apart and (are_parts or followed.output.is_other_softmax_of(other.output))
        if are_added:
            followed.output.refuse(ADDED)
            other.output.refuse(ADDED)


def _sums_stack(call: FunctionCall, tensor: Tensor, followed: FollowedOutput) -> bool:
    """Return True if a function call sums `tensor` over an axis along which several tensors were joined, as by
    `torch.stack`, and keeps the axis of the values. `followed` states how `tensor` was computed from an attention
    output, which does not have the joining axis itself.
    """
    if call.function in _SUMS:
        dims = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis"))
        dims = range(tensor.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
        summed = {dim % tensor.ndim for dim in dims}
    else:
        product = product_with(call, tensor)
        if product is None:
            return False
        summed = {axis for axis, label in enumerate(product.labels_of(tensor)) if label in product.summed}
    of_sum = {factor.axis for axis in summed for factor in followed.axes[axis]}
    kept = {factor.axis for axis in range(tensor.ndim) if axis not in summed for factor in followed.axes[axis]}
    return OTHER in of_sum and followed.output.axes.value in kept


def _is_linear(call: FunctionCall, outputs: list[tuple[Tensor, AttentionOutput]], result: Any) -> bool:
    """Return True if scaling the attention outputs among the arguments scales the `result` of a function call by the
    same factor. To test this, the call is repeated with the outputs times -2. Norms, logarithms and sums with other
    tensors are not linear. Return False if the test is not possible. `outputs` has pairs: an argument of the call, and
    the attention output from which it was computed.
    """
    tensors, name = [tensor for tensor, _ in outputs], getattr(call.function, "__name__", "")
    others = [other for other in call.tensors if not any(other is tensor for tensor in tensors)]
    if any(_depends_on(other, *pair) for other in others for pair in outputs):
        return False
    if name in DROPOUT_NAMES:
        return True
    if any(result is tensor for tensor in tensors) and name not in _ASSIGNMENTS_IN_PLACE:
        is_sum = name in _SUMS_IN_PLACE and not others and len({id(tensor) for tensor in tensors}) > 1
        return is_sum or (name in _PRODUCTS_IN_PLACE and len({id(tensor) for tensor in tensors}) == 1)
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
    lineage, module_calls = current_trace().lineage, current_trace().module_calls
    before = output.origins.q.sources | output.origins.v.sources
    of_output = lineage.origin(tensor, module_calls).sources & ~before & lineage.mixing
    return bool(lineage.origin(other, module_calls).sources & of_output)


# -- modules ----------------------------------------------------------------------------------------------------------


def on_module_end(result: Any) -> Any:
    """Report to the interceptors the attention calls of modules that have ended. Return the `result` of the module that
    has just ended, with the interceptors' changes of attention outputs in it; None if nothing changes.
    """
    trace = current_trace()
    attention, is_last = trace.attention, not trace.module_calls
    if not attention.pending and not attention.outputs and not attention.unchanged:
        return None
    changed = with_changes(result, is_last=is_last)
    running = {id(module_call) for module_call in trace.module_calls}
    attention.pending = [
        output
        for output in attention.pending
        if id(output.module_calls[-1]) in running or not output.finish(is_last=is_last)
    ]
    if is_last:
        for module_calls in attention.unchanged.values():
            trace.report_unreadable(module_calls, NEVER_CHANGED)
        attention.unchanged.clear()
    return changed


def with_changes(tensors: Any, *, is_last: bool = False) -> Any:
    """Return `tensors`, the arguments or the result of a module, with the interceptors' changes in the attention
    outputs among them. Before the end of the model, only outputs whose heads are merged with the values are changed.
    Return None if nothing changes, and for tensors in a container that contains itself.

    Args:
        tensors: tensors in tuples, lists, dicts or other containers.
        is_last: True at the end of the model, after which nothing more can be learnt about an output.
    """
    if not current_trace().attention.may_change or are_nested_deeply((tensors,)):
        return None

    def changed_leaf(tensor: Tensor) -> Tensor:
        for followed in _followed(tensor):
            is_merged = merged_axis(followed.axes, followed.output.axes.value) is not None
            changed = followed.changed() if is_merged or is_last else None
            if changed is not None:
                _follow_changed(changed, tensor, followed)
                return changed
        return tensor

    leaves, structure = pytree.tree_flatten(tensors)
    changed = [changed_leaf(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_unchanged = all(new is old for new, old in zip(changed, leaves, strict=True))
    return None if is_unchanged else pytree.tree_unflatten(changed, structure)


def _follow_changed(changed: Tensor, tensor: Tensor, followed: FollowedOutput) -> None:
    """Record that `changed`, which is `tensor` with the interceptors' changes, was computed from the same attention
    output as `tensor`.
    """
    trace = current_trace()
    trace.attention.outputs.set(changed, [FollowedOutput(followed.output, followed.axes, None, followed.is_linear)])
    trace.on_replaced(changed, tensor)
    trace.lineage.set(changed, trace.lineage.origin(tensor, trace.module_calls))
