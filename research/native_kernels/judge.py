"""Errors of one drawn problem against float64, and the rule that they must satisfy.

The rule was stated before the kernels were run on drawn problems. For every result (output, log-sum-exp, the output of
the operator with statistics, and the gradients of q, k, v, the sinks and the scales of heads),

- the norm of the error, the root of the sum of its squares, is at most 2 times that of plain attention;
- the largest error is at most 4 times that of plain attention. Largest errors of equal distributions differ by luck.

Plain attention is the formula in the dtype of the problem, on the same numbers. Its error counts at least as half a
unit in the last place of the exact result, as in `plain_errors` in tests/oracles.py. In a problem of few numbers, plain
attention is sometimes exact by luck, so a problem beyond a limit is computed again with `MORE_SETS` sets of values,
over which squared errors add up. It fails if it is beyond a limit then. Infinite results, and results that must be
exactly 0, must be equal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.statistics import native_statistics
from headwise.statistics.tally import Tally
from research.native_kernels.problems import DrawnProblem
from tests.oracles import plain_attention

MOST_OF_NORM, MOST_OF_LARGEST = 2.0, 4.0
"""Limits of the ratio of errors: that of the kernels over that of plain attention."""

MORE_SETS = 32
"""Sets of values with which a problem beyond a limit is computed again."""


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
        finite = exact.isfinite()
        if not torch.equal(exact[~finite], ours[~finite].double()) or not bool(ours[finite].isfinite().all()):
            self.squares[0] = self.largest[0] = float("inf")
            return
        exact = exact[finite]
        if not exact.numel():
            return
        plain = [(theirs[finite].double() - exact).abs(), torch.finfo(theirs.dtype).eps / 2 * exact.abs()]
        own = (ours[finite].double() - exact).abs()
        self.squares[0] += float(own.square().sum())
        self.squares[1] += max(float(error.square().sum()) for error in plain)
        self.largest[0] = max(self.largest[0], float(own.max()))
        self.largest[1] = max(self.largest[1], *(float(error.max()) for error in plain))

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


def _ratio(ours: float, theirs: float) -> float:
    """Return a ratio of errors; 0 if both are 0."""
    return 0.0 if ours == 0 else float("inf") if theirs == 0 else ours / theirs


def errors_of(problem: DrawnProblem, dtype: torch.dtype, sets: range) -> dict[str, Errors]:
    """Return the errors of every result of a problem over sets of values."""
    errors: dict[str, Errors] = {}
    for values in sets:
        tensors = problem.tensors(dtype, values)
        exact = results(problem, _plain, tensors, torch.float64)
        theirs, ours = (results(problem, attention, tensors, dtype) for attention in (_plain, _native))
        if problem.allowed is not None or problem.bias is not None:
            check_empty_rows(problem, ours["out"])
        with_statistics = output_with_statistics(problem, tensors)
        if with_statistics is not None:
            ours["out with statistics"] = with_statistics
            exact["out with statistics"], theirs["out with statistics"] = exact["out"], theirs["out"]
        for name, result in exact.items():
            errors.setdefault(name, Errors()).add(ours[name], theirs[name], result)
    return errors


def check_empty_rows(problem: DrawnProblem, out: Tensor) -> None:
    """Check that the output of rows without a key is exactly 0."""
    options = problem.oracle_options
    is_visible = torch.ones(1, dtype=torch.bool) if options["allowed"] is None else options["allowed"]
    if options["bias"] is not None:
        is_visible = is_visible & (options["bias"] > -torch.inf)
    if out.numel() and is_visible.ndim == 4 and problem.sizes.keys:
        assert not out[~is_visible.any(-1)].any(), "rows without a key are not 0"


Attention = Callable[..., tuple[Tensor, Tensor]]


def results(
    problem: DrawnProblem, attention: Attention, tensors: list[Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the output, the log-sum-exp and the gradients of one implementation, in `dtype`."""
    *inputs, upstream, lse_upstream = tensors
    leaves = {name: _leaf(x, dtype) for name, x in zip(("q", "k", "v"), inputs, strict=True)}
    others: dict = {"scale": problem.scale, "sinks": problem.sinks}
    if problem.learns_scale and isinstance(problem.scale, Tensor):
        leaves["scale"] = others["scale"] = problem.scale.clone().requires_grad_()
    if problem.sinks is not None:
        leaves["sinks"] = others["sinks"] = problem.sinks.clone().requires_grad_()
    out, lse = attention(problem, leaves["q"], leaves["k"], leaves["v"], others)
    outputs, gradients_of_outputs = [out], [upstream.to(out.dtype)]
    if problem.has_lse_gradient:
        outputs.append(lse)
        gradients_of_outputs.append(torch.where(lse > -torch.inf, lse_upstream.to(lse.dtype), 0.0))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), gradients_of_outputs)
    named = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype` that requires a gradient, with its strides if the dtype is the same."""
    return tensor.detach().to(dtype).requires_grad_()


def _plain(problem: DrawnProblem, q: Tensor, k: Tensor, v: Tensor, others: dict) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of plain attention in the dtype of q."""
    result = plain_attention(q, k, v, **problem.oracle_options, **others)
    return result.out, result.lse


def _native(problem: DrawnProblem, q: Tensor, k: Tensor, v: Tensor, others: dict) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the native kernels."""
    out, lse = hw.attend(q, k, v, **problem.attend_options, **others, return_lse=True, backend="native")
    return out, lse


@torch.no_grad()
def output_with_statistics(problem: DrawnProblem, tensors: list[Tensor]) -> Tensor | None:
    """Return the output of the operator that also computes the statistics; None if it refuses the problem."""
    options = {**problem.attend_options, "scale": problem.scale, "sinks": problem.sinks}
    call, context = Problem.checked(*tensors[:3], **options), CallContext()
    if native_statistics.why_not(call, context) is not None:
        return None
    answer = native_statistics.attend_tallied(call, context, Tally())
    assert answer is not None, "a finite problem has rows that are not finite"
    return answer.out


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


def judge(problem: DrawnProblem, dtype: torch.dtype) -> Verdict:
    """Compute a problem with the kernels and with plain attention, and compare the errors by the rule."""
    errors = errors_of(problem, dtype, range(1))
    again = not all(error.is_within for error in errors.values())
    if again:
        errors = errors_of(problem, dtype, range(MORE_SETS))
    ratios = {name: (error.norm_ratio, error.largest_ratio) for name, error in errors.items()}
    return Verdict(str(problem), again, ratios, [name for name, error in errors.items() if not error.is_within])
