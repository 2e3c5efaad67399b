"""The native backend: attention by kernels in C++, in float32 and bfloat16, for the CPU.

Scores and sums are in float32. Masks reach the kernels as ranges of keys for each query, or as a boolean matrix where
they are no such ranges. Keys that a mask hides cost nothing where whole tiles of them are hidden.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise.attention.backends import reference
from headwise.attention.backends.native import library, operators
from headwise.attention.backends.native.parts import Options, attend_in_parts
from headwise.attention.masks.key_ranges import visible_keys
from headwise.attention.problem import Answer, Problem
from headwise.attention.tensors import KeyRanges, Matrix
from headwise.checks import is_transformed

name = "native"

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of queries, keys and values, and of a bias, that the kernels read."""


def why_not(problem: Problem) -> str | None:
    """Return the reason that the native kernels cannot compute an attention problem (the tensors and options of one
    call), in one sentence; None if they can.
    """
    if problem.talking is not None:
        return "the native kernels keep heads apart, and talking_heads mixes them"
    reason: str | None = why_no_derivative() or _why_not_tensors(problem) or library.why_not_loaded()
    return reason


def why_no_derivative() -> str | None:
    """Return the reason to refuse a call while torch may compute forward-mode derivatives, which the native operators
    do not have. Return None if torch does not compute any.
    """
    if forward_ad._current_level >= 0:
        return "the native kernels have no forward-mode derivative, and one may be computed here"
    return None


def _why_not_tensors(problem: Problem) -> str | None:
    """Return the reason that the native kernels cannot read the tensors of a problem (one attention call): their
    device, their dtype, or that torch traces or transforms them. Return None if the kernels can read them.
    """
    if problem.q.device.type != "cpu":
        return f"the native kernels are for the CPU, and q is on {problem.q.device}"
    if problem.q.dtype not in DTYPES:
        return f"the native kernels compute in float32 and bfloat16, and q is in {problem.q.dtype}"
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and torch._C._is_tracing():
        return "the native kernels cannot be recorded by torch.jit.trace"
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if is_transformed() if is_compiling else any(map(is_wrapped, problem.tensors)):
        return "the native kernels have no rules for transforms of torch.func"
    return None


def run(problem: Problem) -> Answer:
    """Compute an attention problem with the native kernels. If the weights are asked for, the reference backend
    computes it instead.
    """
    dtype = problem.q.dtype
    if problem.return_weights:
        return reference.run(problem)  # the caller asks for the matrix that kernels avoid
    if isinstance(problem.scale, Tensor) and problem.scale.requires_grad:
        q, k, v = (tensor.float() for tensor in (problem.q, problem.k, problem.v))
        problem = replace(problem, q=q * problem.scale, k=k, v=v, scale=1.0)
    # The seed is an argument of the operator, which is a pure function, so that the compiler may move it. A second
    # forward pass of activation checkpointing, for which torch restores its generator, drops the same weights.
    seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu") if problem.dropout > 0 else None
    dropout = problem.dropout, seed
    if problem.mask is None:
        out, lse = attend(arguments(problem, None, None), dropout)
        return Answer(out if out.dtype == dtype else out.to(dtype), lse if problem.return_lse else None, None)
    visible = visible_keys(problem.mask, problem.grid)
    parts = visible.parts()
    if parts is None:
        out, lse = attend(arguments(problem, visible.ranges, visible.matrix()), dropout)
    else:
        q, k, v, scale, head_scale, softcap, sinks, _, _, bias = arguments(problem, None, None)
        options = Options(scale, head_scale, softcap, sinks, bias, *dropout)
        out, lse = attend_in_parts(q, k, v, options, visible, parts)
    return Answer(out.to(dtype), lse if problem.return_lse else None, None)


def attend(arguments: tuple[Any, ...], dropout: tuple[float, Tensor | None] = (0.0, None)) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a native operator. Without dropout, and if no gradient is needed, an
    operator without a gradient is called: torch's code for gradients of custom operators takes longer than a short
    attention call.
    """
    if (
        dropout[0] > 0
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.is_grad_enabled() and any(each.requires_grad for each in arguments if isinstance(each, Tensor)))
    ):
        out, lse, _ = torch.ops.headwise.attend_forward(*arguments, *dropout)
    else:
        out, lse = torch.ops.headwise.attend.default(*arguments)
    return out, lse


def with_adjacent_columns(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v as the native operators read them: the numbers of a row are adjacent in memory. Tensors with
    gaps between these numbers are copied. Also register the number of operations for torch's counter, if it is active.
    """
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        operators.register_flops()  # one of the modes may be torch's counter of operations
    return tuple(
        tensor
        if tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        else tensor.clone(memory_format=torch.contiguous_format)  # `contiguous` returns an empty tensor unchanged
        for tensor in tensors
    )


def arguments(problem: Problem, ranges: KeyRanges | None, matrix: Matrix | None) -> tuple[Any, ...]:
    """Return the arguments that all native operators share: the tensors and options of a problem (one attention call),
    and its visible keys. A query attends to a key if the key is in the query's `ranges` and `matrix` is True for the
    pair. If `ranges` or `matrix` is None, it excludes no key.
    """
    scale, bias = problem.scale, problem.bias
    head_scale = scale[:, 0, 0].contiguous() if isinstance(scale, Tensor) else None
    if bias is not None and not (bias.is_cpu and bias.dtype in DTYPES):
        bias = bias.to(problem.score_dtype)
    return (
        *with_adjacent_columns(problem.q, problem.k, problem.v),
        1.0 if isinstance(scale, Tensor) else scale,
        head_scale,
        0.0 if problem.softcap is None else problem.softcap,
        None if problem.sinks is None else problem.sinks[:, 0].contiguous(),
        ranges,
        matrix,
        bias,
    )
