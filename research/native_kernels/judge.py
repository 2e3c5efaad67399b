"""Errors of one drawn problem against float64, and the rule that they must satisfy.

The rule was stated before the kernels were run on drawn problems. For every result (output, log-sum-exp, the output of
the operator with statistics, and the gradients of q, k, v, the bias, the sinks and the scales of heads),

- the norm of the error, the root of the sum of its squares, is at most 2 times that of plain attention;
- the largest error is at most 4 times that of plain attention. Largest errors of equal distributions differ by luck.

Plain attention is the formula in the dtype of the problem, on the same numbers. Its error counts at least as half a
unit in the last place of the exact result, as in `plain_errors` in tests/oracles.py. In a problem of few numbers, plain
attention is sometimes exact by luck, so a problem beyond a limit is computed again with `MORE_SETS` sets of values,
over which squared errors add up. If it is still beyond a limit, each of these sets is computed in `ORDERS` orders of
features, by the kernels and by plain attention, and all squared errors add up. It fails if it is beyond a limit then.
Infinite results, and results that must be exactly 0, must be equal.

Corrected on 2026-11-22:

- The exact gradients of the sinks and of the scales were rounded to float32.
- Plain attention in bfloat16 rounded a bias of the least float32 to minus infinity.
- There was one order of features. With large scores, errors differ by orders of magnitude between sets of values, and
  the sum of squares of 32 sets is that of one rounding error in one of them. The ratio of two such numbers is beyond 2
  by luck in 3 of 10 problems, if they are normal with equal variance (2 / pi arctan 1 / 2); the ratio of the norms of 8
  such numbers in 3 of 100.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from research.native_kernels.problems import Draw, DrawnProblem
from research.native_kernels.results import Results, native_results, plain_results

MOST_OF_NORM, MOST_OF_LARGEST = 2.0, 4.0
"""Limits of the ratio of errors: that of the kernels over that of plain attention."""

MORE_SETS = 32
"""Sets of values with which a problem beyond a limit is computed again."""

ORDERS = 8
"""Orders of features in which each of these sets is computed if the problem is still beyond a limit."""

Compute = Callable[[list[Draw]], Iterable[Results]]
"""Function that returns the results of a problem for each of some draws of its values."""

DRAWS = (
    [Draw(0)],
    [Draw(values) for values in range(MORE_SETS)],
    [Draw(values, order) for values in range(MORE_SETS) for order in range(ORDERS)],
)
"""Draws of the values of a problem, of which the next ones are computed if it is beyond a limit."""


@dataclass
class Errors:
    """Errors of one result over some sets of values, of the kernels and of plain attention.

    Attributes:
        squares: sums of squared errors, ours and theirs.
        largest: largest errors, ours and theirs.
    """

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    largest: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
        """Add the errors of one set of values."""
        unit, ours, theirs = torch.finfo(theirs.dtype).eps, ours.double(), theirs.double()
        if not bool(exact.isfinite().all()):
            finite = exact.isfinite()
            if not torch.equal(exact[~finite], ours[~finite]):
                self.squares[0] = self.largest[0] = float("inf")
                return
            exact, ours, theirs = exact[finite], ours[finite], theirs[finite]
        if not exact.numel():
            return
        own, plain = ours - exact, [theirs - exact, unit / 2 * exact]
        if not bool(own.isfinite().all()):
            self.squares[0] = self.largest[0] = float("inf")
            return
        self.squares[0] += _square(own)
        self.squares[1] += max(map(_square, plain))
        self.largest[0] = max(self.largest[0], float(own.abs().max()))
        self.largest[1] = max(self.largest[1], *(float(error.abs().max()) for error in plain))

    @property
    def norm_ratio(self) -> float:
        """Ratio of the norms of errors; 0 if both are 0."""
        return _ratio(*self.squares) ** 0.5

    @property
    def largest_ratio(self) -> float:
        """Ratio of the largest errors; 0 if both are 0."""
        return _ratio(*self.largest)

    @property
    def is_within(self) -> bool:
        """True if both ratios are within their limits."""
        return self.norm_ratio <= MOST_OF_NORM and self.largest_ratio <= MOST_OF_LARGEST


def _square(errors: Tensor) -> float:
    """Return the sum of squares."""
    return float(errors.square().sum())


def _ratio(ours: float, theirs: float) -> float:
    """Return a ratio of errors; 0 if both are 0."""
    return 0.0 if ours == 0 else float("inf") if theirs == 0 else ours / theirs


@dataclass
class Verdict:
    """Verdict on one problem in one dtype.

    Attributes:
        problem: description of the problem, with its seed.
        again: True if it was computed again with more sets of values.
        ratios: by result, the ratio of norms and that of largest errors.
        beyond: results beyond a limit; the problem fails if there are any.
    """

    problem: str
    again: bool
    ratios: dict[str, tuple[float, float]]
    beyond: list[str]


class Judge:
    """Judge of the kernels on one problem in one dtype. The exact results and those of plain attention are computed
    once for all instruction sets.
    """

    def __init__(self, problem: DrawnProblem, dtype: torch.dtype) -> None:
        self.problem = problem
        self.expected = lru_cache(MORE_SETS)(lambda draw: plain_results(problem, dtype, draw))

    def judge(self, compute: Compute) -> Verdict:
        """Compare the errors of `compute` with those of plain attention by the rule."""
        for draws in DRAWS:
            errors = self._errors(compute, draws)
            ratios = {name: (error.norm_ratio, error.largest_ratio) for name, error in errors.items()}
            beyond = [name for name, error in errors.items() if not error.is_within]
            if not beyond:
                break
        return Verdict(str(self.problem), len(draws) > 1, ratios, beyond)

    def _errors(self, compute: Compute, draws: list[Draw]) -> dict[str, Errors]:
        """Return the errors of every result over draws of values."""
        errors: dict[str, Errors] = {}
        for draw, ours in zip(draws, compute(draws), strict=True):
            exact, theirs = self.expected(draw)
            if self.problem.allowed is not None or self.problem.bias is not None:
                check_empty_rows(self.problem, ours["out"])
            for name, result in ours.items():
                same = "out" if name == "out with statistics" else name
                errors.setdefault(name, Errors()).add(result, theirs[same], exact[same])
        return errors


def check_empty_rows(problem: DrawnProblem, out: Tensor) -> None:
    """Check that the output of rows without a key is exactly 0."""
    options = problem.oracle_options
    is_visible = torch.ones(1, dtype=torch.bool) if options["allowed"] is None else options["allowed"]
    if options["bias"] is not None:
        is_visible = is_visible & (options["bias"] > -torch.inf)
    if out.numel() and is_visible.ndim == 4 and problem.sizes.keys:
        assert not out[~is_visible.any(-1)].any(), "rows without a key are not 0"


def judge(problem: DrawnProblem, dtype: torch.dtype) -> Verdict:
    """Judge the kernels of this process on one problem."""
    return Judge(problem, dtype).judge(lambda draws: (native_results(problem, dtype, draw) for draw in draws))
