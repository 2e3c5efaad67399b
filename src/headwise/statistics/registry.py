"""What a head does, in numbers: statistics of its attention weights, accumulated over blocks of rows.

A is the weight matrix of one head, A[i, j] the weight of key j for query i; query i stands at key position p_i. Most
statistics have a value in each row, and a head's is the mean over the rows that count. Rows without a key never count,
nor does padding, and rows in which a statistic has no meaning (the row before the first token, say) do not count for
that one. A new statistic is one entry in `STATISTICS`: what a block of rows contributes, how two contributions merge,
and the number that the whole comes to.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.blockwise.tiles import LOG2_E, full_width_tile
from headwise.attention.backends.blockwise.visibility import TileVisibility
from headwise.attention.backends.reference import attention_weights, masked_scores, mix_heads
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from headwise.shapes import Bool, Float

WEIGHTS_BYTES = 2**24
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
    contribute: Callable[[RowBlock], Sums | None]
    value: Callable[..., Float[Tensor, "batch heads"]]
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add
    start: float = 0.0


@dataclass(frozen=True)
class MeanOfRows:
    """One number a head: the mean over rows of a value in each.

    Attributes:
        name: what it is called.
        unit: nats, tokens, share.
        measure: the value of every row; None where a call lacks what it needs, such as token ids.
        counted: which rows have one; of those only that count at all. All unless given.
    """

    name: str
    unit: str
    measure: Callable[[RowBlock], Values | None]
    counted: Callable[[TileVisibility], Counted | None] = lambda _: None


@dataclass
class Tally:
    """The contributions to every statistic of one call. Tallies of two parts of its rows merge to that of the whole.

    Attributes:
        gram: what `written_norm` is measured by; see `RowBlock`.
        names: which means of rows have a value in this call.
        rows: their sums, and the numbers of rows in these.
        others: the contributions to each other statistic.
    """

    gram: Float[Tensor, "heads value_dim value_dim"] | None = None
    names: tuple[str, ...] = ()
    rows: Float[Tensor, "two means batch heads"] | None = None
    others: dict[str, Sums] = field(default_factory=dict)

    def add(self, rows: RowBlock) -> None:
        """Take in some rows."""
        if self.gram is not None:
            rows = replace(rows, gram=self.gram)
        grid, where = rows.grid, rows.sequences_and_heads
        names, sums = _sums_of(rows)
        if self.rows is None:
            self.names, self.rows = names, sums.new_zeros(*sums.shape[:2], grid.batch, grid.heads)
        self.rows[:, :, where[0], where[1]] += sums
        for statistic in _others():
            contributed = statistic.contribute(rows)
            if contributed is None:
                continue
            if statistic.name not in self.others:
                self.others[statistic.name] = tuple(
                    each.new_full((grid.batch, grid.heads, *each.shape[2:]), statistic.start) for each in contributed
                )
            for total, each in zip(self.others[statistic.name], contributed, strict=True):
                total[where] = statistic.merge(total[where], each)

    def merge(self, other: "Tally") -> None:
        """Take in the tally of other rows of the same call."""
        if other.rows is None:
            return
        self.names, self.rows = other.names, other.rows if self.rows is None else self.rows + other.rows
        for statistic in _others():
            name = statistic.name
            if name in self.others and name in other.others:
                self.others[name] = tuple(map(statistic.merge, self.others[name], other.others[name]))
            elif name in other.others:
                self.others[name] = other.others[name]

    def means(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """Every statistic; NaN where no row counted for it."""
        if self.rows is None:
            return {}
        found = dict(zip(self.names, self.rows[0] / self.rows[1], strict=True))
        found |= {each.name: each.value(*self.others[each.name]) for each in _others() if each.name in self.others}
        return {name: found[name] for name in STATISTICS if name in found}

    def counts(self) -> dict[str, Float[Tensor, "batch heads"]]:
        """How many rows counted for each mean of rows."""
        return {} if self.rows is None else dict(zip(self.names, self.rows[1], strict=True))


def _others() -> Iterator[Statistic]:
    """The statistics that are no means of rows."""
    return (statistic for statistic in STATISTICS.values() if isinstance(statistic, Statistic))


def _sums_of(rows: RowBlock) -> tuple[tuple[str, ...], Float[Tensor, "two means batch heads"]]:
    """What some rows add to the means, all at once: a few operations for each would cost as much as the products.

    Summed in float64: thousands of rows of float32 would lose the digits that tell heads apart.
    """
    measured = {each.name: each.measure(rows) for each in STATISTICS.values() if isinstance(each, MeanOfRows)}
    values = {name: value for name, value in measured.items() if value is not None}
    counts = _counted(rows.visibility, tuple(values))
    totals = torch.stack(list(values.values())).double().masked_fill_(~counts, 0.0).sum(-1)
    return tuple(values), torch.stack([totals, counts.sum(-1).double().expand_as(totals)])


def _counted(visibility: TileVisibility, names: tuple[str, ...]) -> Bool[Tensor, "means #batch #heads rows"]:
    """Which rows count for each of these means."""

    def compute() -> Tensor:
        counted_rows, entries = visibility.counted_rows, [STATISTICS[name] for name in names]
        has_value = [each.counted(visibility) for each in entries if isinstance(each, MeanOfRows)]
        counted = [counted_rows if some is None else counted_rows & some for some in has_value]
        return torch.stack(torch.broadcast_tensors(*counted))  # type: ignore[no-untyped-call]

    return visibility.cached(names, compute)


# -- the statistics ---------------------------------------------------------------------------------------------------


def _evenness(rows: RowBlock) -> Values:
    return rows.entropy / rows.visibility.visible_keys.clamp(min=2).log()


def _at(name: str, back: int) -> MeanOfRows:
    """The weight of the key that stands `back` tokens before the query, in rows that have one."""
    return MeanOfRows(name, "share", lambda rows: rows.weight_at_lag(back), lambda tile: tile.has_key_at_lag(back))


def _special(rows: RowBlock) -> Values | None:
    return None if rows.visibility.is_special is None else rows.feature_sums["special"]


def _after_copy(name: str, shift: int) -> MeanOfRows:
    """The weight of keys `shift` tokens after an earlier copy of the query's token, in rows that have such a copy."""

    def measure(rows: RowBlock) -> Values | None:
        return None if rows.visibility.has_earlier_copy is None else rows.weight_after_copies(shift)

    return MeanOfRows(name, "share", measure, lambda tile: tile.has_earlier_copy)


