"""Interception of attention that a module computes itself: softmax returns its weights, a product its output.

The weights are followed from the softmax to the product by the identity of tensors: functions such as a cast or
dropout in evaluation mode return the same weights, perhaps in another tensor, which is followed instead. A softmax
without such a product is no attention over keys; it mixes levels, points or streams.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.masks.grid import Grid
from headwise.intercept.additive_masks import hides_all_keys
from headwise.intercept.call_handlers import handlers_of_call
from headwise.intercept.call_stack import call_stack
from headwise.intercept.interceptor import NOT_SEEN
from headwise.intercept.module_call import ModuleCall
from headwise.intercept.pending_softmax import PendingSoftmax, weights_by_head

SOFTMAX, DROPOUT, BMM = F.softmax, F.dropout, torch.bmm
"""Torch's own functions, also while others replace them."""

SOFTMAXES: frozenset[Callable[..., Any]] = frozenset({SOFTMAX, torch.softmax, Tensor.softmax})
"""Softmax under all its names."""

PASS_THROUGH: frozenset[Callable[..., Any]] = frozenset(
    {
        *(DROPOUT, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half),
        *(Tensor.bfloat16, Tensor.contiguous, Tensor.view, Tensor.reshape, torch.reshape),
        *(Tensor.double, Tensor.clone, torch.clone, Tensor.flatten, torch.flatten),
    }
)
"""Functions that return the same weights, in another shape, dtype or tensor."""

DROPOUTS: frozenset[Callable[..., Any]] = frozenset({DROPOUT, torch.dropout})
"""Those that set some weights to 0 at random during training."""

FILLS: frozenset[Callable[..., Any]] = frozenset({torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_})
"""Functions that overwrite some of the weights."""

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, BMM, Tensor.bmm, torch.einsum}
)
"""Functions that may multiply the weights with the values."""


def on_softmax(scores: Tensor, result: Tensor, dim: Any) -> None:
    """Record the `result` of a softmax as possible attention weights, which are then tracked until the model multiplies
    them with the values. In rows that hide every key, record zeros as the weights. Ignore a softmax outside of an
    attention module, over another axis than the last, or with fewer than 3 axes.

    Args:
        scores: argument of the softmax.
        result: its result.
        dim: axis of the softmax.
    """
    module_calls = call_stack.module_calls[:]
    if isinstance(module_calls[-1].module, nn.Softmax):  # the module around it attends
        module_calls.pop()
    is_last_axis = dim in (-1, result.ndim - 1)
    if not module_calls or not is_last_axis or result.ndim < 3 or not module_calls[-1].is_attention:
        return
    weights = result
    if scores.is_floating_point() and bool((hidden_rows := hides_all_keys(scores)).any()):
        weights = result.masked_fill(hidden_rows, 0.0)  # softmax is uniform there
    by_head = weights_by_head(weights, module_calls[-1].module)
    origin = call_stack.origin_of_scores(scores)
    call_stack.pending_softmaxes.append(PendingSoftmax(by_head, result, module_calls, scores, origin))


