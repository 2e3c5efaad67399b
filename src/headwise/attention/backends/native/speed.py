"""When torch's fused kernel is as fast as the native kernels: a rule that was measured (docs/lab-notes.md).

In the measurements the native kernels took at most about 1.1 times as long as torch's on every instruction set, and
mostly less, with two exceptions. A block of the native kernels has 64 rows, which few queries do not fill; only the few
rows of a decoding step have kernels of their own. And the tiles of wide heads in float32 do not fit into the
first-level cache.
"""

import torch

from headwise.attention.backends.fused import FEWEST_KEYS_WITHOUT_MASK
from headwise.attention.problem import Problem

MOST_STEP_ROWS = 8
"""Most rows (queries, times query heads for each key/value head) of a decoding step, without a gradient: the number
`kFewRows` of the kernels, in `cpp/few_rows.h`.
"""

FEWEST_QUERIES = 128
"""Number of queries from which the native kernels are as fast as torch's or faster."""

FEWEST_QUERIES_WHERE_TORCH_IS_SLOW = 32
"""The same with gradients in bfloat16, where torch's backward pass is slow, and with dropout, for which torch keeps the
whole matrix.
"""

WIDEST_FLOAT32_HEAD = 128
"""Most features of a head in float32, if the mask hides nothing that torch's kernel would compute."""


def why_slower(problem: Problem, hides_nothing: bool) -> str | None:
    """Return the reason to expect that torch's fused kernel computes a problem faster than the native kernels, in one
    sentence; None if it does not.

    Args:
        problem: the attention call, which both can compute.
        hides_nothing: True if torch's kernel computes no score that the mask hides.
    """
    width = max(problem.q.shape[-1], problem.v.shape[-1])
    is_float32, has_dropout = problem.q.dtype == torch.float32, problem.dropout > 0
    is_wide = hides_nothing and is_float32 and not has_dropout and width > WIDEST_FLOAT32_HEAD
    wide = f"for more than {WIDEST_FLOAT32_HEAD} features in float32, torch's kernel is faster than the native ones"
    if torch.compiler.is_compiling():  # one graph serves all lengths
        return wide if is_wide else None
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (problem.q, problem.k, problem.v))
    rows = problem.grid.queries * problem.grid.heads // max(problem.k.shape[1], 1)
    needs_mask = problem.grid.keys < FEWEST_KEYS_WITHOUT_MASK  # the tensor takes longer than so few scores
    if not needs_gradient and (rows <= MOST_STEP_ROWS or needs_mask):
        return None
    torch_is_slow = has_dropout or (needs_gradient and not is_float32)
    fewest = FEWEST_QUERIES_WHERE_TORCH_IS_SLOW if torch_is_slow else FEWEST_QUERIES
    if problem.grid.queries < fewest:
        return f"for {MOST_STEP_ROWS + 1} rows to {fewest - 1} queries, torch's kernel is faster than the native ones"
    return wide if is_wide else None
