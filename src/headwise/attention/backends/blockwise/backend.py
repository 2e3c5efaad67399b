"""Blockwise attention in plain torch operations; keys that a mask hides cost nothing.

A plan lists the blocks of the score matrix with a visible key (`tiles.py`). It is made once for the forward and the
backward pass. Blocks without a visible key are never computed, and blocks whose keys are all visible are never masked.
A block of query rows is computed over all its keys at once, some sequences and heads at a time (`tiles.py`), so memory
grows with length and not with its square (`attention.py` has the formulas).

For inputs in bfloat16 the scores are in bfloat16 as well, with sums in float32 (`scores.py`). The scores are in float32
if the result needs them: with a softcap, a bias, sinks, dropout or the log-sum-exp. Inputs
in float16 are computed in float32, since CPUs have no fast float16 product.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.attention.backends import reference
from headwise.attention.backends.blockwise import operator
from headwise.attention.backends.blockwise.attention import BlockwiseAttention, CallOptions, Observation
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer
from headwise.attention.backends.blockwise.scores import BFLOAT16_BLOCK_OVERHEAD, FLOAT32_BLOCK_OVERHEAD
from headwise.attention.backends.blockwise.tiles import MOST_ROWS, BlockwisePlan, plan_of, reads_most_keys, threads_of
from headwise.attention.backends.native import backend as native
from headwise.attention.problem import Answer, Problem
from headwise.checks import has_readable_values, has_values, whole_number

name = "blockwise"

UNREADABLE = "its blocks are planned from sizes and masks, which cannot be read here"
"""Reason to refuse tensors without values, transforms of `torch.func` and exporting."""

OBSERVED_ROWS = 256
"""Largest number of rows of an observed block: it keeps scores and powers, and both must fit the cache."""


def why_not(problem: Problem) -> str | None:
    """Return the reason that blockwise attention cannot compute an attention problem (the tensors and options of one
    call), in one sentence; None if it can.
    """
    if problem.talking is not None:
        return "blocks hold some heads at a time, and talking_heads mixes all"
    if not torch.compiler.is_compiling():
        return None if has_values(problem.q) else UNREADABLE
    if torch.compiler.is_exporting():
        return UNREADABLE
    if problem.q.dtype not in native.DTYPES:
        return f"compiled blockwise attention computes in float32 and bfloat16, and q is in {problem.q.dtype}"
    reason: str | None = native.why_no_derivative() or operator.why_not_registered()
    return reason


def run(
    problem: Problem,
    rows: int | None = None,
    plan: BlockwisePlan | None = None,
    observer: Observer | None = None,
    call_context: CallContext | None = None,
) -> Answer:
    """Compute an attention problem in blocks of `rows` query rows, or in the blocks that `plan` lists. By default the
    number of rows is chosen from the mask and the sizes. The function `observer` is called with the weights of each
    block, in tensors that are overwritten after `observer` returns. If the weights are to be returned, or if there are
    no queries or keys, the reference backend computes the result instead.
    """
    if problem.return_weights:
        return reference.run(problem)  # the caller asks for the matrix that blocks avoid
    if torch.compiler.is_compiling():
        return native.run(problem)  # calls the operator, which plans its blocks
    if 0 in (*problem.q.shape, *problem.k.shape):
        return reference.run(problem)  # there is nothing to plan
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    bfloat16_scores = observer is None and uses_bfloat16_scores(problem)
    if not bfloat16_scores:
        q, k, v = (tensor.to(problem.score_dtype) for tensor in (q, k, v))
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    if plan is None:
        plan = plan_blocks(problem, rows, MOST_ROWS if observer is None else OBSERVED_ROWS)
    observation = None
    if observer is not None:
        observation = Observation(observer, call_context or CallContext(), problem.grid, problem.v.detach())
    bias = problem.bias
    options = CallOptions(
        plan=plan,
        bfloat16_scores=bfloat16_scores,
        scale=scale,
        softcap=problem.softcap,
        # A bias that cannot be read, as on a GPU, may hide keys.
        bias_hides=bias is not None and (not has_readable_values(bias) or bool(bias.amin() == -torch.inf)),
        dropout=problem.dropout,
        threads=threads_of(problem.dropout),
        seed=int(torch.randint(2**62, (), device="cpu")) if problem.dropout > 0 else 0,
        observation=observation,
    )
    if bfloat16_scores:
        v = v.contiguous()
    elif len(k) > 1 or reads_most_keys(plan):  # few keys of one sequence are faster to read where they lie
        k, v = k.contiguous(), v.contiguous()
    out, lse, *_ = BlockwiseAttention.apply(q, k, v, bias, problem.sinks, options)  # type: ignore[no-untyped-call]
    return Answer(out.to(problem.q.dtype), lse if problem.return_lse else None, None)


@dataclass(frozen=True)
class Blockwise:
    """Backend `blockwise`, which computes attention in blocks of query rows, with a chosen number of rows in a block.
    Pass it as `backend=` to `attend`.

    Attributes:
        rows: query rows of each block, 1 or more; None chooses them from the mask and the sizes.

    Raises:
        InputError: any other number of rows.
    """

    rows: int | None = None
    name: str = field(default=name, init=False)

    def __post_init__(self) -> None:
        if self.rows is not None:
            whole_number("rows", self.rows, least=1)

    def why_not(self, problem: Problem) -> str | None:
        """Return one sentence that says why blockwise attention cannot compute an attention problem (tensors, mask and
        options of one call); None if it can.
        """
        if self.rows is not None and torch.compiler.is_compiling():
            return "the number of rows in a block cannot be chosen while compiling"
        return why_not(problem)

    def run(self, problem: Problem) -> Answer:
        """Compute attention in blocks of query rows. This object's attribute `rows` is the number of rows in a block;
        if it is None, the number is chosen from the mask and the sizes.
        """
        return run(problem, rows=self.rows)


def plan_blocks(problem: Problem, rows: int | None = None, most_rows: int = MOST_ROWS) -> BlockwisePlan:
    """Return the blocks of the score matrix that blockwise attention computes for a problem (one attention call). Each
    block has `rows` query rows. By default the number of rows is chosen from the mask and the sizes, up to `most_rows`.
    """
    overhead = BFLOAT16_BLOCK_OVERHEAD if uses_bfloat16_scores(problem) else FLOAT32_BLOCK_OVERHEAD
    return plan_of(problem.mask, problem.grid, overhead, rows, most_rows)


def uses_bfloat16_scores(problem: Problem) -> bool:
    """Return True if blockwise attention computes the scores of a problem (one attention call) in bfloat16. This
    requires bfloat16 inputs on a CPU, and a positive scale, and no softcap, bias, sinks, dropout or log-sum-exp. If an
    observer of the weights is passed, scores are in float32 nevertheless.

    Scores in bfloat16 are checked by reading numbers, for which another device than a CPU would wait.
    """
    needs_exact_scores = (
        problem.softcap is not None
        or problem.bias is not None
        or problem.sinks is not None
        or problem.return_lse
        or problem.dropout > 0
        or not problem.scale_is_positive
    )
    return problem.q.is_cpu and problem.q.dtype == torch.bfloat16 and not needs_exact_scores
