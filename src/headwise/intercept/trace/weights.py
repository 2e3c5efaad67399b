"""Attention weights that a model computes by softmax, followed from the softmax to their product with the values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.received_mask import hides_all_keys, with_infinite
from headwise.intercept.trace.axes import VIEWS, Axes, axes_after
from headwise.intercept.trace.functions import (
    FunctionCall,
    functions_named,
    overwritten_tensors,
    share_memory,
    version_of,
)
from headwise.intercept.trace.state import Weights, current_trace
from headwise.shapes import Bool, Float

DROPOUT = F.dropout
"""Torch's own function, also while another one replaces it."""

DATA: Callable[..., Any] = vars(torch._C.TensorBase)["data"].__get__
"""Getter of `Tensor.data`."""

DROPOUTS: frozenset[Callable[..., Any]] = frozenset({DROPOUT, torch.dropout})
"""Functions that set some weights to 0 at random during training."""

FILLS = functions_named("masked_fill") | {Tensor.masked_fill_}
"""Functions that overwrite some of the weights."""

COPIES = functions_named(
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach")
) | {DATA}
"""Functions that return the same numbers in the same shape."""

MODIFICATIONS = functions_named(
    *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "div", "div_", "__truediv__", "__itruediv__"),
    *("divide", "where", "nan_to_num", "nan_to_num_", "tril", "triu", "clamp", "clamp_min"),
)
"""Functions that change single weights, such as a mask by multiplication."""


def uniform_weights(
    scores: Float[Tensor, "*rows keys"], zeroed: Bool[Tensor, "*rows keys"] | None, *, may_be_masked: bool = True
) -> Float[Tensor, "*rows keys"]:
    """Return uniform attention weights: in each query row, equal weights with sum 1 for all visible keys, and 0 for
    hidden keys.

    Keys where `zeroed` is True are not visible. A row whose scores are all hidden by a finite number sees all keys, as
    in torch's softmax.
    """
    hidden = hidden_by_scores(scores, may_be_masked=may_be_masked)
    hidden = hidden & ~(hides_all_keys(scores) & (scores.amax(-1, keepdim=True) > -torch.inf))
    visible = (hidden if zeroed is None else hidden | zeroed).logical_not().to(scores.dtype)
    return visible / visible.sum(-1, keepdim=True).clamp(min=1)


def hidden_by_scores(scores: Float[Tensor, "*rows keys"], *, may_be_masked: bool) -> Bool[Tensor, "*rows keys"]:
    """Return a mask that is True at keys which are hidden by their scores. A score of -inf hides a key. If
    `may_be_masked`, a large negative number does so too, since it may come from an additive mask.
    """
    return (with_infinite(scores) if may_be_masked else scores) == -torch.inf


def record_weights(tensor: Tensor, weights: Weights) -> None:
    """Store `weights`, the record of how `tensor`, which contains attention weights, was computed."""
    weights = replace(weights, version=version_of(tensor), is_overwritten=False)
    current_trace().attention.weights.set(tensor, weights)


def weights_of(tensor: Tensor, writer: FunctionCall | None = None) -> Weights | None:
    """Return the record of a tensor that contains attention weights; None if it is not known to contain any. If the
    model has changed the tensor in place, perhaps through a view, its weights count as scaled, and those that are 0 as
    filled with zeros. `writer` is the running function call, which may have changed the tensor.
    """
    trace = current_trace()
    weights = trace.attention.weights.get(tensor)
    if weights is None:
        return None
    is_written = writer is not None and any(each is tensor for each in overwritten_tensors(writer))
    version, now = weights.version, version_of(tensor)
    is_same = version == now or (is_written and version is not None and version + 1 == now)
    if is_same and not weights.is_overwritten:
        return weights
    if weights.undropped is not None:  # the weights before dropout are lost
        weights.softmax.is_used = True
        trace.attention.weights.discard(tensor)
        return None
    is_zero = tensor.detach() == 0
    zeroed = is_zero if weights.zeroed is None else weights.zeroed | is_zero
    weights = replace(weights, zeroed=zeroed, is_scaled=True)
    if not is_written:
        record_weights(tensor, weights)
    return weights


def before_overwriting(call: FunctionCall) -> None:
    """Prepare a function call of the model that may overwrite tensors in place. Attention scores that are read later
    are copied. Attention weights whose memory is overwritten are marked, unless the call is one that is followed, such
    as dropout or a mask. The records of a tensor that is passed as `out` are discarded, since its content is replaced.
    """
    trace = current_trace()
    attention = trace.attention
    if not (attention.weights or attention.kept_scores or attention.pending or "out" in call.kwargs):
        return
    for written in overwritten_tensors(call):
        for output in attention.pending if written.is_inference() else ():  # otherwise torch counts the changes
            output.on_overwritten(written)
        for kept in list(attention.kept_scores):
            kept.before_overwriting(written)
        is_followed = "out" not in call.kwargs and any(
            call.function in each for each in (DROPOUTS, MODIFICATIONS, FILLS)
        )
        for tensor, weights in attention.weights.items():
            is_undropped = weights.undropped is not None and share_memory(written, weights.undropped)
            is_own = is_followed and written is tensor and "out" not in call.kwargs
            if is_undropped or (share_memory(written, tensor) and not is_own):
                attention.weights.set(tensor, replace(weights, is_overwritten=True))
        if "out" in call.kwargs and not any(written is each for each in call.tensors):
            attention.weights.discard(written)
            attention.scores.discard(written)
            attention.places.discard(written)
            trace.lineage.discard(written)


