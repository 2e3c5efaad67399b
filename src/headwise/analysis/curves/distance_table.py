"""Tables of attention by distance: the distance that holds a share of a head's attention, and the share within each."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.analysis.curves.heads import head_pairs
from headwise.errors import InputError
from headwise.plots.curves import Curve, draw_curves
from headwise.plots.kinds import require_name
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.runs.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = 6
"""Number of heads that a plot shows by default."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DistanceRow(HeadRow):
    """Row of a table of shares: the share of one head's attention within a distance.

    Attributes:
        distance: the distance in tokens.
    """

    distance: int


class DistanceCurve(Table[DistanceRow]):
    """Table of the share of each head's attention within a distance, one row per head and distance. `within` is the
    share of the attention on keys at most this far from the query; in `within_with_first`, attention on the first
    tokens counts too, at any distance.
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
        """Draw the share of attention within a distance for some heads, with error bars, and return the matplotlib
        axes. Distances are drawn plus 1, so that distance 0 fits on the logarithmic axis.

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
        require_name("statistic", statistic, dict.fromkeys(self.statistics))
        chosen = self._spread(statistic) if heads is None else head_pairs(heads)
        curves = []
        for layer, head in chosen:
            points = self._points(layer, head, statistic)
            measured = [row.statistics[statistic] for row in points]
            places = [row.distance + 1 for row in points]
            name = f"{layer}.{head}"
            curves.append(Curve(name, places, [each.value for each in measured], [each.sem for each in measured]))
        axes = draw_curves(
            curves, x="distance in tokens, plus 1", y=statistic, title=self.model_name, errors=errors, ax=ax
        )
        axes.set_xscale("log", base=2)
        return axes

    def _points(self, layer: int, head: int, statistic: str) -> list[DistanceRow]:
        """Return the rows of one head with a share."""
        rows = [row for row in self.rows if (row.layer, row.head) == (layer, head)]
        if not rows:
            raise InputError("head", expected="a (layer, head) of this curve", got=(layer, head))
        return [row for row in rows if math.isfinite(row.statistics[statistic].value)]

    def _spread(self, statistic: str) -> list[tuple[int, int]]:
        """Return heads at equal steps in the order of their mean share over the distances."""
        sums: dict[tuple[int, int], float] = {}
        for row in self.rows:
            if math.isfinite(value := row.statistics[statistic].value):
                sums[row.layer, row.head] = sums.get((row.layer, row.head), 0.0) + value
        order = sorted(sums, key=lambda head: -sums[head])
        steps = min(DRAWN, len(order))
        return [order[round(step * (len(order) - 1) / max(steps - 1, 1))] for step in range(steps)]


@dataclass(frozen=True, repr=False)
class AttentionDistances(HeadTable[HeadRow]):
    """Table of the distances that hold given shares of each head's attention, one row per head: for each sequence the
    smallest distance d such that at least this share of the attention is on keys at most d tokens from the query,
    averaged over sequences, with standard errors over documents.

    The column `distance_90` is for a share of 0.9. In `distance_90_with_first`, attention on the first tokens of a
    sequence counts as within any distance.

    Attributes:
        curve: the share of attention within each of some distances, one row per head and distance.
    """

    curve: DistanceCurve = field(default=DistanceCurve((), {}), repr=False)

    NAME = "attention_distances"
    ROW_TYPE = HeadRow

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write both tables to Parquet files in a folder, `attention_distances.parquet` and `distance_curve.parquet`;
        otherwise as `Table.save`.
        """
        self.curve.save(folder, force=force)
        super().save(folder, force=force)

    @classmethod
    def load(cls, folder: str | Path) -> "AttentionDistances":
        """Return the tables that `save` wrote to a folder.

        Raises:
            InputError: the folder has no such files, or they cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        return replace(super().load(folder), curve=DistanceCurve.load(folder))
