"""What a head does, in numbers: statistics of its attention weights, accumulated over blocks of rows.

A is the weight matrix of one head, A[i, j] the weight of key j for query i; query i stands at key position p_i. Most
statistics have a value in each row, and a head's is the mean over the rows that count. Rows without a key never count,
nor does padding, and rows in which a statistic has no meaning (the row before the first token, say) do not count for
that one. A new statistic is one entry in `STATISTICS`: what a block of rows contributes, how two contributions merge,
and the number that the whole comes to.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.attention.masks import Grid
from headwise.attention.problem import Problem
from headwise.attention.reference import masked_scores, mixed, weights_of
from headwise.attention.rows import Known, Rows
from headwise.attention.tiles import LOWEST, whole_tile
from headwise.shapes import Bool, Float

BLOCK_BYTES = 2**24
"""Size of a block of weights where whole rows are asked for: large enough for full-speed products."""

Sums = tuple[Float[Tensor, "batch heads *more"], ...]
Values = Float[Tensor, "batch heads rows"]
Counted = Bool[Tensor, "*#batch_heads rows"]


@dataclass(frozen=True)
class Statistic:
    """One number a head.

    Attributes:
        name: what it is called.
        unit: nats, tokens, share.
        contribute: what some rows add, in tensors `(batch, heads, ...)` whose shapes are those of every other block;
            None where a call lacks what it needs, such as token ids.
        value: the number, `(batch, heads)`, from all contributions; NaN where there is none.
        merge: two contributions in one.
        start: what merges with a contribution without changing it.
    """

    name: str
    unit: str
    contribute: Callable[[Rows], Sums | None]
    value: Callable[..., Float[Tensor, "batch heads"]]
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add
    start: float = 0.0


def mean_of_rows(name: str, unit: str, measure: Callable[[Rows], tuple[Values, Counted | None] | None]) -> Statistic:
    """The mean over rows of a value in each; `measure` also says which rows have one, where not all have."""

    def contribute(rows: Rows) -> Sums | None:
        measured = measure(rows)
        if measured is None:
            return None
        values, counted = measured
        counts = rows.counts if counted is None else rows.counts & counted
        # Summed in float64: thousands of rows of float32 would lose the digits that tell heads apart.
        total = values.double().masked_fill(~counts, 0.0).sum(-1)
        return total, counts.sum(-1).double().expand_as(total)

    return Statistic(name, unit, contribute, torch.div)


@dataclass
class Tally:
    """The contributions to every statistic of one call. Tallies of two parts of its rows merge to that of the whole."""

    sums: dict[str, Sums] = field(default_factory=dict)

    def add(self, rows: Rows) -> None:
        """Take in some rows."""
        grid = rows.grid
        for statistic in STATISTICS.values():
            contributed = statistic.contribute(rows)
            if contributed is None:
                continue
            if statistic.name not in self.sums:
                self.sums[statistic.name] = tuple(
                    each.new_full((grid.batch, grid.heads, *each.shape[2:]), statistic.start) for each in contributed
                )
            for total, each in zip(self.sums[statistic.name], contributed, strict=True):
                total[rows.where] = statistic.merge(total[rows.where], each)

    def merge(self, other: "Tally") -> None:
        """Take in the tally of other rows of the same call."""
        for name, sums in other.sums.items():
            mine = self.sums.get(name)
            merge = STATISTICS[name].merge
            self.sums[name] = sums if mine is None else tuple(map(merge, mine, sums))

    def means(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Every statistic; NaN where no row counted for it."""
        return {name: STATISTICS[name].value(*sums) for name, sums in self.sums.items()}

    def count(self, name: str) -> Float[Tensor, "batch heads"]:
        """How many rows counted for a mean of rows."""
        return self.sums[name][1]


# -- the statistics ---------------------------------------------------------------------------------------------------


def _evenness(rows: Rows) -> tuple[Values, Counted]:
    return rows.entropy / rows.seen.clamp(min=2).log(), rows.seen > 1


def _at(back: int) -> Callable[[Rows], tuple[Values, Counted]]:
    """The weight of the key that stands `back` tokens before the query, in rows that have one."""

    def measure(rows: Rows) -> tuple[Values, Counted]:
        key = rows.position - back
        return rows.at(back), ((key >= 0) & (key <= rows.last))[:, None]

    return measure


def _special(rows: Rows) -> tuple[Values, None] | None:
    return None if rows.known.special is None else (rows.along["special"], None)


def _after_copy(shift: int) -> Callable[[Rows], tuple[Values, Counted] | None]:
    """The weight of keys `shift` tokens after an earlier copy of the query's token, in rows that have such a copy."""

    def measure(rows: Rows) -> tuple[Values, Counted] | None:
        repeats = rows.known.repeats
        if repeats is None or not rows.grid.aligned:
            return None
        position = rows.position[0]
        has_copy = repeats[rows.tile.sequences][:, position.clamp(min=0)] & (position >= 0)
        return rows.on_copies(shift), has_copy[:, None]

    return measure


def _output_norm(rows: Rows) -> tuple[Values, None] | None:
    return None if rows.out is None else (rows.tile.by_head(rows.out).norm(dim=-1), None)


