"""Distance that holds a share of a head's attention, from the histogram of its weights by distance."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from headwise.analysis.curves.head_curves import DRAWN, HeadCurves
from headwise.analysis.head_pass import head_rows, head_statistics, measure_further, require_some
from headwise.checks import collection_of, finite_number, whole_number
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRegistry
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.statistics.by_distance import WITH_FIRST, WITHIN_DISTANCES, DistanceStatistics, quantile_name
from headwise.statistics.columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, repr=False)
class DistanceRow(HeadRow):
    """Table row: the share of a head's attention on keys at most `distance` tokens from the query.

    Attributes:
        distance: the distance in tokens.
    """

    distance: int


class DistanceCurve(HeadCurves[DistanceRow]):
    """Table of the share of each head's attention within each of several distances, one row per head and distance.
    `within` is the share of the attention on keys at most `distance` tokens from the query. `within_with_first` also
    includes attention on the first tokens of the sequence, at any distance.
    """

    NAME = "distance_curve"
    ROW_TYPE = DistanceRow
    UNIT = "point"

    def plot(
        self,
        statistic: str = "within",
        *,
        heads: Collection[tuple[int, int]] | None = None,
        errors: float = 1.96,
        ax: Any = None,
    ) -> "Axes":
        """Draw the share of attention within a distance against this distance, as one curve with error bars for each of
        some heads. Return the matplotlib axes. The x-axis is logarithmic and shows the distance plus 1, so that
        distance 0 can be drawn.

        Args:
            statistic: "within" or "within_with_first".
            heads: the heads `(layer, head)`; by default 6 from the one with the shortest reach to the longest.
            errors: length of the error bars to each side, in standard errors; 0 draws none.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such statistic or head, or nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.attention_distances(model, texts).curve.plot(heads=[(0, 1)])  # doctest: +SKIP
        """
        return self._draw(statistic, heads, x="distance in tokens, plus 1", errors=errors, ax=ax)

    def _place(self, row: DistanceRow) -> float:
        return row.distance + 1

    def _drawn(self, statistic: str) -> list[tuple[int, int]]:
        """Return the heads that are drawn by default, as `(layer, head)`. All heads are sorted by their mean share of
        attention over the distances. From this order, 6 heads are selected at equal steps, including the first and the
        last.
        """
        sums: dict[tuple[int, int], float] = {}
        for row in self.rows:
            if math.isfinite(value := row.statistics[statistic].value):
                sums[row.layer, row.head] = sums.get((row.layer, row.head), 0.0) + value
        order = sorted(sums, key=lambda head: -sums[head])
        steps = min(DRAWN, len(order))
        return [order[round(step * (len(order) - 1) / max(steps - 1, 1))] for step in range(steps)]


@dataclass(frozen=True, repr=False)
class AttentionDistances(HeadTable[HeadRow]):
    """Table of how far each head attends, one row per head. A column such as `distance_90` is the smallest distance
    such that 90 % of the attention is on keys at most this many tokens from the query. Distances are means over
    sequences, with standard errors over documents.

    The column `distance_90` is for a share of 0.9. In `distance_90_with_first`, attention on the first tokens of a
    sequence counts as within any distance.

    Attributes:
        curve: the share of attention within each of some distances, one row per head and distance.
    """

    curve: DistanceCurve = field(default=DistanceCurve((), {}), repr=False)

    NAME = "attention_distances"
    PARTS = (("curve", DistanceCurve),)

    def column(self, name: str) -> Column:
        """Return the description of the column `name`, which is a distance in tokens."""
        meaning = "Smallest distance within which the head puts this percentage of its attention."
        distance = Column(name, meaning, "tokens")
        how = "where attention on the first tokens counts at any distance"
        return distance.derived(name, how) if name.endswith(WITH_FIRST) else distance


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
    """Measure how far each head attends. By default, return two distances per head, in tokens: the smallest distance
    within which 50 % of the head's attention lies, and the smallest one for 90 %. The result also has the share of
    attention within each of several distances, as a curve.

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

    def make_tables(registry: SiteRegistry, metadata: dict[str, Any]) -> AttentionDistances:
        require_some(registry, statistics.names, "positions of queries and keys that can be established")
        within = [name for name in statistics.names if name.startswith("within")]
        points = [
            DistanceRow(**labels, distance=distance, statistics={name: each[index] for name, each in of_head.items()})
            for labels, of_head in head_statistics(registry, within, len(WITHIN_DISTANCES))
            for index, distance in enumerate(WITHIN_DISTANCES)
        ]
        needed = max(
            (row.distance for row in points if any(each.value < ALL_WITHIN for each in row.statistics.values())),
            default=0,
        )
        last = next(distance for distance in WITHIN_DISTANCES if distance > needed)
        curve = DistanceCurve(tuple(row for row in points if row.distance <= last), metadata)
        rows = head_rows(registry, {name: name for name in statistics.names if name not in within})
        return AttentionDistances(rows, metadata, curve)

    return measure_further(model, dataset, statistics, AttentionDistances, make_tables, **options)


def _quantiles(quantiles: Any) -> tuple[float, ...]:
    """Check that shares of attention are above 0 and below 1, and return them in ascending order."""
    of = "shares above 0 and below 1"
    checked = {finite_number("quantiles", share) for share in collection_of("quantiles", quantiles, of=of)}
    if not checked or any(not 0.0 < share < 1.0 for share in checked):
        raise InputError("quantiles", expected=of, got=sorted(checked) or "none")
    if len({quantile_name(share) for share in checked}) < len(checked):
        raise InputError("quantiles", expected=f"{of} that differ in six digits", got=sorted(checked))
    return tuple(sorted(checked))
