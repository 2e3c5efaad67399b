"""What a head does, in numbers: statistics of its attention weights, accumulated over blocks of rows.

A is the weight matrix of one head, A[i, j] the weight of key j for query i; query i stands at key position
p_i. Every statistic has a value in each row; a head's is the mean over the rows that count. Rows without a
key never count, and rows in which a statistic has no meaning (the row before the first token, say) do not
count for that statistic. A new statistic is one function and one line in `STATISTICS`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from headwise.attention.masks import Grid
from headwise.attention.problem import Problem
from headwise.attention.reference import lse_of, masked_scores, weights_of
from headwise.shapes import Bool, Float, Int

BLOCK_BYTES = 2**24
"""Size of a block of weights: large enough for full-speed products, small against any model."""


@dataclass(frozen=True)
class Rows:
    """Some query rows of an attention call, over all its keys."""

    index: range
    scores: Float[Tensor, "batch heads rows keys"]
    lse: Float[Tensor, "batch heads rows"]
    weights: Float[Tensor, "batch heads rows keys"]
    position: Int[Tensor, " rows"]
    tokens: Int[Tensor, "batch keys"] | None
    special: Bool[Tensor, "batch keys"] | None
    real: Bool[Tensor, "batch rows"] | None

    @cached_property
    def back(self) -> Int[Tensor, "rows keys"]:
        """How many tokens before the query each key stands: 0 itself, 1 the previous, -1 the next."""
        keys = torch.arange(self.weights.shape[-1], device=self.position.device)
        return self.position[:, None] - keys

    @cached_property
    def seen(self) -> Int[Tensor, "batch heads rows"]:
        """How many keys each row may attend to."""
        return (self.scores > -torch.inf).sum(-1)

    @cached_property
    def entropy(self) -> Float[Tensor, "batch heads rows"]:
        """-sum A ln A, nats; 0 in a row without a key."""
        # ln A is s - lse: no logarithm of a weight that may be 0.
        logarithms = (self.scores - self.lse[..., None]).masked_fill(self.weights == 0, 0.0)
        return -(self.weights * logarithms).sum(-1).clamp(max=0.0)


def blocks(
    problem: Problem,
    *,
    tokens: Int[Tensor, "batch keys"] | None = None,
    special: Bool[Tensor, "batch keys"] | None = None,
    real: Bool[Tensor, "batch queries"] | None = None,
    ranges: Iterable[range] | None = None,
) -> Iterator[Rows]:
    """The rows of a problem block by block, so that the whole matrix never exists.

    Args:
        problem: the attention call.
        tokens: token ids of the keys, for the statistics that compare tokens.
        special: True at the keys that are special tokens.
        real: True at the query rows that are not padding; the others do not count.
        ranges: the blocks; by default of `rows_per_block` rows.
    """
    grid, sinks = problem.grid, problem.sinks
    if ranges is None:
        step = rows_per_block(grid)
        ranges = (range(start, min(start + step, grid.queries)) for start in range(0, grid.queries, step))
    for rows in ranges:
        scores = masked_scores(problem, rows)
        here = None if real is None else real[:, rows.start : rows.stop]
        position = torch.arange(rows.start, rows.stop, device=grid.device) + grid.offset
        yield Rows(rows, scores, lse_of(scores, sinks), weights_of(scores, sinks), position, tokens, special, here)


def rows_per_block(grid: Grid) -> int:
    """How many rows of a grid fit `BLOCK_BYTES`, one at least."""
    return max(1, BLOCK_BYTES // (4 * max(1, grid.batch * grid.heads * grid.keys)))


Values = Float[Tensor, "batch heads rows"]
Counted = Bool[Tensor, "*#batch_heads rows"]


@dataclass(frozen=True)
class Statistic:
    """One number a head: its name, its unit, and its value in each row with the rows that count for it.

    `measure` returns None where a call lacks what the statistic needs (token ids, special tokens).
    """

    name: str
    unit: str
    measure: Callable[[Rows], tuple[Values, Counted] | None]


@dataclass
class Tally:
    """Sums of every statistic over rows. Two tallies of two parts add up to that of the whole."""

    total: dict[str, Float[Tensor, "batch heads"]] = field(default_factory=dict)
    count: dict[str, Float[Tensor, "batch heads"]] = field(default_factory=dict)

    def add(self, rows: Rows) -> None:
        """Take in a block."""
        counts = rows.seen > 0
        if rows.real is not None:
            counts = counts & rows.real[:, None]
        for statistic in STATISTICS.values():
            measured = statistic.measure(rows)
            if measured is None:
                continue
            values, counted = measured
            counted = counted & counts
            # Summed in float64: thousands of rows of float32 would lose the digits that tell heads apart.
            self._accumulate(statistic.name, values.double().masked_fill(~counted, 0.0).sum(-1), counted.sum(-1))

    def merge(self, other: "Tally") -> None:
        """Take in another tally of the same heads."""
        for name, total in other.total.items():
            self._accumulate(name, total, other.count[name])

    def _accumulate(self, name: str, total: Tensor, count: Tensor) -> None:
        self.total[name] = self.total.get(name, 0.0) + total
        self.count[name] = self.count.get(name, 0.0) + count.double().expand_as(total)

    def means(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Each statistic's mean over the rows that counted; NaN where none did."""
        return {name: total / self.count[name] for name, total in self.total.items()}


