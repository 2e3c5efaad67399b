"""Which backend is the fastest that can: a rule found by measurement, and its explanation.

Costs are in scores that torch's fused kernel computes in the same time. On a CPU the kernel computes all of them, or
`FLAG` of them under its causal flag; where torch keeps the matrix they cost `MATRIX` times as much. Blocks compute what
the mask leaves, for the price of `WIDE` or `NARROW`, and each block costs as much as `CALL` scores beside. The figures
were measured on two cores with AVX-512 (docs/lab-notes.md). What they decide is mostly plain: a mask that hides much
goes to blocks, and so does bfloat16 where products can be narrow; full attention in float32 goes to the kernel.
Elsewhere than on a CPU and while compiling, torch's kernels are taken wherever they can: nothing has been measured
there yet.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headwise.attention.backends import fused
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise import scores_bf16, scores_fp32
from headwise.attention.backends.blockwise.plan import Plan, cells_of, cost_of
from headwise.attention.problem import Answer, Backend, Problem
from headwise.errors import InputError

FLAG = 0.6
"""Share of the scores that the kernel computes under its causal flag."""

MATRIX = 1.8
"""Time for a score where torch's attention makes the whole matrix: with dropout, or a bias that learns."""

WIDE, NARROW = 1.2, 0.8
"""What a score costs in blocks, with products in float32 and with those in bfloat16."""

SMALLEST = 2**20
"""Below so many scores nothing is planned."""


class Candidate(NamedTuple):
    """A backend that might be taken: why it cannot, or else how many scores it would compute, and what they cost.

    Both are None where they were not needed to decide.
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
    """The backend taken for a problem, and how it compares.

    Attributes:
        backend: its name.
        because: why it was taken, in one sentence.
        candidates: what is said of each.
    """

    backend: str
    because: str
    candidates: tuple[Candidate, ...]
    run: Callable[[Problem], Answer]

    def __str__(self) -> str:
        width = max(len(each.name) for each in self.candidates)
        lines = [f"{each.name:{width}}  {each}" for each in self.candidates]
        return "\n".join([*lines, f"{self.backend}: {self.because}"])


def fastest(problem: Problem) -> Choice:
    """The backend to take; `InputError` with every reason where none can."""
    reasons = {backend.name: backend.why_not(problem) for backend in (fused, blockwise)}
    if None not in reasons.values():
        raise _none_can(reasons)
    kernel, blocks = (Candidate(name, reason) for name, reason in reasons.items())
    if kernel.reason is not None:
        return Choice("blockwise", "the kernels cannot", (kernel, blocks), blockwise.run)
    unplanned = blocks.reason or _why_unplanned(problem)
    if unplanned is not None:
        return Choice("fused", unplanned, (kernel, blocks), fused.run)
    plan = blockwise.planned(problem)
    of_kernel, of_blocks = _cost_of_kernel(problem), _cost_of_blocks(problem, plan)
    kernel = kernel._replace(scores=_computed(problem), cost=of_kernel)
    blocks = blocks._replace(scores=cells_of(plan), cost=of_blocks)
    candidates = (kernel, blocks)
    if of_blocks < of_kernel:
        because = f"it is expected to take 1/{of_kernel / max(of_blocks, 1.0):.2g} of the kernel's time"
        return Choice("blockwise", because, candidates, partial(blockwise.run, plan=plan))
    because = f"blocks are expected to take {of_blocks / of_kernel:.2g} times as long"
    return Choice("fused", because, candidates, fused.run)


def asked_for(backend: Backend, problem: Problem) -> Choice:
    """This backend, or `InputError` with its reason."""
    reason = backend.why_not(problem)
    if reason is not None:
        raise _none_can({backend.name: reason})
    return Choice(backend.name, "it was asked for by name", (Candidate(backend.name, None),), backend.run)


def _none_can(reasons: dict[str, str | None]) -> InputError:
    return InputError(
        "backend",
        expected="one that can do this",
        got="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        remedy="backend='reference' can, with the whole matrix in memory",
    )


def _scores(problem: Problem) -> int:
    """How many scores there are, hidden ones too."""
    grid = problem.grid
    return grid.batch * grid.heads * grid.queries * grid.keys


def _computed(problem: Problem) -> int:
    """How many of them the kernel computes."""
    return round(_scores(problem) * (FLAG if fused.uses_is_causal(problem) else 1.0))


def _why_unplanned(problem: Problem) -> str | None:
    """Why the kernel is taken without asking the mask about its blocks; None where they are worth planning."""
    if problem.q.device.type != "cpu":
        return f"nothing has been measured on {problem.q.device.type}"
    if problem.return_weights:
        return "the matrix is asked for, which every backend makes alike"
    if _scores(problem) < SMALLEST:
        return f"fewer than {SMALLEST:,} scores are not worth a plan"
    hides_nothing = problem.mask is None or fused.uses_is_causal(problem)
    if hides_nothing and not fused.keeps_matrix(problem) and not blockwise.is_narrow(problem):
        return "where nothing is hidden, or the causal flag says it, products in float32 are the kernel's"
    if problem.mask is not None and problem.mask.stored > problem.grid.queries * problem.grid.keys:
        return "a matrix for each sequence or head would take long to read"
    return None


def _cost_of_kernel(problem: Problem) -> float:
    """What torch's attention costs. Its kernel has one width for keys and values."""
    width, value_dim = problem.q.shape[-1], problem.v.shape[-1]
    price = 2 * max(width, value_dim) / (width + value_dim) * (MATRIX if fused.keeps_matrix(problem) else 1.0)
    return price * _computed(problem)


def _cost_of_blocks(problem: Problem, plan: Plan) -> float:
    """What the blocks of a plan cost."""
    if blockwise.is_narrow(problem):
        return NARROW * cost_of(plan, scores_bf16.CALL)
    return WIDE * cost_of(plan, scores_fp32.CALL)
