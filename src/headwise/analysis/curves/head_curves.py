"""Base class of tables with a curve of each head: several rows per head, one for each point."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from headwise.checks import head_pairs, require_one_of
from headwise.errors import InputError
from headwise.plots.curves import Curve, draw_curves
from headwise.plots.kinds import UNITS_IN_LABELS
from headwise.runs.table import HeadRowT, Table
from headwise.statistics.registry import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = 6
"""Number of heads that a plot shows by default."""


class HeadCurves(Table[HeadRowT]):
    """Base class of tables with one curve per head, such as attention by distance. There is one row for each head and
    each point of its curve.
    """

    def curve(self, layer: int, head: int) -> list[HeadRowT]:
        """Return the rows of the table for one head, in the order of the points of its curve.

        Raises:
            InputError: the table has no such head.
        """
        rows = [row for row in self.rows if (row.layer, row.head) == (layer, head)]
        if not rows:
            raise InputError("head", expected="a (layer, head) of these curves", got=(layer, head))
        return rows

    def _place(self, row: HeadRowT) -> float:
        """Return the x-coordinate of a row, which is one point of a curve."""
        raise NotImplementedError

    def _drawn(self, statistic: str) -> list[tuple[int, int]]:
        """Return the heads whose curves of `statistic` are drawn by default, as `(layer, head)`."""
        raise NotImplementedError

    def _draw(
        self, statistic: str, heads: Collection[tuple[int, int]] | None, *, x: str, errors: float, ax: Any
    ) -> "Axes":
        """Draw the curve of a statistic for some heads, with a logarithmic x-axis, and return the matplotlib axes.
        Points without a finite value are left out.
        """
        require_one_of("statistic", statistic, self.statistics)
        unit = unit_of(statistic)
        y = f"{statistic}, {unit}" if unit in UNITS_IN_LABELS else statistic
        curves = []
        for layer, head in self._drawn(statistic) if heads is None else head_pairs("heads", heads):
            points = [(self._place(row), row.statistics[statistic]) for row in self.curve(layer, head)]
            curves.append(Curve.of(f"{layer}.{head}", [point for point in points if math.isfinite(point[1].value)]))
        axes = draw_curves(curves, x=x, y=y, title=self.model_name, errors=errors, ax=ax)
        axes.set_xscale("log", base=2)
        return axes
