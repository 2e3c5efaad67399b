"""The operators of the native backend in plain torch, for compiled calls where the native kernels are not available.

The compiler records a call of an operator without looking into it. So the blocks can be planned when the call runs,
from the sizes and the ranges of keys that it then has.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from headwise.attention.backends import plain_statistics
from headwise.attention.backends.blockwise.attention import BlockwiseAttention, BlockwiseBackward, CallOptions
from headwise.attention.backends.blockwise.scores import FLOAT32_BLOCK_OVERHEAD
from headwise.attention.backends.blockwise.tiles import BlockwisePlan, MaskGroup, plan_of, threads_of
from headwise.attention.backends.native import library
from headwise.attention.backends.native.operators import register_rules
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.kinds import mask_of_keys
from headwise.checks import called_by_compiler

_PROBLEM = plain_statistics.PROBLEM
_DROPOUT = "float dropout=0.0, Tensor? seed=None, SymInt first_query=0, SymInt first_key=0"
_UPSTREAM = "Tensor out_gradient, Tensor? lse_gradient, Tensor out, Tensor normalizers"

SCHEMAS = {
    "attend_forward": f"({_PROBLEM}, {_DROPOUT}) -> (Tensor out, Tensor lse, Tensor normalizers)",
    "attend": f"({_PROBLEM}) -> (Tensor out, Tensor lse)",
    "attend_backward": f"({_UPSTREAM}, {_PROBLEM}, {_DROPOUT}) "
    "-> (Tensor q_gradient, Tensor k_gradient, Tensor v_gradient, Tensor deltas)",
    "attend_bias_gradient": f"({_UPSTREAM}, {_PROBLEM}, {_DROPOUT}) -> Tensor",
    "attend_statistics": plain_statistics.SCHEMA,
}
"""Arguments and results of the operators, as in `native/cpp/operators.cpp`."""


@called_by_compiler
def why_not_registered() -> str | None:
    """Register blockwise attention as torch operators, for `torch.compile` without native kernels, and return None. If
    that is not possible, return the reason that blockwise attention cannot be compiled, in one sentence. The compiler
    calls this function instead of tracing it.
    """
    return _register()


@cache
def _register() -> str | None:
    """Register the torch operators of blockwise attention at the first call. Return None, or the reason that they
    cannot be registered. Later calls return the same result.
    """
    if library.load() is None:
        return "while compiling, its operator is that of the native kernels"
    if hasattr(torch.ops.headwise, "attend_forward"):
        return "its operator cannot be registered next to that of native kernels from other sources"
    fragment = torch.library.Library("headwise", "FRAGMENT")  # type: ignore[no-untyped-call]
    _fragments.append(fragment)  # its operators exist as long as it does
    functions = {
        "attend_forward": _attend_forward,
        "attend": lambda *arguments: _attend_forward(*arguments)[:2],
        "attend_backward": _attend_backward,
        "attend_bias_gradient": _attend_bias_gradient,
        "attend_statistics": plain_statistics.attend_statistics,
    }
    for name, function in functions.items():
        fragment.define(name + SCHEMAS[name])  # type: ignore[no-untyped-call]
        fragment.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_rules(functions)
    return None


SEED_STEP = 0x9E3779B1
"""Odd number of 32 bits, which are all that torch's generator on the CPU reads of a seed: multiples of it are far apart
in them.
"""

_fragments: list[torch.library.Library] = []


Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Queries, keys, values, bias and sinks of a call."""


def _call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    head_scale: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    ranges: Tensor | None,
    dense: Tensor | None,
    bias: Tensor | None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    first_query: int = 0,
    _first_key: int = 0,
) -> tuple[Tensors, Tensor | None, CallOptions]:
    """Convert the arguments of a torch operator to those of blockwise attention. Return q, k, v, bias and sinks, with
    q, k and v in float32; the scale of each head, or None; and the options. A scale of each head is already multiplied
    into q. If the call computes a part of a larger one, from query `first_query` on, its dropout seed differs from
    those of the other parts.
    """
    batch, heads, queries, _ = q.shape
    grid = Grid(batch, heads, queries, k.shape[2], q.device)
    plan: BlockwisePlan = (MaskGroup(range(grid.batch), range(grid.heads), None, grid, ()),)  # no block to compute
    if 0 not in (*q.shape, *k.shape):
        plan = plan_of(mask_of_keys(ranges, dense), grid, FLOAT32_BLOCK_OVERHEAD)
    q, k, v = (tensor.float() for tensor in (q, k, v))
    factors = None
    if head_scale is not None:
        factors, scale = (scale * head_scale)[:, None, None], 1.0
        q = q * factors
    options = CallOptions(
        plan=plan,
        bfloat16_scores=False,
        scale=scale,
        softcap=softcap or None,
        bias_hides=bias is not None and bias.numel() > 0 and bool(bias.amin() == -torch.inf),
        dropout=dropout,
        threads=threads_of(dropout),
        seed=0 if seed is None else (int(seed) + first_query * SEED_STEP) % 2**63,
        observation=None,
    )
    return (q, k, v, bias, None if sinks is None else sinks[:, None]), factors, options


def _attend_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp, and two numbers of each query row for the backward pass. The first is the
    shift, which is subtracted from the row's scores. The second is the inverse of the row's sum of 2^(shifted score).
    """
    tensors, _, options = _call_of(*arguments)
    results: Any = BlockwiseAttention.forward(*tensors, options)
    out, lse, shifts, sums = results
    return out.to(arguments[0].dtype), lse, torch.cat([shifts, 1 / sums], -1)


def _attend_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and the dot product of each row's output and the gradient of this output.
    Without sinks, the last one is not needed and is an empty tensor.
    """
    has_sinks = arguments[10] is not None
    *gradients, _, deltas = _gradients(*arguments, bias_needs_grad=False, needs_exact_output=has_sinks)
    of_q, of_k, of_v = (
        torch.empty_like(tensor).copy_(gradient) for tensor, gradient in zip(arguments[4:7], gradients, strict=True)
    )
    return of_q, of_k, of_v, deltas if has_sinks else deltas.new_empty(0)


def _attend_bias_gradient(*arguments: Any) -> Tensor:
    """Return the gradient of the bias as a contiguous tensor, as the native kernels do."""
    repeats_along_keys = arguments[13].shape[3] == 1
    gradients = _gradients(*arguments, bias_needs_grad=True, needs_exact_output=repeats_along_keys)
    return gradients[3].contiguous()


def _gradients(
    out_gradient: Tensor,
    lse_gradient: Tensor | None,
    out: Tensor,
    normalizers: Tensor,
    *arguments: Any,
    bias_needs_grad: bool,
    needs_exact_output: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and the bias, then the dot product of each row's output and the gradient of this
    output, in float32. With `needs_exact_output`, an output in half precision is first computed again in float32, so
    that the dot product does not have the rounding error of half precision.
    """
    tensors, head_scale, options = _call_of(*arguments)
    if needs_exact_output and out.dtype != torch.float32:
        results: Any = BlockwiseAttention.forward(*tensors, options)
        out = results[0]
    shifts, inverse_sums = normalizers[..., :1], normalizers[..., 1:]
    out_gradient, out = out_gradient.float(), out.float()
    inputs: Any = (out_gradient, lse_gradient, *tensors[:4], out, shifts, 1 / inverse_sums, options, bias_needs_grad)
    gradients: Any = BlockwiseBackward.forward(*inputs)
    of_q, *others = gradients
    of_q = of_q if head_scale is None else of_q * head_scale
    return (of_q, *others, (out_gradient * out).sum(-1))
