"""Columns of results: what each number of a head, or of another unit, means, and its unit."""

from dataclasses import dataclass, replace
from typing import Any

from headwise.page.contents import PageStatistic
from headwise.statistics.registry import STATISTICS


@dataclass(frozen=True)
class Column:
    """Description of one number that a result table has for each of its rows, such as a statistic: name, meaning and
    unit.

    Attributes:
        name: name of the column.
        meaning: what the number is, in one sentence; empty if the name says it.
        unit: "nats", "tokens", "share", "norm" or "logit"; empty for others.
        is_signed: True for an effect or a difference, which is drawn with colours around `null`.
        is_tested: True if the means are tested against `null`.
        null: value of a row without an effect.
    """

    name: str
    meaning: str = ""
    unit: str = ""
    is_signed: bool = False
    is_tested: bool = False
    null: float = 0.0

    def derived(self, name: str, how: str, **changes: Any) -> "Column":
        """Return the description of a second number, called `name`, that is computed from the number that this object
        describes. The words `how` are added to the meaning; `changes` are new values of other attributes.
        """
        return replace(self, name=name, meaning=f"{self.meaning.removesuffix('.')}, {how}.", **changes)

    def on_page(self, source: str) -> PageStatistic:
        """Return the description of this number for an HTML page. `source` names the result that has the number."""
        return PageStatistic(self.name, self.unit, self.meaning, source)


WEIGHTS = tuple(Column(each.name, each.meaning, each.unit) for each in STATISTICS.values())
"""Columns of the statistics of attention weights."""

RANDOM_SUFFIX, CHANGE_SUFFIX = "_random", "_change"
"""Suffixes of a statistic's name where it was measured on random tokens that repeat, and where it is the difference
between the statistic of other weights and that of the attention weights.
"""

CHANGES = tuple(
    column.derived(
        column.name + CHANGE_SUFFIX, "as a change from the attention weights", is_signed=True, is_tested=True
    )
    for column in WEIGHTS
)
"""Columns of the differences between the statistics of other weights and those of the attention weights."""


def column_named(name: str) -> Column:
    """Return the description of a statistic of attention weights by its name. In a name with the suffix `_random`, the
    statistic was measured on random tokens that repeat. For an unknown name, the description has only the name.
    """
    statistic = STATISTICS.get(name.removesuffix(RANDOM_SUFFIX))
    if statistic is None:
        return Column(name)
    column = Column(statistic.name, statistic.meaning, statistic.unit)
    return column if name == statistic.name else column.derived(name, "measured on random tokens that repeat")
