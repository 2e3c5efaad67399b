"""Choice of a kind of plot by its name, and check of the options that the kind has."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.errors import InputError

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


class Kind(NamedTuple):
    """Kind of plot of a result.

    Attributes:
        draw: function that draws the plot and returns its axes; it takes `ax` and the options by name.
        options: names of the options, such as "statistic", that the kind has.
    """

    draw: Callable[..., "Axes"]
    options: tuple[str, ...]


def plot_kind(kinds: Mapping[str, Kind], kind: Any, ax: Any, **options: Any) -> "Axes":
    """Draw the plot of a result that is called `kind`, and return its axes. Options of None have the default of the
    kind.

    Args:
        kinds: every kind of plot that the result has, by name.
        kind: name of the kind.
        ax: matplotlib axes to draw on; those of a new figure if None.
        options: options by name.

    Raises:
        InputError: the result has no such kind of plot, or the kind has no such option.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> plot_kind({"heatmap": Kind(draw, ("statistic",))}, "heatmap", None, statistic="cost")  # doctest: +SKIP
    """
    if not isinstance(kind, str) or kind not in kinds:
        remedy = OTHER_RESULTS.get(kind) if isinstance(kind, str) else None
        raise InputError("kind", expected=_one_of(kinds), got=repr(kind), remedy=remedy)
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in kinds[kind].options:
            others = [other for other, of_other in kinds.items() if name in of_other.options]
            remedy = f"the kinds {', '.join(others)} have it" if others else None
            raise InputError(name, expected=f"None for the kind {kind!r}", got=repr(value), remedy=remedy)
    return kinds[kind].draw(ax=ax, **given)


def require_name(argument: str, name: Any, names: Mapping[str, Any]) -> str:
    """Return `name` if it is among the keys of `names`; otherwise raise `InputError` with all of them."""
    if not isinstance(name, str) or name not in names:
        raise InputError(argument, expected=_one_of(names), got=repr(name))
    return name


def _one_of(names: Mapping[str, Any]) -> str:
    """Return the description of a choice of names, for messages."""
    return f"one of {', '.join(names)}"
