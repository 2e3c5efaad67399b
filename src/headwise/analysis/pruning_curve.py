"""Pruning curves: the loss against the number of heads that are removed together, in the order of an importance."""

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwise.analysis.ablate import ablate, surveyed
from headwise.analysis.losses import Loss, require_loss
from headwise.analysis.replacements import Replacement
from headwise.checks import collection_of, finite_number, head_pairs, require_module, require_one_of, whole_number
from headwise.data.batches import evaluation_mode
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.page.columns import ModelIdentity
from headwise.plots.curves import Band, Curve, draw_curves
from headwise.runs.data_pass import prepare_texts
from headwise.runs.fingerprint import identity_of
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import MeanEstimate, Row
from headwise.runs.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Head = tuple[int, int]
"""A head: its layer's number, and its index in the layer."""

SHARES = tuple(tenth / 10 for tenth in range(1, 11))
"""Default shares of the heads that are removed."""

RANDOM = "random"
"""Name of the orders that were drawn at random."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CurvePoint(Row):
    """Point of a pruning curve: the loss of a model after a number of its heads were removed together. The removed
    heads are the first ones in some order of all heads.

    Attributes:
        order: name of the order in which heads are removed.
        draw: number of the random order, from 0; 0 for other orders.
        removed: number of heads that are removed together.
        share: the same as a share of all heads.
    """

    order: str
    draw: int
    removed: int
    share: float


class PruningCurve(Table[CurvePoint]):
    """Table of pruning curves (Michel, Levy and Neubig 2019, section 4), which show the loss while more and more heads
    are removed in some order. Each row is for one order and one number of removed heads. `loss` is the mean loss
    without these heads, and `cost` is that loss minus the loss of the unchanged model, with standard errors over
    documents.
    """

    NAME = "pruning_curve"
    ROW_TYPE = CurvePoint
    UNIT = "point"
    SAMPLES = "example"

    @property
    def baseline(self) -> MeanEstimate:
        """Mean loss of the unchanged model, with its standard error."""
        return MeanEstimate(**self.metadata["baseline"])

    def curve(self, order: str) -> list[CurvePoint]:
        """Return the points of the pruning curve for one order of heads, in ascending number of removed heads. `order`
        is the name of the order.

        Raises:
            InputError: there is no such order, or it is "random", of which there are several.
        """
        named = {row.order: row for row in self.rows if row.order != RANDOM}
        require_one_of("order", order, named)
        return [row for row in self.rows if row.order == order]

    def band(self, statistic: str = "loss") -> list[tuple[int, float, float, float]]:
        """Return the range of a statistic over the random orders of heads. For each number of removed heads there is a
        tuple: this number, and the smallest, the mean and the largest value. The list is empty without random orders.

        Raises:
            InputError: the statistic is neither "loss" nor "cost".
        """
        require_one_of("statistic", statistic, ("loss", "cost"))
        values: dict[int, list[float]] = {}
        for row in self.rows:
            if row.order == RANDOM:
                values.setdefault(row.removed, []).append(row.statistics[statistic].value)
        return [(count, min(each), sum(each) / len(each), max(each)) for count, each in sorted(values.items())]

    def plot(self, statistic: str = "loss", *, errors: float = 1.96, ax: Any = None) -> "Axes":
        """Draw the pruning curve of each order of heads, with error bars, and the range of the random orders as a band.
        Return the matplotlib axes.

        Args:
            statistic: "loss" or "cost".
            errors: length of the error bars to each side, in standard errors; 0 draws none.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such statistic, or nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.pruning_curve(model, texts, hw.next_token_loss, scores).plot()  # doctest: +SKIP
        """
        if not self.rows:
            raise InputError("orders", expected="at least one point to draw", got="none")
        require_one_of("statistic", statistic, ("loss", "cost"))
        start = self.baseline._replace(value=0.0, sem=0.0) if statistic == "cost" else self.baseline
        names = dict.fromkeys(row.order for row in self.rows if row.order != RANDOM)
        curves = []
        for name in names:
            points = self.curve(name)
            estimates = [start, *(point.statistics[statistic] for point in points)]
            removed = [0, *(point.removed for point in points)]
            curves.append(Curve.of(name, list(zip(removed, estimates, strict=True))))
        spread = None
        if band := self.band(statistic):
            counts, *values = zip(*band, strict=True)
            spread = Band(RANDOM, [0, *counts], *([start.value, *each] for each in values))
        return draw_curves(curves, spread, x="removed heads", y=statistic, title=self.model_name, errors=errors, ax=ax)


def pruning_curve(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    loss: Loss,
    orders: HeadTable[Any] | Mapping[str, HeadTable[Any] | Collection[Head]],
    *,
    shares: Collection[float] = SHARES,
    random: int = 10,
    seed: int = 0,
    replacement: float | Replacement | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> PruningCurve:
    """Measure the loss of a model while more and more of its heads are removed together, the least important first
    (Michel, Levy and Neubig 2019, section 4). For comparison, the loss is also measured for random orders of heads.

        scores = hw.importance(model, validation, hw.next_token_loss)
        curve = hw.pruning_curve(model, test, hw.next_token_loss, scores)
        curve.table()                           # one row per order and number of removed heads
        curve.plot()

    On the data on which it was measured, an order looks better than it is, and there is a warning.

    Args:
        model: any module that `watch` supports.
        dataset: `Texts`, or batches, as for `ablate`.
        loss: function `(model, batch) -> (batch,)`, as for `ablate`.
        orders: a table of heads, such as that of `importance`, `ablate` or `profile`, of which the heads with the
            smallest values of the first statistic are removed first; or, by name, such tables, or all heads
            `(layer, head)` in the order in which they are removed.
        shares: shares of the heads that are removed, above 0 and at most 1.
        random: number of random orders.
        seed: seed of the random orders.
        replacement: takes the place of the outputs of removed heads, as for `ablate`; by default zeros.
        out: folder in which an interrupted run resumes.
        force: replace the results of another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Raises:
        InputError: an order has not every head of the model once, or a value that is NaN; the data cannot be read
            twice; another argument cannot be used, as for `ablate`.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.
    """
    require_module(model)
    require_loss(loss)
    if isinstance(dataset, Iterator):
        expected = "batches that can be read twice"
        raise InputError("dataset", expected=expected, got="an iterator", remedy="list(batches)")
    dataset = prepare_texts(dataset, model, out, shown=progress)
    with evaluation_mode(model), torch.no_grad():
        registry, _ = surveyed(model, dataset, loss)
    heads = [(labels["layer"], labels["head"]) for _, labels in registry.head_labels()]
    named = {_name_of(orders): orders} if isinstance(orders, HeadTable) else orders
    counts, identity = _counts(shares, len(heads)), identity_of(model)
    _require_names(named)
    removals = {(name, 0): _order(name, order, heads, identity) for name, order in named.items()}
    whole_number("random", random, least=0)
    draws = Random(whole_number("seed", seed, least=0))
    removals |= {(RANDOM, draw): draws.sample(heads, len(heads)) for draw in range(random)}
    sets = {
        f"{name} {draw}, {count} heads": order[:count] for (name, draw), order in removals.items() for count in counts
    }
    options: dict[str, Any] = {"replacement": replacement, "out": out, "force": force, "title": title}
    effects = ablate(model, dataset, loss, units=sets, progress=progress, **options)
    digest = effects.metadata["measured"]["digest"]
    tables = {name: order for name, order in named.items() if isinstance(order, HeadTable)}
    same = [name for name, table in tables.items() if table.metadata.get("measured", {}).get("digest") == digest]
    if same:
        message = "these orders were chosen on the data of the curve, on which they look better than on other data"
        warnings.warn(f"{message}: {', '.join(same)}", stacklevel=2)
    points = ((name, draw, count) for name, draw in removals for count in counts)
    rows = [
        CurvePoint(order=name, draw=draw, removed=count, share=count / len(heads), statistics=effect.statistics)
        for (name, draw, count), effect in zip(points, effects.rows, strict=True)
    ]
    return PruningCurve(tuple(rows), effects.metadata)


def _name_of(table: HeadTable[Any]) -> str:
    """Return the name of the statistic by which a table orders heads: the statistic that the table plots by default, or
    else its first one.
    """
    if not table.heads:
        raise InputError("orders", expected="a table with heads", got="none")
    return table.PLOTTED if table.PLOTTED in table.statistics else table.statistics[0]


def _require_names(orders: Any) -> None:
    """Raise `InputError` if the argument `orders` is not a mapping from names to orders of heads, or is empty. The name
    "random" is also refused, because it is the name of the random orders.
    """
    if not isinstance(orders, Mapping):
        expected = "a table of heads, or orders of heads by name"
        raise InputError("orders", expected=expected, got=type(orders).__name__)
    if not orders:
        raise InputError("orders", expected="at least one order", got="none")
    if (other := next((name for name in orders if not isinstance(name, str)), None)) is not None:
        raise InputError("orders", expected="strings as names of orders", got=repr(other))
    if RANDOM in orders:
        raise InputError("orders", expected=f"other names than {RANDOM!r}, which the random orders have", got=RANDOM)


def _order(name: str, order: Any, heads: Sequence[Head], identity: ModelIdentity) -> list[Head]:
    """Return the heads of a model in the order in which they are removed. `order` is a list of heads, or a table whose
    heads with the smallest values are removed first. Raise `InputError` unless every head occurs exactly once.
    """
    if isinstance(order, HeadTable):
        if order.identity is not None and order.identity.is_other(identity):
            remedy = "pass heads (layer, head) in their order"
            raise InputError("orders", expected=f"a table of this model in {name!r}", got="another's", remedy=remedy)
        statistic = _name_of(order)
        values = {(row.layer, row.head): row.statistics[statistic].value for row in order.heads}
        if missing := [head for head, value in values.items() if math.isnan(value)]:
            raise InputError("orders", expected=f"a {statistic} of each head in {name!r}", got=f"NaN for {missing[0]}")
        removed = sorted(values, key=lambda head: values[head])
    else:
        removed = head_pairs("orders", order)
    if sorted(removed) != sorted(heads):
        different = sorted(set(removed) ^ set(heads)) or [head for head in heads if removed.count(head) > 1]
        expected = f"every head of the model once in {name!r}"
        raise InputError("orders", expected=expected, got=f"another number of {different[0]}")
    return removed


def _counts(shares: Any, heads: int) -> list[int]:
    """Return how many heads are removed at each point of a pruning curve, in ascending order. The counts are computed
    from `shares`, shares of all heads.
    """
    counts = set()
    for share in collection_of("shares", shares, of="shares of the heads"):
        if not 0.0 < finite_number("shares", share) <= 1.0:
            raise InputError("shares", expected="numbers above 0 and at most 1", got=share)
        counts.add(max(1, round(share * heads)))
    if not counts:
        raise InputError("shares", expected="at least one share", got="none")
    return sorted(counts)
