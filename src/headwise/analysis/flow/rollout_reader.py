"""Rollout of the attention of all layers in one run of a model, without the matrix of the tokens.

The rollout of layer l is R_l = A_l R_(l-1) with A_l = r I + (1 - r) times the mean over heads of the attention weights,
and R_(-1) = I (Abnar and Zuidema 2020, section 4). All statistics follow from products of R_l with fixed matrices F,
and R_l F obeys the same equation. So a run carries some columns of these products through the layers.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headwise.analysis.flow.layer_reader import LayerReader, eps_of, require_whole
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.intercept.interceptor import Call, Observation, SiteKey
from headwise.intercept.observed_call import ObservedCall
from headwise.settings import ROLLOUT_STATISTICS
from headwise.shapes import Bool, Float, Int

STATE_BYTES = 2**26
"""Largest size of the columns that one run carries through the layers."""

ROWS = "rows"
"""Name of the numbers of queries that count for each head."""

LAYER_STATISTICS = (*ROLLOUT_STATISTICS, "entropy")
"""Statistics of the rollout of a layer."""


@dataclass
class LayerSums:
    """Sums over the queries of each sequence, in float64, from all runs over a batch.

    Attributes:
        of_layer: sums of the statistics of the rollout, by name.
        rolled: sums of those of each head's attention, rolled out over the layers below.
        direct: sums of those of each head's attention alone, and numbers of queries that count, by the name `ROWS`.
        rows: number of queries that count.
    """

    of_layer: dict[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    rolled: dict[str, Float[Tensor, "batch heads"]] = field(default_factory=dict)
    direct: dict[str, Float[Tensor, "batch heads"]] = field(default_factory=dict)
    rows: Float[Tensor, " batch"] | None = None


class RolloutRun(LayerReader):
    """Interceptor that rolls out attention in one run over a batch, for some of the tokens: as tokens that are attended
    to for the entropy, and as queries for the shares on the query itself and for distances.

    Args:
        model: the intercepted model.
        special: ids of special tokens.
        residual: share of the residual connection in each layer.
        sums: sums by site, to which the run adds.
        start: first of the tokens.
    """

    def __init__(
        self, model: nn.Module, special: Collection[int], residual: float, sums: dict[SiteKey, LayerSums], start: int
    ) -> None:
        super().__init__(model, special)
        self._residual, self._sums, self._start = residual, sums, start
        self._columns: _Columns | None = None

    @property
    def stop(self) -> int:
        """Token after the last one of this run."""
        return 0 if self._columns is None else self._columns.tokens.stop

    @property
    def length(self) -> int:
        """Number of tokens of a sequence."""
        return 0 if self._columns is None else self._columns.values.shape[1]

    def read_layer(self, number: int, call: Call, observed: ObservedCall) -> Observation:
        """Return an observation that rolls out a layer."""
        sums, layer, context = self._sums.setdefault(call.site, LayerSums()), _Layer(), observed.context

        def observer(row_block: RowBlock) -> None:
            if self._columns is None:
                self._columns = _Columns.of(row_block, context, self._start)
            layer.add(row_block, self._columns, sums)

        def on_end() -> None:
            assert self._columns is not None
            layer.finish(self._columns, self._residual, sums, call.site.label)

        return Observation(observer, context, on_end)


@dataclass
class _Columns:
    """Columns of the products of the rollout with fixed matrices, for the tokens `tokens`: those of the identity, those
    of the distances between tokens, and columns that are 1 at first tokens, at special tokens, and at all tokens.

    Attributes:
        tokens: the tokens.
        values: the columns, those of the identity first.
        has_special: True if special tokens are known.
    """

    tokens: range
    values: Float[Tensor, "batch tokens columns"] = field(repr=False)
    has_special: bool

    @staticmethod
    def of(row_block: RowBlock, context: CallContext, start: int) -> "_Columns":
        """Return the columns before the first layer."""
        grid, powers = row_block.grid, row_block.powers
        room = STATE_BYTES // (
            2 * 2 * powers.element_size() * grid.batch * grid.queries
        )  # with those of the next layer
        tokens = range(start, min(start + max(room, 1), grid.queries))
        columns = slice(tokens.start, tokens.stop)
        everything = torch.arange(grid.queries, device=grid.device)
        positions = (grid if context.positions is None else context.positions).key_position(everything[None])
        positions = positions.reshape(-1, grid.queries).expand(grid.batch, -1)
        distances = (positions[:, :, None] - positions[:, None, columns]).abs()
        identity = (everything[:, None] == everything[None, columns]).expand(grid.batch, -1, -1)
        special = context.is_special
        of_special = torch.zeros(grid.batch, grid.queries, device=grid.device) if special is None else special
        marked = [_is_first(grid, context, positions), of_special, torch.ones_like(positions)]
        parts = [identity, distances, *(part[..., None] for part in marked)]
        return _Columns(tokens, torch.cat([part.to(powers.dtype) for part in parts], -1), special is not None)


def _is_first(grid: Grid, context: CallContext, positions: Int[Tensor, "batch tokens"]) -> Bool[Tensor, "batch tokens"]:
    """Return True at the first token of each sequence, or of each of its documents, without padding."""
    everything = torch.arange(grid.queries, device=grid.device)[None]
    if context.first_keys is not None:
        return (context.first_keys == everything).expand(grid.batch, -1)
    if context.positions is not None and not context.positions.uses_default_positions:
        return positions == 0
    if context.real_keys is None:
        return (everything == 0).expand(grid.batch, -1)
    return context.real_keys.int().argmax(-1, keepdim=True) == everything


class _Layer:
    """One layer in a run: the mean over heads of the products of its weights with the columns so far."""

    def __init__(self) -> None:
        self._product: Tensor | None = None
        self._counted: Bool[Tensor, "batch tokens"] | None = None
        self._eps = 0.0

    def add(self, row_block: RowBlock, columns: _Columns, sums: LayerSums) -> None:
        """Add the weights of some query rows of some heads."""
        grid, tile, before = row_block.grid, row_block.tile, columns.values
        if self._product is None or self._counted is None:
            self._product = torch.zeros_like(before)
            self._counted = torch.zeros(grid.batch, grid.queries, dtype=torch.bool, device=grid.device)
            self._eps = eps_of(row_block)
        (sequences, _), rows = row_block.sequences_and_heads, slice(row_block.rows.start, row_block.rows.stop)
        weights = row_block.weights.to(before.dtype)
        counted = row_block.visibility.counted_rows.expand(*tile.shape)
        self._counted[sequences, rows] |= counted.any(1)
        own = range(max(row_block.rows.start, columns.tokens.start), min(row_block.rows.stop, columns.tokens.stop))
        rolled = weights.new_zeros(*weights.shape[:3], 3)
        at_query = weights.new_zeros(2, *weights.shape[:2], len(own))
        for keys, span in tile.spans(weights):
            below = before[sequences, keys.start : keys.stop]
            self._product[sequences, rows] += span.sum(1) @ below / grid.heads
            if not columns.tokens.start:
                rolled += span @ below[:, None, :, -3:]
            if own:
                of_own = span[:, :, own.start - row_block.rows.start : own.stop - row_block.rows.start]
                for which, first in enumerate((0, len(columns.tokens))):
                    place = first + own.start - columns.tokens.start
                    at_query[which] += (of_own * below[:, None, :, place : place + len(own)].mT).sum(-1)
        self._add_heads(row_block, columns, sums, counted, own, rolled, at_query)

    def _add_heads(
        self,
        row_block: RowBlock,
        columns: _Columns,
        sums: LayerSums,
        counted: Bool[Tensor, "part heads rows"],
        own: range,
        rolled: Float[Tensor, "part heads rows 3"],
        at_query: Float[Tensor, "2 part heads own"],
    ) -> None:
        """Add the statistics of some query rows of each head."""
        of_own = counted[..., own.start - row_block.rows.start :][..., : len(own)]
        _add(sums.rolled, "self", row_block, at_query[0], of_own)
        _add(sums.rolled, "distance", row_block, at_query[1], of_own)
        if columns.tokens.start:
            return
        _add(sums.direct, ROWS, row_block, torch.ones_like(rolled[..., 0]), counted)
        _add(sums.rolled, "first", row_block, rolled[..., 0], counted)
        _add(sums.direct, "first", row_block, row_block.weight_on_first, counted)
        _add(sums.direct, "self", row_block, row_block.weight_at_lag(0), counted)
        _add(sums.direct, "distance", row_block, row_block.distance, counted)
        if columns.has_special:
            _add(sums.rolled, "special", row_block, rolled[..., 1], counted)
            _add(sums.direct, "special", row_block, row_block.feature_sums["special"], counted)

    def finish(self, columns: _Columns, residual: float, sums: LayerSums, path: str) -> None:
        """Replace the columns by those after the layer, and add the statistics of its rollout.

        Raises:
            InputError: the rollout of a query has lost attention.
        """
        assert self._product is not None
        assert self._counted is not None
        columns.values.mul_(residual).add_(self._product, alpha=1 - residual)
        counted, tokens, width = self._counted, columns.tokens, len(columns.tokens)
        after, part = columns.values, slice(columns.tokens.start, columns.tokens.stop)
        require_whole(after[..., -1][counted], path, self._eps)
        shares = after[..., :width]
        values = {"entropy": (-torch.special.xlogy(shares, shares).sum(-1), counted)}
        for name, first in (("self", 0), ("distance", width)):
            of_own = after[:, part, first : first + width].diagonal(dim1=1, dim2=2)
            values[name] = of_own, counted[:, part]
        if not tokens.start:
            values["first"] = after[..., -3], counted
            if columns.has_special:
                values["special"] = after[..., -2], counted
            sums.rows = counted.double().sum(-1)
        for name, (numbers, is_counted) in values.items():
            total = numbers.double().masked_fill(~is_counted, 0.0).sum(-1)
            sums.of_layer[name] = sums.of_layer.get(name, 0.0) + total


def _add(
    sums: dict[str, Tensor],
    name: str,
    row_block: RowBlock,
    values: Float[Tensor, "part heads rows"],
    counted: Bool[Tensor, "part heads rows"],
) -> None:
    """Add the values of the query rows that count to the sums of a statistic for each sequence and head."""
    grid = row_block.grid
    if name not in sums:
        sums[name] = torch.zeros(grid.batch, grid.heads, dtype=torch.float64, device=grid.device)
    sums[name][row_block.sequences_and_heads] += values.double().masked_fill(~counted, 0.0).sum(-1)
