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
    """Return the scores of an attention problem, and those before its softcap (None without one). Both are None if the
    problem cannot be stated, or if its weights are not the weights that the function returned, up to rounding.

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
    tolerance = max(torch.finfo(dtype).eps for dtype in _dtypes(weights, problem)) ** 0.5
    with torch.no_grad(), without_autocast(problem.q.device):
        scores = masked_scores(problem)
        expected = attention_weights(scores, problem.sinks)
        has_key = (scores > -torch.inf).any(-1, keepdim=True)
        difference = (weights.to(expected.dtype) - expected).masked_fill(~has_key, 0.0).abs()
        if not bool((difference <= tolerance).all()):  # also if it is NaN
            return None, None
        if problem.softcap is None:
            return scores, None
        return scores, scaled_products(problem).where(scores > -torch.inf, -torch.inf)


def unshifted(scores: Scores) -> Scores | None:
    """Return scores that entered a softmax; None if they were shifted so that the largest of each row is 0, as in a
    softmax by hand.
    """
    is_shifted = scores.numel() > 0 and bool((scores.amax(-1) == 0).all())
    return None if is_shifted else scores


def _dtypes(weights: torch.Tensor, problem: Problem) -> list[torch.dtype]:
    """Return the dtypes in which the function may have computed: those of its tensors, that of autocast, and float32,
    in which `transformers` computes every softmax.
    """
    device = weights.device.type
    of_autocast = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return [weights.dtype, problem.q.dtype, torch.float32, *of_autocast]
