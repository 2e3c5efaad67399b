"""Numbers of tokens with which unrelated heads have a large centred kernel alignment by chance."""

import math
from typing import Any

from headwise.errors import require

LEAST_TOKENS = 4
"""Number of tokens from which on there is an unbiased estimate of dependence."""

LARGEST_EXPECTATION = 0.05
"""Largest expected number of pairs of unrelated heads at the threshold that is not named."""


def chance_reason(tokens: int, pairs: int, threshold: float) -> str | None:
    """Return the reason why comparisons of the outputs of heads over this number of tokens mean nothing; None if
    unrelated heads are not expected to reach the threshold by chance.

    Args:
        tokens: number of tokens.
        pairs: number of pairs of heads that are compared.
        threshold: least `cka` of similar heads.
    """
    if tokens < LEAST_TOKENS:
        return f"outputs of heads were compared over fewer than {LEAST_TOKENS} tokens, so cka is NaN for these modules"
    if pairs * chance_of(threshold, tokens) <= LARGEST_EXPECTATION:
        return None
    return (
        f"outputs of heads were compared over only {tokens} tokens, so that some of {pairs} pairs of unrelated heads "
        f"may have a cka of {threshold:g} or more by chance, and cka and clusters mean nothing for these modules"
    )


def chance_of(threshold: float, tokens: int) -> float:
    """Return about the largest probability with which the debiased centred kernel alignment of independent outputs is
    at least `threshold`, for independent tokens. Its standard deviation is sqrt(2 / (n (n - 3))) for n tokens.

    With m = n (n - 3) / 2, the alignment r of outputs of many features has sqrt(m - 1) r / sqrt(1 - r^2) distributed as
    Student's t with m - 1 degrees of freedom (Szekely and Rizzo 2013). Outputs of one feature have about the square of
    the correlation coefficient, with a beta distribution. The larger probability is returned.

    Raises:
        MissingExtra: scipy is not installed.
    """
    if threshold >= 1.0:
        return 0.0
    stats: Any = require("scipy.stats", purpose="a test of similarity", extra="tables")
    degrees = tokens * (tokens - 3) / 2 - 1
    of_many = stats.t.sf(threshold * math.sqrt(degrees / (1 - threshold**2)), degrees)
    of_one = stats.beta.sf(threshold, 1 / 2, (tokens - 2) / 2)
    return float(max(of_many, of_one))
