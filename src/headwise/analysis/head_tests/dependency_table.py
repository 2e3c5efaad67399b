"""Tables of dependency accuracy."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.runs.significance import zero_tests
from headwise.runs.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIRECTIONS = ("to governor", "to dependent")
"""Directions of attention between a dependent and its governor."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DependencyRow(HeadRow):
    """Row of a table of dependency accuracy.

    Attributes:
        relation: relation of the dependent to its governor, such as `nsubj`.
        direction: "to governor" if the dependent attends, "to dependent" if the governor does.
        offset: the fixed offset in words, from the attending word, that is most often right in the selection half.
    """

    relation: str
    direction: str
    offset: int

    def _described(self) -> list[str]:
        return [self.name, self.relation, self.direction]


class _GainTable(Table[DependencyRow]):
    """Table whose gains are tested against zero."""

    ROW_TYPE = DependencyRow
    SAMPLES = "document"

    def tests(self) -> dict[str, list[float]]:
        """Return the p-value of each gain and its adjusted value.

        Raises:
            MissingExtra: scipy is not installed.
        """
        return zero_tests("gain", [row.statistics["gain"] for row in self.rows])


class DependencyHeads(_GainTable, HeadTable[DependencyRow]):
    """Table with one row per head: the relation and the direction with the largest gain in the selection half. The
    columns are those of `DependencyAccuracy`. As the test half does not choose, `gain` has no bias from the choice.
    `gain_q` is adjusted for the number of heads.
    """

    NAME = "dependency_heads"
    SIGNED = ("gain", "selection_gain")
    PLOTTED = "gain"


class DependencyAccuracy(_GainTable):
    """Table of dependency accuracy (Clark et al. 2019, section 4.2), one row per head, relation and direction.

        accuracy         share of pairs in which the head's most attended word is the other word of the pair
        offset_accuracy  share in which the word at the best fixed offset is
        gain             accuracy - offset_accuracy, paired
        selection_gain   the same in the selection half

    The attention between two words is the sum over the tokens of the attended word, and the mean over those of the
    attending one. Special tokens and the word itself do not compete.

    The first three columns are of the test half; the offset was chosen in the selection half, from -10 to 10 words.
    Standard errors are clustered by document, or by sentence in a treebank without documents, which `n` counts.
    `gain_p` is the p-value of a two-sided t-test of the gain against zero, and `gain_q` is adjusted for the number of
    all rows (Benjamini and Hochberg 1995).
    """

    NAME = "dependencies"
    UNIT = "head, relation and direction"

    def best(self) -> DependencyHeads:
        """Return a table with one row per head: the relation and direction with the largest `selection_gain`."""
        best: dict[tuple[int, int, str], DependencyRow] = {}
        for row in self.rows:
            key = row.layer, row.head, row.module
            if key not in best or _selection_gain(row) > _selection_gain(best[key]):
                best[key] = row
        return DependencyHeads(tuple(best.values()), self.metadata)

    def plot(self, statistic: str = "gain", *, kind: str = "heatmap", **options: Any) -> "Axes":
        """Draw a plot of the table `best`, and return its matplotlib axes. `HeadTable.plot` has the arguments.

        Raises:
            InputError: there is no such statistic or kind.
            MissingExtra: matplotlib is not installed.
        """
        return self.best().plot(statistic, kind=kind, **options)


def _selection_gain(row: DependencyRow) -> float:
    """Return the gain in the selection half; minus infinity where there is none."""
    value = row.statistics["selection_gain"].value
    return -math.inf if math.isnan(value) else value
