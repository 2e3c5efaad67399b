"""Where attention calls are met: torch's functions by any name, and the dispatch of transformers."""

import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.attention.autocast import autocast_dtype
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem, mask_and_bias
from headwise.attention.uniform_attention import uniform_output
from headwise.intercept import eager_softmax
from headwise.intercept.hf_calls import even_where_all_is_hidden, hides_all, read_call, require_readable, with_infinite
from headwise.intercept.interceptor import answering, meet, running
from headwise.shapes import Float

SDPA = F.scaled_dot_product_attention
"""Torch's own, whatever stands in its place later."""


class Mode(TorchFunctionMode):
    """Torch's own attention and softmax, called by anybody, in the thread where it is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        func = eager_softmax.DROPOUT if func is _dropout else func
        if func is SDPA:
            return sdpa(*args, **kwargs)
        if not running.are_met:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _hidden:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is _softmax or func in eager_softmax.SOFTMAXES:
            scores, dim = (*args, *(kwargs[name] for name in ("input", "dim") if name in kwargs))[:2]
            eager_softmax.meets(scores, result, dim)
            return result
        return eager_softmax.follow(func, args, kwargs, result)


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
    result = eager_softmax.SOFTMAX(input, dim, *args, **kwargs)
    if _hidden.on and running.are_met:
        eager_softmax.meets(input, result, dim)
    return result


def _dropout(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's dropout, as the same function finds it."""
    return _followed(eager_softmax.DROPOUT, args, kwargs)


def _bmm(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's product, as the same function finds it."""
    return _followed(eager_softmax.BMM, args, kwargs)


def _followed(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result = function(*args, **kwargs)
    return eager_softmax.follow(function, args, kwargs, result) if _hidden.on and running.are_met else result


# -- scaled_dot_product_attention -------------------------------------------------------------------------------------


def sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Torch's attention, answered where it is met."""
    if not running.are_met:
        return SDPA(query, key, value, *args, **kwargs)
    q, k, v = map(_by_head, (query, key, value))
    met = meet(Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device), k.shape[1], v.shape[3])
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs

    @cache
    def problem() -> Problem:
        return _problem_of(query, key, value, **given)

    def otherwise() -> Answer:
        return Answer(_by_head(SDPA(query, key, value, *args, **kwargs)), None, None)

    def as_torch(out: Tensor) -> Tensor:
        return even_where_all_is_hidden(out, v, given.get("attn_mask")) if query.ndim == 4 else out

    out = met.answer(problem, otherwise).out
    out = met.changed(as_torch(out) if met.looks else out, lambda: as_torch(uniform_output(problem())))
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _by_head(tensor: Tensor) -> Float[Tensor, "batch heads length width"]:
    """Heads stand on the third axis from the end; without one there is a single head."""
    return tensor[:, None] if tensor.ndim == 3 else tensor.reshape(-1, *tensor.shape[-3:])


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
    """The call in our terms."""
    q, k, v = _alike(_by_head(query), _by_head(key), _by_head(value))
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


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in the widest dtype among them, where autocast would make them alike."""
    if autocast_dtype(q.device) is None:
        return q, k, v
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(widest), k.to(widest), v.to(widest)


# -- transformers -----------------------------------------------------------------------------------------------------


def _visited(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' choice of a function, which is wrapped where a visited model asks for one."""

    @wraps(dispatch)
    def chosen(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = dispatch(interface, implementation, default)

        @wraps(attention)
        def called(*args: Any, **kwargs: Any) -> Any:
            return _call(implementation, attention, args, kwargs) if running.are_met else attention(*args, **kwargs)

        return called

    return chosen


def _call(implementation: str, attention: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a function of transformers, which gives `(batch, queries, heads, value_dim)`, weights and more."""
    module, (q, k, v), mask, options = _given(*args, **kwargs)
    met = meet(Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device), k.shape[1], v.shape[3])
    more: list[Any] = [None]

    def problem() -> Problem:
        require_readable(implementation)
        return read_call(implementation, module, *_alike(q, k, v), attention_mask=mask, **options)

    def otherwise() -> Answer:
        out, *more[:] = attention(*args, **kwargs)
        return Answer(out.transpose(1, 2), None, None)

    def as_torch(out: Tensor) -> Tensor:
        return even_where_all_is_hidden(out, v, mask)

    out = None
    if met.looks and implementation == "eager" and not options.get("dropout"):
        with answering():  # it makes the weights, and may hand them on
            answered = otherwise()
        if more[0] is not None:
            out = answered.out
            met.show(_without_hidden_rows(more[0], mask), out)
    if out is None:
        out = met.answer(problem, otherwise).out
        out = as_torch(out) if met.looks else out
    out = met.changed(out, lambda: as_torch(uniform_output(problem())))
    return out.transpose(1, 2).contiguous(), *more


def _given(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]]:
    """What a function of transformers is given."""
    return module, (query, key, value), attention_mask, options


def _without_hidden_rows(weights: Tensor, mask: Tensor | None) -> Tensor:
    """The weights that a function of transformers made: in a row that hides all it makes them even."""
    if mask is None or not mask.is_floating_point():
        return weights
    return weights.masked_fill(hides_all(mask), 0.0)


# -- in place of others' functions ------------------------------------------------------------------------------------


class _InPlace:
    """What stands in the place of others' functions while any model is visited; the last one out puts them back."""

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
                self._put(F, "dropout", _dropout)
                self._put(torch, "bmm", _bmm)
                interfaces = sys.modules.get("transformers.modeling_utils")
                if interfaces is not None:
                    dispatch = interfaces.AttentionInterface.get_interface
                    self._put(interfaces.AttentionInterface, "get_interface", _visited(dispatch))

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
