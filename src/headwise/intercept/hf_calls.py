"""Interception of attention calls of Hugging Face `transformers`, where the library dispatches them.

Every model of `transformers` 5 gets its attention function from `AttentionInterface.get_interface` at each call. While
a model is intercepted that method returns the same function, wrapped. The model keeps its implementation's name, which
some models read.
"""

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.attend import uniform_output
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem
from headwise.errors import InputError
from headwise.intercept.accelerated_modules import OBSERVED, accelerated_modules
from headwise.intercept.additive_masks import (
    fill_hidden_rows_as_torch,
    hides_all_keys,
    is_uniform_where_hidden,
    with_infinite,
)
from headwise.intercept.attention_source import OutputAxes
from headwise.intercept.call_handlers import handlers_of_call
from headwise.intercept.call_stack import call_stack
from headwise.intercept.foreign_answer import is_attention
from headwise.intercept.foreign_functions import is_sdpa_foreign
from headwise.intercept.output_tracking import follow_reported
from headwise.intercept.received_mask import MaskSource, ReceivedMask
from headwise.intercept.scores_behind_weights import scores_behind
from headwise.intercept.sdpa_calls import widest_dtype_under_autocast
from headwise.intercept.undropped import call_without_dropout, random_state
from headwise.intercept.unreadable_tensors import reports_unreadable

READABLE = ("sdpa", "eager")
"""The implementations whose masks are tensors, so that a call can be stated as a `Problem`."""


