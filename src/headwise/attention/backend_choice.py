"""Choice of the fastest backend for an attention problem, by rules that were measured, and its explanation.

On a CPU the native kernels are chosen wherever they can compute the problem, with the exceptions of `why_slower`.
Without them, the costs of torch's fused kernel and of blockwise attention are compared. The unit of cost is the time in
which torch's kernel computes one score. On a CPU this kernel computes every score, or the share `CAUSAL_FLAG_SHARE`
under its causal flag. Where torch keeps the whole matrix, a score costs `FULL_MATRIX_COST`. Blockwise attention
computes only the blocks that the mask leaves, at `FLOAT32_SCORE_COST` or `BFLOAT16_SCORE_COST` for a score, plus an
overhead for each block. All figures were measured on two cores with AVX-512 (docs/lab-notes.md).

On a GPU, the choice follows from what the kernels compute: `fused` where torch's kernels leave out what the mask hides,
and for few queries, and `flex` elsewhere. On other devices, `fused` is chosen wherever it can.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends import fused, reference
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise.scores import BFLOAT16_BLOCK_OVERHEAD, FLOAT32_BLOCK_OVERHEAD
from headwise.attention.backends.blockwise.tiles import cost_of, score_count
from headwise.attention.backends.gpu import flex
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.native import library
from headwise.attention.problem import Answer, Backend, Problem
from headwise.checks import has_own_class, known_to_be_true, records_program
from headwise.errors import InputError

CAUSAL_FLAG_SHARE = 0.6
"""Share of the scores that torch's kernel computes under its causal flag."""

FULL_MATRIX_COST = 1.8
"""Cost of a score where torch's attention keeps the whole matrix: with dropout, or with a bias that requires grad."""

FLOAT32_SCORE_COST, BFLOAT16_SCORE_COST = 1.2, 0.8
"""Cost of a score in blockwise attention, with scores in float32 and in bfloat16."""

MATRIX = "the matrix is asked for, which every backend makes alike"
"""Reason for calls with `return_weights`."""

RECORDED = "a recorded program that contains torch's operators alone runs without headwise"
"""Reason for programs that are being exported or traced."""

SMALLEST_PLANNED = 2**20
"""Number of scores below which no plan of blocks is made."""

MOST_STEP_ROWS = 8
"""Most rows (queries, times query heads for each key/value head) of a decoding step, without a gradient: the number
`kFewRows` of the kernels, in `cpp/few_rows.h`.
"""

FEWEST_NATIVE_QUERIES = 128
"""Number of queries from which the native kernels are as fast as torch's or faster on every processor. `accelerate`
requires more queries on some processors (`SMALLEST_QUERIES`).
"""

FEWEST_NATIVE_QUERIES_WHERE_TORCH_IS_SLOW = 32
"""Number of queries from which they are faster with gradients in bfloat16, where torch's backward pass is slow, and
with dropout, for which torch keeps the whole matrix.
"""

FEWEST_NATIVE_QUERIES_WITH_AVX512 = {torch.float32: (32, 64), torch.bfloat16: (1, 16)}
"""Numbers of queries, without and with gradients, from which they are faster on processors where they use AVX-512 and
MKL, the library of torch for float32 products, does not. Both dtypes were measured on such processors.
"""

WIDEST_FLOAT32_HEAD = 128
"""Most features of a head in float32, if the mask hides nothing that torch's kernel would compute."""

FEW_QUERIES = 8
"""Number of queries up to which the matrix of a mask is small, as in a step of decoding."""


class Candidate(NamedTuple):
    """One backend that was considered for an attention problem (one call of `attend`): its name, and the reason if it
    cannot compute the problem. If the costs of backends were compared, its expected cost is stored too.

    Attributes:
        name: name of the backend.
        reason: the reason the backend cannot do the problem, in one sentence; None if it can.
        scores: number of scores it would compute; None if the choice did not depend on it.
        cost: cost of these scores, in scores of torch's fused kernel; None if the choice did not depend on it.
    """

    name: str
    reason: str | None
    scores: int | None = None
    cost: float | None = None

    def __str__(self) -> str:
        return self.reason or (
            "can" if self.scores is None else f"{self.scores:,} scores, at a cost of {self.cost:,.0f}"
        )


class Choice(NamedTuple):
    """Backend that is chosen to compute an attention problem (one call of `attend`), with the reason for the choice.
    `print` shows a `Choice` as readable text.

    Attributes:
        backend: name of the chosen backend.
        because: reason for the choice, in one sentence.
        candidates: every backend that was considered, the chosen one included, with its refusal or its cost.
        run: function that computes the problem with the chosen backend.
    """

    backend: str
    because: str
    candidates: tuple[Candidate, ...]
    run: Callable[[Problem], Answer]

    def __str__(self) -> str:
        width = max(len(candidate.name) for candidate in self.candidates)
        lines = [f"{candidate.name:{width}}  {candidate}" for candidate in self.candidates]
        return "\n".join([*lines, f"{self.backend}: {self.because}"])


