"""Statistics of heads in the form that plots take, and the kinds of plots that every table of heads has."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headwise.checks import finite_number, whole_number
from headwise.errors import InputError
from headwise.plots.canvas import axis_label
from headwise.plots.heatmap import draw_heatmap
from headwise.plots.kinds import Kind, require_name
from headwise.plots.ranking import draw_ranking
from headwise.plots.role_counts import draw_role_counts
from headwise.plots.role_grid import draw_role_grid
from headwise.plots.scatter import PlottedNumbers, draw_scatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Y_OF_SCATTER, X_OF_SCATTER = "distance", "entropy"
"""Statistics along the axes of a scatter plot by default, if there are both."""

UNITS_IN_LABELS = ("nats", "tokens")
"""Units of statistics that are written into labels; shares and norms have none."""


@dataclass(frozen=True, kw_only=True)
class HeadNumbers:
    """Statistics of the heads of a model, for plots.

    Attributes:
        heads: each head's `(layer, head)`, zero-based.
        values: numbers of all heads, by the name of the statistic; NaN where a head has none.
        sems: standard errors of these numbers; a statistic without standard errors is missing.
        roles: name of each head's role; None if roles were not measured.
        title: end of titles, such as the model.
        units: unit of each statistic that has one.
        meanings: meaning of statistics in one sentence, for labels.
        signed: names of effects and differences, which are drawn with colours around 0.
        default: statistic that is drawn by default; the first one if None.
        label_suffix: text after the name of the statistic in labels, such as ", b minus a".
    """

    heads: Sequence[tuple[int, int]]
    values: Mapping[str, Sequence[float]]
    sems: Mapping[str, Sequence[float]] = field(default_factory=dict)
    roles: Sequence[str] | None = None
    title: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)
    signed: Collection[str] = ()
    default: str | None = None
    label_suffix: str = ""

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of plots of these heads by name: "heatmap", "ranking", "scatter" and, if roles were
        measured, "roles" and "role_counts".
        """
        kinds = {
            "heatmap": Kind(self._draw_heatmap, ("statistic",)),
            "ranking": Kind(self._draw_ranking, ("statistic", "errors", "top")),
            "scatter": Kind(self._draw_scatter, ("statistic", "against", "errors", "top")),
        }
        if self.roles is not None:
            roles = dict(zip(self.heads, self.roles, strict=True))
            kinds["roles"] = Kind(partial(draw_role_grid, roles, title=self.title), ())
            kinds["role_counts"] = Kind(partial(draw_role_counts, roles, title=self.title), ())
        return kinds

    def axis(self, statistic: str) -> PlottedNumbers:
        """Return the numbers of one statistic with their standard errors, and a label with the unit and the meaning."""
        unit = self.units.get(statistic, "")
        unit = unit if unit in UNITS_IN_LABELS else ""
        label = axis_label(statistic + self.label_suffix, unit, self.meanings.get(statistic, ""))
        return PlottedNumbers(statistic, self.values[statistic], self.sems.get(statistic, ()), label)

    def chosen(self, statistic: Any) -> str:
        """Return the name of the statistic to draw, the default one if `statistic` is None.

        Raises:
            InputError: there are no heads, or the heads have no such statistic.
        """
        if not self.heads or not self.values:
            raise InputError("heads", expected="at least one head to plot", got="none")
        default = next(iter(self.values)) if self.default is None else self.default
        return require_name("statistic", default if statistic is None else statistic, self.values)

    def _draw_heatmap(self, statistic: Any = None, *, ax: Any = None) -> "Axes":
        """Draw a heat map of one statistic."""
        name = self.chosen(statistic)
        cells = dict(zip(self.heads, self.values[name], strict=True))
        label, is_signed = self.axis(name).label, name in self.signed
        return draw_heatmap(cells, statistic=name, label=label, title=self.title, centred=is_signed, ax=ax)

    def _draw_ranking(self, statistic: Any = None, *, errors: Any = 1.96, top: Any = 10, ax: Any = None) -> "Axes":
        """Draw the heads in descending order of one statistic."""
        name, names = self.chosen(statistic), [f"{layer}.{head}" for layer, head in self.heads]
        errors, top = standard_errors(errors), whole_number("top", top, least=0)
        return draw_ranking(self.axis(name), names, title=self.title, errors=errors, top=top, ax=ax)

    def _draw_scatter(
        self, statistic: Any = None, *, against: Any = None, errors: Any = 0.0, top: Any = 0, ax: Any = None
    ) -> "Axes":
        """Draw one statistic against another."""
        if statistic is None and Y_OF_SCATTER in self.values:
            statistic = Y_OF_SCATTER
        name = self.chosen(statistic)
        if against is None:
            others = [other for other in (X_OF_SCATTER, *self.values) if other in self.values and other != name]
            against = next(iter(others), name)
        x, y = self.axis(require_name("against", against, self.values)), self.axis(name)
        return self.draw_pairs(x, y, errors=errors, top=top, ax=ax)

    def draw_pairs(
        self,
        x: PlottedNumbers,
        y: PlottedNumbers,
        *,
        errors: Any = 0.0,
        top: Any = 0,
        named_by: Sequence[float] | None = None,
        with_diagonal: bool = False,
        ax: Any = None,
    ) -> "Axes":
        """Draw one point per head with the numbers `x` and `y`, as `draw_scatter` does, and return the axes.

        Raises:
            InputError: `errors` or `top` is not a number of 0 or more, or no head has two finite numbers.
            MissingExtra: matplotlib is not installed.
        """
        return draw_scatter(
            x,
            y,
            heads=self.heads,
            roles=self.roles,
            title=self.title,
            errors=standard_errors(errors),
            top=whole_number("top", top, least=0),
            named_by=named_by,
            with_diagonal=with_diagonal,
            ax=ax,
        )


def standard_errors(errors: Any) -> float:
    """Return the length of error bars, in standard errors, as a float; raise `InputError` unless it is a finite number
    of 0 or more.
    """
    number = finite_number("errors", errors)
    if number < 0:
        raise InputError("errors", expected="a number of standard errors, 0 or more", got=repr(errors))
    return number
