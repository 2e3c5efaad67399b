"""Attention rollout of every layer, and of every head, over a data set (Abnar and Zuidema 2020)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.analysis.flow.layer_reader import LayerReader, eps_of, require_whole
from headwise.analysis.head_pass import SequenceValues, SiteValues, measure_sequences, pass_data, require_finite_outputs
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.checks import collection_of, finite_number, require_one_of
from headwise.data.batches import count_sequences_and_tokens, documents_of
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Observation, SiteKey
from headwise.intercept.observed_call import ObservedCall
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.plots.curves import Curve, draw_curves
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate, Row
from headwise.runs.table import Table
from headwise.settings import ROLLOUT_RESIDUAL, ROLLOUT_STATISTICS
from headwise.shapes import Bool, Float, Int
from headwise.statistics.columns import CHANGE_SUFFIX, CHANGES, WEIGHTS
from headwise.statistics.registry import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLLED_PREFIX = "rolled_"
"""Prefix of the name of a statistic of rolled-out attention."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRow(Row):
    """Table row for one layer of a model, with statistics of attention rollout (attention multiplied over layers).

    Attributes:
        layer: the layer's number, zero-based.
        module: path of its attention module.
    """

    layer: int
    module: str


class RolloutLayers(Table[LayerRow]):
    """Table of attention rollout (attention multiplied over layers), one row per layer. The rollout states, for each
    query, which share of its attention goes to each input token. Statistics of the shares are averaged first over the
    queries of a sequence, then over sequences. Standard errors are over documents.

    The columns `first`, `self` and `special` are shares on the first token, on the query's own token and on special
    tokens; `distance` is the mean distance in tokens, and `entropy` is in nats.
    """

    NAME = "rollout_layers"
    ROW_TYPE = LayerRow
    UNIT = "layer"

    def plot(
        self, statistics: Collection[str] = ("first", "self", "special"), *, errors: float = 1.96, ax: Any = None
    ) -> "Axes":
        """Draw statistics of the attention rollout (attention multiplied over layers) against the layer, with error
        bars, and return the matplotlib axes.

        Args:
            statistics: names of statistics of the same unit; those that were not measured are left out.
            errors: length of the error bars to each side, in standard errors; 0 draws none.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such statistic, or nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.rollout(model, texts).layers.plot(["entropy"])  # doctest: +SKIP
        """
        names = list(collection_of("statistics", statistics, of="names of statistics"))
        for name in names:
            require_one_of("statistic", name, LAYER_STATISTICS)
        curves = [
            Curve.of(name, [(row.layer, row.statistics[name]) for row in self.rows])
            for name in names
            if name in self.statistics
        ]
        units = {unit_of(name) for name in names} - {""}
        y = "share of the rollout" if units == {"share"} else ", ".join([*names, *units])
        return draw_curves(curves, x="layer", y=y, title=self.model_name, errors=errors, ax=ax)


@dataclass(frozen=True, repr=False)
class Rollout(HeadTable[HeadRow]):
    """Table of rolled-out attention (Abnar and Zuidema 2020), one row per head. Rolled-out attention is the attention
    of a head to the input tokens of the model. It is the product of the head's attention weights and the attention
    rollout of the layers below.

    With A_h the weights of a head in layer l, H heads, and r the share of the residual connection (0.5 in the paper),

        R_l = r R_(l-1) + (1 - r) / H * sum over heads h of A_h R_(l-1),    R_(-1) = I

    The rolled-out attention of the head is A_h R_(l-1): where it reads from in the input, if the keys of its layer are
    mixtures of input tokens as the rollout of the layers below states. So the rollout of a layer is the mean over its
    heads, mixed with the rollout of the layer below. Each statistic has two columns: `rolled_first` is that of
    A_h R_(l-1), and `first_change` is that minus the same statistic of A_h. Changes are tested against zero, with
    p-values (`_p`) and p-values adjusted for the number of heads (`_q`, Benjamini and Hochberg 1995). In layer 0 all
    changes are 0. All numbers are means over sequences, with standard errors clustered by document.

    Attributes:
        layers: the rollout R_l of each layer, one row per layer.
    """

    layers: RolloutLayers = field(default=RolloutLayers((), {}), repr=False)

    NAME = "rollout"
    PARTS = (("layers", RolloutLayers),)
    COLUMNS = (
        *(column.derived(ROLLED_PREFIX + column.name, "rolled out over the layers below") for column in WEIGHTS),
        *CHANGES,
    )


