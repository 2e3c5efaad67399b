"""Functions whose weights cannot be read: fused attention, and operators of other libraries that may compute it."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from headwise.intercept.module_call import ModuleCall, report_unreadable
from headwise.intercept.patches import OPERATORS, operator_name
from headwise.intercept.trace.functions import FunctionCall, is_parameter
from headwise.intercept.trace.unread import is_projected
from headwise.intercept.undropped import random_state_kept
from headwise.intercept.unreadable_tensors import has_no_numbers, has_usual_values

NAME_PARTS = ("attention", "attn", "transformer_encoder_layer_fwd")
"""Parts of the names of fused attention functions of torch and of other libraries."""

LIBRARY_PARTS = ("attn", "attention", "flash")
"""Parts of the names of libraries of operators, all of which compute attention, such as `flash_attn_3`."""


def report_fused(call: FunctionCall, result: Any, module_calls: list[ModuleCall]) -> None:
    """Report the running module to the interceptors as unreadable if `call` is a call of a fused attention function. A
    function counts as one if two conditions hold: its name, or that of its library, contains a term such as
    "attention", and at least three arguments have a shape and dtype that queries, keys and values can have. An operator
    of another library than torch also counts, whatever its name, if a test of its results shows that it may attend.
    """
    name = _attention_name(call.function)
    if name is not None:
        if sum(_may_be_heads(argument) for argument in (*call.args, *call.kwargs.values())) >= 3:
            reason = f"attention of these modules by {name} cannot be read; call scaled_dot_product_attention"
            report_unreadable(module_calls, reason)
    elif _is_of_other_library(call.function) and _may_attend(call, result):
        name = operator_name(call.function)
        reason = f"these modules call the operator {name}, which may be attention and is not read"
        report_unreadable(module_calls, reason)


@cache
def _is_of_other_library(function: Any) -> bool:
    """Return True if a function is an operator under `torch.ops` that is not one of torch itself."""
    own = ("aten::", "prim::", "prims::")
    return isinstance(function, OPERATORS) and not operator_name(function).startswith(own)


def _may_attend(call: FunctionCall, result: Any) -> bool:
    """Return True if an operator may compute attention: three of its arguments are activations, its `result` has the
    shape of the first of them but for the features, and depends on other tokens of the last one. A single argument that
    is three times as large as the result may also be queries, keys and values.

    To test this, the operator is called again, unless it changes its arguments.
    """
    if has_no_numbers():
        return False
    tensors = list({id(each): each for each in call.tensors if _may_be_heads(each) and not is_parameter(each)}.values())
    activations = [each for each in tensors if has_usual_values(each) and is_projected(each)]
    out = _first(result)
    if len(activations) < 3:  # one of them may have queries, keys and values, unless the operator returns them
        are_parts = result is not out and any(each.shape == out.shape for each in result[1:])
        is_third = isinstance(out, Tensor) and any(each.numel() == 3 * out.numel() for each in activations)
        return is_third and not are_parts
    if not isinstance(out, Tensor):
        return True  # it may write into one of its arguments
    if out.ndim != activations[0].ndim or out.shape[:-1] != activations[0].shape[:-1]:
        return False
    return _mixes_tokens(call, activations[2], out)


def _first(result: Any) -> Any:
    """Return the first of several results of a function, or its only result."""
    return result[0] if isinstance(result, tuple | list) and result else result


def _mixes_tokens(call: FunctionCall, values: Tensor, out: Tensor) -> bool:
    """Return True if the output `out` of an operator depends on `values` of other tokens, or if this cannot be tested.

    The first half of the values along each axis but that of the features is changed. Functions of single elements or
    tokens, such as norms, activation functions and rotary embeddings, change at the same places only.
    """
    operator: Any = call.function
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
    if any(overload._schema.is_mutable for overload in overloads):
        return True
    if out.ndim != values.ndim or out.shape[:-1] != values.shape[:-1]:
        return True
    for axis in range(values.ndim - 1):
        half = values.shape[axis] // 2
        changed = values.detach().clone()
        changed.narrow(axis, 0, half).mul_(-2)
        with torch.no_grad(), random_state_kept(values.device):
            difference = _first(call.replaced(values, changed).run()) - out
        if bool(difference.narrow(axis, half, out.shape[axis] - half).nan_to_num().any()):
            return True
    return False


@cache
def _attention_name(function: Any) -> str | None:
    """Return the name of a function if the name, or that of the library of an operator, shows that it computes
    attention. Return None for other functions.
    """
    name = getattr(function, "__name__", "").removesuffix(".default")
    name = name if isinstance(name, str) else str(function)
    if any(part in name.lower() for part in NAME_PARTS):
        return name
    library = str(getattr(function, "namespace", getattr(function, "_qualified_op_name", ""))).partition("::")[0]
    return f"{library}.{name}" if any(part in library.lower() for part in LIBRARY_PARTS) else None


def _may_be_heads(argument: Any) -> bool:
    """Return True if an argument can be queries, keys or values: a floating-point tensor with at least two axes."""
    return isinstance(argument, Tensor) and argument.ndim >= 2 and argument.is_floating_point()