def _output_norm(rows: RowBlock) -> Values | None:
    return None if rows.out is None else rows.tile.by_head(rows.out).norm(dim=-1)


def _written_norm(rows: RowBlock) -> Values | None:
    if rows.out is None or rows.gram is None:
        return None
    out = rows.tile.by_head(rows.out)
    squares = ((out @ rows.gram[rows.tile.heads].to(out.dtype)) * out).sum(-1)
    return squares.clamp(min=0.0).sqrt()


def _received(rows: RowBlock) -> Sums:
    """What every key got, and of how many rows it was seen."""
    totals = []
    for each in rows.received:
        total = each.new_zeros((*each.shape[:2], rows.grid.keys), dtype=torch.float64)
        for keys, span in rows.tile.spans(each):
            total[..., keys.start : keys.stop] = span
        totals.append(total)
    return tuple(totals)


def _most_received(
    got: Float[Tensor, "batch heads keys"], seen: Float[Tensor, "batch heads keys"]
) -> Float[Tensor, "batch heads"]:
    """The largest mean weight of a key over the rows that may see it; of keys that half as many see as any."""
    most = seen.amax(-1, keepdim=True)
    return (got / seen).masked_fill(2 * seen < most, -torch.inf).amax(-1).masked_fill(most[..., 0] == 0, torch.nan)