def rollout(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    residual: float = ROLLOUT_RESIDUAL,
    special: Collection[int] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> Rollout:
    """Measure to which input tokens the attention of each layer and head goes if attention matrices are multiplied over
    layers (attention rollout, Abnar and Zuidema 2020). `Rollout` defines the statistics.

        rollout = hw.rollout(model, texts)
        rollout.layers.table()          # one row per layer: first, self, special, distance, entropy
        rollout.table()                 # one row per head: rolled_first, first_change, rolled_self, ...
        rollout.layers.plot()

    No attention matrix is kept. A run of the model carries some columns of the rollout through the layers, of 64 MiB
    with their successors. For long sequences, the model runs once for each group of columns.

    Args:
        model: any module that `watch` can observe, in which each layer attends once, from all tokens to all. For texts,
            an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches of the model's arguments, as for `hw.profile`.
        residual: share of the residual connection in each layer, at least 0 and below 1.
        special: ids of special tokens; by default those of the tokenizer.
        out: folder for the tables; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the data is unusable; or the model has cross-attention, several attention modules in a layer, layers
            over other numbers of tokens, or a layer whose attention is not seen or whose weights have not the sum 1.
        MissingExtra: a package that `out`, `progress` or the data needs is not installed.
    """
    residual = residual_share(residual)
    data = pass_data(model, dataset, special, out=out, shown=progress)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], SiteValues]:
        count = count_sequences_and_tokens(batch)[0]
        reader, sums = rolled_out(data.model, batch, data.special, residual)
        return reader.records, {site: _means(of_site, site, count) for site, of_site in sums.items()}

    def make_table(registry: SiteRegistry, values: SiteValues, metadata: dict[str, Any]) -> Rollout:
        def estimates(record: SiteRecord, names: Iterable[str], unit: int) -> dict[str, MeanEstimate]:
            numbers = {name: values[record.site][name][:, unit].tolist() for name in names if name in measured}
            return {name: MeanEstimate.of(of_name, documents) for name, of_name in numbers.items()}

        measured, documents = next(iter(values.values())), documents_of(data.dataset)
        of_heads = [name for each in ROLLOUT_STATISTICS for name in (ROLLED_PREFIX + each, each + CHANGE_SUFFIX)]
        heads = tuple(
            HeadRow(**labels, statistics=estimates(record, of_heads, labels["head"]))
            for record, labels in registry.head_labels()
        )
        layers = tuple(
            LayerRow(layer=layer, module=record.site.label, statistics=estimates(record, LAYER_STATISTICS, 0))
            for layer, record in zip(registry.layers, registry.records, strict=True)
        )
        return Rollout(heads, metadata, RolloutLayers(layers, metadata))

    options: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    return measure_sequences(
        data, measure_batch, Rollout, make_table, residual=residual, special=data.special, **options
    )


def residual_share(residual: Any) -> float:
    """Return `residual`, the weight of the residual connection in the rollout (attention multiplied over layers), as a
    float. Raise `InputError` unless it is at least 0 and below 1.
    """
    share = finite_number("residual", residual)
    if not 0.0 <= share < 1.0:
        raise InputError("residual", expected="a share of at least 0 and below 1", got=residual)
    return share


