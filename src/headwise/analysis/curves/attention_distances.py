"""Distance that holds a share of a head's attention, from the histogram of its weights by distance."""

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from headwise.analysis.curves.distance_table import AttentionDistances, DistanceCurve, DistanceRow
from headwise.analysis.head_pass import estimates, measure_further, require_some
from headwise.checks import collection_of, finite_number, whole_number
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRegistry
from headwise.runs.rows import HeadRow
from headwise.statistics.by_distance import WITHIN_DISTANCES, DistanceStatistics, quantile_name

ALL_WITHIN = 1.0 - 1e-9
"""Share from which all attention is within a distance; longer distances are left out of the curve."""


def attention_distances(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    quantiles: Collection[float] = (0.5, 0.9),
    first: int = 4,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> AttentionDistances:
    """Measure how far every head reaches: the smallest distance within which the head puts a share of its attention,
    90 % by default, and the whole curve of the share within a distance.

        distances = hw.attention_distances(model, texts)
        distances.table()           # one row per head: layer, head, ..., distance_90, distance_90_with_first
        distances.curve.plot()      # share of attention against distance

    With A_ij the weight of key j for query i and n queries in a sequence, let

        share(d) = sum over i and |i - j| <= d of A_ij / sum over i and j of A_ij

    The distance of a share p is the smallest whole d with share(d) >= p, up to a rounding of 1e-6. So a window of d
    tokens to each side keeps the share p of the attention of an average query. (The mean of such distances of single
    queries would not state that: most queries may reach 2 tokens, and a few of them 2000.) The result is the mean over
    sequences, which depends on their lengths. The weights are computed in blocks; the sums take memory in proportion to
    the length.

    Args:
        model: any module that `watch` supports. For texts, an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches in the same order each time.
        quantiles: shares of the attention, above 0 and below 1.
        first: number of first tokens on which attention counts as near in the statistics `..._with_first`, as in the
            streaming heads of `localize`; 0 leaves these statistics out.
        out: folder for the tables; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Returns:
        The distances, with `curve`.

    Raises:
        InputError: an argument cannot be used, or no module of the model has distances between queries and keys.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.

    Warns:
        UserWarning: of modules without distances, such as cross-attention.
    """
    statistics = DistanceStatistics(_quantiles(quantiles), whole_number("first", first, least=0))
    options: dict[str, Any] = {"special": (), "out": out, "force": force, "progress": progress, "title": title}
    options |= {"quantiles": list(statistics.quantiles), "first": statistics.first}
    make = partial(_tables, statistics=statistics)
    return measure_further(model, dataset, statistics, AttentionDistances, make, **options)


def _quantiles(quantiles: Any) -> tuple[float, ...]:
    """Return shares after checking that they are between 0 and 1, in ascending order."""
    of = "shares above 0 and below 1"
    checked = {finite_number("quantiles", share) for share in collection_of("quantiles", quantiles, of=of)}
    if not checked or any(not 0.0 < share < 1.0 for share in checked):
        raise InputError("quantiles", expected=of, got=sorted(checked) or "none")
    if len({quantile_name(share) for share in checked}) < len(checked):
        raise InputError("quantiles", expected=f"{of} that differ in six digits", got=sorted(checked))
    return tuple(sorted(checked))


def _tables(registry: SiteRegistry, metadata: dict[str, Any], statistics: DistanceStatistics) -> AttentionDistances:
    """Return the result of a run: how far each head attends, and the share of its attention within each distance."""
    require_some(registry, statistics.names, "positions of queries and keys that can be established")
    names = [name for name in statistics.names if not name.startswith("within")]
    found = {record.site: {name: estimates(record, name, 1) for name in names} for record in registry.records}
    rows = tuple(
        HeadRow(
            **labels,
            statistics={name: of_heads[labels["head"]][0] for name, of_heads in found[record.site].items()},
        )
        for record, labels in registry.head_labels()
    )
    points = list(_points(registry, statistics))
    needed = max(
        (row.distance for row in points if any(each.value < ALL_WITHIN for each in row.statistics.values())), default=0
    )
    last = next(distance for distance in WITHIN_DISTANCES if distance > needed)
    curve = DistanceCurve(tuple(row for row in points if row.distance <= last), metadata)
    return AttentionDistances(rows, metadata, curve)


def _points(registry: SiteRegistry, statistics: DistanceStatistics) -> Iterator[DistanceRow]:
    """Yield the share of each head's attention within each distance."""
    names, size = [name for name in statistics.names if name.startswith("within")], len(WITHIN_DISTANCES)
    found = {record.site: {name: estimates(record, name, size) for name in names} for record in registry.records}
    for record, labels in registry.head_labels():
        for index, distance in enumerate(WITHIN_DISTANCES):
            shares = {name: of_heads[labels["head"]][index] for name, of_heads in found[record.site].items()}
            yield DistanceRow(**labels, distance=distance, statistics=shares)
