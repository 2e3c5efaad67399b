"""Results of one drawn problem: those of the native kernels, and those of plain attention."""

from collections.abc import Callable

import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.statistics import kernel_statistics
from headwise.statistics.tally import Tally
from research.native_kernels.problems import Draw, DrawnProblem
from tests.oracles import plain_attention

Results = dict[str, Tensor]
"""Results by name: output, log-sum-exp, and gradients."""

Attention = Callable[..., tuple[Tensor, Tensor]]
"""Function of q, k, v and learned options that returns the output and the log-sum-exp."""


def plain_results(problem: DrawnProblem, dtype: torch.dtype, draw: Draw) -> tuple[Results, Results]:
    """Return the exact results for a set of values in `dtype`, computed in float64, and those of plain attention, the
    formula in `dtype`.
    """
    tensors, factors = problem.tensors(dtype, draw), problem.factors_of_dropout(draw)

    def plain(q: Tensor, k: Tensor, v: Tensor, learned: dict) -> tuple[Tensor, Tensor]:
        options = problem.oracle_options | learned
        if options["bias"] is not None:
            options["bias"] = _representable(options["bias"], q.dtype).expand(problem.score_shape)
        result = plain_attention(q, k, v, **options, factors=factors)
        return result.out, result.lse

    exact, rounded = (_results(problem, plain, tensors, each) for each in (torch.float64, dtype))
    return exact, rounded


def native_results(problem: DrawnProblem, dtype: torch.dtype, draw: Draw) -> Results:
    """Return the results of the native kernels for a set of values in `dtype`. "out with statistics" is the output of
    the operator that also computes the statistics, where it accepts the problem; it has no dropout.
    """
    tensors = problem.tensors(dtype, draw)

    def native(q: Tensor, k: Tensor, v: Tensor, learned: dict) -> tuple[Tensor, Tensor]:
        options = problem.attend_options | learned | {"dropout": problem.dropout}
        problem.start_dropout(draw)
        out, lse = hw.attend(q, k, v, **options, return_lse=True, backend="native")
        return out, lse

    results = _results(problem, native, tensors, dtype)
    with_statistics = _output_with_statistics(problem, tensors)
    return results if with_statistics is None else results | {"out with statistics": with_statistics}


def _results(problem: DrawnProblem, attention: Attention, tensors: list[Tensor], dtype: torch.dtype) -> Results:
    """Return the output, the log-sum-exp and the gradients of one implementation, in `dtype`."""
    *inputs, upstream, lse_upstream = tensors
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # the exact gradient must not be rounded
    options = {"scale": problem.scale, "sinks": problem.sinks, "bias": problem.bias}
    is_learned = {"scale": problem.learns_scale, "sinks": problem.sinks is not None, "bias": problem.learns_bias}
    tensors_of_options = {name: option for name, option in options.items() if isinstance(option, Tensor)}
    learned = {name: _leaf(option, wide) for name, option in tensors_of_options.items() if is_learned[name]}
    leaves = {name: _leaf(x, dtype) for name, x in zip(("q", "k", "v"), inputs, strict=True)}
    out, lse = attention(*leaves.values(), options | learned)
    leaves |= learned
    outputs, gradients_of_outputs = [out], [upstream.to(out.dtype)]
    if problem.has_lse_gradient:
        outputs.append(lse)
        gradients_of_outputs.append(torch.where(lse > -torch.inf, lse_upstream.to(lse.dtype), 0.0))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), gradients_of_outputs)
    named = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def _representable(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in which finite numbers are not below the least number of a dtype, where they would be rounded to
    minus infinity. Its gradient is that of the bias.
    """
    least = max(torch.finfo(dtype).min, torch.finfo(bias.dtype).min)
    change = bias.detach().clamp(min=least) - bias.detach()
    return bias + change.masked_fill(bias == -torch.inf, 0.0)


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype` that requires a gradient, with its strides if the dtype is the same."""
    return tensor.detach().to(dtype).requires_grad_()


@torch.no_grad()
def _output_with_statistics(problem: DrawnProblem, tensors: list[Tensor]) -> Tensor | None:
    """Return the output of the operator that also computes the statistics; None if it refuses the problem."""
    options = {**problem.attend_options, "scale": problem.scale, "sinks": problem.sinks}
    call, context = Problem.checked(*tensors[:3], **options), CallContext()
    if problem.dropout or kernel_statistics.why_not(call, context) is not None:
        return None
    answer = kernel_statistics.attend_tallied(call, context, Tally())
    assert answer is not None, "a finite problem has rows that are not finite"
    return answer.out
