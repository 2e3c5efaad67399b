"""Columns of results: what each number of a head, or of another unit, means, and its unit."""

from dataclasses import dataclass, replace
from typing import Any

from headwise.page.contents import PageStatistic
from headwise.statistics.registry import unit_of


@dataclass(frozen=True)
class Column:
    """Description of a number that a result has for each of its rows.

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
        """Return the column of a number that is derived from this one in the way that the words `how` describe."""
        return replace(self, name=name, meaning=f"{self.meaning.removesuffix('.')}, {how}.", **changes)

    def on_page(self, source: str) -> PageStatistic:
        """Return the description for a page, of a number that was measured on `source`."""
        return PageStatistic(self.name, self.unit, self.meaning, source)


WEIGHTS = tuple(
    Column(name, meaning, unit_of(name))
    for name, meaning in {
        "entropy": "Mean entropy of the attention weights of a query.",
        "evenness": "Mean entropy of the weights of a query, divided by the logarithm of its number of visible keys.",
        "confidence": "Mean of the largest attention weight of each query.",
        "confidence_content": "Mean of the largest attention weight of each query on a token that is not special.",
        "distance": "Mean distance between a query and the keys that it attends to.",
        "self": "Mean attention on the query's own token.",
        "previous": "Mean attention on the token before.",
        "next": "Mean attention on the token after.",
        "first": "Mean attention on the first token.",
        "special": "Mean attention on special tokens.",
        "duplicate": "Mean attention on earlier copies of the query's token.",
        "induction": "Mean attention on the tokens after earlier copies of the query's token.",
        "received": "Largest mean attention that one token receives.",
        "max_logit": "Largest attention score of any query and visible key, as it enters the softmax.",
        "max_logit_uncapped": "Largest attention score of any query and visible key, before the softcap and the bias.",
        "output_norm": "Mean norm of the head's output, before the output projection.",
        "written_norm": "Mean norm of the head's output after its slice of the output projection.",
    }.items()
)
"""Columns of the statistics of attention weights."""

RANDOM_SUFFIX, CHANGE_SUFFIX = "_random", "_change"
"""Suffixes of a statistic's name where it was measured on random tokens that repeat, and where it is the difference
between the statistic of other weights and that of the attention weights.
"""

RANDOM = tuple(
    column.derived(column.name + RANDOM_SUFFIX, "measured on random tokens that repeat") for column in WEIGHTS
)
"""Columns of the same statistics on random tokens that repeat."""

CHANGES = tuple(
    column.derived(
        column.name + CHANGE_SUFFIX, "as a change from the attention weights", is_signed=True, is_tested=True
    )
    for column in WEIGHTS
)
"""Columns of the differences between the statistics of other weights and those of the attention weights."""


def column_named(name: str) -> Column:
    """Return the column of a statistic of attention weights; for another name, one without a description."""
    return next((column for column in (*WEIGHTS, *RANDOM) if column.name == name), Column(name))