def choose_fastest(problem: Problem) -> Choice:
    """Return a `Choice`: the backend that the rules of this module expect to be fastest for an attention problem (one
    call of `attend`), and why. If no backend can compute the problem, raise `InputError` with the reason of each
    backend.
    """
    if records_program():
        # Programs cannot store the operator for the log-sum-exp, or other runtimes do not have it.
        lse = "torch's operator for the log-sum-exp is no part of programs" if problem.return_lse else None
        reason = fused.why_not(problem) or lse
        backend: Backend = fused if reason is None else reference
        both = (Candidate(fused.name, reason), Candidate(reference.name, None))
        return Choice(backend.name, RECORDED, both, backend.run)
    if problem.q.device.type == "cuda":
        return _choose_on_gpu(problem)
    reasons = {backend.name: backend.why_not(problem) for backend in (native, fused, blockwise)}
    if None not in reasons.values():
        raise _refusal(reasons)
    candidates = kernels, torch_kernel, blocks = tuple(Candidate(*reason) for reason in reasons.items())
    if torch_kernel.reason is not None:
        backend = native if kernels.reason is None else blockwise
        return Choice(backend.name, "torch's kernel cannot", candidates, backend.run)
    if kernels.reason is None:
        why_fused = _why_not_native(problem)
        if why_fused is None:
            because = "its kernels leave out hidden keys, and are as fast as torch's where none is hidden"
            return Choice("native", because, candidates, native.run)
    else:
        why_fused = blocks.reason or _why_unplanned(problem)
        if why_fused is None:
            return _choose_by_cost(problem, candidates)
    return Choice("fused", why_fused, candidates, fused.run)


def _choose_on_gpu(problem: Problem) -> Choice:
    """Return the `Choice` between the backends `fused`, `flex` and `blockwise` for an attention problem on a GPU. Raise
    `InputError` if none of them can compute it.
    """
    backends = (fused, flex, blockwise)
    candidates = tuple(Candidate(backend.name, backend.why_not(problem)) for backend in backends)
    reasons = {candidate.name: candidate.reason for candidate in candidates}
    possible = [backend for backend in backends if reasons[backend.name] is None]
    if not possible:
        raise _refusal(reasons)
    if fused not in possible:
        because = "torch's kernels cannot, and FlexAttention can" if flex in possible else "torch's kernels cannot"
        return Choice(possible[0].name, because, candidates, possible[0].run)
    why_fused = _why_fused_on_gpu(problem) or ("FlexAttention cannot" if flex not in possible else None)
    if why_fused is None:
        because = "torch's kernels would read the mask and bias as a matrix and compute every score"
        return Choice("flex", because, candidates, flex.run)
    return Choice("fused", why_fused, candidates, fused.run)


def _why_fused_on_gpu(problem: Problem) -> str | None:
    """Return the reason to prefer torch's fused kernels to FlexAttention for an attention problem on a GPU; None if
    FlexAttention is preferred.
    """
    if problem.return_weights:
        return MATRIX
    hides_nothing = problem.mask is None or fused.uses_is_causal(problem)
    if hides_nothing and problem.bias is None and problem.sinks is None and not isinstance(problem.scale, Tensor):
        return "nothing is hidden, or the causal flag says what is"
    if known_to_be_true(problem.grid.queries <= FEW_QUERIES):
        return f"the mask of {FEW_QUERIES} queries or fewer is a small matrix"
    return None


def _choose_by_cost(problem: Problem, candidates: tuple[Candidate, ...]) -> Choice:
    """Return a `Choice`: whichever of the backends `fused` and `blockwise` has the lower expected cost for an attention
    problem. The unit of cost is the time in which torch's fused kernel computes one score.
    """
    kernels, torch_kernel, blocks = candidates
    width, value_dim = problem.q.shape[-1], problem.v.shape[-1]
    score_cost = 2 * max(width, value_dim) / (width + value_dim)  # the narrower one is padded
    score_cost *= FULL_MATRIX_COST if fused.keeps_matrix(problem) else 1.0
    scores = round(problem.grid.scores * (CAUSAL_FLAG_SHARE if fused.uses_is_causal(problem) else 1.0))
    kernel_cost = score_cost * scores
    plan = blockwise.plan_blocks(problem)
    if blockwise.uses_bfloat16_scores(problem):
        blocks_cost = BFLOAT16_SCORE_COST * cost_of(plan, BFLOAT16_BLOCK_OVERHEAD)
    else:
        blocks_cost = FLOAT32_SCORE_COST * cost_of(plan, FLOAT32_BLOCK_OVERHEAD)
    torch_kernel = torch_kernel._replace(scores=scores, cost=kernel_cost)
    blocks = blocks._replace(scores=score_count(plan), cost=blocks_cost)
    candidates = (kernels, torch_kernel, blocks)
    if blocks_cost < kernel_cost:
        because = f"it is expected to take 1/{kernel_cost / max(blocks_cost, 1.0):.2g} of the kernel's time"
        return Choice("blockwise", because, candidates, partial(blockwise.run, plan=plan))
    because = f"blocks are expected to take {blocks_cost / kernel_cost:.2g} times as long"
    return Choice("fused", because, candidates, fused.run)


