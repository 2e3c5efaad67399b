"""`attend`: attention of several heads on the fastest backend, with `why_not` and `explain` for its choice."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.attention import prepared_calls
from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype, without_autocast
from headwise.attention.backend_choice import Choice, choose_fastest, choose_named
from headwise.attention.backends import fused, reference
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.gpu import flex
from headwise.attention.backends.native import backend as native
from headwise.attention.masks.base import Mask
from headwise.attention.nonfinite import run_contained
from headwise.attention.problem import Answer, Backend, Problem
from headwise.errors import InputError
from headwise.shapes import Bool, Float, Int

interception_hook: Callable[[Problem, Callable[[Problem], Answer]], Answer] | None = None
"""Hook that answers attention problems in place of the chosen backend while a model is intercepted; otherwise None."""

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (fused, flex, blockwise, native, reference)}
"""All backends, by name."""


def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    mask: Mask | Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    talking_heads: tuple[Float[Tensor, "heads heads"], Float[Tensor, "heads heads"]] | None = None,
    query_positions: Int[Tensor, "... queries"] | None = None,
    key_positions: Int[Tensor, "... keys"] | None = None,
    gate: Float[Tensor, "..."] | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str | Backend | None = None,
) -> Float[Tensor, "batch heads queries value_dim"] | tuple[Tensor, ...]:
    """Return the output of scaled dot-product attention for each head (Vaswani et al. 2017, equation 1). With
    `return_lse` or `return_weights`, return a tuple: the output, then the log-sum-exp of each row of scores if
    requested, then the attention weights if requested.

    The output of a head is `softmax(scale * q k^T + bias) v` over the keys that the mask allows. Memory grows with
    length, not with its square, unless you ask for the weights. The output has the dtype of q; scores are accumulated
    in float32 at least. Keys and values that a mask hides do not change a row, not even if they are NaN or infinite
    (on CPU, outside of `torch.compile`, `torch.jit.trace` and transforms of `torch.func`).

    Args:
        q: queries `(batch, heads, queries, head_dim)`.
        k: keys `(batch, kv_heads, keys, head_dim)`. `kv_heads` divides `heads`, and consecutive query heads share a
            key/value head (Ainslie et al. 2023, grouped-query attention). Keys are not repeated in memory, except by
            torch itself with dropout, or with a bias that requires grad, on CPU.
        v: values `(batch, kv_heads, keys, value_dim)`.
        mask: keys that each query may attend to: a `Mask`, or a boolean tensor in which True means "attends". Its shape
            is `(queries, keys)`, or four axes that broadcast to `(batch, heads, queries, keys)`. A float tensor is
            used as `bias`. A row without a visible key has output 0, weights 0 and log-sum-exp -inf.
        bias: float tensor that is added to the scores after scale and softcap, in the same shapes as a mask. A key with
            a bias of -inf is hidden. A row of large finite negative numbers is not empty, and torch's kernel on CPU
            computes a wrong gradient for it.
        scale: factor of the scores; by default `head_dim ** -0.5`. A tensor `(heads,)` has one factor for each head.
        softcap: limit c that keeps the scaled scores between -c and c, as `c * tanh(score / c)` (Gemma Team 2024,
            section 2).
        sinks: `(heads,)`, one logit for each head that takes part in the softmax without a value (gpt-oss). The
            weights of a row then sum to less than 1, and the log-sum-exp includes the sink.
        talking_heads: two matrices `(heads, heads)`, before and after the softmax (Shazeer et al. 2020). Scores become
            `before @ scores` over the heads, before bias and mask; weights become `after @ weights`. Row h has the
            coefficients of head h.
        query_positions: positions of the queries for the mask, `(queries,)` or `(batch, queries)`, integers. -1 marks a
            query that does not exist, whose row is empty. By default the last query is aligned with the last key.
        key_positions: positions of the keys, `(keys,)` or `(batch, keys)`; -1 marks a key that does not exist. Pass
            both positions or neither.
        gate: factor of each head's output: `(heads,)`, `(batch, heads)` or `(batch, heads, queries)`.
        dropout: probability with which a weight is dropped; the others are scaled up. It is applied whenever it is
            above 0, and only to the output: log-sum-exp and weights are those without dropout.
        return_lse: also return the log-sum-exp of each row's scores, `(batch, heads, queries)`, in nats, in float32 at
            least. It is differentiable.
        return_weights: also return the weights `(batch, heads, queries, keys)`, which takes memory for the matrix.
        backend: "native", "fused", "flex", "blockwise", "reference", `Blockwise(rows=128)` or `Flex("triton")`. By
            default the fastest is chosen; `explain` returns the choice. A backend that you name is never replaced.

    Returns:
        The output `(batch, heads, queries, value_dim)`. With `return_lse` or `return_weights`, a tuple of the output,
        the log-sum-exp and the weights, as far as they are asked for, in this order.

    Raises:
        InputError: the arguments do not fit together, or the backend cannot compute them (see `why_not`).

    Example:
        >>> q = torch.randn(2, 8, 100, 64)
        >>> k, v = torch.randn(2, 2, 2, 100, 64)  # two key/value heads, shared by eight query heads
        >>> hw.attend(q, k, v, mask=hw.causal() & hw.window(32)).shape
        torch.Size([2, 8, 100, 64])
    """
    key = None
    if (
        not torch.compiler.is_compiling()
        and interception_hook is None
        and softcap is None
        and sinks is None
        and talking_heads is None
        and query_positions is None
        and key_positions is None
        and gate is None
        and type(dropout) is float
        and dropout == 0.0
        and return_lse is False
        and type(return_weights) is bool
    ):
        key = prepared_calls.signature(q, k, v, mask, bias, scale, return_weights, backend)
        result = None if key is None else prepared_calls.run(key, q, k, v, bias)
        if result is not None:
            return result
    q, k, v = _cast(q, k, v)
    problem = Problem.checked(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        talking_heads=talking_heads,
        query_positions=query_positions,
        key_positions=key_positions,
        gate=gate,
        dropout=dropout,
        return_lse=return_lse,
        return_weights=return_weights,
    )
    choice = _choice(problem, backend)
    run = partial(run_contained, run=choice.run)
    hook = None if torch.compiler.is_compiling() else interception_hook
    with without_autocast(problem.q.device):
        answer = run(problem) if hook is None else hook(problem, run)
    if key is not None:
        prepared_calls.prepare(key, mask, problem, choice)  # type: ignore[arg-type]
    out = answer.out if problem.gate is None else answer.out * problem.gate
    extras = [extra for extra in (answer.lse, answer.weights) if extra is not None]
    return (out, *extras) if extras else out


def why_not(
    backend: str | Backend,
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    **options: Any,
) -> str | None:
    """Return the reason that a backend cannot compute `attend(q, k, v, **options)`, in one sentence; None if it can.

    Args:
        backend: "native", "fused", "flex", "blockwise", "reference", a `Blockwise` or a `Flex`.
        q: queries, as in `attend`.
        k: keys, as in `attend`.
        v: values, as in `attend`.
        **options: further arguments of `attend`, such as `mask` or `return_lse`.

    Raises:
        InputError: there is no such backend, or no backend could compute these arguments.

    Example:
        >>> hw.why_not("fused", q, k, v, softcap=30.0)
        "torch's fused operators have no softcap"
    """
    return backend_named(backend).why_not(Problem.checked(*_cast(q, k, v), **options))


def explain(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    backend: str | Backend | None = None,
    **options: Any,
) -> Choice:
    """Return a `Choice`: the name of the backend that `attend(q, k, v, **options)` would use, and the reason. `print`
    shows a `Choice` as readable text. No attention is computed.

    Where "fused" and "blockwise" are compared, costs are in scores: the unit is the time in which torch's fused kernel
    computes one score.

    Args:
        q: queries, as in `attend`.
        k: keys, as in `attend`.
        v: values, as in `attend`.
        backend: the backend to explain; by default the fastest.
        **options: further arguments of `attend`, such as `mask` or `return_lse`.

    Returns:
        A `Choice` with `backend` (its name), `because` (the reason) and `candidates` (refusals or costs).

    Raises:
        InputError: the same as `attend` would raise.

    Example:
        >>> print(hw.explain(q, k, v, mask=hw.window(64)))  # q, k, v of 8 heads, 1,024 tokens, head_dim 16
        native     can
        fused      can
        blockwise  can
        native: its kernels leave out hidden keys, and are as fast as torch's where none is hidden
    """
    return _choice(Problem.checked(*_cast(q, k, v), **options), backend)


def _choice(problem: Problem, backend: str | Backend | None) -> Choice:
    """Return a `Choice` (a backend and the reason for choosing it) for an attention problem, the tensors and options of
    one call. If the caller named a backend, it is chosen; if `backend` is None, the backend that is expected to be
    fastest is chosen.
    """
    return choose_fastest(problem) if backend is None else choose_named(backend_named(backend), problem)


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """Return the given tensors (q, k, v), cast to the dtype of torch's autocast if autocast is on for their device.
    Only float16, bfloat16 and float32 tensors are cast; all others are returned unchanged.
    """
    dtype = autocast_dtype(tensors[0].device) if isinstance(tensors[0], Tensor) else None
    if dtype is None:
        return tensors
    casts = [isinstance(tensor, Tensor) and tensor.dtype in AUTOCAST_DTYPES for tensor in tensors]
    return tuple(tensor.to(dtype) if cast else tensor for tensor, cast in zip(tensors, casts, strict=True))


def backend_named(backend: str | Backend) -> Backend:
    """Return the backend with the given name, such as "fused". An argument that is a backend object itself, such as a
    `Blockwise`, is returned unchanged.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InputError("backend", expected=f"one of {', '.join(BACKENDS)}", got=repr(backend))
    return BACKENDS[backend]


def uniform_output(problem: Problem) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return each head's output under uniform attention: the mean of the values of all visible keys. If this mean
    replaces the head's output in an ablation, only the head's choice between keys is removed.

    A key is visible unless the mask or a bias of -inf hides it. Sinks, talking heads, gate and dropout are left out.
    """
    uniform = problem.with_uniform_weights()
    with without_autocast(problem.q.device):
        return run_contained(uniform, choose_fastest(uniform).run).out