def _every(rows: Rows) -> Counted:
    return torch.ones_like(rows.lse, dtype=torch.bool)


def _entropy(rows: Rows) -> tuple[Values, Counted]:
    return rows.entropy, _every(rows)


def _evenness(rows: Rows) -> tuple[Values, Counted]:
    return rows.entropy / rows.seen.clamp(min=2).log(), rows.seen > 1


def _confidence(rows: Rows) -> tuple[Values, Counted]:
    return rows.weights.amax(-1), _every(rows)


def _distance(rows: Rows) -> tuple[Values, Counted]:
    return (rows.weights * rows.back.abs()).sum(-1), _every(rows)


def _at(back: int) -> Callable[[Rows], tuple[Values, Counted]]:
    """The weight of the key that stands `back` tokens before the query."""

    def measure(rows: Rows) -> tuple[Values, Counted]:
        key = rows.position - back
        exists = (key >= 0) & (key < rows.weights.shape[-1])
        index = key.clamp(0, rows.weights.shape[-1] - 1)[:, None].expand(*rows.lse.shape, 1)
        return rows.weights.gather(-1, index)[..., 0], exists

    return measure


def _first(rows: Rows) -> tuple[Values, Counted]:
    return rows.weights[..., 0], _every(rows)


def _special(rows: Rows) -> tuple[Values, Counted] | None:
    if rows.special is None:
        return None
    return (rows.weights * rows.special[:, None, None]).sum(-1), _every(rows)


def _after_copy(shift: int) -> Callable[[Rows], tuple[Values, Counted] | None]:
    """The weight of the keys that stand `shift` tokens after an earlier copy of the query's token."""

    def measure(rows: Rows) -> tuple[Values, Counted] | None:
        if rows.tokens is None:
            return None
        queries = rows.tokens[:, rows.position.clamp(min=0), None]
        copies = (queries == rows.tokens[:, None]) & (rows.back > 0)
        there = copies.roll(shift, dims=-1)
        return (rows.weights * there[:, None]).sum(-1), there.any(-1)[:, None]

    return measure


STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        Statistic("entropy", "nats", _entropy),  # -sum_j A_ij ln A_ij
        Statistic("evenness", "share", _evenness),  # entropy over ln(keys in sight), rows with 2 or more
        Statistic("confidence", "share", _confidence),  # max_j A_ij (Voita et al. 2019, section 4)
        Statistic("distance", "tokens", _distance),  # sum_j A_ij |p_i - j|
        Statistic("self", "share", _at(0)),  # A[i, p_i]
        Statistic("previous", "share", _at(1)),  # A[i, p_i - 1]
        Statistic("next", "share", _at(-1)),  # A[i, p_i + 1]
        Statistic("first", "share", _first),  # A[i, 0], the sink of most decoders (Xiao et al. 2023)
        Statistic("special", "share", _special),  # on special tokens (Clark et al. 2019, section 3.2)
        Statistic("duplicate", "share", _after_copy(0)),  # on earlier copies of the query's token
        Statistic("induction", "share", _after_copy(1)),  # on what followed them (Olsson et al. 2022)
    )
}
"""Every statistic by name."""
