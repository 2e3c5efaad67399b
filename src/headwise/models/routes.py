"""Where attention calls are met: torch's functions by any name, and the dispatch of transformers."""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.attention.masks import Mask
from headwise.attention.problem import Answer, Problem, mask_and_bias
from headwise.attention.rules import causal
from headwise.models import softmax
from headwise.models.running import answer, answering, running, show
from headwise.models.transformers import even_where_all_is_hidden, hides_all, read_call, require_readable, with_infinite

SDPA = F.scaled_dot_product_attention
"""Torch's own, whatever stands in its place later."""


class Mode(TorchFunctionMode):
    """Torch's own attention and softmax, called by anybody, in the thread where it is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return sdpa(*args, **kwargs)
        if not running.are_met:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _hidden:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is _softmax or func in softmax.SOFTMAXES:
            scores, dim = (*args, *(kwargs[name] for name in ("input", "dim") if name in kwargs))[:2]
            softmax.meets(scores, result, dim)
        else:
            softmax.follow(func, args, result)
        return result


class _Hidden(threading.local):
    """Within it the mode is off: torch runs a function of its own that calls others."""

    def __init__(self) -> None:
        self.on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: Any) -> None:
        self.on = False


_hidden = _Hidden()


def _softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """Torch's softmax as `F.multi_head_attention_forward` finds it where weights are asked for."""
    result = softmax.SOFTMAX(input, dim, *args, **kwargs)
    if _hidden.on and running.are_met:
        softmax.meets(input, result, dim)
    return result


def _bmm(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's product, as the same function finds it."""
    result = softmax.BMM(*args, **kwargs)
    if _hidden.on and running.are_met:
        softmax.follow(softmax.BMM, args, result)
    return result


# -- scaled_dot_product_attention -------------------------------------------------------------------------------------


def sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Torch's attention, answered where it is met."""
    if not running.are_met:
        return SDPA(query, key, value, *args, **kwargs)
    names = ("attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    problem = _problem_of(query, key, value, **given)

    def otherwise(_: Problem) -> Answer:
        out = SDPA(query, key, value, *args, **kwargs)
        return Answer(out.reshape(-1, *out.shape[-3:]) if out.ndim > 3 else out[:, None], None, None)

    out = answer(problem, otherwise).out
    if query.ndim == 4:
        out = even_where_all_is_hidden(out, problem.v, given.get("attn_mask"))
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _problem_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """The call in our terms. Heads stand on the third axis from the end; without one there is a single head."""
    q, k, v = (each[:, None] if each.ndim == 3 else each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
    mask: Mask | Tensor | None = attn_mask
    if attn_mask is not None and query.ndim == 3 and attn_mask.ndim == 3:
        mask = attn_mask[:, None]
    elif attn_mask is not None and attn_mask.ndim > 4:
        mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    mask, bias = mask_and_bias(mask, None)
    bias = None if bias is None else with_infinite(bias)
    where: dict[str, Any] = {}
    if is_causal:
        mask = causal() if mask is None else causal() & mask
        if q.shape[2] != k.shape[2]:  # torch aligns the first query with the first key
            of_queries, of_keys = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
            where = {"query_positions": of_queries, "key_positions": of_keys}
    return Problem.checked(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p, **where)


# -- transformers -----------------------------------------------------------------------------------------------------


def _watched(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' choice of a function, which is wrapped where a watched model asks for one."""

    @wraps(dispatch)
    def chosen(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = dispatch(interface, implementation, default)

        @wraps(attention)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not running.are_met:
                return attention(*args, **kwargs)
            require_readable(implementation)
            results: list[Any] = []

            def otherwise(_: Problem) -> Answer:
                results.append(attention(*args, **kwargs))
                return Answer(results[0][0].transpose(1, 2), None, None)

            if implementation == "eager" and not kwargs.get("dropout"):
                with answering():  # it makes the weights, and may hand them on
                    out, weights, *more = attention(*args, **kwargs)
                if weights is not None:
                    _show_eager(weights, out, *args, **kwargs)
                    return out, weights, *more
            problem = read_call(implementation, *args, **kwargs)
            found = answer(problem, otherwise)
            if results:
                return results[0]
            out = even_where_all_is_hidden(found.out, problem.v, _mask_of(*args, **kwargs))
            return out.transpose(1, 2).contiguous(), None

        return called

    return chosen


def _mask_of(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> Tensor | None:
    """The mask that a function of transformers is given."""
    return attention_mask


def _show_eager(
    weights: Tensor,
    out: Tensor,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> None:
    """Show the weights that a function of transformers made; in a row that hides all it makes them even."""
    if attention_mask is not None and attention_mask.is_floating_point():
        weights = weights.masked_fill(hides_all(attention_mask), 0.0)
    show(weights, out.transpose(1, 2), key.shape[1], running.frames)


# -- in place of others' functions ------------------------------------------------------------------------------------


class _InPlace:
    """What stands in the place of others' functions while any model is watched; the last one out puts them back."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._put_back: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                # `F.multi_head_attention_forward` finds them under these names; the mode is off inside of it.
                self._put(F, "scaled_dot_product_attention", sdpa)
                self._put(F, "softmax", _softmax)
                self._put(torch, "bmm", _bmm)
                interfaces = sys.modules.get("transformers.modeling_utils")
                if interfaces is not None:
                    dispatch = interfaces.AttentionInterface.get_interface
                    self._put(interfaces.AttentionInterface, "get_interface", _watched(dispatch))

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._depth -= 1
            while not self._depth and self._put_back:
                self._put_back.pop()()

    def _put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        before = getattr(owner, name)
        self._put_back.append(lambda: setattr(owner, name, before))
        setattr(owner, name, function)


in_place = _InPlace()