def intercepting_dispatch(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `dispatch`, the method `AttentionInterface.get_interface` of `transformers`, which looks
    up an attention function. Functions returned by the replacement are intercepted while an intercepted model runs, and
    otherwise compute the same as before.
    """

    @wraps(dispatch)
    def get_interface(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = dispatch(interface, implementation, default)

        @wraps(attention)
        def attention_or_intercepted(*args: Any, **kwargs: Any) -> Any:
            if call_stack.intercepts and not reports_unreadable(kwargs["query"] if "query" in kwargs else args[1]):
                return _intercepted_call(implementation, attention, args, kwargs)
            return attention(*args, **kwargs)

        return attention_or_intercepted

    return get_interface


def _intercepted_call(
    implementation: str, attention: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute a call of the `transformers` attention function `attention` inside an intercepted model and return its
    result: the output `(batch, queries, heads, value_dim)`, the weights or None, and possibly more. The interceptors
    observe the attention weights and may change the head outputs.
    """
    module, (q, k, v), mask, options = _split_arguments(*args, **kwargs)
    others: list[Any] = [None]  # what the function returns in addition to the output

    @cache
    def read_problem() -> Problem:
        tensors = widest_dtype_under_autocast(q, k, v)
        return _problem_of(implementation, module, *tensors, attention_mask=mask, **options)

    added = _as_added(mask, options.get("position_bias"))
    mask_origin = (implementation, mask, options.get("position_bias"), _is_causal(module, options.get("is_causal")))
    mask_source = MaskSource(lambda: ReceivedMask.of_problem(read_problem()), mask_origin)
    grid = Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    origins = call_stack.origins_of(q, k, v)

    @cache
    def compute() -> Answer:
        out, *others[:] = attention(*args, **kwargs)
        return Answer(out.transpose(1, 2), None, None)

    def compute_without_dropout() -> Answer:
        return Answer(attention(*args, **{**kwargs, "dropout": 0.0})[0].transpose(1, 2), None, None)

    as_torch = partial(fill_hidden_rows_as_torch, v=v, mask=added)
    is_replaced = implementation == "sdpa" and (is_sdpa_foreign() or not _is_own_sdpa(attention))
    if is_replaced and not is_attention(read_problem, compute, compute_without_dropout):
        return compute().out.transpose(1, 2), *others
    handlers = handlers_of_call(grid, k.shape[1], v.shape[3], mask_source=mask_source, origins=origins, keys=k)
    if handlers.observations and implementation == "eager":
        with call_stack.paused():
            state = random_state(q.device)
            out = undropped_out = compute().out
            weights = others[0]
            if not torch.equal(state, random_state(q.device)):
                undropped_out, weights = _without_dropout(attention, args, kwargs, q.device)
        if weights is not None:
            weights = _zeros_in_hidden_rows(weights.detach(), mask)
            behind = partial(scores_behind, weights, read_problem)
            handlers.observe_weights(weights, mask_source.read(), undropped_out, v, True, behind)
        else:
            handlers.answer(read_problem, lambda: Answer(undropped_out, None, None))
    else:
        is_uniform = is_uniform_where_hidden(added)
        keeps_output = is_replaced or handlers.keeps_output or (bool(handlers.observations) and not is_uniform)
        out = handlers.answer(read_problem, compute, keeps_output).out
        if not compute.cache_info().currsize and accelerated_modules.is_accelerated:
            accelerated_modules.record(OBSERVED)
        if handlers.observations and not keeps_output and not options.get("dropout"):
            out = as_torch(out)
    out = handlers.changed(out, lambda: as_torch(uniform_output(read_problem())), read_problem)
    with call_stack.paused():
        out = out.transpose(1, 2).contiguous()
    follow_reported(out, OutputAxes(3, (1,)), origins)
    return out, *others


def _as_added(mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """Return the mask of a call as the attention function adds it to the scores, if that matters for rows in which the
    mask hides all keys: together with a position bias, a boolean mask is added as large negative numbers. Other masks
    are returned unchanged.
    """
    if mask is None or position_bias is None or mask.is_floating_point() or bool(mask.any(-1).all()):
        return mask
    return torch.zeros_like(mask, dtype=position_bias.dtype).masked_fill(~mask, torch.finfo(position_bias.dtype).min)


def _is_own_sdpa(attention: Callable[..., Any]) -> bool:
    """Return True if `attention` is the function of `transformers` that calls torch's SDPA."""
    library = sys.modules.get("transformers.integrations.sdpa_attention")
    return attention is getattr(library, "sdpa_attention_forward", None)


def _without_dropout(
    attention: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Call the `transformers` attention function `attention` without dropout. Return the head outputs with axes
    `(batch, heads, queries, value_dim)`, and the weights, or None if it returns none.
    """
    path = call_stack.module_calls[-1].path
    out, weights, *_ = call_without_dropout(attention, args, kwargs, device, path)
    return out.transpose(1, 2), weights


def _split_arguments(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]]:
    """Return the module, `(q, k, v)`, the mask and a dict of all other options from the arguments of a `transformers`
    attention function, which may be passed by position or by name.
    """
    return module, (query, key, value), attention_mask, options


def _require_readable(implementation: str) -> None:
    """Raise `InputError` unless a `transformers` attention implementation is "sdpa" or "eager", whose masks are
    tensors.
    """
    if implementation not in READABLE:
        raise InputError(
            "model",
            expected=f"attention implementation {' or '.join(READABLE)}",
            got=implementation,
            remedy="call model.set_attn_implementation('sdpa')",
        )


def _problem_of(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: Any = 0.0,
    **_: Any,
) -> Problem:
    """Return a call of a `transformers` attention function as a `Problem`, headwise's form of the tensors and options
    of one attention call. Causality and masks are those that `implementation` ("sdpa" or "eager") applies in such a
    call.

    Raises:
        InputError: it is another implementation, whose masks cannot be read.
    """
    _require_readable(implementation)
    queries = query.shape[2]
    mask: Mask | Tensor | None = attention_mask
    bias = position_bias
    if attention_mask is None:
        # SDPA then takes causality from the call or the module, over as many keys as queries; eager does not.
        if implementation == "sdpa" and _is_causal(module, is_causal) and queries > 1:
            mask, key, value = causal(), key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
    elif attention_mask.is_floating_point():
        added = with_infinite(attention_mask)
        mask, bias = None, added if bias is None else bias + added
    sinks = s_aux if implementation == "eager" else None  # the other function ignores them
    return Problem.checked(
        query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sinks=sinks, dropout=dropout
    )


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Return the option `is_causal` of a call of a `transformers` attention function; if it is None, the attribute
    `is_causal` of the calling module, by default True.
    """
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _zeros_in_hidden_rows(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention weights of an eager attention function with 0 in the rows where an additive mask hides every
    key; the function's softmax attends uniformly there. Without an additive mask, return them unchanged.
    """
    if mask is None or not mask.is_floating_point():
        return weights
    return weights.masked_fill(hides_all_keys(mask), 0.0)