def rolled_out(
    model: nn.Module, batch: dict[str, Any], special: Collection[int], residual: float
) -> "tuple[RolloutRun, dict[SiteKey, LayerSums]]":
    """Compute the attention rollout of a batch: for each layer, a matrix of queries (rows) by input tokens (columns).
    If the columns do not fit into the memory limit, the model runs several times, each time for some columns. Return
    the interceptor of the last run and, for each attention module, the sums of the rollout statistics over the queries
    of each sequence.
    """
    sums: dict[SiteKey, LayerSums] = {}
    start, length = 0, 1
    while start < length:
        reader = RolloutRun(model, special, residual, sums, start)
        reader.run(batch)
        if reader.columns is None:  # sequences without a token
            break
        start, length = reader.columns.tokens.stop, reader.columns.values.shape[1]
    for site, of_site in sums.items():
        if not all(bool(each.isfinite().all()) for each in (*of_site.of_layer.values(), *of_site.rolled.values())):
            require_finite_outputs([site.label], model, batch)
    return reader, sums


def _means(sums: "LayerSums", site: SiteKey, sequences: int) -> SequenceValues:
    """Return the mean of each statistic of an attention module for each sequence, on the CPU: its sum over queries,
    divided by the number of queries. Statistics of the layer have the names in `LAYER_STATISTICS`. Statistics of its
    heads have the names of columns of the table `Rollout`.
    """
    assert sums.rows is not None
    if len(sums.rows) != sequences:
        got = f"{len(sums.rows)} in {site.label}"
        raise InputError("model", expected=f"attention over {sequences} sequences", got=got)
    found = {name: (total / sums.rows)[:, None] for name, total in sums.of_layer.items()}
    rows = sums.direct[ROWS]
    for name, total in sums.rolled.items():
        found[ROLLED_PREFIX + name] = total / rows
        found[name + CHANGE_SUFFIX] = (total - sums.direct[name]) / rows
    return {name: each.cpu() for name, each in found.items()}


STATE_BYTES = 2**26
"""Largest size of the columns that one run carries through the layers."""

ROWS = "rows"
"""Name of the entry of `LayerSums.direct` that has, for each head, the number of queries that count."""

LAYER_STATISTICS = (*ROLLOUT_STATISTICS, "entropy")
"""Names of the statistics of the rollout of a layer."""