STATISTICS: dict[str, Statistic | MeanOfRows] = {
    statistic.name: statistic
    for statistic in (
        # -sum_j A_ij ln A_ij
        MeanOfRows("entropy", "nats", lambda rows: rows.entropy),
        # entropy over ln(keys in sight), in rows with 2 or more
        MeanOfRows("evenness", "share", _evenness, lambda tile: tile.visible_keys > 1),
        # max_j A_ij (Voita et al. 2019)
        MeanOfRows("confidence", "share", lambda rows: rows.largest_weight),
        # sum_j A_ij |p_i - p_j|
        MeanOfRows("distance", "tokens", lambda rows: rows.distance),
        # A[i, p_i], A[i, p_i - 1], A[i, p_i + 1]
        _at("self", 0),
        _at("previous", 1),
        _at("next", -1),
        # on the first token, the sink of most decoders (Xiao et al. 2023)
        MeanOfRows("first", "share", lambda rows: rows.feature_sums["first"]),
        # on special tokens (Clark et al. 2019, section 3.2)
        MeanOfRows("special", "share", _special),
        # on earlier copies of the query's token, and on what followed them (Olsson et al. 2022)
        _after_copy("duplicate", 0),
        _after_copy("induction", 1),
        # max_j mean_i A_ij (Gu et al. 2024, equation 7)
        Statistic("received", "share", _received, _most_received),
        # |A_i V|, and |A_i V W|, W the head's slice of the output projection
        MeanOfRows("output_norm", "norm", _output_norm),
        MeanOfRows("written_norm", "norm", _written_norm),
    )
}
"""Every statistic by name."""


# -- whole rows of every head -----------------------------------------------------------------------------------------


def blocks(
    problem: Problem, call_context: CallContext | None = None, ranges: Iterable[range] | None = None
) -> Iterator[RowBlock]:
    """The rows of a problem, every head and key of some rows at once, so that the whole matrix never exists.

    Args:
        problem: the attention call.
        call_context: its tokens and padding.
        ranges: the blocks; by default of `rows_per_block` rows.
    """
    grid = problem.grid
    if ranges is None:
        step = rows_per_block(grid)
        ranges = (range(start, min(start + step, grid.queries)) for start in range(0, grid.queries, step))
    for index in ranges:
        scores = masked_scores(problem, index)
        weights = attention_weights(scores, problem.sinks)
        if problem.talking is not None:
            weights = mix_heads(weights, problem.talking.after)
        yield rows_of_weights(weights, scores > -torch.inf, grid, index, call_context or CallContext())


def blocks_of_weights(
    weights: Float[Tensor, "batch heads queries keys"],
    out: Float[Tensor, "batch heads queries value_dim"] | None,
    call_context: CallContext,
) -> Iterator[RowBlock]:
    """The rows of a matrix that is there already, with their outputs where these are. A key of weight 0 is hidden."""
    batch, heads, queries, keys = weights.shape
    grid = Grid(batch, heads, queries, keys, weights.device)
    step = rows_per_block(grid)
    for start in range(0, grid.queries, step):
        index = range(start, min(start + step, grid.queries))
        some = slice(start, index.stop)
        block = weights[:, :, some].to(torch.promote_types(weights.dtype, torch.float32))
        out_rows = None if out is None else out[:, :, some].to(block.dtype).flatten(0, 1)
        yield rows_of_weights(block, block > 0, grid, index, call_context, out_rows)


def rows_of_weights(
    weights: Float[Tensor, "batch heads rows keys"],
    allowed: Bool[Tensor, "#batch #heads rows keys"],
    grid: Grid,
    index: range,
    call_context: CallContext,
    out: Float[Tensor, "kv stacked value_dim"] | None = None,
) -> RowBlock:
    """Rows whose weights are there already, over all keys."""
    powers = weights.flatten(0, 1)
    tile = full_width_tile(grid, index, allowed)
    power_score_sum = torch.special.xlogy(powers, powers).sum(-1, keepdim=True) * LOG2_E
    return RowBlock(
        tile=tile,
        grid=grid,
        call_context=call_context,
        visibility=call_context.visibility(tile, grid),
        powers=powers,
        power_score_sum=power_score_sum,
        power_sum=powers.sum(-1, keepdim=True),
        normalizer=torch.ones_like(power_score_sum),
        largest_power=powers.amax(-1, keepdim=True),
        out=out,
    )


def rows_per_block(grid: Grid) -> int:
    """How many rows of a grid fit `WEIGHTS_BYTES`, one at least."""
    return max(1, WEIGHTS_BYTES // (4 * max(1, grid.batch * grid.heads * grid.keys)))
