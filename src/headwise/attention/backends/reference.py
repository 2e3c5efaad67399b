"""The reference backend: attention with the whole matrix in memory. It specifies the results of all backends.

Vaswani et al. 2017, equation 1, for every head h with key/value head h // (heads / kv_heads):

    scores = scale * q k^T                 one scale, or one for each head
           = c tanh(scores / c)            with a softcap c (Gemma 2)
           = before @ scores               over the heads, with talking heads (Shazeer et al. 2020)
           + bias, and -inf where the mask forbids
    lse    = log sum exp scores            over the keys, and the head's sink logit where it has one (gpt-oss)
    A      = exp(scores - lse)             the weights; 0 in a row without a key
           = after @ A                     over the heads, with talking heads
    out    = A v

Run it in float64 to get the exact result. It is used only if it is asked for by name, and in recorded programs for what
torch's kernel cannot compute.
"""

import torch
from torch import Tensor

from headwise.attention.problem import Answer, Problem
from headwise.attention.tensors import RowsByHead
from headwise.checks import records_program
from headwise.shapes import Float

name = "reference"


def why_not(problem: Problem) -> str | None:
    """Return None, since the reference backend can compute every attention problem."""
    return None


def run(problem: Problem) -> Answer:
    """Compute attention by its definition, with all weights as one matrix in memory. The result can be differentiated
    with respect to every tensor, any number of times.
    """
    scores = masked_scores(problem)
    weights = attention_weights(scores, problem.sinks)
    used_weights = torch.dropout(weights, problem.dropout, train=True) if problem.dropout > 0 else weights
    if problem.talking is not None:
        weights, used_weights = (mix_heads(each, problem.talking.after) for each in (weights, used_weights))
    out = grouped_matmul(used_weights, problem.v.to(scores.dtype))
    dtype = problem.q.dtype
    return Answer(
        out.to(dtype),
        log_sum_exp(scores, problem.sinks) if problem.return_lse else None,
        weights.to(dtype) if problem.return_weights else None,
    )


def masked_scores(problem: Problem, rows: range | None = None) -> Float[Tensor, "batch heads rows keys"]:
    """Return the scores of some query rows (by default all) as they enter the softmax, in float32 at least. They
    include scale, softcap, talking heads and bias, and are -inf at hidden keys.
    """
    part = slice(None) if rows is None else slice(rows.start, rows.stop)
    scores = scaled_products(problem, rows)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.talking is not None:
        scores = mix_heads(scores, problem.talking.before)
    hidden = None if problem.mask is None else ~problem.mask.block(problem.grid, rows)
    if problem.bias is not None:
        bias = problem.bias if problem.bias.shape[2] == 1 else problem.bias[:, :, part]
        scores = scores + bias
        # These scores are -inf already; filling them stops their gradient, which softmax and logsumexp make NaN in a
        # row without a key.
        hidden = bias == -torch.inf if hidden is None else hidden | (bias == -torch.inf)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def scaled_products(problem: Problem, rows: range | None = None) -> Float[Tensor, "batch heads rows keys"]:
    """Return the products of the query rows in the range `rows` (by default all) with all keys, times the scale."""
    part = slice(None) if rows is None else slice(rows.start, rows.stop)
    dtype = problem.score_dtype
    return grouped_matmul(problem.q[:, :, part].to(dtype), problem.k.to(dtype).mT) * problem.scale


def log_sum_exp(scores: Float[Tensor, "batch heads rows keys"], sinks: Float[Tensor, "heads 1"] | None) -> RowsByHead:
    """Return the log-sum-exp of each row's scores, in which the head's sink logit is one more score. It is -inf in a
    row without a visible key, if there is no sink.
    """
    lse = scores.logsumexp(-1)
    return lse if sinks is None else logaddexp(lse, sinks)


def with_sinks(
    out: Float[Tensor, "batch heads rows value_dim"], lse: RowsByHead, sinks: Float[Tensor, "heads 1"]
) -> tuple[Float[Tensor, "batch heads rows value_dim"], RowsByHead]:
    """Include the sink logit of each head in the softmax of an output and log-sum-exp that were computed without sinks.
    A sink only adds to the divisor of a row, so the output is multiplied by exp(lse) / (exp(lse) + exp(sink)).
    """
    total = logaddexp(lse, sinks)
    share = torch.sigmoid(lse.masked_fill(total == -torch.inf, 0.0) - sinks)
    return out * share[..., None], total


def logaddexp(lse: RowsByHead, sinks: Float[Tensor, "heads 1"]) -> RowsByHead:
    """Return `log(exp(lse) + exp(sinks))` for each row: its log-sum-exp with the sink logit included. Where both are
    -inf, the gradient is 0 instead of NaN.
    """
    neither = (lse == -torch.inf) & (sinks == -torch.inf)
    return torch.logaddexp(lse.masked_fill(neither, 0.0), sinks).masked_fill(neither, -torch.inf)


def attention_weights(
    scores: Float[Tensor, "batch heads rows keys"], sinks: Float[Tensor, "heads 1"] | None
) -> Float[Tensor, "batch heads rows keys"]:
    """Return the attention weights: the softmax over each row's scores. A head's sink logit is one more score in the
    softmax, and its own weight is left out of the result. Weights are 0 in a row without a visible key.
    """
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].expand(*scores.shape[:-1], 1)], dim=-1)
    empty = scores.amax(-1, keepdim=True) == -torch.inf if scores.shape[-1] else scores[..., :1] == 0.0
    if sinks is not None:
        scores = scores.masked_fill(empty, 0.0)  # softmax of -inf alone would give the sink a gradient of NaN
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)
    return weights if sinks is None else weights[..., :-1]


def mix_heads(
    scores: Float[Tensor, "batch heads rows keys"], matrix: Float[Tensor, "heads heads"]
) -> Float[Tensor, "batch heads rows keys"]:
    """Return scores or weights in which head h is the sum over heads g of `matrix[h, g]` times head g."""
    return torch.einsum("hg,bgij->bhij", matrix, scores)


def grouped_matmul(
    left: Float[Tensor, "batch heads rows inner"], right: Float[Tensor, "batch kv_heads inner columns"]
) -> Float[Tensor, "batch heads rows columns"]:
    """Return `left @ right` for each query head. Consecutive query heads form a group, which shares one key/value head
    of `right`.

    The key/value head is not repeated in memory: the heads of a group are consecutive, so their rows are stacked and
    multiplied at once. Recorded programs repeat it, since torch exports stacked rows for one number of rows only.
    """
    batch, heads, rows, inner = left.shape
    kv_heads, columns = right.shape[1], right.shape[3]
    group = heads // kv_heads
    if records_program():
        return left @ right[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
    grouped = left.reshape(batch, kv_heads, group * rows, inner)
    return (grouped @ right).view(batch, heads, rows, columns)
