"""Gradient of the sink logits, for backends that save a shift and a sum of each row of scores, and not the weights; and
the refusal of second derivatives, which only the reference backend has.
"""

import math
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from headwise.attention.tensors import PerHead, PerRow


class OnlyFirstDerivative(torch.autograd.Function):
    """Base class for the backward passes of attention. They are autograd functions themselves, so that differentiating
    them again raises `RuntimeError`. Otherwise, a second derivative would silently be 0.

    Attributes:
        attention: kind of attention, such as "fused attention", for the error.
    """

    attention: ClassVar[str]

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the kind of attention alone, for the error that `backward` raises."""
        ctx.attention = cls.attention

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        """Raise `RuntimeError`, since the second derivative is not implemented."""
        refuse_second_derivative(ctx.attention)


def refuse_second_derivative(attention: str) -> NoReturn:
    """Raise `RuntimeError`: the second derivative of `attention`, a kind of attention such as "native attention", is
    not implemented. The message has torch's wording.
    """
    raise RuntimeError(
        f"the derivative for the gradient of {attention} is not implemented; backend='reference' has one"
    )


class SinksGradient(OnlyFirstDerivative):
    """Gradient of the sink logits. A head's sink is one more score in the softmax, without a value vector: it takes a
    part of the weights of each row, and so makes the output smaller. Its logit is a term of the log-sum-exp.

    The rounding error of a log-sum-exp would be one of the weight, so shifts and sums are used. Where the inverse of
    the sum is tiny, the sink has all weight of the row, and the log-sum-exp equals its logit.

    Differentiating this gradient raises an error: shifts and sums, on which it depends, have no gradient here.
    """

    attention = "sinks"

    @staticmethod
    def forward(
        deltas: PerRow, lse_gradient: PerRow | None, lse: PerRow, shifts: PerRow, inverse_sums: PerRow, sinks: PerHead
    ) -> PerHead:
        """Return the gradient of the sink logits, from numbers of each query row. `deltas` is the dot product of the
        output and the output's gradient, and `lse` is the log-sum-exp. `shifts` is the number that was subtracted from
        the scores, in units of ln 2. `inverse_sums` is the inverse of the sum of 2^(shifted score), sink included.

        The output must not be rounded to half precision: its rounding error would be one of this gradient.
        """
        upstream = -deltas.double() if lse_gradient is None else lse_gradient.double() - deltas
        inverse = inverse_sums.double()
        log_sum = torch.where(inverse > 1e-30, (shifts.double() - inverse.log2()) * math.log(2), lse)
        weight = torch.exp(sinks[:, None] - log_sum).masked_fill(lse == -torch.inf, 0.0)
        return (weight * upstream).sum((0, 2)).to(sinks.dtype)
