"""Pruning curves: the loss against the number of heads that are removed together, in the order of an importance."""

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from headwise.analysis.ablate import ablate
from headwise.analysis.ablation_result import SetAblation
from headwise.analysis.losses import Loss, finite_loss_per_example, prepare_loss, require_loss
from headwise.analysis.pruning_curve_table import RANDOM, CurvePoint, PruningCurve
from headwise.analysis.repeated_runs import restored_state
from headwise.analysis.replacements import Replacement
from headwise.checks import collection_of, finite_number, head_pair, require_module, whole_number
from headwise.data.batches import device_of, evaluation_mode, iterate_batches, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.survey import survey
from headwise.page.columns import ModelIdentity
from headwise.runs.data_pass import prepare_texts
from headwise.runs.fingerprint import identity_of
from headwise.runs.head_table import HeadTable

Head = tuple[int, int]
"""A head: its layer's number, and its index in the layer."""

SHARES = tuple(tenth / 10 for tenth in range(1, 11))
"""Default shares of the heads that are removed."""


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
    """Measure the loss of a model without a growing set of heads, which are removed together: the least important first
    (Michel, Levy and Neubig 2019, section 4). Random orders show what an order is worth.

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
    dataset = prepare_texts(_read_twice(dataset), model, out, shown=progress)
    heads, identity = _heads_of(model, dataset, loss), identity_of(model)
    named = {_name_of(orders): orders} if isinstance(orders, HeadTable) else orders
    counts = _counts(shares, len(heads))
    removals = {(name, 0): _order(name, order, heads, identity) for name, order in _items(named)}
    removals |= _random_orders(heads, whole_number("random", random, least=0), whole_number("seed", seed, least=0))
    options: dict[str, Any] = {"replacement": replacement, "out": out, "force": force, "title": title}
    effects = ablate(model, dataset, loss, units=_sets(removals, counts), progress=progress, **options)
    assert isinstance(effects, SetAblation)
    _warn_of_same_data(named, effects)
    return PruningCurve(tuple(_points(effects, list(removals), counts, len(heads))), effects.metadata)


def _read_twice(dataset: Any) -> Any:
    """Return a data set unchanged; raise `InputError` for an iterator, whose first batch could not be read again."""
    if isinstance(dataset, Iterator):
        expected = "batches that can be read twice"
        raise InputError("dataset", expected=expected, got="an iterator", remedy="list(batches)")
    return dataset


def _heads_of(model: nn.Module, dataset: Texts | Iterable[Any], loss: Loss) -> list[Head]:
    """Return all heads of a model that run for the loss of the first batch, in the order of the model."""
    first = next(iterate_batches(dataset), None)
    if first is None:
        raise InputError("dataset", expected="at least one batch", got="none")
    batch = to_device(first, device_of(model))
    with evaluation_mode(model), torch.no_grad(), restored_state(model):
        prepare_loss(loss, model, batch)
        registry = survey(model, lambda: finite_loss_per_example(loss, model, batch))
    return [(labels["layer"], labels["head"]) for _, labels in registry.head_labels()]


def _name_of(table: HeadTable[Any]) -> str:
    """Return the statistic by which a table orders heads: the one that it plots by default, or else its first."""
    if not table.heads:
        raise InputError("orders", expected="a table with heads", got="none")
    return table.PLOTTED if table.PLOTTED in table.statistics else table.statistics[0]


def _random_orders(heads: Sequence[Head], number: int, seed: int) -> dict[tuple[str, int], list[Head]]:
    """Return random orders of all heads, by their name and number."""
    draws = Random(seed)
    return {(RANDOM, draw): draws.sample(heads, len(heads)) for draw in range(number)}


def _sets(orders: Mapping[tuple[str, int], list[Head]], counts: Sequence[int]) -> dict[str, list[Head]]:
    """Return the first heads of each order, each number of them, as sets with a name."""
    return {
        f"{name} {draw}, {count} heads": order[:count] for (name, draw), order in orders.items() for count in counts
    }


def _items(orders: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and orders of a mapping; raise `InputError` for anything else, or for the name "random"."""
    if not isinstance(orders, Mapping):
        expected = "a table of heads, or orders of heads by name"
        raise InputError("orders", expected=expected, got=type(orders).__name__)
    if not orders:
        raise InputError("orders", expected="at least one order", got="none")
    if (other := next((name for name in orders if not isinstance(name, str)), None)) is not None:
        raise InputError("orders", expected="strings as names of orders", got=repr(other))
    if RANDOM in orders:
        raise InputError("orders", expected=f"other names than {RANDOM!r}, which the random orders have", got=RANDOM)
    return orders.items()


def _order(name: str, order: Any, heads: Sequence[Head], identity: ModelIdentity) -> list[Head]:
    """Return the heads of a model in the order in which they are removed, after checking that each occurs once."""
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
        expected = "heads (layer, head)"
        removed = [head_pair("orders", head, of=expected) for head in collection_of("orders", order, of=expected)]
    if sorted(removed) != sorted(heads):
        different = sorted(set(removed) ^ set(heads)) or [head for head in heads if removed.count(head) > 1]
        expected = f"every head of the model once in {name!r}"
        raise InputError("orders", expected=expected, got=f"another number of {different[0]}")
    return removed


def _counts(shares: Any, heads: int) -> list[int]:
    """Return the numbers of heads that are removed, in ascending order, from their shares of all heads."""
    counts = set()
    for share in collection_of("shares", shares, of="shares of the heads"):
        if not 0.0 < finite_number("shares", share) <= 1.0:
            raise InputError("shares", expected="numbers above 0 and at most 1", got=share)
        counts.add(max(1, round(share * heads)))
    if not counts:
        raise InputError("shares", expected="at least one share", got="none")
    return sorted(counts)


def _warn_of_same_data(orders: Mapping[str, Any], effects: SetAblation) -> None:
    """Warn of tables that were measured on the data of the curve."""
    digest = effects.metadata["measured"]["digest"]
    same = [
        name
        for name, order in orders.items()
        if isinstance(order, HeadTable) and order.metadata.get("measured", {}).get("digest") == digest
    ]
    if same:
        message = "these orders were chosen on the data of the curve, on which they look better than on other data"
        warnings.warn(f"{message}: {', '.join(same)}", stacklevel=3)


def _points(
    effects: SetAblation, orders: Sequence[tuple[str, int]], counts: Sequence[int], heads: int
) -> Iterator[CurvePoint]:
    """Yield the points of all orders, each `(name, draw)`, from the effects of their sets in the same order."""
    rows = iter(effects.rows)
    for name, draw in orders:
        for count in counts:
            yield CurvePoint(
                order=name, draw=draw, removed=count, share=count / heads, statistics=next(rows).statistics
            )
