"""Scores of a call whose attention weights another function computed, from the queries and keys that it received."""

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
    with torch.no_grad(), without_autocast(problem.q.device):
        scores = masked_scores(problem)
        expected = attention_weights(scores, problem.sinks)
        has_key = (scores > -torch.inf).any(-1, keepdim=True)
        difference = (weights.to(expected.dtype) - expected).masked_fill(~has_key, 0.0).abs()
        # Models of `transformers` compute the softmax in float32, also those in float64.
        rounding = max(torch.finfo(weights.dtype).eps, torch.finfo(torch.float32).eps)
        if not bool((difference <= rounding**0.5).all()):  # also if it is NaN
            return None, None
        if problem.softcap is None:
            return scores, None
        return scores, scaled_products(problem).where(scores > -torch.inf, -torch.inf)
