"""Comparison of two profiles head by head, for example of two checkpoints or two data sets."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from headwise.analysis.profile import Profile, ProfiledHead
from headwise.checks import collection_of
from headwise.errors import InputError, require
from headwise.runs.rows import MeanEstimate
from headwise.runs.table import require_statistic


@dataclass(frozen=True)
class Difference:
    """Difference of one statistic of one head between two profiles a and b (tables of attention statistics of every
    head). It is the mean in b minus the mean in a, in the units of the statistic and in standard errors.

    Attributes:
        a, b: the head's row in each profile.
        statistic: name of the statistic.
        difference: the mean in b minus the mean in a.
        errors: the difference in units of its standard error, the root of the sum of both squared standard errors; NaN
            if either mean is over fewer than two sequences.
    """

    a: ProfiledHead
    b: ProfiledHead
    statistic: str
    difference: float
    errors: float


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

    def largest(self, statistics: Collection[str] = ()) -> list[Difference]:
        """Return the differences between two compared profiles (tables of attention statistics) in the named
        statistics, for all heads. They are sorted by absolute size in standard errors, largest first. By default all
        statistics are included.

        Differences without standard errors (NaN) come last.

        Args:
            statistics: names of the statistics to include; all by default.

        Raises:
            InputError: a statistic is not in both profiles.
        """
        available = dict.fromkeys(entry.statistic for entry in self.differences)
        for name in collection_of("statistics", statistics, of="names of statistics"):
            require_statistic(name, available)
        chosen = [entry for entry in self.differences if not statistics or entry.statistic in statistics]
        return sorted(chosen, key=lambda entry: -1.0 if math.isnan(entry.errors) else abs(entry.errors), reverse=True)

    def table(self) -> Any:
        """Return the comparison of two profiles (tables of attention statistics) as a pandas DataFrame with one row per
        head and statistic: the means in both profiles, their difference, and the difference in standard errors.

        Columns: the head's layer, head, kv_head, module and kind, both roles, the statistic's name, both means (`a` and
        `b`), their `difference`, and `errors`, the difference in standard errors.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame([self.record(difference) for difference in self.differences])

    def record(self, difference: Difference) -> dict[str, Any]:
        """Return one of the differences as a dictionary with the columns that `table` lists."""
        a, b = (head.statistics[difference.statistic] for head in (difference.a, difference.b))
        identifiers = {name: value for name, value in difference.a.identifiers.items() if name != "role"}
        roles = {"role_a": difference.a.role, "role_b": difference.b.role}
        values = {"a": a.value, "b": b.value, "difference": difference.difference, "errors": difference.errors}
        return {**identifiers, **roles, "statistic": difference.statistic, **values}

    def changed_roles(self) -> list[tuple[ProfiledHead, ProfiledHead]]:
        """Return the rows, in both profiles, of every head whose role differs between them."""
        pairs = zip(self.a.heads, self.b.heads, strict=True)
        return [(head_a, head_b) for head_a, head_b in pairs if head_a.role != head_b.role]


def compare(a: Profile, b: Profile) -> Comparison:
    """Compare two profiles (tables of attention statistics) of the same heads. For every head and every statistic that
    both profiles have, return the mean in `b` minus the mean in `a`, in the units of the statistic and in standard
    errors.

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
    pairs = zip(a.heads, b.heads, strict=True)
    differences = (_difference(head_a, head_b, name) for head_a, head_b in pairs for name in common)
    return Comparison(a, b, tuple(differences))


def _description(head: ProfiledHead | None) -> str:
    """Describe a head for error messages by its name (layer.head), module and kind of attention (self or cross). If
    `head` is None, because a profile has fewer heads than the other, return the words "no more" instead.
    """
    return "no more" if head is None else f"{head.name} in {head.module} ({head.kind} attention)"


def _difference(head_a: ProfiledHead, head_b: ProfiledHead, statistic: str) -> Difference:
    """Return the difference of one statistic of one head between two profiles (tables of attention statistics).
    `head_a` and `head_b` are the rows of the head. The difference is the mean in `head_b` minus the mean in `head_a`,
    in the units of the statistic and in standard errors.
    """
    a, b = head_a.statistics[statistic], head_b.statistics[statistic]
    return Difference(head_a, head_b, statistic, b.value - a.value, _difference_in_errors(a, b))


def _difference_in_errors(a: MeanEstimate, b: MeanEstimate) -> float:
    """Return the difference b - a of two independent means in units of its standard error. If the standard errors of
    both means are 0, return 0 for equal means and plus or minus infinity for different means.
    """
    difference, error = b.value - a.value, math.hypot(a.sem, b.sem)
    if error == 0.0:  # no variation between sequences in either profile
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error
