"""Units of an ablation: single heads, whole layers, key/value groups, or named sets of heads."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.analysis.ablation_result import HeadSet
from headwise.analysis.gate_interceptor import GateInterceptor, HeadGate
from headwise.analysis.replacements import Replacement
from headwise.checks import named_head
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Change, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.runs.rows import HeadRow, Row

HeadSets = Mapping[str, Collection[tuple[int, int]]]
"""Sets of heads `(layer, head)`, by name."""


@dataclass(frozen=True)
class AblationUnit:
    """Set of heads that are ablated together in one run of the model. It comes with the Python class of the result row
    for this set, and with the first columns of that row, such as layer and head.

    Attributes:
        gates: gates of the ablated heads, by site (attention module, self or cross).
        row_type: type of the row.
        identifiers: first columns of the row.
    """

    gates: Mapping[SiteKey, list[HeadGate]]
    row_type: type[Row]
    identifiers: Mapping[str, Any]


class UnitGates(GateInterceptor):
    """Interceptor of attention calls that ablates the heads of one unit (set of heads that are ablated together). Its
    attribute `unit` is set to another unit between runs of the model.

    Attributes:
        unit: the unit that is ablated; None leaves the model unchanged.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.unit: AblationUnit | None = None

    def change(self, call: Call) -> Change | None:
        """Return the function that applies the gates (factors or replacements of head outputs) of the current ablation
        unit to the head outputs of an attention call; None if the unit has no head in the call's module.
        """
        gates = None if self.unit is None else self.unit.gates.get(call.site)
        self.gates = {} if gates is None else {call.site.label: gates}
        return super().change(call)


def ablation_units(
    registry: SiteRegistry, units: str | HeadSets, replacement: float | Replacement, model: nn.Module
) -> Iterator[AblationUnit]:
    """Yield the sets of heads that are ablated together (ablation units): each head, each layer, each key/value group,
    or each named set of heads.

    The replacement is prepared for the model first. Heads, layers and groups are in the order of the model.

    Args:
        registry: sites of the model and their heads.
        units: "heads", "layers", "groups", or named sets of heads.
        replacement: takes the place of the ablated heads' outputs, or multiplies them.
        model: the model, on which the replacement is prepared.

    Raises:
        InputError: a set without heads, or with a head that the model does not have.
    """
    value = replacement
    if isinstance(value, Replacement):
        value = value.prepare(model, {record.site.label for record in registry.records})
    if units == "heads":
        for record, labels in registry.head_labels():
            yield AblationUnit({record.site: [HeadGate(labels["head"], value)]}, HeadRow, labels)
        return
    site_of_head = {(labels["layer"], labels["head"]): record.site for record, labels in registry.head_labels()}
    for name, heads in (_standard_sets(registry, units) if isinstance(units, str) else units).items():
        gates: dict[SiteKey, list[HeadGate]] = {}
        pairs = [named_head(head) for head in heads]
        for layer, head in pairs:
            if (layer, head) not in site_of_head:
                expected = f"heads (layer, head) of this model in {name!r}"
                raise InputError("units", expected=expected, got=(layer, head))
            gates.setdefault(site_of_head[layer, head], []).append(HeadGate(head, value))
        if not gates:
            raise InputError("units", expected=f"heads in {name!r}", got="none")
        yield AblationUnit(gates, HeadSet, {"name": name, "heads": [f"{layer}.{head}" for layer, head in pairs]})


def _standard_sets(registry: SiteRegistry, kind: str) -> dict[str, list[tuple[int, int]]]:
    """Return named sets of heads `(layer, head)`: for the kind "layers", the heads of each layer; for "groups", the
    heads of each key/value group. Examples of names are "layer 3" and "group 3.1".
    """
    sets: dict[str, list[tuple[int, int]]] = {}
    for _, labels in registry.head_labels():
        layer, group = labels["layer"], labels["kv_head"]
        name = f"layer {layer}" if kind == "layers" else f"group {layer}.{group}"
        sets.setdefault(name, []).append((layer, labels["head"]))
    return sets
