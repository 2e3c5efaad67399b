"""Gradient of the sink logits, for backends that save a shift and a sum of each row of scores, and not the weights; and
the refusal of second derivatives, which only the reference backend has.
"""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from headwise.attention.tensors import PerHead, PerRow


class OnlyFirstDerivative(torch.autograd.Function):
    """Base class of gradients of attention that are autograd functions themselves, so that differentiating them raises
    `RuntimeError`; otherwise a second derivative would silently be 0.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save no tensors."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        """Raise `RuntimeError`, since the second derivative is not implemented."""
        refuse_second_derivative(ctx._forward_cls.attention)


def refuse_second_derivative(attention: str) -> NoReturn:
    """Raise `RuntimeError`, in the words of torch, for the gradient of the gradient of a kind of attention."""
    raise RuntimeError(
        f"the derivative for the gradient of {attention} is not implemented; backend='reference' has one"
    )


class SinksGradient(OnlyFirstDerivative):
    """Gradient of the sink logits. A sink takes a part of the weights of a row but has no value vector, so it makes the
    output smaller. Its logit is a term of the log-sum-exp.

    The rounding error of a log-sum-exp would be one of the weight, so shifts and sums are used. Where the inverse of
    the sum is tiny, the sink has all weight of the row, and the log-sum-exp equals its logit.

    Its own gradient would lack what shifts and sums depend on.
    """

    attention = "sinks"

    @staticmethod
    def forward(
        deltas: PerRow, lse_gradient: PerRow | None, lse: PerRow, shifts: PerRow, inverse_sums: PerRow, sinks: PerHead
    ) -> PerHead:
        """Return the gradient, from numbers of each row: `deltas`, the product of the output and its gradient; the
        gradient of the log-sum-exp and itself; the number that was subtracted from the scores, in units of ln 2; and
        the inverse of the sum of 2 to the power of each shifted score, the sink's included. The output must not be
        rounded to half precision: its rounding error would be one of this gradient.
        """
        upstream = -deltas.double() if lse_gradient is None else lse_gradient.double() - deltas
        inverse = inverse_sums.double()
        log_sum = torch.where(inverse > 1e-30, (shifts.double() - inverse.log2()) * math.log(2), lse)
        weight = torch.exp(sinks[:, None] - log_sum).masked_fill(lse == -torch.inf, 0.0)
        return (weight * upstream).sum((0, 2)).to(sinks.dtype)
