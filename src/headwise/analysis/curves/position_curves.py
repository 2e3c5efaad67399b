"""Statistics of every head against the position of the query."""

import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from headwise.analysis.curves.position_table import SLOPE_SUFFIX, PositionCurves, PositionRow, PositionSlopes
from headwise.analysis.head_pass import estimates, measure_further, require_some
from headwise.checks import LARGEST_INTEGER, collection_of, whole_number
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRegistry
from headwise.runs.rows import NO_ESTIMATE, HeadRow
from headwise.settings import ROW_STATISTICS
from headwise.statistics.by_position import BY_POSITION, SLOPE, PositionStatistics

POWERS_OF_TWO = (0, *(2**power for power in range(32)))
"""Default edges of bins: 0, 1, 2 to 3, 4 to 7, 8 to 15, ..."""


def position_curves(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    edges: Collection[int] | None = None,
    special: Collection[int] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> PositionCurves:
    """Measure the attention statistics of every head against the position of the query in its sequence: their means in
    bins of positions, and their slopes on the logarithm of the position.

        curves = hw.position_curves(model, texts)
        curves.table()                          # one row per head and bin: position_from, position_to, entropy, ...
        curves.slopes.table()                   # one row per head: entropy_slope, entropy_slope_p, entropy_slope_q, ...
        curves.plot("entropy")

    The statistics are those of `profile` that have a value for each query; `received` is not one of them. Positions are
    counted from 0 at the first token that is not padding, in each document where a mask separates packed documents, and
    go on through calls with cached keys. The attention matrix is never in memory. The model runs in evaluation mode
    without gradients and is unchanged afterwards.

    Args:
        model: any module that `watch` supports. For texts, an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches in the same order each time: mappings of the model's arguments, or tensors.
        edges: first position of each bin, in ascending order, and the position after the last bin; by default bins of
            powers of two: 0, 1, 2 to 3, 4 to 7, ... Slopes are over all positions, also over those outside of the bins.
        special: ids of special tokens; by default those of the tokenizer.
        out: folder for the tables; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Returns:
        The curves, with `slopes`. Bins that no sequence reaches are left out.

    Raises:
        InputError: an argument cannot be used, or in no module of the model the positions of queries are known.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.

    Warns:
        UserWarning: of modules without curves, because the positions of their queries are unknown; if no sequence
            reaches a bin.
    """
    checked = _edges(edges)
    options: dict[str, Any] = {"special": special, "out": out, "force": force, "progress": progress, "title": title}
    options["edges"] = None if edges is None else list(checked)
    make = partial(_tables, edges=checked)
    return measure_further(model, dataset, PositionStatistics(checked), PositionCurves, make, **options)


def _edges(edges: Any) -> tuple[int, ...]:
    """Return the edges of bins after checking that they ascend."""
    if edges is None:
        return POWERS_OF_TWO
    of = "positions in ascending order"
    checked = tuple(
        whole_number("edges", edge, least=0, most=LARGEST_INTEGER) for edge in collection_of("edges", edges, of=of)
    )
    if len(checked) < 2 or any(one >= other for one, other in pairwise(checked)):
        raise InputError("edges", expected=f"two or more {of}", got=list(checked))
    return checked


def _tables(registry: SiteRegistry, metadata: dict[str, Any], edges: tuple[int, ...]) -> PositionCurves:
    """Return the curves and the slopes of all heads."""
    names = [name for name in ROW_STATISTICS if any(name + SLOPE in each.statistics for each in registry.records)]
    require_some(registry, [name + BY_POSITION for name in names], "positions of queries that can be established")
    rows = list(_rows(registry, names, edges))
    reached = {row.position_from for row in rows if any(estimate.n for estimate in row.statistics.values())}
    if not reached:
        warnings.warn(f"no sequence reaches position {edges[0]}, where the bins start: curves are empty", stacklevel=3)
    slopes = {record.site: {name: estimates(record, name + SLOPE, 1) for name in names} for record in registry.records}
    slope_rows = tuple(
        HeadRow(
            **labels,
            statistics={
                name + SLOPE_SUFFIX: of_heads[labels["head"]][0] for name, of_heads in slopes[record.site].items()
            },
        )
        for record, labels in registry.head_labels()
    )
    curves = tuple(row for row in rows if row.position_from in reached)
    return PositionCurves(curves, metadata, PositionSlopes(slope_rows, metadata))


def _rows(registry: SiteRegistry, names: list[str], edges: tuple[int, ...]) -> Iterator[PositionRow]:
    """Yield the statistics of each head in each bin."""
    bins = len(edges) - 1
    curves = {
        record.site: {name: estimates(record, name + BY_POSITION, bins) for name in names}
        for record in registry.records
    }
    for record, labels in registry.head_labels():
        for index in range(bins):
            statistics = {name: of_heads[labels["head"]][index] for name, of_heads in curves[record.site].items()}
            statistics = {name: each if each.n else NO_ESTIMATE for name, each in statistics.items()}
            yield PositionRow(
                **labels, position_from=edges[index], position_to=edges[index + 1] - 1, statistics=statistics
            )