def _written_norm(rows: Rows) -> tuple[Values, None] | None:
    if rows.out is None or rows.known.gram is None:
        return None
    out = rows.tile.by_head(rows.out)
    squares = ((out @ rows.known.gram[rows.tile.heads].to(out.dtype)) * out).sum(-1)
    return squares.clamp(min=0.0).sqrt(), None


def _received(rows: Rows) -> Sums:
    """What every key got, and of how many rows it was seen."""
    totals = []
    for each in rows.received:
        total = each.new_zeros((*each.shape[:2], rows.grid.keys), dtype=torch.float64)
        total[..., rows.columns] = each.double()
        totals.append(total)
    return tuple(totals)


def _most_received(
    got: Float[Tensor, "batch heads keys"], seen: Float[Tensor, "batch heads keys"]
) -> Float[Tensor, "batch heads"]:
    """The largest mean weight of a key over the rows that may see it; of keys that half as many see as any."""
    most = seen.amax(-1, keepdim=True)
    return (got / seen).masked_fill(2 * seen < most, -torch.inf).amax(-1).masked_fill(most[..., 0] == 0, torch.nan)


STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        mean_of_rows("entropy", "nats", lambda rows: (rows.entropy, None)),  # -sum_j A_ij ln A_ij
        mean_of_rows("evenness", "share", _evenness),  # entropy over ln(keys in sight), rows with 2 or more
        mean_of_rows("confidence", "share", lambda rows: (rows.largest, None)),  # max_j A_ij (Voita et al. 2019)
        mean_of_rows("distance", "tokens", lambda rows: (rows.distance, None)),  # sum_j A_ij |p_i - p_j|
        mean_of_rows("self", "share", _at(0)),  # A[i, p_i]
        mean_of_rows("previous", "share", _at(1)),  # A[i, p_i - 1]
        mean_of_rows("next", "share", _at(-1)),  # A[i, p_i + 1]
        # on the first token, the sink of most decoders (Xiao et al. 2023)
        mean_of_rows("first", "share", lambda rows: (rows.along["first"], None)),
        mean_of_rows("special", "share", _special),  # on special tokens (Clark et al. 2019, section 3.2)
        mean_of_rows("duplicate", "share", _after_copy(0)),  # on earlier copies of the query's token
        mean_of_rows("induction", "share", _after_copy(1)),  # on what followed them (Olsson et al. 2022)
        Statistic("received", "share", _received, _most_received),  # max_j mean_i A_ij (Gu et al. 2024, equation 7)
        mean_of_rows("output_norm", "norm", _output_norm),  # |A_i V|
        mean_of_rows("written_norm", "norm", _written_norm),  # |A_i V W|, W the head's slice of the output projection
    )
}
"""Every statistic by name."""


# -- whole rows of every head -----------------------------------------------------------------------------------------


def blocks(problem: Problem, known: Known | None = None, ranges: Iterable[range] | None = None) -> Iterator[Rows]:
    """The rows of a problem, every head and key of some rows at once, so that the whole matrix never exists.

    Args:
        problem: the attention call.
        known: what is known of its tokens.
        ranges: the blocks; by default of `rows_per_block` rows.
    """
    grid = problem.grid
    if ranges is None:
        step = rows_per_block(grid)
        ranges = (range(start, min(start + step, grid.queries)) for start in range(0, grid.queries, step))
    for index in ranges:
        scores = masked_scores(problem, index)
        weights = weights_of(scores, problem.sinks)
        if problem.talking is not None:
            weights = mixed(weights, problem.talking.after)
        yield rows_of_weights(weights, scores > -torch.inf, grid, index, known or Known())


def blocks_of_weights(
    weights: Float[Tensor, "batch heads queries keys"],
    out: Float[Tensor, "batch heads queries value_dim"] | None,
    known: Known,
) -> Iterator[Rows]:
    """The rows of a matrix that is there already, with their outputs where these are. A key of weight 0 is hidden."""
    batch, heads, queries, keys = weights.shape
    grid = Grid(batch, heads, queries, keys, weights.device)
    step = rows_per_block(grid)
    for start in range(0, grid.queries, step):
        index = range(start, min(start + step, grid.queries))
        some = slice(start, index.stop)
        block = weights[:, :, some].to(torch.promote_types(weights.dtype, torch.float32))
        rows = rows_of_weights(block, block > 0, grid, index, known)
        if out is not None:
            rows.out = out[:, :, some].to(block.dtype).flatten(0, 1)
        yield rows


def rows_of_weights(
    weights: Float[Tensor, "batch heads rows keys"],
    allowed: Bool[Tensor, "#batch #heads rows keys"],
    grid: Grid,
    index: range,
    known: Known,
) -> Rows:
    """Rows whose weights are there already, over all keys."""
    powers = weights.flatten(0, 1)
    scores, one = powers.log2().clamp(min=LOWEST), torch.ones_like(powers[..., :1])
    largest = powers.amax(-1, keepdim=True)
    return Rows(
        whole_tile(grid, index, allowed), grid, scores, powers, powers.sum(-1, keepdim=True), one, largest, known
    )


def rows_per_block(grid: Grid) -> int:
    """How many rows of a grid fit `BLOCK_BYTES`, one at least."""
    return max(1, BLOCK_BYTES // (4 * max(1, grid.batch * grid.heads * grid.keys)))
