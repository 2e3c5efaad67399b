"""Rotation of the queries or keys of few tokens by one native operator.

A step of decoding rotates one token. The operators of torch that compute its angles and rotate it take longer than the
attention to thousands of keys.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise.attention.backends.native import library
from headwise.checks import has_own_class, makes_plain_tensors
from headwise.shapes import Float, Int

MOST_TOKENS = 8
"""Largest number of tokens, over all sequences, that the operator rotates."""


def suits(x: Float[Tensor, "batch heads length head_dim"], positions: Int[Tensor, "#batch length"]) -> bool:
    """Return True if the operator can rotate queries or keys by these positions, and is expected to be faster than the
    operators of torch. It has no gradient.
    """
    return (
        makes_plain_tensors()  # first: while exporting, reading sizes would fix them
        and x.shape[0] * x.shape[2] <= MOST_TOKENS
        and x.is_cpu
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.stride(3) == 1
        and has_own_class(x)
        and has_own_class(positions)
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and not (x.requires_grad and torch.is_grad_enabled())
        and forward_ad._current_level < 0
        and library.load() is None
    )


def rotate(
    x: Float[Tensor, "batch heads length head_dim"],
    positions: Int[Tensor, "#batch length"],
    turns: Float[Tensor, " pairs"],
    factor: float,
    interleaved: bool,
) -> Float[Tensor, "batch heads length head_dim"]:
    """Return queries or keys rotated by their positions. `suits` must be True for them.

    Args:
        x: queries or keys.
        positions: of the tokens.
        turns: full turns of each pair of features from one position to the next, in float64.
        factor: factor of the rotated features.
        interleaved: True if neighbouring features are a pair.
    """
    rotated: Tensor = _operator()(x, positions, turns, factor, interleaved)
    return rotated


@cache
def _operator() -> Any:
    """Return the operator. Finding it anew takes as long as a rotation."""
    return torch.ops.headwise.rotate_few_tokens.default
