"""Errors of the implementations of the operator on drawn calls, and the rule that they must satisfy.

- Numbers of keys and rows are equal, and so are infinite numbers.
- The error of every other number is at most its bound. The products of queries and keys are sums of `head_dim` terms in
  float32. So the error of a score is at most d = (head_dim + 8) eps S, where S is 1 and the largest sum of absolute
  terms in a row, plus the largest absolute bias and sink. To first order, a log-sum-exp then has an error of d, a
  weight a relative one of 2 d, and the statistics those of `bounds`.
- Over all calls, the root of the mean square of (error / bound) of each result is at most twice that of the plain
  implementation in float32, or at most a thousandth.

The last four words were added after 90 calls: the plain implementation adds up the weights on a key in float64, so the
errors of the kernels, 2e-4 of the bound, were more than twice as large. The exact numbers are those of the plain
implementation in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.attention.backends import plain_statistics
from headwise.attention.backends.gpu.statistics import weight_statistics
from headwise.attention.backends.native import library
from headwise.attention.backends.plain_statistics import RECEIVED_UNIT, ROWS, StatisticsCall
from research.statistics_operator.calls import MOST_TILES, draw_call

COUNTS = ("visible keys", "seen by")
"""Results that are integers, and must be equal."""

Results = dict[str, Tensor]
"""Results of the operator by name, in float64."""


def plain(call: StatisticsCall) -> tuple[Tensor, ...]:
    """Return the results of the plain implementation in float32."""
    return plain_statistics.attend_statistics(*call)


def native(call: StatisticsCall) -> tuple[Tensor, ...]:
    """Return the results of the native kernels."""
    assert library.load() is None, "the native kernels are not available"
    results: tuple[Tensor, ...] = torch.ops.headwise.attend_statistics(*call)
    return results


def triton(call: StatisticsCall) -> tuple[Tensor, ...]:
    """Return the results of the Triton kernels, in addition to the plain output."""
    out = plain_statistics.attend_statistics(*(_wide(each) for each in call))[0]
    lse, rows, received, seen_by = weight_statistics(call, out)
    return out, lse, rows, received / RECEIVED_UNIT, seen_by


IMPLEMENTATIONS: dict[str, Callable[[StatisticsCall], tuple[Tensor, ...]]] = {
    "plain": plain,
    "native": native,
    "triton": triton,
}
"""Implementations by name."""


def results_of(call: StatisticsCall, results: tuple[Tensor, ...]) -> Results:
    """Return results of the operator by name. Numbers that have no meaning in a call are left out."""
    out, lse, rows, received, seen_by = results
    named = {"out": out, "lse": lse, **dict(zip(ROWS, rows, strict=True))}
    named |= {"received": received.double() * RECEIVED_UNIT, "seen by": seen_by}
    if not call.softcap:
        del named["max_logit_uncapped"]
    return {name: result.double() for name, result in named.items()}


def exact_results(call: StatisticsCall) -> Results:
    """Return the results of the plain implementation in float64."""
    exact = (each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in call)
    return results_of(call, plain_statistics.attend_statistics(*exact))


def bounds(call: StatisticsCall) -> dict[str, Tensor | float]:
    """Return the bound of the error of each result."""
    _, heads, queries, head_dim = call.q.shape
    group, keys = heads // call.k.shape[1], call.k.shape[2]
    eps = torch.finfo(torch.float32).eps
    q, k = call.q.double().abs(), call.k.double().abs().repeat_interleave(group, 1)
    scale = abs(call.scale) if call.head_scale is None else (call.scale * call.head_scale).abs()[:, None].double()
    size = (q @ k.mT).amax(-1) * scale
    others = [each.double().abs() for each in (call.bias, call.sinks) if each is not None]
    largest = 1 + size + sum(each.where(each.isfinite(), 0.0).amax() for each in others)
    of_score = (head_dim + 8) * eps * largest
    share, most = 2 * of_score + keys * eps, call.v.double().abs().amax() * call.v.shape[3] ** 0.5
    farthest = float((call.positions[:, :, None] - torch.arange(keys)).abs().max())
    entropy = share * (1 + math.log(keys) + 2 * largest)
    norms = {"output_norm": share * most}
    if call.gram is not None:
        norms["written_norm"] = share * most * call.gram.double().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()[:, None] * 2
        # The root of a difference of rounded numbers near 0 is less exact.
        norms["written_norm"] = norms["written_norm"] + 4 * eps**0.5 * most
    shares = ("confidence", "self", "previous", "next", "first", "special", "duplicate", "induction")
    return {
        "out": (share * call.v.double().abs().amax())[..., None],
        "lse": 2 * of_score,
        "entropy": entropy,
        "distance": share * (farthest + 1),
        **dict.fromkeys((*shares, "confidence_content"), share),
        "max_logit": of_score,
        "max_logit_uncapped": of_score,
        **norms,
        "received": (share.sum(-1) + queries * RECEIVED_UNIT)[..., None],
    }


NEGLIGIBLE = 1e-3
"""Mean error, as a share of the bound, that is not compared with that of the plain implementation."""


@dataclass
class Agreement:
    """Errors of one implementation over some calls.

    Attributes:
        calls: number of calls.
        beyond: descriptions of the results beyond their bound, or not equal.
        squares: by result, the sum of squares of error / bound, and the number of numbers.
    """

    calls: int = 0
    beyond: list[str] = field(default_factory=list)
    squares: dict[str, list[float]] = field(default_factory=dict)

    def add(self, label: str, ours: Results, exact: Results, bound: dict[str, Tensor | float]) -> None:
        """Add the errors of one call, which `label` names."""
        self.calls += 1
        for name, expected in exact.items():
            if name in COUNTS or name not in bound:
                if not torch.equal(ours[name], expected):
                    self.beyond.append(f"{label}: {name} is not equal")
                continue
            finite = expected.isfinite()
            if not torch.equal(ours[name][~finite], expected[~finite]) or not bool(ours[name][finite].isfinite().all()):
                self.beyond.append(f"{label}: {name} is not equal where it is infinite")
                continue
            error = ((ours[name] - expected).abs() / bound[name])[finite]
            if error.numel() and float(error.max()) > 1:
                self.beyond.append(f"{label}: {name} has an error of {float(error.max()):.3g} times its bound")
            total = self.squares.setdefault(name, [0.0, 0.0])
            total[:] = [total[0] + float(error.square().sum()), total[1] + error.numel()]

    def merge(self, other: "Agreement") -> None:
        """Add the errors of other calls."""
        self.calls += other.calls
        self.beyond += other.beyond
        for name, (square, count) in other.squares.items():
            total = self.squares.setdefault(name, [0.0, 0.0])
            total[:] = [total[0] + square, total[1] + count]

    def worse_than(self, plain: "Agreement") -> list[str]:
        """Return the results whose mean error is more than twice that of the plain implementation, and not
        negligible.
        """
        theirs = plain.mean_errors()
        return [
            f"{name}: {error:.2g}"
            for name, error in self.mean_errors().items()
            if error > max(2 * theirs[name], NEGLIGIBLE)
        ]

    def mean_errors(self) -> dict[str, float]:
        """Return, by result, the root of the mean square of error / bound."""
        return {name: (square / max(count, 1.0)) ** 0.5 for name, (square, count) in self.squares.items()}


def compare(
    seeds: range, dtype: torch.dtype = torch.float32, most: int | None = None, most_tiles: int = MOST_TILES
) -> dict[str, Agreement]:
    """Return the agreement of every implementation that computes in `dtype` with the exact numbers, over the calls of
    up to `most_tiles` tiles that are drawn with some seeds, up to `most` calls.
    """
    names = [name for name in IMPLEMENTATIONS if name != "native" or dtype == torch.float32]
    agreements = {name: Agreement() for name in names}
    for seed in seeds:
        if agreements["plain"].calls == most:
            break
        call = draw_call(seed, dtype, most_tiles)
        if call is None:
            continue
        exact = exact_results(call)
        bound = bounds(call)
        for name in names:
            ours = results_of(call, IMPLEMENTATIONS[name](call))
            if dtype == torch.float16:
                ours.pop("out")  # it is rounded to float16
            agreements[name].add(f"seed {seed}", ours, {key: exact[key] for key in ours}, bound)
    return agreements


def _wide(value: object) -> object:
    """Return tensors of float16 in float32, and everything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value
