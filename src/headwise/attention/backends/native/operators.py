"""Rules of the native operators, by which torch traces them, differentiates attention and counts operations."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from headwise.attention.backends.plain_statistics import ROWS
from headwise.attention.backends.sinks_gradient import SinksGradient, refuse_second_derivative
from headwise.attention.tensors import Outputs, PerRow
from headwise.checks import savable


def register_rules(names: Iterable[str]) -> None:
    """Register the rules by which torch traces the operators called `names`, computes the gradients of attention, and
    counts floating-point operations. A second derivative of attention raises an error; without these rules it would
    silently be 0.
    """
    for name in names:
        torch.library.register_fake(f"headwise::{name}", FAKES[name])
    torch.library.register_autograd("headwise::attend_forward", _backward, setup_context=_save)
    for name in ("attend_backward", "attend_bias_gradient"):
        torch.library.register_autograd(f"headwise::{name}", lambda *_: refuse_second_derivative("native attention"))
    register_flops()


# -- tracing: results without values -----------------------------------------------------------------------------------


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors without meaningful values, in the shapes and dtypes of the results of `attend_forward`, for
    tracing. The results are the output, the log-sum-exp, and two numbers of each row for the backward pass.
    """
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return empty_output(q, v), lse, lse.new_empty(*lse.shape, 2)


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Return an output of attention in the memory layout of the native kernels, without values: the heads of one
    position are adjacent.
    """
    batch, heads, queries, _head_dim = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return tensors without meaningful values, in the shapes and dtypes of the results of `attend_backward`, for
    tracing. The results are the gradients of q, k and v and, with sinks, one number of each row.
    """
    q, k, v, sinks = *arguments[4:7], arguments[10]
    deltas = q.new_empty(0 if sinks is None else q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), deltas


def _fake_statistics(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Return tensors without meaningful values, in the shapes and dtypes of the results of `attend_statistics`, for
    tracing. The results are the output, the log-sum-exp, and the statistics of rows and keys.
    """
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
    "attend": lambda *arguments: _fake_forward(*arguments)[:2],
    "attend_statistics": _fake_statistics,
    "attend_backward": _fake_backward,
    "attend_bias_gradient": lambda *arguments: arguments[13].new_empty(arguments[13].shape, dtype=torch.float32),
    "row_sums": lambda rows, _counted, numbers, _: (
        rows.new_empty(2, len(numbers), *rows.shape[1:3], dtype=torch.float64),
        rows.new_empty(2, *rows.shape[1:3], dtype=torch.float64),
        True,
    ),
    "linear_map": lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    "rotate_few_tokens": lambda x, *_: x.new_empty(*(x.shape[axis] for axis in (0, 2, 1, 3))).transpose(1, 2),
}
"""Functions that return the results of each operator without values, for tracing."""


# -- the gradient ------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the inputs and results that the backward pass needs."""
    q, k, v, ctx.scale, head_scale, ctx.softcap, sinks, ranges, matrix, bias, ctx.dropout, seed, *ctx.origin = inputs
    tensors = (q, k, v, head_scale, sinks, ranges, matrix, bias, seed)
    ctx.save_for_backward(*(each if each is None else savable(each) for each in tensors), *output)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, out_gradient: Outputs | None, lse_gradient: PerRow | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, the sinks and the bias, given the gradients of the output and the
    log-sum-exp.
    """
    q, k, v, head_scale, sinks, ranges, matrix, bias, seed, out, lse, normalizers = ctx.saved_tensors
    out_gradient, lse_gradient = with_usual_strides(out_gradient, lse_gradient, out)
    arguments = (
        *(out_gradient, lse_gradient, out, normalizers, q, k, v),
        *(ctx.scale, head_scale, ctx.softcap, sinks, ranges, matrix, bias, ctx.dropout, seed, *ctx.origin),
    )
    of_q = of_k = of_v = of_sinks = of_bias = None
    if any(ctx.needs_input_grad[:3]) or ctx.needs_input_grad[6]:
        of_q, of_k, of_v, deltas = torch.ops.headwise.attend_backward(*arguments)
    if ctx.needs_input_grad[6]:
        of_rows = (deltas, lse_gradient, lse, *normalizers.unbind(-1))
        of_sinks = SinksGradient.apply(*of_rows, sinks)  # type: ignore[no-untyped-call]
    if ctx.needs_input_grad[9]:
        of_bias = torch.ops.headwise.attend_bias_gradient(*arguments).to(bias.dtype)
    return (of_q, of_k, of_v, None, None, None, of_sinks, None, None, of_bias, *4 * [None])


def with_usual_strides(
    out_gradient: Outputs | None, lse_gradient: PerRow | None, out: Outputs
) -> tuple[Outputs, PerRow | None]:
    """Return the gradients of the output and of the log-sum-exp in the memory layout that the native backward pass
    reads. A missing gradient of the output is replaced by zeros.
    """
    out_gradient = torch.zeros_like(out) if out_gradient is None else out_gradient
    if out_gradient.stride(-1) != 1:
        out_gradient = out_gradient.clone(memory_format=torch.contiguous_format)  # also without elements
    return out_gradient, None if lse_gradient is None else lse_gradient.contiguous()


# -- numbers of operations ---------------------------------------------------------------------------------------------


def register_flops() -> None:
    """Register formulas for the native operators with torch's counter of floating-point operations, for counters that
    are active now and for later ones. Do nothing if torch's module of the counter has not been imported, since
    importing it takes long.
    """
    counter: Any = sys.modules.get("torch.utils.flop_counter")
    if counter is None or not hasattr(torch.ops.headwise, "attend_forward"):
        return
    for name, formula in FLOPS.items():
        operator = getattr(torch.ops.headwise, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):  # it copied the formulas when it was made
            added = {getattr(torch.ops.headwise, name) for name in FLOPS}
            mode.counter.flop_registry.update({each: counter.flop_registry[each] for each in added})


def _flops(with_queries: int, with_values: int, first: int = 0) -> Callable[..., int]:
    """Return the formula for the number of floating-point operations of an operator. For each query-key pair, the
    operator computes `with_queries` dot products of the width of queries, and `with_values` dot products of the width
    of values. The operator's arguments from index `first` on are q, k and v.
    """

    def formula(*arguments: Any, **_: Any) -> int:
        (batch, heads, queries, head_dim), (*_, keys, _), (*_, value_dim) = arguments[first : first + 3]
        operations: int = 2 * batch * heads * queries * keys * (with_queries * head_dim + with_values * value_dim)
        return operations

    return formula


FLOPS: dict[str, Callable[..., int]] = {
    "attend": _flops(1, 1),
    "attend_forward": _flops(1, 1),
    "attend_statistics": _flops(1, 1),
    "attend_backward": _flops(3, 2, first=4),  # one of them computes the scores again
    "attend_bias_gradient": _flops(1, 1, first=4),  # another pass over the scores
}
"""Formula of each operator for its number of operations: a function of the shapes of its tensors. They count what torch
counts for `scaled_dot_product_attention`: all scores, also those that a mask hides. A mask that is evaluated in parts
leaves out keys, which are not counted.
"""
