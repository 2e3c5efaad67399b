"""`attend`: the one function under every layer. Check once, ask the backends `why_not`, run one, gate."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype, without_autocast
from headwise.attention.backend_choice import Choice, choose_fastest, choose_named
from headwise.attention.backends import fused, reference
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise.backend import Blockwise
from headwise.attention.masks.base import Mask
from headwise.attention.problem import Answer, Backend, Problem
from headwise.errors import InputError
from headwise.shapes import Bool, Float, Int

interception_hook: ContextVar[Callable[[Problem, Callable[[Problem], Answer]], Answer] | None] = ContextVar(
    "interception_hook", default=None
)
"""Hook that answers attention problems in place of the chosen backend while a model is intercepted; otherwise None."""

BACKENDS: dict[str, Backend] = {each.name: each for each in (fused, blockwise, reference)}
"""Every backend by name."""


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
    backend: str | Blockwise | None = None,
) -> Float[Tensor, "batch heads queries value_dim"] | tuple[Tensor, ...]:
    """Scaled dot-product attention of several heads (Vaswani et al. 2017, equation 1).

    Args:
        q: queries `(batch, heads, queries, head_dim)`.
        k: keys `(batch, kv_heads, keys, head_dim)`; `kv_heads` divides `heads`, and consecutive query heads
            share one (Ainslie et al. 2023, grouped-query attention). They are not repeated in memory, except by
            torch itself with dropout or a bias that learns, on CPU.
        v: values `(batch, kv_heads, keys, value_dim)`.
        mask: who attends to whom: a `Mask`, or a boolean tensor, True = attends, of shape `(queries, keys)`
            or one that broadcasts to `(batch, heads, queries, keys)`. A float tensor is taken as `bias`.
            A row that may attend to nothing gives output 0, weights 0 and log-sum-exp -inf.
        bias: added to the scaled and capped scores; same shapes. -inf is what may not be attended to; a row of large
            finite numbers alone is not empty, and torch's kernel on CPU gets its gradient wrong.
        scale: multiplies the scores before anything else; `head_dim ** -0.5` unless given. A tensor `(heads,)` is
            a scale, or inverse temperature, of each head's own.
        softcap: c keeps the scaled scores between -c and c, as c tanh(score / c) (Gemma Team 2024, section 2).
        sinks: `(heads,)`, a logit of each head's own that takes its share of the softmax and gives nothing
            (gpt-oss); the weights of a row then add up to less than 1, and its log-sum-exp counts the sink.
        talking_heads: `(before, after)`, each `(heads, heads)`: scores become `before @ scores` over the heads ahead
            of bias and mask, and weights `after @ weights` (Shazeer et al. 2020). Row h says what head h takes.
        query_positions: where queries stand, for masks: `(queries,)` or `(batch, queries)`, whole numbers; -1 is a
            query that is not there, whose row is empty. Unless given, the last query stands at the last key.
        key_positions: where keys stand, `(keys,)` or `(batch, keys)`; -1 is a key that is not there.
        gate: multiplies each head's output: `(heads,)`, `(batch, heads)` or `(batch, heads, queries)`.
        dropout: probability with which a weight is left out and the rest scaled up. It acts whenever it is
            above 0 and touches only `out`: `lse` and `weights` are those of attention without it.
        return_lse: also return the log-sum-exp of each row's scores, `(batch, heads, queries)`, nats,
            float32 at least; differentiable.
        return_weights: also return the weights `(batch, heads, queries, keys)`. The matrix exists then.
        backend: "fused", "blockwise" or "reference", or `Blockwise(rows=128)`; None takes the faster of the first two,
            as `explain` tells. One asked for never falls back to another.

    Returns:
        `out (batch, heads, queries, value_dim)`; with `return_lse` or `return_weights` a tuple of `out` and
        what was asked for, in that order.

    Raises:
        InputError: arguments that do not fit together, or a backend that cannot do them (see `why_not`).
    """
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
    hook = None if torch.compiler.is_compiling() else interception_hook.get()
    with without_autocast(problem.q.device):
        answer = choice.run(problem) if hook is None else hook(problem, choice.run)
    out = answer.out if problem.gate is None else answer.out * problem.gate
    extras = [extra for extra in (answer.lse, answer.weights) if extra is not None]
    return (out, *extras) if extras else out


def why_not(
    backend: str | Blockwise,
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    **options: Any,
) -> str | None:
    """None when `backend` can do `attend(q, k, v, **options, backend=backend)`, otherwise why not, in one sentence.

    Raises `InputError` for a backend that does not exist and for arguments that no backend could take.
    """
    return backend_named(backend).why_not(Problem.checked(*_cast(q, k, v), **options))


def explain(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    backend: str | Blockwise | None = None,
    **options: Any,
) -> Choice:
    """Which backend `attend(q, k, v, **options)` takes, and why; print it, or read its fields.

    The costs that are compared are in scores that torch's fused kernel computes in the same time.

    Raises:
        InputError: what `attend` would raise.
    """
    return _choice(Problem.checked(*_cast(q, k, v), **options), backend)


def _choice(problem: Problem, backend: str | Blockwise | None) -> Choice:
    """The backend asked for, or the fastest."""
    return choose_fastest(problem) if backend is None else choose_named(backend_named(backend), problem)


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as autocast would hand them to torch's own attention; what is no tensor is refused later."""
    dtype = autocast_dtype(tensors[0].device) if isinstance(tensors[0], Tensor) else None
    if dtype is None:
        return tensors
    return tuple(
        each.to(dtype) if isinstance(each, Tensor) and each.dtype in AUTOCAST_DTYPES else each for each in tensors
    )


def backend_named(backend: str | Blockwise) -> Backend:
    """The backend of that name, or one that is given itself; `InputError` where there is none."""
    if isinstance(backend, Blockwise):
        return backend
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InputError("backend", expected=f"one of {', '.join(BACKENDS)}", got=repr(backend))
    return BACKENDS[backend]
