"""Loader of the library of native kernels. It is loaded by the first call that may use it, never by an import."""

import os
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from headwise.attention.backends.native import flops, gradients, installed
from headwise.attention.backends.native.installed import VARIABLE
from headwise.attention.backends.plain_statistics import ROWS
from headwise.checks import called_by_compiler


@called_by_compiler
def why_not_loaded() -> str | None:
    """Load the library of native kernels, and return None; or return the reason that it is not available, in one
    sentence. The compiler calls this function instead of tracing it.
    """
    return load()


@cache
def load() -> str | None:
    """Load the library at the first call. The result is that of `why_not_loaded`. A library that is there and cannot be
    used is also the subject of a warning.
    """
    reason = installed.why_no_library() or _load_library()
    if reason is None:
        register_rules(FAKES)
    elif installed.LIBRARY.is_file() and os.environ.get(VARIABLE) != "off":
        warnings.warn(f"{reason}; headwise computes without them", stacklevel=2)
    return reason


def _load_library() -> str | None:
    """Load the library, and return None; or return the reason that its kernels cannot be used, in one sentence."""
    try:
        torch.ops.load_library(str(installed.LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the native kernels cannot be loaded: {error}"
    return None if instruction_set() else installed.why_no_instructions()


def instruction_set() -> str:
    """Return the name of the instruction set that the loaded kernels use, such as "avx512"."""
    name: str = _constant("instruction_set")
    return name


def _constant(name: str) -> Any:
    """Return the result of an operator without arguments. Modes of torch that are active do not see the call: those
    that trace would record it in the program.
    """
    with _disable_current_modes():
        return getattr(torch.ops.headwise, name)()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp and the normalizers of each row, without values, for tracing."""
    batch, heads, queries, _head_dim = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    return out, lse, lse.new_empty(*lse.shape, 2)


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp without values, for tracing."""
    return _fake_forward(q, k, v)[:2]


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v and, with sinks, a number of each row, without values, for tracing."""
    q, k, v, sinks = *arguments[4:7], arguments[10]
    deltas = q.new_empty(0 if sinks is None else q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), deltas


def _fake_bias_gradient(*arguments: Any) -> Tensor:
    """Return the gradient of the bias without values, for tracing."""
    bias: Tensor = arguments[13]
    return bias.new_empty(bias.shape, dtype=torch.float32)


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear map without values, for tracing."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _fake_rotation(x: Tensor, *_: object) -> Tensor:
    """Return rotated queries or keys without values, for tracing."""
    batch, heads, tokens, width = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _fake_statistics(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Return the output, the log-sum-exp and the statistics without values, for tracing."""
    batch, heads, queries, _head_dim = q.shape
    sums = (batch, heads, k.shape[2])
    return (
        *_fake_forward(q, k, v)[:2],
        q.new_empty(len(ROWS), batch, heads, queries, dtype=torch.float32),
        q.new_empty(sums, dtype=torch.int64),
        q.new_empty(sums, dtype=torch.int32),
    )


FAKES: dict[str, Callable[..., Any]] = {
    "attend_forward": _fake_forward,
    "attend": _fake_attend,
    "attend_statistics": _fake_statistics,
    "attend_backward": _fake_backward,
    "attend_bias_gradient": _fake_bias_gradient,
    "linear_few_rows": _fake_linear,
    "rotate_few_tokens": _fake_rotation,
}
"""Functions that return the results of each operator without values."""


def register_rules(names: Iterable[str]) -> None:
    """Register with torch the rules by which it traces the operators with these names, differentiates attention
    and counts its operations.
    """
    for name in names:
        torch.library.register_fake(f"headwise::{name}", FAKES[name])
    gradients.register()
    flops.register()
