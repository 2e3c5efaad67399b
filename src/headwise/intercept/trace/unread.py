"""Computations that may be attention, but are not followed, and reasons for which attention is left out."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.trace.functions import (
    ADDED_PRODUCTS,
    CONVOLUTIONS,
    PRODUCTS,
    Contraction,
    FunctionCall,
    Label,
    contraction_of,
    is_parameter,
)
from headwise.intercept.trace.modules import RunningModule
from headwise.intercept.trace.refusals import NORMALISED, NOT_FOLLOWED, NOT_NORMALISED
from headwise.intercept.trace.scores import compares_activations, compares_two
from headwise.intercept.trace.state import current_trace
from headwise.intercept.trace.weights import weights_of
from headwise.intercept.unreadable_tensors import has_no_numbers, has_usual_values

_CONVERSIONS: frozenset[Any] = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
"""Functions that make a tensor of numbers that other functions than torch's may have computed."""

_MAPS = ADDED_PRODUCTS | CONVOLUTIONS | {F.linear}


def report_averages(call: FunctionCall) -> None:
    """Report the running module to the interceptors if a function call computes an average by weights that are not
    followed as attention weights. Such a call multiplies two activations and sums over an axis. One of the two is
    normalised along this axis: it has no negative number, and its sums are 1, or 0 if everything is hidden. If it is a
    product of queries and keys that has no negative number, the call is reported even if nothing is normalised.

    An average over features of the same token, such as one over experts, is not reported.
    """
    if call.function not in PRODUCTS or has_no_numbers():
        return
    contraction = contraction_of(call.function, call.args, call.kwargs)
    if contraction is None or len(contraction.operands) != 2 or any(map(is_parameter, contraction.operands)):
        return
    if any(weights_of(operand) is not None or not _is_computed(operand) for operand in contraction.operands):
        return
    for operand, other in (contraction.operands, contraction.operands[::-1]):
        reason = _why_unread(contraction, operand, other)
        if reason is not None:
            current_trace().report_unreadable(current_trace().module_calls, reason)
            return


def _why_unread(contraction: Contraction, weights: Tensor, values: Tensor) -> str | None:
    """Return the reason why the product of `weights` and `values` may be attention that is not followed. Return None if
    the product does not look like attention.
    """
    labels, labels_of_values = contraction.labels_of(weights), contraction.labels_of(values)
    summed = [axis for axis, label in enumerate(labels) if label in contraction.summed and label in labels_of_values]
    sizes = zip(labels_of_values, values.shape, strict=True)
    has_own_axis = any(label not in labels and size > 1 for label, size in sizes)
    if (
        not is_projected(weights)
        or len(summed) != 1
        or not has_own_axis
        or not has_usual_values(weights)
        or not weights.is_floating_point()
    ):
        return None
    (axis,) = summed
    is_of_scores = compares_activations(weights, axis)
    if weights.shape[axis] < 2 or not (is_of_scores or _may_be_of_tokens(contraction, weights, values, labels[axis])):
        return None
    numbers = weights.detach().nan_to_num()
    is_selection = not is_of_scores and bool(((numbers == 0) | (numbers == 1)).all())
    if is_selection or not bool((numbers >= 0).all()):
        return None
    sums = numbers.sum(axis)
    tolerance = torch.finfo(numbers.dtype).eps ** 0.5
    if bool((((sums - 1).abs() <= tolerance) | (sums.abs() <= tolerance)).all()):
        return NORMALISED
    return NOT_NORMALISED if is_of_scores and not compares_two(values) else None


def report_new_tensors(call: FunctionCall, result: Any) -> None:
    """Record in the running module if an argument of a function call may be the output of attention by functions that
    are not followed, such as scripted ones. A tensor counts as such an output if no followed function computed it, and
    the module had computed projections before whose sizes fit the queries, keys and values of an attention with this
    output. If the call itself is a projection, record its size.
    """
    owner = _owner()
    if owner.projected:
        report_new(owner, [*call.tensors, result] if call.function in _CONVERSIONS else call.tensors)
    if call.function in _MAPS and isinstance(result, Tensor) and _is_computed(call.tensors[0]):
        owner.projected.append(result.numel())


def report_new(owner: RunningModule, tensors: list[Any]) -> None:
    """Record in the module call `owner` if attention by functions that are not followed may have computed one of
    `tensors`. The module is reported at the end of the call, unless attention is found in it.
    """
    projected = owner.projected
    trace = current_trace()
    if all(map(trace.lineage.is_known, tensors)) or has_no_numbers() or trace.is_recomputing:
        return
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not trace.lineage.is_new(tensor, trace.module_calls):
            continue
        size = tensor.numel() if tensor.is_floating_point() and tensor.ndim > 1 else -1
        are_three = size in projected and (len(projected) >= 3 or 2 * size in projected)
        if are_three or 3 * size in projected:
            owner.unfollowed.append(NOT_FOLLOWED)


def _owner() -> RunningModule:
    """Return the innermost running call of a module that contains other modules, such as its projections."""
    trace = current_trace()
    for call in reversed(trace.module_calls):
        if call.module._modules:
            return call
    return trace.module_calls[-1]


def _is_computed(tensor: Tensor) -> bool:
    trace = current_trace()
    return bool(trace.lineage.origin(tensor, trace.module_calls).sources & ~trace.lineage.state)


def is_projected(tensor: Tensor) -> bool:
    """Return True if a tensor was computed from activations by a linear map or a product of activations. Return False
    for inputs, parameters and masks, and for tensors computed from positions alone.
    """
    trace = current_trace()
    origin = trace.lineage.origin(tensor, trace.module_calls)
    return _is_computed(tensor) and bool(origin.maps or origin.factors)


def _may_be_of_tokens(contraction: Contraction, weights: Tensor, values: Tensor, label: Label | None) -> bool:
    """Return True if the axis `label`, over which a product is summed, may be tokens. Return False if `values` are
    known to have features along this axis, such as experts. If `weights` are known to have features there, return True
    only if `values` are known to have tokens there.
    """
    of_weights, of_values = (_are_tokens(contraction, operand, label) for operand in (weights, values))
    return of_values is not False if of_weights is not False else of_values is True


def _are_tokens(contraction: Contraction, operand: Tensor, label: Label | None) -> bool | None:
    """Return True if elements along an axis of `operand`, a factor of a product, belong to different tokens, False if
    all of them are features of one token, and None if this is unknown. `label` is the axis.
    """
    numbered = current_trace().lineage.tokens.along(contraction, operand, label)
    if numbered is None:
        return None
    numbers = numbered.numbers
    return numbers.stride(-1) != 0 and bool((numbers[..., 1:] != numbers[..., :1]).any())
