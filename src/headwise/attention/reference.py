"""The reference: attention with the whole matrix in memory. It is the specification, not a fall-back.

Vaswani et al. 2017, equation 1, for every head h with key/value head h // (heads / kv_heads):

    scores = scale * q k^T + bias, and -inf where the mask forbids
    lse    = log sum exp scores            over the keys
    A      = exp(scores - lse)             the weights, which is softmax(scores); 0 in a row without a key
    out    = A v

Run it in float64 to know the right answer.
"""

import torch
from torch import Tensor

from headwise.attention.problem import Answer, Problem
from headwise.shapes import Float

name = "reference"


def why_not(problem: Problem) -> str | None:
    """None: the reference does every problem that can be stated."""
    return None


def run(problem: Problem) -> Answer:
    """The answer by definition, differentiable in every tensor."""
    scores = masked_scores(problem)
    weights = weights_of(scores)
    kept = torch.dropout(weights, problem.dropout, train=problem.dropout > 0)
    out = each_kv_head(kept, problem.v.to(scores.dtype))
    dtype = problem.q.dtype
    return Answer(
        out.to(dtype),
        scores.logsumexp(-1) if problem.return_lse else None,
        weights.to(dtype) if problem.return_weights else None,
    )


def masked_scores(problem: Problem, rows: range | None = None) -> Float[Tensor, "batch heads rows keys"]:
    """`scale q k^T + bias`, -inf where the mask forbids, for some query rows or all; float32 at least."""
    rows = range(problem.grid.queries) if rows is None else rows
    part = slice(rows.start, rows.stop)
    dtype = problem.score_dtype
    scores = each_kv_head(problem.q[:, :, part].to(dtype), problem.k.to(dtype).mT) * problem.scale
    if problem.bias is not None:
        scores = scores + (problem.bias if problem.bias.shape[2] == 1 else problem.bias[:, :, part])
    hidden = scores == -torch.inf
    if (mask := problem.masked()) is not None:
        hidden = hidden | ~mask.block(problem.grid, rows)
    # Filling what a bias has hidden already stops the gradient there: those of softmax and logsumexp are NaN in a
    # row without a key.
    return scores.masked_fill(hidden, -torch.inf)


def weights_of(scores: Float[Tensor, "batch heads rows keys"]) -> Float[Tensor, "batch heads rows keys"]:
    """`softmax(scores)`, with weights 0 in a row without a key."""
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(empty, 0.0)


def each_kv_head(
    left: Float[Tensor, "batch heads rows inner"], right: Float[Tensor, "batch kv_heads inner columns"]
) -> Float[Tensor, "batch heads rows columns"]:
    """`left @ right`, each head with its group's key/value head, which is not repeated.

    The heads of a group are consecutive, so their rows are put one under the other and multiplied at once.
    """
    batch, heads, rows, inner = left.shape
    kv_heads, columns = right.shape[1], right.shape[3]
    grouped = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (grouped @ right).view(batch, heads, rows, columns)
