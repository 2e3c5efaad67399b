"""Gradient of the native attention operator."""

from typing import Any

import torch
from torch import Tensor

from headwise.attention.backends.sinks_gradient import sinks_gradient
from headwise.checks import savable
from headwise.shapes import Float

FORWARD, BACKWARD, BIAS_GRADIENT = (
    "headwise::attend_forward",
    "headwise::attend_backward",
    "headwise::attend_bias_gradient",
)
"""Names of the operators."""


def register() -> None:
    """Register the gradient of the operator of the forward pass, and an error for the gradients of this gradient, which
    would otherwise silently be 0.
    """
    torch.library.register_autograd(FORWARD, _backward, setup_context=_save)
    for name in (BACKWARD, BIAS_GRADIENT):
        torch.library.register_autograd(name, _refuse_second_derivative)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the inputs and results that the backward pass needs."""
    q, k, v, ctx.scale, head_scale, ctx.softcap, sinks, ranges, matrix, bias, ctx.dropout, seed, *ctx.origin = inputs
    tensors = (q, k, v, head_scale, sinks, ranges, matrix, bias, seed)
    ctx.save_for_backward(*(each if each is None else savable(each) for each in tensors), *output)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,
    out_gradient: Float[Tensor, "batch heads queries value_dim"] | None,
    lse_gradient: Float[Tensor, "batch heads queries"] | None,
    _: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs of the forward pass, given those of its output and its log-sum-exp. Only q, k,
    v, the sinks and the bias have one.
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
        of_sinks = sinks_gradient(deltas, lse_gradient, lse, normalizers[..., 0], normalizers[..., 1], sinks)
    if ctx.needs_input_grad[9]:
        of_bias = torch.ops.headwise.attend_bias_gradient(*arguments).to(bias.dtype)
    return (of_q, of_k, of_v, None, None, None, of_sinks, None, None, of_bias, *4 * [None])


def with_usual_strides(
    out_gradient: Float[Tensor, "batch heads queries value_dim"] | None,
    lse_gradient: Float[Tensor, "batch heads queries"] | None,
    out: Float[Tensor, "batch heads queries value_dim"],
) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries"] | None]:
    """Return the gradients of the output and of the log-sum-exp with strides that the operator of the backward pass
    accepts. Zeros stand for a missing gradient of the output.
    """
    out_gradient = torch.zeros_like(out) if out_gradient is None else out_gradient
    if out_gradient.stride(-1) != 1:
        out_gradient = out_gradient.clone(memory_format=torch.contiguous_format)  # also without elements
    return out_gradient, None if lse_gradient is None else lse_gradient.contiguous()


def _refuse_second_derivative(ctx: Any, *_: Tensor | None) -> None:
    """Raise `RuntimeError`, since the second derivative of native attention is not implemented."""
    raise RuntimeError(
        "the derivative for the gradient of native attention is not implemented; backend='reference' has one"
    )
