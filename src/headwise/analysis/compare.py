"""Comparison of two profiles head by head, for example of two checkpoints or two data sets."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from headwise.analysis.page import page_contents
from headwise.analysis.profile import Profile, ProfiledHead
from headwise.checks import collection_of, require_one_of
from headwise.errors import InputError, require
from headwise.page.write import notebook_html
from headwise.plots.kinds import HeadNumbers, Kind, plot_kind
from headwise.runs.rows import MeanEstimate
from headwise.runs.significance import ROUNDING, false_discovery_rates, has_no_variance, p_values
from headwise.wording import counted, number, quotient

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Difference:
    """Difference of one statistic of one head between two profiles a and b (tables of attention statistics of every
    head). It is the mean in b minus the mean in a, in the units of the statistic and in standard errors.

    Attributes:
        a, b: the head's row in each profile.
        statistic: name of the statistic.
        difference: the mean in b minus the mean in a.
        errors: the difference in units of its standard error, the root of the sum of both squared standard errors; NaN
            if either mean is over fewer than two documents.
        p: p-value of the difference, two-sided, by Welch's t-test.
        q: the p-value, adjusted for the number of differences (Benjamini and Hochberg 1995).
    """

    a: ProfiledHead
    b: ProfiledHead
    statistic: str
    difference: float
    errors: float
    p: float = math.nan
    q: float = math.nan

    def __repr__(self) -> str:
        difference, errors = number(self.difference, "+.4g"), quotient(self.errors, "+.3g")
        return f"Difference({self.a.name}, {self.statistic} {difference}, {errors} standard errors)"


@dataclass(frozen=True)
class Comparison:
    """Two profiles (tables of attention statistics) of the same heads, and the differences between them: one for every
    head and every statistic that both profiles have.

    Attributes:
        a, b: the profiles.
        differences: one per head and statistic, in the order of the heads in a.
    """

    a: Profile
    b: Profile
    differences: tuple[Difference, ...]

    def __repr__(self) -> str:
        statistics = counted(len({entry.statistic for entry in self.differences}), "statistic")
        names = [profile.model_name or "a model" for profile in (self.a, self.b)]
        model = names[0] if names[0] == names[1] else " and ".join(names)
        changed = counted(len(self.changed_roles()), "changed role")
        return f"Comparison({counted(len(self.a.heads), 'head')} of {model}, {statistics}, {changed})"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the first rows of profile a, and an interactive page that compares both
        profiles.
        """
        return notebook_html(repr(self), self.a.columns(), page_contents([self.a], against=[self.b]))

    def largest(self, statistics: Collection[str] = ()) -> list[Difference]:
        """Return the differences between the two compared profiles (tables of attention statistics), one per head and
        statistic, sorted by absolute size in standard errors, largest first. `statistics` names those to include, by
        default all.

        Differences without standard errors (NaN) come last.

        Args:
            statistics: names of the statistics to include; all by default.

        Raises:
            InputError: a statistic is not in both profiles.
        """
        available = dict.fromkeys(entry.statistic for entry in self.differences)
        for name in collection_of("statistics", statistics, of="names of statistics"):
            require_one_of("statistic", name, available)
        chosen = [entry for entry in self.differences if not statistics or entry.statistic in statistics]
        return sorted(chosen, key=lambda entry: -1.0 if math.isnan(entry.errors) else abs(entry.errors), reverse=True)

    def table(self) -> Any:
        """Return the comparison of two profiles (tables of attention statistics) as a pandas DataFrame with one row per
        head and statistic: the means in both profiles, their difference, and the difference in standard errors.

        Columns: the head's layer, head, kv_head, module and kind, both roles, the statistic's name, both means (`a` and
        `b`), their `difference`, `errors`, the difference in standard errors, its p-value `p`, and `q`, the p-value
        adjusted for the number of differences of the comparison.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame([self.record(difference) for difference in self.differences])

    def record(self, difference: Difference) -> dict[str, Any]:
        """Return one difference between the two compared profiles as a dictionary, which has the columns of `table` as
        keys.
        """
        a, b = (head.statistics[difference.statistic] for head in (difference.a, difference.b))
        identifiers = {name: value for name, value in difference.a.identifiers.items() if name != "role"}
        roles = {"role_a": difference.a.role, "role_b": difference.b.role}
        values = {"a": a.value, "b": b.value, "difference": difference.difference, "errors": difference.errors}
        values |= {"p": difference.p, "q": difference.q}
        return {**identifiers, **roles, "statistic": difference.statistic, **values}

    def changed_roles(self) -> list[tuple[ProfiledHead, ProfiledHead]]:
        """Return the heads whose role (name for what the head attends to) differs between the two profiles: for each, a
        pair of its rows in profile a and in profile b.
        """
        pairs = zip(self.a.heads, self.b.heads, strict=True)
        return [(head_a, head_b) for head_a, head_b in pairs if head_a.role != head_b.role]

    def plot(
        self,
        statistic: str | None = None,
        *,
        kind: str = "heatmap",
        errors: float | None = None,
        top: int | None = None,
        ax: Any = None,
    ) -> "Axes":
        """Draw the differences of one statistic between the compared profiles a and b, the mean in b minus the mean in
        a. Return the matplotlib axes.

        | kind      | plot                                                                                             |
        | --------- | ------------------------------------------------------------------------------------------------ |
        | "heatmap" | the difference of every head, layers down and heads across, with colours around 0                |
        | "ranking" | heads in descending order of the difference, with error bars from both standard errors           |
        | "scatter" | one point per head, its mean in b against its mean in a, coloured by its role in b; the diagonal |

        Args:
            statistic: name of a statistic that both profiles have; the entropy by default, or else the first one.
            kind: the kind of plot.
            errors: length of error bars to each side, in standard errors: 1.96 by default for "ranking", 0 for
                "scatter".
            top: number of heads that "ranking" (10 by default) and "scatter" (0) name.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: the profiles have no such statistic, there is no such kind, or there is no number to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> headwise.compare(before, after).plot("entropy").figure.savefig("difference.pdf")  # doctest: +SKIP
        """
        numbers = self._head_numbers()
        kinds = numbers.kinds()
        kinds = {"heatmap": kinds["heatmap"], "ranking": kinds["ranking"]}
        kinds["scatter"] = Kind(partial(self._draw_scatter, numbers), ("statistic", "errors", "top"))
        return plot_kind(kinds, kind, ax, statistic=statistic, errors=errors, top=top)

    def _head_numbers(self) -> HeadNumbers:
        """Return the differences of all heads in all statistics that both profiles have, with their standard errors, in
        the form that the plot functions need.
        """
        common = [name for name in self.a.statistics if name in self.b.statistics]
        pairs = list(zip(self.a.heads, self.b.heads, strict=True))
        estimates = {name: [(a.statistics[name], b.statistics[name]) for a, b in pairs] for name in common}
        names = dict.fromkeys(profile.model_name for profile in (self.a, self.b))
        return replace(
            self.b._head_numbers(),
            values={name: [b.value - a.value for a, b in of_heads] for name, of_heads in estimates.items()},
            sems={name: [math.hypot(a.sem, b.sem) for a, b in of_heads] for name, of_heads in estimates.items()},
            title=" and ".join(name for name in names if name),
            label_suffix=", b minus a",
            meanings={},
            signed=common,
            default="entropy" if "entropy" in common else None,
        )

    def _draw_scatter(
        self, numbers: HeadNumbers, statistic: Any = None, *, errors: Any = 0.0, top: Any = 0, ax: Any = None
    ) -> "Axes":
        """Draw one point per head: the mean of one statistic in profile b against the mean in profile a, with the
        diagonal.
        """
        name = numbers.chosen(statistic)
        a, b = (profile._head_numbers().axis(name) for profile in (self.a, self.b))
        label = replace(numbers, label_suffix="", meanings={}).axis(name).label
        axes = [replace(axis, label=f"{label} in {of}") for axis, of in ((a, "a"), (b, "b"))]
        differences = numbers.values[name]
        return numbers.draw_pairs(*axes, errors=errors, top=top, named_by=differences, with_diagonal=True, ax=ax)


def compare(a: Profile, b: Profile) -> Comparison:
    """Compare two profiles (tables of attention statistics) of the same heads, for every head and every statistic that
    both profiles have. Return the differences, the mean in `b` minus the mean in `a`, in the units of the statistic and
    in standard errors.

    Differences are given in standard errors of two independent samples. For two models on the same data these errors
    are too large, because both profiles share the variation between sequences.

    Args:
        a: the first profile.
        b: the second profile, whose heads must be the same by layer, head, module and kind.

    Raises:
        InputError: an argument is not a profile, the heads differ, or the profiles have no statistic in common.

    Example:
        >>> before, after = headwise.load_profile("a"), headwise.load_profile("b")  # doctest: +SKIP
        >>> headwise.compare(before, after).largest(["entropy"])[0].errors  # doctest: +SKIP
    """
    for argument, profile in (("a", a), ("b", b)):
        if not isinstance(profile, Profile):
            remedy = "hw.load_profile(folder) reads one"
            raise InputError(argument, expected="a profile", got=type(profile).__name__, remedy=remedy)
    for head_a, head_b in zip_longest(a.heads, b.heads):
        if _description(head_a) != _description(head_b):
            raise InputError("b", expected=f"the heads of a, here {_description(head_a)}", got=_description(head_b))
    common = [name for name in a.statistics if name in b.statistics]
    if not common:
        raise InputError("b", expected=f"some of the statistics of a ({', '.join(a.statistics)})", got="none")
    rows = [(*pair, name) for pair in zip(a.heads, b.heads, strict=True) for name in common]
    means = [(head_a.statistics[name], head_b.statistics[name]) for head_a, head_b, name in rows]
    errors = [_difference_in_errors(*pair) for pair in means]
    p = p_values(errors, [_degrees_of_freedom(*pair) for pair in means])
    # If no samples of either profile vary, their variance is unknown rather than 0. The p-value is then that of a
    # permutation test: of all ways to choose which samples are those of `a`, two have a difference as large.
    p = [
        min(1.0, 2 / math.comb(mean_a.n + mean_b.n, mean_a.n)) if math.isinf(error) else own
        for error, (mean_a, mean_b), own in zip(errors, means, p, strict=True)
    ]
    differences = [mean_b.value - mean_a.value for mean_a, mean_b in means]
    columns = zip(rows, differences, errors, p, false_discovery_rates(p), strict=True)
    return Comparison(a, b, tuple(Difference(*row, *numbers) for row, *numbers in columns))


def _description(head: ProfiledHead | None) -> str:
    """Return text that identifies a head in an error message: name, module and kind of attention (self or cross). If
    the head is None, because one profile has fewer heads than the other, the text is "no more".
    """
    return "no more" if head is None else f"{head.name} in {head.module} ({head.kind} attention)"


def _degrees_of_freedom(a: MeanEstimate, b: MeanEstimate) -> float:
    """Return the degrees of freedom of the difference of two means, for Welch's t-test (Welch 1947)."""
    parts = [each.sem**4 / each.df for each in (a, b) if each.df and each.sem]
    return math.hypot(a.sem, b.sem) ** 4 / sum(parts) if parts else max(a.df + b.df, 1.0)


def _difference_in_errors(a: MeanEstimate, b: MeanEstimate) -> float:
    """Return the difference b - a of two independent means in units of its standard error. If both standard errors are
    0 up to rounding, the result is 0 for equal means, and otherwise plus or minus infinity.
    """
    difference = b.value - a.value
    if has_no_variance(a) and has_no_variance(b):
        is_equal = abs(difference) <= ROUNDING * max(abs(a.value), abs(b.value))
        return 0.0 if is_equal else math.copysign(math.inf, difference)
    return difference / math.hypot(a.sem, b.sem)
