"""The operator of attention with statistics in plain torch: the definition of what the kernels compute.

Some rows of the score matrix exist at a time, with all their keys. Scores and sums are in float32, and for tensors in
float64 in float64.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.reference import attention_weights, grouped_matmul, log_sum_exp
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.kinds import mask_of_keys
from headwise.attention.problem import score_dtype
from headwise.attention.tensors import Bias, KeyRanges, Keys, Matrix, PerHead, Queries, Values
from headwise.shapes import Bool, Float, Int

ROWS = (
    *("entropy", "confidence", "distance", "self", "previous", "next", "first"),
    *("special", "duplicate", "induction", "confidence_content", "max_logit", "max_logit_uncapped"),
    *("output_norm", "written_norm", "visible keys"),
)
"""Names of the numbers that the operator computes for each query row, in their order. `RowStatistic` in
`native/cpp/problem.h` has the same order. `_numbers` computes all numbers except the last three.
"""

RECEIVED_UNIT = 2.0**-40
"""Unit of the operator's sums of weights: integers, whose sums do not depend on the order of threads."""

PROBLEM = (
    "Tensor q, Tensor k, Tensor v, float scale, Tensor? head_scale, float softcap, Tensor? sinks, Tensor? ranges, "
    "Tensor? dense, Tensor? bias"
)
"""Arguments that all operators of attention have, as in `native/cpp/operators.cpp`."""

SCHEMA = (
    f"({PROBLEM}, Tensor positions, Tensor first_key, Tensor? special, Tensor? key_tokens, Tensor? query_tokens, "
    "int token_count, Tensor? counted, Tensor? gram) "
    "-> (Tensor out, Tensor lse, Tensor rows, Tensor received, Tensor seen_by)"
)
"""Arguments and results of the operator."""

SCORES_AT_ONCE = 2**22
"""Largest number of scores that exist at a time, unless those of one row are more."""


class StatisticsCall(NamedTuple):
    """Arguments of the operator `attend_statistics`, which computes attention and the statistics of its weights.

    Attributes:
        head_scale: further factor of each head; None without.
        sinks: sink logit of each head; None without.
        ranges: keys that each query may attend to, as starts and stops; None for all.
        dense: True where a query may attend to a key; None for all.
        bias: number added to each score; None without.
        positions: index that a key has, or would have, at the position of each query.
        first_key: index of the key of the first token, for each query; -1 if it is not among the keys.
        special: True at keys that are special tokens; None if unknown.
        key_tokens: numbers of the keys' tokens, from 0 on; None if unknown.
        query_tokens: numbers of the queries' tokens; -1 where a query has none.
        token_count: number of different tokens.
        counted: True at queries that sums over rows include; None for all.
        gram: product of each head's slice of the output projection with itself; None if unknown.
    """

    q: Queries
    k: Keys
    v: Values
    scale: float
    head_scale: PerHead | None
    softcap: float
    sinks: PerHead | None
    ranges: KeyRanges | None
    dense: Matrix | None
    bias: Bias | None
    positions: Int[Tensor, "batch queries"]
    first_key: Int[Tensor, "batch queries"]
    special: Bool[Tensor, "batch keys"] | None = None
    key_tokens: Int[Tensor, "batch keys"] | None = None
    query_tokens: Int[Tensor, "batch queries"] | None = None
    token_count: int = 0
    counted: Bool[Tensor, "batch queries"] | None = None
    gram: Float[Tensor, "heads value_dim value_dim"] | None = None


