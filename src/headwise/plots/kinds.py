"""Kinds of plots of a result: choice of a kind by its name, and the kinds that every table of heads has."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.checks import collection_of, head_pair, require_one_of
from headwise.errors import InputError
from headwise.plots.canvas import axis_label
from headwise.plots.grids import draw_heatmap, draw_role_counts, draw_role_grid
from headwise.plots.points import PlottedNumbers, draw_ranking, draw_scatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHER_RESULTS = {
    "roles": "hw.profile(...) and hw.view(...) have roles",
    "role_counts": "hw.profile(...) and hw.view(...) have roles",
    "received": "hw.watch(...) and hw.view(...) have received attention",
    "pattern": "hw.view(...) has the pattern of a head",
    "lines": "hw.view(...) has lines between words",
}
"""Results that have the kinds of plots that some results lack."""

Y_OF_SCATTER, X_OF_SCATTER = "distance", "entropy"
"""Statistics along the axes of a scatter plot by default, if there are both."""

UNITS_IN_LABELS = ("nats", "tokens")
"""Units of statistics that are written into labels; shares and norms have none."""


class Kind(NamedTuple):
    """Kind of plot of a result, such as a heat map: a function that draws it on the axes `ax`, and the names of the
    options that this function accepts.
    """

    draw: Callable[..., "Axes"]
    options: tuple[str, ...]


def plot_kind(kinds: Mapping[str, Kind], kind: Any, ax: Any, **options: Any) -> "Axes":
    """Draw one of the `kinds` of plots. Options that are None have the defaults of this kind. Other options that this
    kind lacks raise `InputError`.
    """
    chosen = kinds[require_one_of("kind", kind, kinds, OTHER_RESULTS)]
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in chosen.options:
            others = [other for other, of_other in kinds.items() if name in of_other.options]
            remedy = f"the kinds {', '.join(others)} have it" if others else None
            raise InputError(name, expected=f"None for the kind {kind!r}", got=repr(value), remedy=remedy)
    return chosen.draw(ax=ax, **given)


def require_heads(heads: Any, available: Container[tuple[int, int]], described: str) -> list[tuple[int, int]]:
    """Return the heads `(layer, head)` in the option `heads` as a list. Raise `InputError` if it is not a collection of
    heads, or if a head is not among those that are `available`. `described` describes the available heads in the
    message.
    """
    of = "a collection of (layer, head)"
    pairs = [head_pair("heads", head, of=of) for head in collection_of("heads", heads, of="heads (layer, head)")]
    for pair in pairs:
        if pair not in available:
            raise InputError("heads", expected=f"each a (layer, head) {described}", got=pair)
    return pairs


@dataclass(frozen=True, kw_only=True)
class HeadNumbers:
    """Statistics and roles (names for what a head attends to) of the heads of one model, in the form that plot
    functions need.

    Attributes:
        heads: each head's `(layer, head)`, zero-based.
        values: numbers of all heads, by the name of the statistic; NaN where a head has none.
        sems: standard errors of these numbers; a statistic without standard errors is missing.
        roles: name of each head's role; None if roles were not measured.
        title: end of titles, such as the model.
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

    @classmethod
    def of_columns(cls, columns: Any, **further: Any) -> "HeadNumbers":
        """Return the statistics in `columns` (those of an HTML page) in the form for plots. `further` sets other
        attributes.
        """
        statistics, (means, errors, _) = columns.statistics, columns.estimates
        names = [each.name for each in statistics]
        return cls(
            heads=[(place.layer, place.head) for place in columns.places],
            values=dict(zip(names, means.tolist(), strict=True)),
            sems=dict(zip(names, errors.tolist(), strict=True)),
            roles=columns.roles if any(columns.roles) else None,
            title=columns.model,
            units={each.name: each.unit for each in statistics},
            meanings={each.name: each.meaning for each in statistics},
            **further,
        )

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of plots that can be drawn, by name. Two of them are included only if the roles of the heads
        are known.
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
        """Return the numbers of one statistic for all heads, with their standard errors. The axis label has the
        statistic's name, unit and meaning.
        """
        unit = self.units.get(statistic, "")
        unit = unit if unit in UNITS_IN_LABELS else ""
        label = axis_label(statistic + self.label_suffix, unit, self.meanings.get(statistic, ""))
        return PlottedNumbers(statistic, self.values[statistic], self.sems.get(statistic, ()), label)

    def chosen(self, statistic: Any) -> str:
        """Return the name of the statistic to draw: `statistic`, or the default one if it is None. Raise `InputError`
        if the heads do not have it.
        """
        if not self.heads or not self.values:
            raise InputError("heads", expected="at least one head to plot", got="none")
        default = next(iter(self.values)) if self.default is None else self.default
        return require_one_of("statistic", default if statistic is None else statistic, self.values)

    def _draw_heatmap(self, statistic: Any = None, *, ax: Any = None) -> "Axes":
        name = self.chosen(statistic)
        cells = dict(zip(self.heads, self.values[name], strict=True))
        label, is_signed = self.axis(name).label, name in self.signed
        return draw_heatmap(cells, statistic=name, label=label, title=self.title, centred=is_signed, ax=ax)

    def _draw_ranking(self, statistic: Any = None, **options: Any) -> "Axes":
        names = [f"{layer}.{head}" for layer, head in self.heads]
        return draw_ranking(self.axis(self.chosen(statistic)), names, title=self.title, **options)

    def _draw_scatter(self, statistic: Any = None, *, against: Any = None, **options: Any) -> "Axes":
        if statistic is None and Y_OF_SCATTER in self.values:
            statistic = Y_OF_SCATTER
        name = self.chosen(statistic)
        if against is None:
            others = [other for other in (X_OF_SCATTER, *self.values) if other in self.values and other != name]
            against = next(iter(others), name)
        return self.draw_pairs(self.axis(require_one_of("against", against, self.values)), self.axis(name), **options)

    def draw_pairs(self, x: PlottedNumbers, y: PlottedNumbers, **options: Any) -> "Axes":
        """Draw a scatter plot with one point per head, at the numbers `x` and `y` of the head, and return the axes.
        `options` are further arguments of `draw_scatter`.
        """
        return draw_scatter(x, y, heads=self.heads, roles=self.roles, title=self.title, **options)
