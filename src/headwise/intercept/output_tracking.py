"""Attention outputs, followed by the identity of tensors from attention to their use, such as the output projection."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from headwise.intercept.attention_output import AttentionOutput
from headwise.intercept.attention_source import OutputAxes
from headwise.intercept.axes import VIEWS, Factor, axes_of, has_unknown_axes
from headwise.intercept.contractions import is_parameter
from headwise.intercept.element_places import ASSIGNMENT, written_by
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.head_layout import HeadLayout, merged_axis
from headwise.intercept.in_place_changes import overwritten_tensor
from headwise.intercept.joined_outputs import refuse_added, refuse_concatenated_heads
from headwise.intercept.module_call import report_unreadable
from headwise.intercept.origin import CallOrigins
from headwise.intercept.output_step import REARRANGEMENTS, Arguments, OutputStep, take_note_of_merged_axis
from headwise.intercept.output_use import (
    FollowedOutput,
    features_of,
    is_joined,
    is_multiplied,
    is_part,
    layout_of,
    may_contain_heads,
    may_hide_heads,
)
from headwise.intercept.overwritten_outputs import before_overwriting
from headwise.intercept.plans import Step
from headwise.intercept.refusals import (
    HEADS_SEPARATE,
    HEADS_UNKNOWN,
    MULTIPLIED,
    NEVER_CHANGED,
    NO_QUERIES,
    NOT_LINEAR,
    NOT_OVER_KEYS,
)
from headwise.intercept.score_products import CONCATENATIONS
from headwise.intercept.session import current_session
from headwise.intercept.source_rules import CONSTANTS


def hold(output: AttentionOutput, tensor: Tensor) -> Tensor:
    """Start to follow an attention output through later functions, and return its `tensor`. Inside torch's
    `F.multi_head_attention_forward`, where the layout of the heads is known, report the attention call to the
    interceptors at once. Then return the tensor with their changes.
    """
    session = current_session()
    heads = session.torch_attention_heads
    if heads is None:
        session.attention.pending.append(output)
        session.attention.may_change |= output.may_change
        followed = FollowedOutput(output, axes_of(tensor.shape), lambda other: other)
        session.attention.outputs.set(tensor, [*(session.attention.outputs.get(tensor) or ()), followed])
        return tensor
    *others, queries, value = range(tensor.ndim)
    axis_of_heads = (Factor(others[-1], 1, heads),) if heads > 1 else ()
    output.establish(HeadLayout(tuple(tensor.shape), value, (queries,), axis_of_heads))
    changed = output.changed()
    output.finish()
    return tensor if changed is None else changed


def follow_reported(out: Tensor, axes: OutputAxes, origins: CallOrigins, step: Step) -> None:
    """Follow the output of an attention call that was already reported to the interceptors. The report is withdrawn if
    the model adds the output to another one, or reorders its heads, before the output projection. `origins` are the
    sources of the queries, keys and values, and `step` is the call as it is recorded for a plan.
    """
    session = current_session()
    session.lineage.set_attended(out, origins)
    others = [axis for axis in range(1, out.ndim) if axis not in (axes.value, *axes.queries)]
    axis_of_heads = others[0] if len(others) == 1 else None
    output = AttentionOutput(None, out, axes, session.module_calls[:], origins, axis_of_heads, step.number)
    session.attention.outputs.set(out, [FollowedOutput(output, axes_of(out.shape), None)])


def before_function(call: FunctionCall) -> FunctionCall:
    """Process the arguments of a torch function before the model calls it. If an argument is an attention output, and
    the function does more than rearrange this output, record how the function uses it: a linear map, for example, shows
    which axes are the heads. Return the call. If an interceptor changes the attention output, the changed tensor
    replaces the output in the arguments of the returned call.
    """
    session = current_session()
    if not session.attention.outputs or (call.function in REARRANGEMENTS and not _loses_changes(call)):
        return call
    before_overwriting(call)
    if call.function in CONCATENATIONS:
        refuse_concatenated_heads(call)
    for tensor in call.tensors:
        for followed in session.attention.outputs.get(tensor) or ():
            features = features_of(call, tensor, followed)
            if features is not None and call.function not in CONCATENATIONS:
                followed.output.on_projected([other for other in call.tensors if is_parameter(other)])
            if is_multiplied(call, tensor, followed) and not followed.output.is_established:
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


def _loses_changes(call: FunctionCall) -> bool:
    """Return True if a function such as `reshape` rearranges an attention output in a way that cannot be followed. An
    interceptor must then change the output before this call.
    """
    if call.function not in VIEWS:
        return False
    tensor = call.tensors[0] if call.tensors else None
    all_followed = () if tensor is None else current_session().attention.outputs.get(tensor) or ()
    return tensor is not None and any(
        followed.output.may_change and has_unknown_axes(call, followed.axes, tensor) for followed in all_followed
    )


def lose_outputs() -> None:
    """Record that no attention output so far can be followed any further. This is called inside function transforms
    such as `torch.vmap`, where the model works with other tensor objects.
    """
    for output in current_session().attention.pending:
        output.is_lost = True


def refuse_multiplied(*tensors: Tensor) -> None:
    """Exclude from the results those attention outputs that are among `tensors`, the inputs of another attention call.
    Such an output is only a factor in the computation of that call, not the final output of a head. Outputs whose heads
    are already established are not excluded.
    """
    for tensor in tensors:
        for followed in current_session().attention.outputs.get(tensor) or ():
            if not followed.output.is_established:
                followed.output.refuse(MULTIPLIED)


def after_function(call: FunctionCall, result: Any) -> None:
    """Follow attention outputs through a function call of the model. If the `result` contains elements of an output,
    perhaps rearranged or scaled, it is recorded as computed from that output.
    """
    session = current_session()
    if not session.attention.outputs or call.function in CONSTANTS:
        return
    result, written = written_by(call, result), overwritten_tensor(call)
    if isinstance(result, Tensor) and result.dtype == torch.bool:  # a comparison
        return
    arguments = _followed_arguments(call)
    if arguments:
        refuse_added(call, arguments)
    by_result: dict[int, tuple[Tensor, list[FollowedOutput]]] = {}
    for argument, followed in arguments:
        step = OutputStep.of(call, argument, followed, result)
        is_in_another = written is not None and written is not argument  # perhaps in a view of it
        followed.output.is_lost |= is_in_another or step.is_last
        if call.function in ASSIGNMENT and step.loses_values:
            continue
        if step.moves_heads:
            followed.output.refuse(HEADS_UNKNOWN)
        for tensor, after in step.followed_results(arguments):
            by_result.setdefault(id(tensor), (tensor, []))[1].append(after)
            take_note_of_merged_axis(after)
    for tensor, all_followed in by_result.values():
        session.attention.outputs.set(tensor, all_followed)


def _followed_arguments(call: FunctionCall) -> Arguments:
    """Return the arguments of a function call that were computed from attention outputs, each with a record of how it
    was computed.
    """
    return [
        (argument, followed)
        for position, argument in enumerate(call.tensors)
        if not position or call.function not in VIEWS  # `expand_as` uses only the shape of another tensor
        for followed in current_session().attention.outputs.get(argument) or ()
    ]


def report_established() -> None:
    """Report to the interceptors all attention calls whose axis of heads is established. Calls that may be one of
    several heads of a module are not reported before the module ends.
    """
    session = current_session()
    session.attention.pending = [
        output
        for output in session.attention.pending
        if output.may_be_one_head or not (output.is_established and output.finish())
    ]


def on_module_end(result: Any) -> Any:
    """Report to the interceptors the attention calls of modules that have ended. Return the `result` of the module that
    has just ended, with the interceptors' changes of attention outputs in it; None if nothing changes.
    """
    session = current_session()
    attention, is_last = session.attention, not session.module_calls
    if not attention.pending and not attention.outputs and not attention.unchanged:
        return None
    changed = with_changes(result, is_last=is_last)
    running = {id(module_call) for module_call in session.module_calls}
    attention.pending = [
        output
        for output in attention.pending
        if id(output.module_calls[-1]) in running or not output.finish(is_last=is_last)
    ]
    if is_last:
        for module_calls in attention.unchanged.values():
            report_unreadable(module_calls, NEVER_CHANGED)
        attention.unchanged.clear()
    return changed


def with_changes(tensors: Any, *, is_last: bool = False) -> Any:
    """Return `tensors`, the arguments or the result of a module, with the interceptors' changes in the attention
    outputs among them. Before the end of the model, only outputs whose heads are merged with the values are changed.
    Return None if nothing changes.

    Args:
        tensors: tensors in tuples, lists, dicts or other containers.
        is_last: True at the end of the model, after which nothing more can be learnt about an output.
    """
    if not current_session().attention.may_change:
        return None
    leaves, structure = pytree.tree_flatten(tensors)
    changed = [_changed_leaf(leaf, is_last) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_unchanged = all(new is old for new, old in zip(changed, leaves, strict=True))
    return None if is_unchanged else pytree.tree_unflatten(changed, structure)


def _changed_leaf(tensor: Tensor, is_last: bool) -> Tensor:
    """Return `tensor` with the interceptors' changes if it is an attention output whose heads are merged with the
    values. At the end of the model (`is_last`), also change outputs whose heads are not merged. Return other tensors
    unchanged.
    """
    for followed in current_session().attention.outputs.get(tensor) or ():
        is_merged = merged_axis(followed.axes, followed.output.axes.value) is not None
        changed: Tensor | None = followed.changed() if is_merged or is_last else None
        if changed is not None:
            _follow_changed(changed, tensor, followed)
            return changed
    return tensor


def _establish(followed: FollowedOutput, features: list[int]) -> None:
    """Set the layout of the heads of an attention output, since the model has just used the axes `features` of a tensor
    as the features of all heads. `followed` states how this tensor was computed from the output. If the layout is
    contradictory or unknown, exclude the attention call from the results.
    """
    output, layout = followed.output, layout_of(followed, features)
    if output.may_change and not followed.is_linear:
        output.refuse(NOT_LINEAR)
    elif layout is not None:
        may_hide = layout.head_count == 1 and may_hide_heads(followed, features)
        output.establish(layout, may_hide_heads=may_hide or is_part(followed, layout))
        _refuse_separate_heads(output)
    elif output.is_established and is_joined(followed, features):
        return  # the function that joined it with other features has shown the layout
    elif may_contain_heads(followed, features):
        others = [each for each in current_session().attention.pending if each is not output]
        output.refuse(HEADS_SEPARATE if any(map(output.is_other_call_of, others)) else HEADS_UNKNOWN)
    else:
        output.refuse(NOT_OVER_KEYS if output.axes.queries else NO_QUERIES)


def _refuse_separate_heads(output: AttentionOutput) -> None:
    """Exclude an attention output from the results if other outputs of the same module may be further heads of the same
    layer. Exclude these as well.
    """
    pending = current_session().attention.pending
    others = [each for each in pending if each is not output and output.is_other_head_of(each, as_features=False)]
    for each in [output, *others] if others else ():
        each.refuse(HEADS_SEPARATE)


def _follow_changed(changed: Tensor, tensor: Tensor, followed: FollowedOutput) -> None:
    """Record that `changed` is `tensor` with the interceptors' changes, so that it is followed as computed from the
    same attention output.
    """
    session = current_session()
    session.attention.outputs.set(changed, [FollowedOutput(followed.output, followed.axes, None, followed.is_linear)])
    if session.module_calls and session.module_calls[0].recording is not None:
        session.module_calls[0].recording.on_replaced(changed, tensor)
    session.lineage.set(changed, session.lineage.origin(tensor, session.module_calls))