def attend_statistics(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the output, the log-sum-exp, and the statistics of each query row that `ROWS` names, such as the entropy.
    Then return two numbers for each key: the sum of the weights on it, in units of `RECEIVED_UNIT`, and the number of
    rows that may attend to it. Both numbers include only rows where `counted` is True.
    """
    call = StatisticsCall(*arguments)
    batch, heads, queries, _ = call.q.shape
    keys = call.k.shape[2]
    out = call.q.new_empty(batch, queries, heads, call.v.shape[3]).transpose(1, 2)
    dtype, sinks = score_dtype(call.q), None if call.sinks is None else call.sinks[:, None]
    lse = call.q.new_empty(batch, heads, queries, dtype=dtype)
    rows = lse.new_empty(len(ROWS), batch, heads, queries)
    received = lse.new_zeros(batch, heads, keys, dtype=torch.float64)
    seen_by = lse.new_zeros(batch, heads, keys, dtype=torch.int32)
    step = max(1, SCORES_AT_ONCE // max(1, batch * heads * keys))
    for start in range(0, queries, step):
        part = slice(start, start + step)
        uncapped, scores = _scores(call, part)
        weights = attention_weights(scores, sinks)
        of_rows = grouped_matmul(weights, call.v.to(dtype))
        out[:, :, part] = of_rows.to(out.dtype)
        lse[:, :, part] = log_sum_exp(scores, sinks)
        rows[:-3, :, :, part] = _numbers(call, part, weights, scores, uncapped)
        rows[-3:-1, :, :, part] = output_norms(of_rows, call.gram)
        visible = scores != -torch.inf
        rows[-1, :, :, part] = visible.sum(-1)
        counted = visible if call.counted is None else visible & call.counted[:, None, part, None]
        received += weights.masked_fill(~counted, 0.0).sum(2, dtype=torch.float64)
        seen_by += counted.sum(2, dtype=torch.int32)
    return out, lse, rows, (received / RECEIVED_UNIT).long(), seen_by


def output_norms(
    out: Float[Tensor, "batch heads rows value_dim"], gram: Float[Tensor, "heads value_dim value_dim"] | None
) -> Float[Tensor, "2 batch heads rows"]:
    """Return two norms for each query row: of the head's output o, and of o multiplied by the head's slice of the
    output projection. The second is the square root of `o G o`, where G is the head's matrix in `gram`. The second is 0
    if `gram` is None.
    """
    out = out.to(score_dtype(out))
    norms = out.norm(dim=-1)
    if gram is None:
        return torch.stack([norms, torch.zeros_like(norms)])
    return torch.stack([norms, ((out @ gram) * out).sum(-1).clamp(min=0.0).sqrt()])


def _scores(
    call: StatisticsCall, part: slice
) -> tuple[Float[Tensor, "batch heads rows keys"], Float[Tensor, "batch heads rows keys"]]:
    """Return the scores of the query rows `part` in two forms: before softcap and bias, and as they enter the softmax.
    Both are -inf at hidden keys.
    """
    dtype = score_dtype(call.q)
    products = grouped_matmul(call.q[:, :, part].to(dtype), call.k.to(dtype).mT) * call.scale
    uncapped = products if call.head_scale is None else products * call.head_scale[:, None, None]
    scores = call.softcap * torch.tanh(uncapped / call.softcap) if call.softcap else uncapped
    visible = torch.ones_like(scores, dtype=torch.bool)
    mask = mask_of_keys(call.ranges, call.dense)
    if mask is not None:
        batch, heads, queries, keys = *call.q.shape[:3], call.k.shape[2]
        visible &= mask.block(Grid(batch, heads, queries, keys, call.q.device), range(queries)[part])
    if call.bias is not None:
        bias = call.bias if call.bias.shape[2] == 1 else call.bias[:, :, part]
        visible &= bias != -torch.inf
        scores = scores + bias
    return uncapped.where(visible, -torch.inf), scores.where(visible, -torch.inf)


def _numbers(
    call: StatisticsCall,
    part: slice,
    weights: Float[Tensor, "batch heads rows keys"],
    scores: Float[Tensor, "batch heads rows keys"],
    uncapped: Float[Tensor, "batch heads rows keys"],
) -> Float[Tensor, "numbers batch heads rows"]:
    """Return the statistics that `ROWS` names (such as the entropy) of the query rows `part`, except the last three:
    two norms of the output, and the number of visible keys.
    """
    key = torch.arange(weights.shape[3], device=weights.device)
    position, first_key = (each[:, None, part, None].long() for each in (call.positions, call.first_key))
    no_key = weights.new_zeros(1, dtype=torch.bool)
    is_special = no_key if call.special is None else call.special[:, None, None]
    is_copy = is_after_copy = no_key
    if call.key_tokens is not None and call.query_tokens is not None:
        copies = call.key_tokens[:, None, None] == call.query_tokens[:, None, part, None]
        is_copy = copies & (key < position)
        is_after_copy = F.pad(is_copy, (1, -1))
    content = weights.masked_fill(is_special, 0.0).amax(-1)
    numbers = (
        -torch.special.xlogy(weights, weights).sum(-1),
        weights.amax(-1),
        (weights * (position - key).abs()).sum(-1),
        *((weights * (key == each)).sum(-1) for each in (position, position - 1, position + 1, first_key)),
        *((weights * chosen).sum(-1) for chosen in (is_special, is_copy, is_after_copy)),
        torch.zeros_like(content) if call.special is None else content,
        scores.amax(-1),
        uncapped.amax(-1) if call.softcap else torch.full_like(content, -torch.inf),
    )
    return torch.stack(numbers)
