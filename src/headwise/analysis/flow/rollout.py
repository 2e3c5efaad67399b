"""Attention rollout of every layer, and of every head, over a data set (Abnar and Zuidema 2020)."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from headwise.analysis.flow.rollout_reader import LAYER_STATISTICS, ROWS, LayerSums, RolloutRun
from headwise.analysis.flow.rollout_table import CHANGE_SUFFIX, ROLLED_PREFIX, LayerRow, Rollout, RolloutLayers
from headwise.analysis.head_pass import SequenceValues, measure_sequences, pass_data
from headwise.analysis.nonfinite import nonfinite_error
from headwise.checks import finite_number
from headwise.data.batches import call_model, count_sequences_and_tokens, documents_of
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.settings import ROLLOUT_RESIDUAL, ROLLOUT_STATISTICS


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
    """Measure where the attention of each layer and head goes in the input, if attention is multiplied over layers
    (attention rollout, Abnar and Zuidema 2020); `Rollout` has the definitions.

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

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], dict[SiteKey, SequenceValues]]:
        count = count_sequences_and_tokens(batch)[0]
        reader, sums = rolled_out(data.model, batch, data.special, residual)
        return reader.records, {site: _means(of_site, site, count) for site, of_site in sums.items()}

    def make_table(registry: SiteRegistry, values: dict[SiteKey, SequenceValues], metadata: dict[str, Any]) -> Rollout:
        return _tables(registry, values, documents_of(data.dataset), metadata)

    options: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    return measure_sequences(
        data, measure_batch, Rollout, make_table, residual=residual, special=data.special, **options
    )


def residual_share(residual: Any) -> float:
    """Return the share of the residual connection after checking that it is at least 0 and below 1."""
    share = finite_number("residual", residual)
    if not 0.0 <= share < 1.0:
        raise InputError("residual", expected="a share of at least 0 and below 1", got=residual)
    return share


def rolled_out(
    model: nn.Module, batch: dict[str, Any], special: Collection[int], residual: float
) -> tuple[RolloutRun, dict[SiteKey, LayerSums]]:
    """Roll out the attention of one batch, in as many runs of the model as its columns need. Return the interceptor of
    the last run and the sums over the queries of each sequence, by site in the order of the layers.
    """
    sums: dict[SiteKey, LayerSums] = {}
    start, length = 0, 1
    while start < length:
        reader = RolloutRun(model, special, residual, sums, start)
        with intercepted(model, reader):
            call_model(model, batch)
        reader.require_layers()
        start, length = reader.stop, reader.length
    for site, of_site in sums.items():
        if not all(bool(each.isfinite().all()) for each in (*of_site.of_layer.values(), *of_site.rolled.values())):
            error = nonfinite_error(model, lambda: call_model(model, batch), batch)
            raise error or InputError("model", expected="finite attention", got=f"NaN or infinity in {site.label}")
    return reader, sums


def _means(sums: LayerSums, site: SiteKey, sequences: int) -> SequenceValues:
    """Return the means over the queries of each sequence, on the CPU: of the rollout of a layer, by the names of
    `LAYER_STATISTICS`, and of its heads, by their names in the table.
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


def _tables(
    registry: SiteRegistry,
    values: dict[SiteKey, SequenceValues],
    documents: Sequence[int] | None,
    metadata: dict[str, Any],
) -> Rollout:
    """Return the tables from the means of each sequence."""

    def estimate(site: SiteKey, name: str, unit: int) -> MeanEstimate:
        return MeanEstimate.of(values[site][name][:, unit].tolist(), documents)

    measured = next(iter(values.values()))
    of_heads = [name for each in ROLLOUT_STATISTICS for name in (ROLLED_PREFIX + each, each + CHANGE_SUFFIX)]
    heads = tuple(
        HeadRow(
            **labels,
            statistics={name: estimate(record.site, name, labels["head"]) for name in of_heads if name in measured},
        )
        for record, labels in registry.head_labels()
    )
    layers = tuple(
        LayerRow(
            layer=layer,
            module=record.site.label,
            statistics={name: estimate(record.site, name, 0) for name in LAYER_STATISTICS if name in measured},
        )
        for layer, record in zip(registry.layers, registry.records, strict=True)
    )
    return Rollout(heads, metadata, RolloutLayers(layers, metadata))