@dataclass
class LayerSums:
    """Sums of the attention statistics of one layer and of its heads. Each sum is over the queries of one sequence, in
    float64. The dictionaries map the name of a statistic to its sums.

    Attributes:
        of_layer: sums of the statistics of the layer's rollout.
        rolled: sums of the statistics of each head's rolled-out attention: its attention weights times the rollout of
            the layers below.
        direct: sums of the statistics of each head's attention weights themselves. The entry `ROWS` has the number of
            queries that count.
        rows: number of queries that count in the statistics of the layer.
    """

    of_layer: dict[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    rolled: dict[str, Float[Tensor, "batch heads"]] = field(default_factory=dict)
    direct: dict[str, Float[Tensor, "batch heads"]] = field(default_factory=dict)
    rows: Float[Tensor, " batch"] | None = None


class RolloutRun(LayerReader):
    """Interceptor that computes the attention rollout (attention multiplied over layers) of a batch, in one of several
    runs of the model. Each run is for a range of tokens, which begins at the token `start` and has as many tokens as
    fit into memory. The statistics that depend on these tokens are added to `sums`, which has the sums of each layer.

    For the entropy, the tokens of the range are the input tokens to which rolled-out attention goes. For attention on
    the query itself and for distances, they are the queries.
    """

    def __init__(
        self, model: nn.Module, special: Collection[int], residual: float, sums: dict[SiteKey, LayerSums], start: int
    ) -> None:
        super().__init__(model, special)
        self._residual, self._sums, self._start = residual, sums, start
        self.columns: _Columns | None = None

    def read_layer(self, number: int, call: Call, observed: ObservedCall) -> Observation:
        sums, layer, context = self._sums.setdefault(call.site, LayerSums()), _Layer(), observed.context

        def observer(row_block: RowBlock) -> None:
            if self.columns is None:
                self.columns = _Columns.of(row_block, context, self._start)
            layer.add(row_block, self.columns, sums)

        def on_end() -> None:
            assert self.columns is not None
            layer.finish(self.columns, self._residual, sums, call.site.label)

        return Observation(observer, context, on_end)


@dataclass
class _Columns:
    """State of attention rollout (attention multiplied over layers) while the model runs: the product of the rollout
    matrix of the layers so far and a matrix C. C has two columns for each token in `tokens`: the token's column of the
    identity matrix, and the distances of all tokens to this token. Its last three columns mark first tokens, special
    tokens and all tokens with 1.

    Attributes:
        tokens: indices of the tokens that have two columns each.
        values: the product of the rollout matrix and the columns.
        has_special: True if the special tokens are known.
    """

    tokens: range
    values: Float[Tensor, "batch tokens columns"] = field(repr=False)
    has_special: bool

    @staticmethod
    def of(row_block: RowBlock, context: CallContext, start: int) -> "_Columns":
        """Return the columns of the attention rollout (attention multiplied over layers) at the input of the first
        layer, where the rollout matrix is the identity. The columns are for the tokens from `start` on, as many as fit
        into memory.
        """
        grid, powers = row_block.grid, row_block.powers
        token_bytes = 2 * 2 * powers.element_size() * grid.batch * grid.queries  # with the columns of the next layer
        room = STATE_BYTES // token_bytes
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
    """Return True at the first token of each sequence, not counting padding. If several documents are packed into a
    sequence, return True at the first token of each document.
    """
    everything = torch.arange(grid.queries, device=grid.device)[None]
    if context.first_keys is not None:
        return (context.first_keys == everything).expand(grid.batch, -1)
    if context.positions is not None and not context.positions.uses_default_positions:
        return positions == 0
    if context.real_keys is None:
        return (everything == 0).expand(grid.batch, -1)
    return context.real_keys.int().argmax(-1, keepdim=True) == everything


class _Layer:
    """Object that computes the attention rollout (attention multiplied over layers) of one layer. `add` multiplies the
    attention weights of a block of query rows by the rollout of the layers below, and adds the product to the mean over
    heads. `finish` computes the rollout of the layer from this mean. One run of the model computes only some columns of
    the rollout (see `_Columns`).
    """

    def __init__(self) -> None:
        self._product: Tensor | None = None
        self._counted: Bool[Tensor, "batch tokens"] | None = None
        self._eps = 0.0

    def add(self, row_block: RowBlock, columns: _Columns, sums: LayerSums) -> None:
        """Multiply the attention weights of a block (some query rows of some heads) by `columns`, the attention rollout
        of the layers below. Add the products to this layer's mean over heads, and the attention statistics of each head
        to `sums`.
        """
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
        counted_own = counted[..., own.start - row_block.rows.start :][..., : len(own)]

        def add(totals: dict[str, Tensor], name: str, of_rows: Tensor, is_counted: Tensor = counted) -> None:
            """Add to `totals[name]` the sum of a statistic over query rows, for each sequence and head. `of_rows` is
            the statistic of each row; rows for which `is_counted` is False, such as padding, are left out.
            """
            if name not in totals:
                totals[name] = torch.zeros(grid.batch, grid.heads, dtype=torch.float64, device=grid.device)
            of_sequences = of_rows.double().masked_fill(~is_counted, 0.0).sum(-1)
            totals[name][row_block.sequences_and_heads] += of_sequences

        add(sums.rolled, "self", at_query[0], counted_own)
        add(sums.rolled, "distance", at_query[1], counted_own)
        if not columns.tokens.start:
            add(sums.rolled, "first", rolled[..., 0])
            add(sums.direct, ROWS, torch.ones_like(rolled[..., 0]))
            add(sums.direct, "first", row_block.weight_on_first)
            add(sums.direct, "self", row_block.weight_at_lag(0))
            add(sums.direct, "distance", row_block.distance)
            if columns.has_special:
                add(sums.rolled, "special", rolled[..., 1])
                add(sums.direct, "special", row_block.feature_sums["special"])

    def finish(self, columns: _Columns, residual: float, sums: LayerSums, path: str) -> None:
        """Update `columns` from the rollout (attention multiplied over layers) of the layers below to the rollout that
        includes this layer and its residual connection. Add the statistics of this layer's rollout to `sums`.
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
