"""Functions after which the elements of an attention output are no longer at their places along an axis.

Functions that move elements, such as `flip` or `scatter`, and those that mix them, such as `cumsum`, are found by their
results: the function is repeated with changed elements at some places, and elements at other places must not change.
"""

from typing import Any

import torch
from torch import Tensor

from headwise.intercept.contractions import PRODUCTS, is_parameter
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.session import current_session
from headwise.intercept.softmax_weights import COPIES, DROPOUTS
from headwise.intercept.undropped import DROPOUT_NAMES, random_state_kept
from headwise.intercept.unreadable_tensors import has_no_numbers

_NAMES = frozenset(
    f"{start}{name}{end}"
    for name in (
        *("add", "sub", "mul", "truediv", "div", "pow", "neg", "abs", "square", "sqrt", "rsqrt", "exp", "log"),
        *("reciprocal", "addcmul", "addcdiv", "where", "masked_fill", "clamp", "clamp_min", "clamp_max", "clip"),
        *("nan_to_num", "tril", "triu", "maximum", "minimum", "sigmoid", "tanh", "relu", "gelu", "silu", "elu"),
        *("leaky_relu", "hardtanh", "softplus", "round", "floor", "ceil", "erf", "sin", "cos"),
    )
    for start, end in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
).union(
    ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "softmax", "log_softmax"),
    ("special_softmax", "special_log_softmax", "_softmax", "softmin"),
    ("quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic", "dequantize"),
    DROPOUT_NAMES,
)
"""Names of functions that compute each element from those at the same place, and of norms, which divide all features by
one number.
"""

ASSIGNMENT: frozenset[Any] = frozenset({Tensor.__setitem__})
"""Function that assigns to an index of a tensor."""

TOLERANCE = 1e-4
"""Largest change of elements at other places, relative to that of the changed ones, that counts as rounding in float32.
In other dtypes, four times the distance between 1 and the next number may be more.
"""


def may_project(call: FunctionCall) -> bool:
    """Return True if a function call may be the output projection: if it is a product of tensors, or reads a parameter
    of a module. The same holds for an operator that torch does not define as a function, such as a quantised product.
    """
    is_operator = isinstance(call.function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator or call.function in PRODUCTS or any(map(is_parameter, call.tensors))


def written_by(call: FunctionCall, result: Any) -> Any:
    """Return the tensors that contain what a function call computed. That is its `result`, or, for an assignment to an
    index (`x[i] = y`), the tensor that was assigned to.
    """
    return call.args[0] if call.function in ASSIGNMENT else result


def keeps_places(call: FunctionCall, argument: Tensor, number: int | None, axis: int) -> bool:
    """Return True if a function call keeps elements at their index along `axis`: each element of its result depends
    only on elements of its `argument` with the same index. Return False if this is not so, or unknown.

    Args:
        call: the call.
        argument: tensor that the function was called with.
        number: number of the tensor among the results; None if the function computes one tensor.
        axis: the axis, counted from the last one, which is -1.
    """
    if call.function in COPIES | DROPOUTS or getattr(call.function, "__name__", "") in _NAMES:
        return True
    if has_no_numbers() or argument.is_meta:
        return False
    size, values = argument.shape[axis], argument.detach().nan_to_num()
    index = torch.arange(size, device=argument.device).view(-1, *(1,) * (-axis - 1))
    wave = torch.arange(argument.numel(), device=argument.device).view(argument.shape).mul(1.7).cos()
    others = values + ((1 + 2 * values.abs().amax()) * wave).to(values.dtype)
    tolerance = max(TOLERANCE, 4 * torch.finfo(values.dtype).eps) if values.is_floating_point() else TOLERANCE
    try:
        before = repeated(call, argument, values, number)
        for bit in range((size - 1).bit_length()):
            for is_other in ((index >> bit) % 2 == 1, (index >> bit) % 2 == 0):
                after = repeated(call, argument, torch.where(is_other, others, values), number)
                change = (after - before).abs().nan_to_num()
                if bool((change * ~is_other).amax() > tolerance * change.amax()):
                    return False
    except Exception:  # whatever a function raises for numbers that it was not written for
        return False
    return True


def repeated(call: FunctionCall, argument: Tensor, other: Tensor, number: int | None) -> Tensor:
    """Repeat a function call with the tensor `other` in place of its `argument`, and return the result. If the function
    returns several tensors, return the one with index `number`. Tensors of the model are not overwritten.
    """
    first, out = call.tensors[0], call.kwargs.get("out")
    call = call.replaced(argument, other.clone())
    for written in (first, out):
        if isinstance(written, Tensor) and written is not argument:
            call = call.replaced(written, written.clone())
    with current_session().paused(), torch.no_grad(), random_state_kept(argument.device):
        result = written_by(call, call.run())
    tensor: Tensor = result if number is None else result[number]
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