def _why_not_native(problem: Problem) -> str | None:
    """Return the reason to prefer torch's fused kernel to the native kernels, for an attention problem that both can
    compute; None if the native kernels are preferred.
    """
    if problem.return_weights:
        return MATRIX
    if not torch.compiler.is_compiling() and not all(map(has_own_class, (problem.q, problem.k, problem.v))):
        return "torch's kernel knows subclasses of tensors, and the native kernels do not"
    return why_slower(problem, hides_nothing=problem.mask is None or fused.uses_is_causal(problem))


def why_slower(problem: Problem, hides_nothing: bool) -> str | None:
    """Return the reason that the native kernels are expected to be slower than torch's fused kernel for an attention
    problem; None if they are not. `hides_nothing` is True if torch's kernel computes no score that the mask hides.

    In the measurements (docs/lab-notes.md) the native kernels took at most about 1.1 times as long as torch's on every
    instruction set, and mostly less, with two exceptions. With few queries, preparing a block of the native kernels,
    which has up to 64 rows, takes longer than the kernels save; only the few rows of a decoding step have kernels of
    their own. And the tiles of wide heads in float32 do not fit into the first-level cache.
    """
    width = max(problem.q.shape[-1], problem.v.shape[-1])
    is_float32, has_dropout = problem.q.dtype == torch.float32, problem.dropout > 0
    is_wide = hides_nothing and is_float32 and not has_dropout and width > WIDEST_FLOAT32_HEAD
    wide = f"for more than {WIDEST_FLOAT32_HEAD} features in float32, torch's kernel is faster than the native ones"
    if torch.compiler.is_compiling():  # one graph serves all lengths
        return wide if is_wide else None
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (problem.q, problem.k, problem.v))
    rows = problem.grid.queries * problem.grid.heads // max(problem.k.shape[1], 1)
    needs_mask = problem.grid.keys < fused.FEWEST_KEYS_WITHOUT_MASK  # the tensor takes longer than so few scores
    if not needs_gradient and (rows <= MOST_STEP_ROWS or needs_mask):
        return None
    fewest = _fewest_native_queries(problem.q.dtype, needs_gradient)
    if has_dropout:
        fewest = min(fewest, FEWEST_NATIVE_QUERIES_WHERE_TORCH_IS_SLOW)
    if problem.grid.queries < fewest:
        return f"for {MOST_STEP_ROWS + 1} rows to {fewest - 1} queries, torch's kernel is faster than the native ones"
    return wide if is_wide else None


@cache
def _fewest_native_queries(dtype: torch.dtype, needs_gradient: bool) -> int:
    """Return the number of queries from which the native kernels are as fast on this processor as torch's kernel, or
    faster, for an attention problem in float32 or bfloat16, without dropout.
    """
    if library.instruction_set().startswith("avx512") and library.mkl_uses_avx512() is False:
        return FEWEST_NATIVE_QUERIES_WITH_AVX512[dtype][needs_gradient]
    torch_is_slow = needs_gradient and dtype == torch.bfloat16
    return FEWEST_NATIVE_QUERIES_WHERE_TORCH_IS_SLOW if torch_is_slow else FEWEST_NATIVE_QUERIES


def choose_named(backend: Backend, problem: Problem) -> Choice:
    """Return a `Choice` of the backend that the caller named. Raise `InputError` with the backend's reason if it cannot
    compute the attention problem.
    """
    reason = backend.why_not(problem)
    if reason is not None:
        raise _refusal({backend.name: reason})
    return Choice(backend.name, "it was asked for by name", (Candidate(backend.name, None),), backend.run)


def _refusal(reasons: dict[str, str | None]) -> InputError:
    """Return (not raise) the `InputError` for an attention problem that none of the considered backends can compute.
    Its message has the reason of each backend; `reasons` maps the name of a backend to its reason.
    """
    return InputError(
        "backend",
        expected="one that can do this",
        got="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        remedy="backend='reference' can, with the whole matrix in memory",
    )


def _why_unplanned(problem: Problem) -> str | None:
    """Return the reason to choose the backend `fused` without comparing its expected cost with that of `blockwise`: the
    comparison is impossible or not worthwhile. Return None if the two costs are to be compared.
    """
    hides_nothing = problem.mask is None or fused.uses_is_causal(problem)
    reason = None
    if problem.q.device.type != "cpu":
        reason = f"nothing has been measured on {problem.q.device.type}"
    elif torch.compiler.is_compiling():
        reason = "costs depend on sizes, which are not known while compiling"
    elif problem.return_weights:
        reason = MATRIX
    elif problem.grid.scores < SMALLEST_PLANNED:
        reason = f"fewer than {SMALLEST_PLANNED:,} scores are not worth a plan"
    elif hides_nothing and not fused.keeps_matrix(problem) and not blockwise.uses_bfloat16_scores(problem):
        reason = "where nothing is hidden, or the causal flag says it, products in float32 are the kernel's"
    elif problem.mask is not None and problem.mask.stored_values > problem.grid.queries * problem.grid.keys:
        reason = "a matrix for each sequence or head would take long to read"
    return reason
