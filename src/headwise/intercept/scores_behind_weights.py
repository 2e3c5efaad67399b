"""Scores behind attention weights that a model computes itself."""

from collections.abc import Callable

import torch

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.reference import attention_weights, masked_scores, scaled_products
from headwise.attention.problem import Problem
from headwise.errors import InputError
from headwise.shapes import Float

Scores = Float[torch.Tensor, "batch heads queries keys"]


def scores_behind(
    weights: Float[torch.Tensor, "batch heads queries keys"], read_problem: Callable[[], Problem]
) -> tuple[Scores | None, Scores | None]:
    """Return the scores from which attention `weights` were computed, and the scores before the softcap (None without a
    softcap). They are computed again from the call as a `Problem`. Both are None if that is not possible, or if the
    softmax of the scores differs from `weights` by more than rounding.

    Args:
        weights: weights that the function returned.
        read_problem: function that states the call as a `Problem`.
    """
    try:
        problem = read_problem()
    except InputError:
        return None, None
    if problem.talking is not None or problem.grid.keys != weights.shape[-1]:
        return None, None
    eps = max(torch.finfo(dtype).eps for dtype in _dtypes(weights, problem))
    with torch.no_grad(), without_autocast(problem.q.device):
        scores = masked_scores(problem)
        expected = attention_weights(scores, problem.sinks)
        if not _are_weights_of(scores, expected, weights.to(expected.dtype), eps):
            return None, None
        if problem.softcap is None:
            return scores, None
        return scores, scaled_products(problem).where(scores > -torch.inf, -torch.inf)


def _are_weights_of(scores: Scores, expected: Scores, weights: Scores, eps: float) -> bool:
    """Return True if `weights` equal `expected`, the softmax of `scores`, up to rounding. `eps` is the relative
    rounding error of scores and weights.

    A score s is rounded by up to eps |s|, so a weight may differ by a factor. Large scores in float16 would seem to be
    other scores without this: at 300, the rounding is 0.3.
    """
    is_visible = scores > -torch.inf
    largest = scores.amax(-1, keepdim=True)
    rounding = (2 * eps * (scores.abs() + largest.abs())).where(is_visible, 0.0)
    logarithms = torch.where(expected > 0, expected.log(), scores - largest)  # weights that underflow
    tolerance = eps**0.5
    is_low_enough = weights <= (logarithms + rounding).clamp(max=0.0).exp() + tolerance
    is_high_enough = weights >= (logarithms - rounding).exp() - tolerance
    has_key = is_visible.any(-1, keepdim=True)
    return bool(((is_low_enough & is_high_enough) | ~has_key).all())  # False if a weight is NaN


def unshifted(scores: Scores) -> Scores | None:
    """Return `scores`, the input of a softmax that a model computes, unchanged. Return None if the largest score of
    every row is 0, or the log-sum-exp of every row: the model has then subtracted the maximum or the log-sum-exp by
    hand, and the original scores are unknown.
    """
    largest = scores.amax(-1) if scores.numel() else None
    if largest is None or not bool((largest <= 0).all()):
        return scores
    tolerance = torch.finfo(scores.dtype).eps ** 0.5
    is_shifted = bool((largest == 0).all()) or bool((scores.logsumexp(-1).abs() <= tolerance).all())
    return None if is_shifted else scores


def _dtypes(weights: torch.Tensor, problem: Problem) -> list[torch.dtype]:
    """Return the dtypes in which a model may have computed its attention weights. These are the dtypes of the weights
    and of the queries, that of autocast, and float32, in which `transformers` computes softmax.
    """
    device = weights.device.type
    of_autocast = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return [weights.dtype, problem.q.dtype, torch.float32, *of_autocast]
