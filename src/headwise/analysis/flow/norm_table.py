"""Table of norm-weighted attention, one row per head."""

from dataclasses import replace
from typing import Any

from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.runs.significance import zero_tests
from headwise.statistics.by_norm import PREFERENCE
from headwise.statistics.registry import unit_of

NORM_PREFIX, CHANGE_SUFFIX = "norm_", "_change"
"""Prefix of the name of a statistic of norms, and suffix of its difference from that of weights, in tables."""


class NormWeighted(HeadTable[HeadRow]):
    """Table of norm-weighted attention (Kobayashi et al. 2020), one row per head.

    With A_ij the weight of key j for query i and f(x_j) the key's value vector, with its bias, times the head's slice
    of the output projection, let

        B_ij = |A_ij f(x_j)| / sum over keys k of |A_ik f(x_k)|

    Each statistic of weights, such as `entropy` and `first`, has two columns: `norm_entropy` is the statistic of B, and
    `entropy_change` is that of B minus that of A over the same queries. Two columns compare B with A in queries that
    see more than one key:

        moved             sum over j of |B_ij - A_ij| / 2: the share of attention that is on other keys, 0 to 1
        norm_preference   ln of the mean of |f(x_j)| weighted by A_ij, divided by its plain mean over the visible keys

    The preference is negative for a head that attends to keys with short vectors, and 0 for one to which the norms do
    not matter. Changes and preferences are tested against zero, with p-values (`_p`) and p-values adjusted for the
    number of heads (`_q`, Benjamini and Hochberg 1995). All numbers are means over sequences, with standard errors
    clustered by document.
    """

    NAME = "norm_weighted"
    ROW_TYPE = HeadRow
    PLOTTED = PREFERENCE

    def tests(self) -> dict[str, list[float]]:
        """Return, for each change and for the preference, the p-value of Student's t-test against zero and the p-value
        adjusted for the number of heads, with the suffixes `_p` and `_q`.

        Raises:
            MissingExtra: scipy is not installed.
        """
        columns: dict[str, list[float]] = {}
        for name in self._signed:
            columns |= zero_tests(name, [row.statistics[name] for row in self.rows])
        return columns

    @property
    def _signed(self) -> list[str]:
        """Names of the statistics that can be negative, and are 0 for a head to which the norms do not matter."""
        return [name for name in self.statistics if name == PREFERENCE or name.endswith(CHANGE_SUFFIX)]

    def _head_numbers(self) -> Any:
        units = {
            name: unit_of(name.removeprefix(NORM_PREFIX).removesuffix(CHANGE_SUFFIX))
            for name in self.statistics
            if name != PREFERENCE
        }
        return replace(super()._head_numbers(), signed=self._signed, units=units)
