"""Result of an ablation: the loss without each head, or without each set of heads, and the ablation effect."""

from dataclasses import dataclass

from headwise.runs.rows import HeadRow, MeanEstimate, Row
from headwise.runs.table import HeadTable, RowT, Table


class _AblationTable(Table[RowT]):
    """Table of the loss without each ablated unit, and of its difference to the loss of the unchanged model."""

    NAME = "ablation"

    @property
    def baseline(self) -> MeanEstimate:
        """Loss of the unchanged model: mean, standard error and number over the examples."""
        return MeanEstimate(**self.metadata["baseline"])


class Ablation(_AblationTable[HeadRow], HeadTable[HeadRow]):
    """Ablation effect of each head: `loss` without the head, and `cost`, that loss minus the unchanged model's."""

    ROW_TYPE = HeadRow


@dataclass(frozen=True, kw_only=True)
class HeadSet(Row):
    """Heads that were ablated together.

    Attributes:
        name: name of the set.
        heads: each head as "layer.head", zero-based.
    """

    name: str
    heads: list[str]


class SetAblation(_AblationTable[HeadSet]):
    """Ablation effect of sets of heads: `loss` without the set, and `cost`, that loss minus the unchanged model's."""

    ROW_TYPE = HeadSet
