"""Gradient of the sink logits, for backends that save a shift and a sum of each row of scores, and not the weights; and
the refusal of second derivatives, which only the reference backend has.
"""

import math
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from headwise.attention.tensors import PerHead, PerRow


class OnlyFirstDerivative(torch.autograd.Function):
    """Base class for the backward passes of attention, which are autograd functions themselves. If such a backward pass
    is differentiated again, this class raises `RuntimeError`. Without this class, a second derivative would silently be
    0.

    Attributes:
        attention: kind of attention, such as "fused attention", for the error message.
    """

    attention: ClassVar[str]

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the kind of attention, which the error message of `backward` names, and nothing else."""
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
    """Gradient of the loss with respect to the sink logits. The sink of a head is one more score in the softmax of each
    query row, without a value vector: it takes a part of the weight of the row, and so makes the output smaller. Its
    score, the sink logit, is also a term of the log-sum-exp of the row.

    This gradient depends on the weight of the sink in each row, which is exp(sink logit - log-sum-exp). A rounding
    error of the log-sum-exp would be a relative error of this weight. So the log-sum-exp is computed again in float64,
    from two numbers that the forward pass saves for each row: a shift and a sum. Only where the sum exceeds 10^30 is
    the saved log-sum-exp used instead: there the sink has all weight of the row, and the log-sum-exp equals the sink
    logit.

    Differentiating this gradient raises an error, because its derivatives with respect to the shifts and sums are not
    implemented.
    """

    attention = "sinks"

    @staticmethod
    def forward(
        deltas: PerRow, lse_gradient: PerRow | None, lse: PerRow, shifts: PerRow, inverse_sums: PerRow, sinks: PerHead
    ) -> PerHead:
        """Return the gradient of the loss with respect to the sink logits, one number per head: the sum over sequences
        and query rows of `weight * (lse_gradient - deltas)`. `weight` is the sink's weight in the row; `deltas` are the
        dot products of each row's head output and its gradient.

        Args:
            deltas: for each query row, the dot product of the head output and the gradient of the loss with respect to
                this output. The output must not be rounded to bfloat16 or float16 before, because its rounding error
                would be an error of the result.
            lse_gradient: gradient of the loss with respect to `lse`; None if the loss does not depend on `lse`.
            lse: log-sum-exp of the scores of each row, the sink logit included. Rows in which it is -inf do not count.
            shifts: for each row, the number that the forward pass subtracted from the scores after it had divided them
                by ln 2.
            inverse_sums: for each row, 1 / sum of 2^(score / ln 2 - shift), where the sum is over the keys and the
                sink.
            sinks: the sink logits.
        """
        upstream = -deltas.double() if lse_gradient is None else lse_gradient.double() - deltas
        inverse = inverse_sums.double()
        log_sum = torch.where(inverse > 1e-30, (shifts.double() - inverse.log2()) * math.log(2), lse)
        weight = torch.exp(sinks[:, None] - log_sum).masked_fill(lse == -torch.inf, 0.0)
        return (weight * upstream).sum((0, 2)).to(sinks.dtype)
