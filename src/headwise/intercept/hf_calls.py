"""Attention calls of a Hugging Face `transformers` model, seen where the library dispatches them.

Every model of `transformers` 5 asks `AttentionInterface.get_interface` for its attention function at each
call. Inside `observe` that method hands out the same function, wrapped: the model runs as it did, under its
own implementation's name, and each call is passed on as a `Problem`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.problem import Problem
from headwise.errors import InputError
from headwise.shapes import Float

READABLE = ("sdpa", "eager")
"""The implementations whose masks are tensors, so that a call can be read."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention inside a model."""

    layer: int
    path: str
    problem: Problem
    out: Float[Tensor, "batch queries heads value_dim"]


@contextmanager
def observe(model: nn.Module, on_call: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Within the context, call `on_call` after each attention call of `model`, in the order they run.

    Layers are numbered as the model numbers them, or in the order of the calls where it does not. The
    dispatch is put back when the context ends, also by an exception. Raises `InputError` inside the context
    when the model uses an attention implementation whose masks cannot be read.
    """
    from transformers.modeling_utils import AttentionInterface

    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    dispatch = AttentionInterface.get_interface

    def observed_dispatch(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = dispatch(interface, implementation, default)

        @wraps(attention)
        def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in paths:
                return attention(module, *args, **kwargs)
            require_readable(implementation)
            result = attention(module, *args, **kwargs)
            layer = getattr(module, "layer_idx", None)
            if layer is None or layer in seen:
                layer = max(seen, default=-1) + 1
            seen.add(layer)
            problem = read_call(implementation, module, *args, **kwargs)
            on_call(AttentionCall(layer, paths[id(module)], problem, result[0]))
            return result

        return observed

    AttentionInterface.get_interface = observed_dispatch
    try:
        yield
    finally:
        AttentionInterface.get_interface = dispatch


def require_readable(implementation: str) -> None:
    """Raise `InputError` for an attention implementation whose masks cannot be read."""
    if implementation not in READABLE:
        raise InputError(
            "model",
            expected=f"attention implementation {' or '.join(READABLE)}",
            got=implementation,
            remedy="call model.set_attn_implementation('sdpa')",
        )


def read_call(
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
    **_: Any,
) -> Problem:
    """The call in our terms."""
    queries = query.shape[2]
    mask: Mask | Tensor | None = attention_mask
    bias = position_bias
    if attention_mask is None:
        # SDPA then takes causality from the call or the module, over as many keys as queries; eager does not.
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if implementation == "sdpa" and is_causal and queries > 1:
            mask, key, value = causal(), key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
    elif attention_mask.is_floating_point():
        added = with_infinite(attention_mask)
        mask, bias = None, added if bias is None else bias + added
    return Problem.checked(query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sinks=s_aux)


FAR = 1e4
"""How much less than another an additive mask must give a key to hide it: no score makes up for it."""


def with_infinite(added: Tensor) -> Tensor:
    """What is added to scores, with -inf where it hides a key."""
    hidden = (added <= added.amax(-1, keepdim=True) - FAR) | hides_all(added)
    return added.masked_fill(hidden, -torch.inf)


def hides_all(added: Tensor) -> Tensor:
    """Which rows of an additive mask hide every key.

    The smallest number of a dtype stands for that, also after another was added to it.
    """
    return added.amax(-1, keepdim=True) <= torch.finfo(added.dtype).min / 2


def even_where_all_is_hidden(
    out: Float[Tensor, "batch heads queries value_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """The output as torch's own attention gives it, where ours gives 0.

    A finite mask that hides every key of a row leaves none before another: each gets the same weight. Some models read
    such rows.
    """
    if mask is None or not mask.is_floating_point():
        return out
    rows = hides_all(mask) & (mask.amax(-1, keepdim=True) > -torch.inf)
    if not bool(rows.any()):
        return out
    return torch.where(rows, v.mean(-2, keepdim=True).repeat_interleave(out.shape[1] // v.shape[1], 1), out)
