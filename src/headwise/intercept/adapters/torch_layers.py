"""Attention of torch's layers, by `F.multi_head_attention_forward`, in which torch turns function modes off."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept import eager_softmax
from headwise.intercept.module_call import must_trace
from headwise.intercept.patches import Replacement, intercepting
from headwise.intercept.session import current_session
from headwise.intercept.trace.functions import BMM, FunctionCall
from headwise.intercept.trace.lineage import CallOrigins
from headwise.intercept.trace.weights import DROPOUT

TORCH_ATTENTION = F.multi_head_attention_forward
"""Torch's own function, also while another one replaces it."""


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    in_proj_weight: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute `F.multi_head_attention_forward` inside an intercepted model, and return its result. This function
    records the sources of the queries, keys and values. The attention inside is intercepted by replacements of SDPA,
    softmax and other functions.
    """
    session = current_session()
    lineage, module_calls = session.lineage, session.module_calls
    weight = kwargs["q_proj_weight"] if in_proj_weight is None else in_proj_weight
    projection = lineage.origin(weight, module_calls)
    of_q, of_k, of_v = (lineage.linear(lineage.origin(each, module_calls), projection) for each in (query, key, value))
    origins = CallOrigins(of_q, of_k, of_v)
    appended_keys = _appended_keys(query, key, value, embed_dim, heads, in_proj_weight, *args, **kwargs)
    if appended_keys:
        must_trace(module_calls)
    with session.torch_attention(heads, origins, appended_keys):
        result = TORCH_ATTENTION(query, key, value, embed_dim, heads, in_proj_weight, *args, **kwargs)
    lineage.set_attended(result[0], origins)
    return result


def _appended_keys(*args: Any, **kwargs: Any) -> int:
    """Return the number of keys that a call of `F.multi_head_attention_forward` appends and that belong to no token.
    There may be a learned key (`bias_k`) and a key of zeros (`add_zero_attn`).
    """
    arguments = _TORCH_ATTENTION_SIGNATURE.bind(*args, **kwargs).arguments
    return int(arguments.get("bias_k") is not None) + int(bool(arguments.get("add_zero_attn")))


_TORCH_ATTENTION_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
"""Signature of torch's function, whose arguments may be passed by position or by name."""

# -- functions that `F.multi_head_attention_forward` finds under their names: the mode is off inside of it ------------


def _softmax(
    previous: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    dim: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Replacement of `F.softmax`, which calls `previous`, the replaced function. Inside
    `F.multi_head_attention_forward` of an intercepted model, it also records the result as attention weights, so that
    they are followed to their product with the values.
    """
    result = previous(input, dim, *args, **kwargs)
    if _is_in_torch_attention():
        eager_softmax.on_softmax(input, result, dim, is_attention=True)
    return result


def _following(own: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return an intercepting function for `own`, torch's dropout or `bmm`. The new function calls the replaced
    function, its first argument. Inside `F.multi_head_attention_forward` of an intercepted model, it also follows
    attention weights among the arguments. A product of attention weights with the values is reported to the
    interceptors, which may change it.
    """

    def call_and_follow(previous: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        result = previous(*args, **kwargs)
        if _is_in_torch_attention():
            return eager_softmax.on_function(FunctionCall(own, args, kwargs), result)
        return result

    return call_and_follow


def _is_in_torch_attention() -> bool:
    """Return True inside `F.multi_head_attention_forward` of an intercepted model."""
    session = current_session()
    return session.torch_attention_heads is not None and session.intercepts


def replacements_in_torch_attention() -> Iterator[Replacement]:
    """Yield the replacements that intercept attention inside `F.multi_head_attention_forward` where it is computed
    without SDPA: by softmax, dropout and `bmm`.
    """
    yield intercepting(F, "softmax", _softmax)
    yield intercepting(F, "dropout", _following(DROPOUT))
    yield intercepting(torch, "bmm", _following(BMM))