def weights_among(call: FunctionCall) -> list[Tensor]:
    """Return the arguments of a function call that are known to contain attention weights."""
    trace = current_trace()
    if not trace.attention.weights:
        return []
    return [tensor for tensor in call.tensors if trace.attention.weights.get(tensor) is not None]


def follow_weights(call: FunctionCall, tensor: Tensor, result: Any) -> None:
    """Record the `result` of a function as attention weights, if the function casts, masks, rearranges or applies
    dropout to its argument `tensor`, which contains attention weights. After any other function, mark the softmax that
    computed them as used in a way that is not followed.
    """
    weights = weights_of(tensor, call)
    if weights is None:
        return
    function = call.function
    is_modification = function in MODIFICATIONS and isinstance(result, Tensor) and result.shape == tensor.shape
    if function in DROPOUTS:
        if result is not tensor and _drops(*call.args, **call.kwargs):
            before = tensor if weights.undropped is None else weights.undropped
            weights = replace(weights, undropped=before.detach())
        elif _drops(*call.args, **call.kwargs):  # the weights before dropout are lost
            current_trace().attention.weights.discard(tensor)
            return
        record_weights(result, weights)
    elif function in COPIES or function in FILLS or is_modification:
        undropped = _undropped_after(call, tensor, weights)
        zeroed = weights.zeroed
        newly_zeroed = None
        if function in FILLS and not bool((mask_and_value := _mask_and_value(*call.args, **call.kwargs))[1]):
            newly_zeroed = mask_and_value[0]
        elif is_modification:
            newly_zeroed = _zeroed_by(tensor if weights.undropped is None else weights.undropped, undropped, result)
        if newly_zeroed is not None:
            zeroed = newly_zeroed if zeroed is None else newly_zeroed | zeroed
        is_scaled = weights.is_scaled or is_modification or (newly_zeroed is None and function in FILLS)
        record_weights(result, replace(weights, undropped=undropped, zeroed=zeroed, is_scaled=is_scaled))
    elif function in VIEWS:
        is_sequence = isinstance(result, list | tuple)
        for index, (view, axes) in enumerate(axes_after(call, weights.axes, tensor, result)):
            record_weights(view, _view(call, tensor, weights, axes, index if is_sequence else None))
    else:
        weights.on_unfollowed_use(tensor, result)


def average_keys(weights: Weights, tensor: Tensor, key_axis: int) -> bool:
    """Return True if each query row of attention weights, as the model has modified them, is still an average over
    keys. No weight may be negative. The sum of a row must be 1 or 0, or its weights must be those of the softmax with
    some set to 0.
    """
    if not weights.is_scaled:
        return True
    observed = (tensor if weights.undropped is None else weights.undropped).detach().nan_to_num()
    tolerance = torch.finfo(observed.dtype).eps ** 0.5
    with torch.no_grad():
        difference = (observed - weights.scores().softmax(key_axis)).abs()
    sums = observed.sum(key_axis, keepdim=True)
    has_sum = ((sums - 1).abs() <= tolerance) | (sums.abs() <= tolerance)
    is_masked = ((observed == 0) | (difference <= tolerance)).all(key_axis, keepdim=True)
    return bool((observed >= 0).all() & (has_sum | is_masked).all())


def _view(call: FunctionCall, tensor: Tensor, weights: Weights, axes: Axes, index: int | None) -> Weights:
    """Return the record of attention weights for a view of `tensor` with these `axes`, as made by `reshape` or an
    index. `weights` is the record of `tensor`. `index` is the number of the view among the results; None if the
    function returns one tensor.
    """
    repeat = call.as_function_of(tensor)

    def view_of(other: Tensor) -> Tensor:
        result = repeat(other.contiguous())  # `view` refuses some tensors that are expanded or transposed
        view: Tensor = result if index is None else result[index]
        return view

    before, shape = weights.arranged, tensor.shape
    return Weights(
        weights.softmax,
        axes,
        weights.kept,
        lambda scores: view_of(before(scores)),
        None if weights.undropped is None else view_of(weights.undropped),
        None if weights.zeroed is None else view_of(weights.zeroed.expand(shape)),
        weights.is_scaled,
    )


def _zeroed_by(before: Tensor, undropped: Tensor | None, result: Tensor) -> Bool[Tensor, "*shape"] | None:
    """Return a mask that is True where a function has set attention weights to 0, such as a product with a mask of 0
    and 1. Return None if it has set none. If the function overwrote the weights `before` in place, each weight that is
    0 counts as set.
    """
    is_zero = (result if undropped is None else undropped).detach() == 0
    if before is not result:
        is_zero &= before.detach() != 0
    return is_zero if bool(is_zero.any()) else None


def _undropped_after(call: FunctionCall, tensor: Tensor, weights: Weights) -> Tensor | None:
    """Return attention weights as they would be without dropout, after a function call that is applied to `tensor`;
    None if the model applied no dropout.
    """
    if weights.undropped is None:
        return None
    with torch.no_grad():
        undropped: Tensor = call.as_function_of(tensor)(weights.undropped.clone())
    return undropped


def _drops(
    input: Tensor,  # noqa: A002
    p: Any = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> bool:
    """Return True if dropout with these arguments sets elements to 0."""
    return training and train and bool(p)


def _mask_and_value(input: Tensor, mask: Tensor, value: Tensor | float) -> tuple[Tensor, Tensor | float]:  # noqa: A002
    """Return the mask and the value of a call of `masked_fill`, passed by position or by name."""
    return mask, value
