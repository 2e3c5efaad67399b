"""`compare`: two profiles, head by head: two checkpoints, or two data sets."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from headwise.analysis.profile_result import Profile, ProfiledHead
from headwise.errors import InputError, require
from headwise.runs.table import MeanEstimate, require_statistic


@dataclass(frozen=True)
class Difference:
    """A statistic of a head in two profiles.

    Attributes:
        a, b: the head in both.
        statistic: its name.
        difference: that of b less that of a.
        errors: the difference over its standard error, the root of both squared errors' sum; NaN where either rests on
            fewer than two sequences.
    """

    a: ProfiledHead
    b: ProfiledHead
    statistic: str
    difference: float
    errors: float


@dataclass(frozen=True)
class Comparison:
    """Two profiles of heads that line up, `a` and `b`, and every difference."""

    a: Profile
    b: Profile
    differences: tuple[Difference, ...]

    def largest(self, statistics: Collection[str] = ()) -> list[Difference]:
        """The differences of some statistics, or of all: those of most standard errors first, NaN last.

        Raises:
            InputError: a statistic that is not in both.
        """
        known = dict.fromkeys(each.statistic for each in self.differences)
        for name in statistics:
            require_statistic(name, known)
        chosen = [each for each in self.differences if not statistics or each.statistic in statistics]
        return sorted(chosen, key=lambda each: -1.0 if math.isnan(each.errors) else abs(each.errors), reverse=True)

    def table(self) -> Any:
        """A pandas DataFrame, one row a head and statistic: where, both roles and means, difference, and errors."""
        pandas = require("pandas", purpose="a table", extra="tables")
        rows = []
        for each in self.differences:
            a, b = (head.statistics[each.statistic] for head in (each.a, each.b))
            place = {name: value for name, value in each.a.identifiers.items() if name != "role"}
            roles = {"role_a": each.a.role, "role_b": each.b.role}
            values = {"a": a.value, "b": b.value, "difference": each.difference, "errors": each.errors}
            rows.append({**place, **roles, "statistic": each.statistic, **values})
        return pandas.DataFrame(rows)


def compare(a: Profile, b: Profile) -> Comparison:
    """Line up two profiles head by head.

    Differences are given in standard errors of two independent samples. Of two models on the same data they are
    larger than that says, since what is common to both is in each error.

    Raises:
        InputError: heads that do not line up, or no statistic in common.
    """
    for one, other in zip_longest(a.heads, b.heads):
        if _where(one) != _where(other):
            raise InputError("b", expected=f"the heads of a, here {_where(one)}", got=_where(other))
    common = [name for name in a.statistics if name in b.statistics]
    if not common:
        raise InputError("b", expected=f"some of the statistics of a ({', '.join(a.statistics)})", got="none")
    pairs = [(one, other, name) for one, other in zip(a.heads, b.heads, strict=True) for name in common]
    return Comparison(a, b, tuple(_difference(*pair) for pair in pairs))


def _where(head: ProfiledHead | None) -> str:
    return "no more" if head is None else f"{head.name} in {head.module} ({head.kind} attention)"


def _difference(one: ProfiledHead, other: ProfiledHead, name: str) -> Difference:
    a, b = one.statistics[name], other.statistics[name]
    return Difference(one, other, name, b.value - a.value, _errors(a, b))


def _errors(a: MeanEstimate, b: MeanEstimate) -> float:
    difference, error = b.value - a.value, math.hypot(a.sem, b.sem)
    if error == 0.0:  # every sequence alike, in both
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error
