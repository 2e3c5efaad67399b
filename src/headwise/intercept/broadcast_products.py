"""Products that a model writes as a multiplication and a sum, such as `(q[:, :, None] * k[:, None]).sum(-1)`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.intercept.contractions import is_parameter, multiplied_and_summed
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.in_place_changes import TensorVersions, version_of
from headwise.intercept.session import current_session

_MULTIPLICATIONS: frozenset[Callable[..., Any]] = frozenset(
    {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
)
_SUMS: frozenset[Callable[..., Any]] = frozenset({torch.sum, Tensor.sum})


def contracted(call: FunctionCall, result: Any) -> FunctionCall:
    """Return a call of `multiplied_and_summed` in place of a call that sums a broadcast product of two tensors. Return
    other calls unchanged, and if the product or a factor was changed in place. If a call computes such a product, store
    its factors, and keep them as long as the `result` exists.
    """
    session = current_session()
    if call.function in _MULTIPLICATIONS:
        is_product = len(call.tensors) == 2 and isinstance(result, Tensor) and not any(map(is_parameter, call.tensors))
        if is_product and any(_is_broadcast(factor, result) for factor in call.tensors):
            record = tuple(call.tensors), version_of(result), TensorVersions(call.tensors)
            session.attention.factors.set(result, record)
    elif call.function in _SUMS and call.tensors and session.attention.factors:
        factors: tuple[Tensor, Tensor] | None
        versions: TensorVersions | None
        factors, version, versions = session.attention.factors.get(call.tensors[0]) or (None, None, None)
        arguments = dict(zip(("input", "dim", "keepdim"), call.args, strict=False)) | call.kwargs
        dims = arguments.get("dim", arguments.get("axis"))
        if factors is None or versions is None or version != version_of(call.tensors[0]) or versions.have_changed():
            return call
        if dims is not None and arguments.get("dtype") is None and "out" not in arguments:
            dims = (dims,) if isinstance(dims, int) else tuple(dims)
            return FunctionCall(multiplied_and_summed, (*factors, dims, bool(arguments.get("keepdim"))), {})
    return call


def _is_broadcast(factor: Tensor, result: Tensor) -> bool:
    """Return True if a factor of a product has the same elements in several places along an axis of the `result`."""
    if factor.layout is not torch.strided or factor.is_nested or result.ndim < 2 or not factor.ndim:
        return False
    is_smaller = factor.numel() < result.numel()
    return is_smaller or any(
        size > 1 and not stride for size, stride in zip(factor.shape, factor.stride(), strict=True)
    )
