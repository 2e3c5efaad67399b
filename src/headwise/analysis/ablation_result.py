"""Result of an ablation: the loss without each head, or without each set of heads, and the ablation effect."""

from dataclasses import dataclass

from headwise.runs.rows import HeadRow, MeanEstimate, Row
from headwise.runs.table import HeadTable, RowT, Table


class _AblationTable(Table[RowT]):
    """Table with the loss of the model without each ablated head or set of heads, and the difference of that loss to
    the loss of the unchanged model.
    """

    NAME = "ablation"

    @property
    def baseline(self) -> MeanEstimate:
        """Loss of the unchanged model, with which the losses after ablation are compared: mean, standard error and
        number of examples.
        """
        return MeanEstimate(**self.metadata["baseline"])


class Ablation(_AblationTable[HeadRow], HeadTable[HeadRow]):
    """Table of the ablation effect of each head, one row per head: `loss`, the mean loss of the model without the head,
    and `cost`, that loss minus the loss of the unchanged model.

    With L the loss of an example and g_h the gate of head h, 1 in the unchanged model, the columns are

        loss   mean of L(g_h = 0) over examples
        cost   mean of L(g_h = 0) - L(g_h = 1) over examples, paired by example

    each with its standard error over examples and their number (leave-one-out: Michel, Levy and Neubig 2019, section
    3.2). Both are in units of the loss; nats for `next_token_loss`. A positive cost means that the model is worse
    without the head. Effects do not add up: the cost of a set of heads can differ much from the sum of their costs.
    """

    ROW_TYPE = HeadRow


@dataclass(frozen=True, kw_only=True)
class HeadSet(Row):
    """Row of a table of ablation effects: a named set of heads that were ablated together, with the loss of the model
    without these heads and their ablation effect.

    Attributes:
        name: name of the set.
        heads: each head as "layer.head", zero-based.
    """

    name: str
    heads: list[str]


class SetAblation(_AblationTable[HeadSet]):
    """Table of the ablation effects of layers, key/value groups or named sets of heads, one row per set of heads that
    were ablated together.

    The columns are `loss`, the mean loss without the heads of the set, and `cost`, that loss minus the unchanged
    model's, as for single heads in `Ablation`.
    """

    ROW_TYPE = HeadSet