def on_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return the `result` of a torch function that a model called. If an argument is a recorded softmax result
    (possible attention weights), first update the record, since the function may cast, reshape or partly overwrite the
    weights. If the function multiplies the weights with the values, report the attention call to the interceptors, and
    return the product as changed by them.
    """
    for pending in call_stack.pending_softmaxes:
        if any(argument is pending.tensor for argument in _flat((*args, *kwargs.values()))):
            return _follow(pending, function, args, kwargs, result)
    return result


def on_module_end(module_call: ModuleCall) -> None:
    """Handle the end of a module call. If softmax results recorded in it were never multiplied with values, discard
    them and report the module to its interceptors as one whose attention cannot be read.
    """
    for pending in [each for each in call_stack.pending_softmaxes if each.module_calls[-1] is module_call]:
        call_stack.pending_softmaxes.remove(pending)
        for innermost in {id(each.interceptor): each for each in pending.module_calls}.values():
            innermost.interceptor.on_unreadable(innermost.path, NOT_SEEN)


def _follow(
    pending: PendingSoftmax,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """Update `pending`, a record of attention weights, after `function` was called with these weights and returned
    `result`: a cast or reshape replaces the tracked tensor, and a fill overwrites weights. If `result` is the product
    of the weights and the values, return it as changed by the interceptors; otherwise return it unchanged.
    """
    if function in DROPOUTS:
        pending.is_dropped |= result is not pending.tensor
        if _overwrites(*args, **kwargs):
            pending.weights = None  # those before dropout are lost
    if function in PASS_THROUGH:
        pending.tensor = result
    elif function in FILLS:
        pending.fill(result, *_mask_and_value(*args, **kwargs))
    elif function in PRODUCTS and pending.weights is not None:
        return _product(pending, function, args, kwargs, result)
    return result


def _product(
    pending: PendingSoftmax,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
) -> Tensor:
    """Handle `result`, a product of recorded softmax weights with another tensor. If `result` has the shape of head
    outputs, the other tensor is the values: stop tracking the weights, pass them to the observers, and return `result`
    as changed by the interceptors. Otherwise return `result` unchanged.
    """
    assert pending.weights is not None
    batch, heads, queries, keys = pending.weights.shape
    order = list(range(result.ndim)) if function is not torch.einsum else _einsum_order(args, pending.tensor)
    if order is None or result.permute(*order).shape[:-1] not in ((batch, heads, queries), (batch * heads, queries)):
        return result
    call_stack.pending_softmaxes.remove(pending)

    def by_head(product: Tensor) -> Tensor:
        return product.permute(*order).reshape(batch, heads, queries, -1)

    def output_of(weights: Tensor) -> Tensor:
        return by_head(
            function(*_replaced(args, pending.tensor, weights), **_replaced(kwargs, pending.tensor, weights))
        )

    out = by_head(result)
    grid = Grid(batch, heads, queries, keys, out.device)
    origins = call_stack.origins_of_product(pending.origin, _other_factor(args, kwargs, pending.tensor))
    handlers = handlers_of_call(grid, heads, out.shape[-1], pending.module_calls, origins=origins)
    if pending.is_dropped and handlers.observations:
        with torch.no_grad():
            undropped_out = output_of(pending.weights.to(pending.tensor.dtype).reshape(pending.tensor.shape))
        handlers.observe_weights(pending.weights_of_visible_rows(), undropped_out)
    elif handlers.observations:
        handlers.observe_weights(pending.weights_of_visible_rows(), out)
    if not handlers.changes:
        return result
    changed = handlers.changed(out, lambda: output_of(pending.uniform_weights()))
    inverse = [order.index(axis) for axis in range(result.ndim)]
    return changed.reshape(result.permute(*order).shape).permute(*inverse)


def _other_factor(args: tuple[Any, ...], kwargs: dict[str, Any], weights: Tensor) -> Tensor:
    """Return the tensor with which a function call multiplies `weights`."""
    return next(
        other for other in _flat((*args, *kwargs.values())) if isinstance(other, Tensor) and other is not weights
    )


def _mask_and_value(input: Tensor, mask: Tensor, value: Tensor | float) -> tuple[Tensor, Tensor | float]:  # noqa: A002
    """Return the arguments `mask` and `value` of a call of `masked_fill`, in which they may be passed by position or by
    name.
    """
    return mask, value


def _overwrites(
    input: Tensor,  # noqa: A002
    p: Any = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> bool:
    """Return True if a call of `F.dropout` or `torch.dropout` with these arguments overwrites its input."""
    return inplace and training and train and bool(p)


def _replaced(argument: Any, before: Tensor, after: Tensor) -> Any:
    """Return `argument` with the tensor `before` replaced by `after` wherever it occurs, also inside nested lists,
    tuples and dicts. Lists and tuples are returned as lists.
    """
    if isinstance(argument, list | tuple):
        return [_replaced(element, before, after) for element in argument]
    if isinstance(argument, dict):
        return {name: _replaced(element, before, after) for name, element in argument.items()}
    return after if argument is before else argument


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments one by one; in place of an argument that is a list or tuple, yield its elements (one level
    deep).
    """
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def _einsum_order(arguments: tuple[Any, ...], weights: Tensor) -> list[int] | None:
    """Return the order of axes, for `permute`, in which to rearrange an einsum's result. The einsum was called with
    `arguments`, one of which is the attention `weights`. Axes that the result shares with the weights come first, in
    the order of the weights; all other axes follow. Return None if the equation is not a string, has no "->" or
    contains an ellipsis.
    """
    equation, *operands = _flat(arguments)
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    weight_axes = next(axes for axes, operand in zip(inputs.split(","), operands, strict=False) if operand is weights)
    order = [axis for axis in weight_axes if axis in result] + [axis for axis in result if axis not in weight_axes]
    return [result.index(axis) for axis in order]
