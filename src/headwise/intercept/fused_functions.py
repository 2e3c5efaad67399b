"""Fused attention functions other than `scaled_dot_product_attention`, whose weights cannot be read."""

from functools import cache
from typing import Any

from torch import Tensor

from headwise.intercept.function_call import FunctionCall
from headwise.intercept.module_call import ModuleCall, report_unreadable

NAME_PARTS = ("attention", "attn", "transformer_encoder_layer_fwd")
"""Parts of the names of fused attention functions of torch and of other libraries."""

LIBRARY_PARTS = ("attn", "attention", "flash")
"""Parts of the names of libraries of operators, all of which compute attention, such as `flash_attn_3`."""


def report_fused(call: FunctionCall, module_calls: list[ModuleCall]) -> None:
    """Report the running module to the interceptors as unreadable if `call` is a call of a fused attention function.
    Its name, or that of its library, must contain a term such as "attention". At least three of its arguments must have
    a shape and dtype that queries, keys and values can have.
    """
    name = _attention_name(call.function)
    if name is None or sum(_may_be_heads(argument) for argument in (*call.args, *call.kwargs.values())) < 3:
        return
    reason = f"attention of these modules by {name} cannot be read; call scaled_dot_product_attention"
    report_unreadable(module_calls, reason)


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
