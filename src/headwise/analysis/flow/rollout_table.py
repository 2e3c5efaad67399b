"""Tables of attention rollout: one row per head, and one per layer."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.analysis.flow.rollout_reader import LAYER_STATISTICS
from headwise.checks import collection_of
from headwise.plots.curves import Curve, draw_curves
from headwise.plots.kinds import require_name
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, Row
from headwise.runs.significance import zero_tests
from headwise.runs.table import Table
from headwise.statistics.registry import unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLLED_PREFIX, CHANGE_SUFFIX = "rolled_", "_change"
"""Prefix of the name of a statistic of rolled-out attention, and suffix of its difference from that of the weights."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRow(Row):
    """Row of a table of layers.

    Attributes:
        layer: the layer's number, zero-based.
        module: path of its attention module.
    """

    layer: int
    module: str


class RolloutLayers(Table[LayerRow]):
    """Table of the attention rollout of each layer, one row per layer: where the rollout of a query goes, as the mean
    over the queries of a sequence, averaged over sequences, with standard errors over documents.

    The columns `first`, `self` and `special` are shares on the first token, on the query's own token and on special
    tokens; `distance` is the mean distance in tokens, and `entropy` is in nats.
    """

    NAME = "rollout_layers"
    ROW_TYPE = LayerRow
    UNIT = "layer"

    def plot(
        self, statistics: Collection[str] = ("first", "self", "special"), *, errors: float = 1.96, ax: Any = None
    ) -> "Axes":
        """Draw statistics of the rollout against the layer, with error bars, and return the matplotlib axes.

        Args:
            statistics: names of statistics of the same unit; those that were not measured are left out.
            errors: length of the error bars to each side, in standard errors; 0 draws none.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such statistic, or nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.rollout(model, texts).layers.plot(["entropy"])  # doctest: +SKIP
        """
        names = list(collection_of("statistics", statistics, of="names of statistics"))
        for name in names:
            require_name("statistic", name, dict.fromkeys(LAYER_STATISTICS))
        layers, curves = [row.layer for row in self.rows], []
        for name in (each for each in names if each in self.statistics):
            found = [row.statistics[name] for row in self.rows]
            curves.append(Curve(name, layers, [each.value for each in found], [each.sem for each in found]))
        units = {unit_of(name) for name in names} - {""}
        y = "share of the rollout" if units == {"share"} else ", ".join([*names, *units])
        return draw_curves(curves, x="layer", y=y, title=self.model_name, errors=errors, ax=ax)


@dataclass(frozen=True, repr=False)
class Rollout(HeadTable[HeadRow]):
    """Table of rolled-out attention (Abnar and Zuidema 2020), one row per head.

    With A_h the weights of a head in layer l, H heads, and r the share of the residual connection (0.5 in the paper),

        R_l = r R_(l-1) + (1 - r) / H * sum over heads h of A_h R_(l-1),    R_(-1) = I

    The rolled-out attention of the head is A_h R_(l-1): where it reads from in the input, if the keys of its layer are
    mixtures of input tokens as the rollout of the layers below states. So the rollout of a layer is the mean over its
    heads, mixed with the rollout of the layer below. Each statistic has two columns: `rolled_first` is that of
    A_h R_(l-1), and `first_change` is that minus the same statistic of A_h. Changes are tested against zero, with
    p-values (`_p`) and p-values adjusted for the number of heads (`_q`, Benjamini and Hochberg 1995). In layer 0 all
    changes are 0. All numbers are means over sequences, with standard errors clustered by document.

    Attributes:
        layers: the rollout R_l of each layer, one row per layer.
    """

    layers: RolloutLayers = field(default=RolloutLayers((), {}), repr=False)

    NAME = "rollout"
    ROW_TYPE = HeadRow

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write both tables to Parquet files in a folder, `rollout.parquet` and `rollout_layers.parquet`; otherwise as
        `Table.save`.
        """
        self.layers.save(folder, force=force)
        super().save(folder, force=force)

    @classmethod
    def load(cls, folder: str | Path) -> "Rollout":
        """Return the tables that `save` wrote to a folder.

        Raises:
            InputError: the folder has no such files, or they cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        return replace(super().load(folder), layers=RolloutLayers.load(folder))

    def tests(self) -> dict[str, list[float]]:
        """Return, for each change, the p-value of Student's t-test against zero and the p-value adjusted for the number
        of heads, with the suffixes `_p` and `_q`.

        Raises:
            MissingExtra: scipy is not installed.
        """
        columns: dict[str, list[float]] = {}
        for name in self._changes:
            columns |= zero_tests(name, [row.statistics[name] for row in self.rows])
        return columns

    @property
    def _changes(self) -> list[str]:
        """Names of the statistics that are differences."""
        return [name for name in self.statistics if name.endswith(CHANGE_SUFFIX)]

    def _head_numbers(self) -> Any:
        units = {
            name: unit_of(name.removeprefix(ROLLED_PREFIX).removesuffix(CHANGE_SUFFIX)) for name in self.statistics
        }
        return replace(super()._head_numbers(), signed=self._changes, units=units)
