"""Ablation: the loss of a model without each of its heads, or without sets of heads.

All runs on one batch share the layers below the first ablated head, which are computed once.
"""

import math
import warnings
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from headwise.analysis.ablation_result import Ablation, DocumentEffects, SetAblation
from headwise.analysis.gate import GateInterceptor, HeadGate
from headwise.analysis.head_pass import PassData, table_of_pass
from headwise.analysis.losses import (
    Loss,
    finite_loss_per_example,
    name_of_loss,
    options_of_loss,
    prepare_loss,
    require_loss,
    require_some_loss,
)
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.analysis.replacements import Replacement, zero
from headwise.checks import finite_number, head_pairs, named_head, require_module
from headwise.data.batches import device_of, documents_of, iterate_batches, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.survey import survey
from headwise.progress import progress_bar
from headwise.runs.checkpoint import storable
from headwise.runs.data_pass import Pass, PassProgress, prepare_texts
from headwise.runs.rows import MeanEstimate
from headwise.settings import UNIT_KINDS
from headwise.statistics.moments import Clusters

ROUNDING = 1e-5
"""Largest size of a loss that counts as 0: rounding makes cosines of equal vectors differ from 1."""

HeadSets = Mapping[str, Collection[tuple[int, int]]]
"""Sets of heads `(layer, head)`, by name."""

AblationUnit = tuple[Mapping[SiteKey, list[HeadGate]], Mapping[str, Any]]
"""Heads that are ablated together: the gates at each site, and the columns that identify the heads."""

AblationT = TypeVar("AblationT", bound=Ablation | SetAblation)


def ablate(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    loss: Loss,
    *,
    replacement: float | Replacement | None = None,
    units: str | Mapping[str, Collection[tuple[int, int]]] = "heads",
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> Ablation | SetAblation:
    """Measure how much the loss changes without each head, layer, key/value group or named set of heads. The model runs
    once for each of them, with the outputs of its heads replaced, by zeros by default. The ablation effect is the mean
    loss over examples in this run, minus the mean loss of the unchanged model (Michel, Levy and Neubig 2019, section
    3.2). It is in the column `cost` of the returned table.

        effects = hw.ablate(model, texts, hw.next_token_loss)
        effects.table()                                 # one row per head: layer, head, ..., cost, loss, ...
        effects.outliers()                              # documents whose effect is far from the median
        effects.head(3, 5).statistics["cost"]           # value, sem, n

    The model runs in evaluation mode without gradients, each time with the same random numbers, and is unchanged
    afterwards. With torch.distributed, the processes share the batches, and each returns the same table. Layers below
    the first ablated head are computed once per batch, and their outputs kept in memory. If a check on the first batch
    shows that this changes results, there is a warning, and each run computes all layers.

    Args:
        model: any module that `watch` supports.
        dataset: `Texts`, or an iterable of batches, each a tensor or a mapping of the model's arguments.
        loss: function `(model, batch) -> (batch,)`, such as `next_token_loss` or `EmbeddingDistance()`.
        replacement: factor of an ablated head's output, or one of `hw.replacements`; `zero()` by default.
        units: heads that are ablated together: "heads", each alone; "layers", all heads of a layer; "groups", heads
            that share keys and values; or named sets of `(layer, head)`, such as `profile.roles()`.
        out: folder for the table; an interrupted run resumes there with the same arguments, and the same numbers.
        force: replace the results of another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Returns:
        A table with one row per head (`Ablation`) or per layer, group or set (`SetAblation`), in units of the loss.

    Raises:
        InputError: `dataset`, `units` or `out` cannot be used; the loss is not one number per example, or changes when
            the model runs again; no attention of the model is intercepted.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.
    """
    require_module(model)
    require_loss(loss)
    dataset = prepare_texts(dataset, model, out, shown=progress)
    if replacement is None:
        replacement = zero()
    elif isinstance(replacement, str | FunctionType):
        expected = "a number, or one of hw.replacements: zero(), uniform(), mean(dataset), resample(batch)"
        got = repr(replacement) if isinstance(replacement, str) else f"the function {replacement.__name__}, not called"
        raise InputError("replacement", expected=expected, got=got)
    elif not isinstance(replacement, Replacement):
        replacement = finite_number("replacement", replacement)
    data = PassData(model, dataset, [])
    table_type: type[Ablation | SetAblation] = Ablation if units == "heads" else SetAblation
    notes: list[str] = []
    options: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    table: Ablation | SetAblation = table_of_pass(
        data,
        table_type,
        AblationProgress,
        lambda data_pass: measure_losses(data, loss, replacement, units, data_pass, notes),
        lambda parts, metadata: table_of_losses(table_type, parts, documents_of(dataset), metadata),
        units=_names_of_units(units),
        replacement=type(replacement).__name__.lower() if isinstance(replacement, Replacement) else replacement,
        replacement_data={"digest": replacement.digest(model)} if isinstance(replacement, Replacement) else None,
        loss=name_of_loss(loss),
        loss_options=options_of_loss(loss),
        **options,
    )
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return table


def _names_of_units(units: str | HeadSets) -> str | dict[str, list[str]]:
    """Return `units` (the heads that are ablated together) in a form for metadata: "heads", "layers" or "groups"
    unchanged; for named sets, a dictionary from each set's name to the names of its heads, such as "3.5".
    """
    if isinstance(units, str) and units in UNIT_KINDS:
        return units
    if not isinstance(units, Mapping):
        expected = f"one of {', '.join(UNIT_KINDS)}, or sets of heads by name"
        raise InputError("units", expected=expected, got=repr(units))
    if not units:
        raise InputError("units", expected="at least one set of heads", got="none")
    return {name: [f"{layer}.{head}" for layer, head in head_pairs("units", heads)] for name, heads in units.items()}


@storable
@dataclass
class AblationProgress(PassProgress):
    """Partial result of an ablation in one process: the losses measured so far. It is saved after each run of the
    model, so that an interrupted ablation can resume even in the middle of a batch.

    Attributes:
        units: the columns that identify each unit.
        losses: by the number of the batch, the losses of its examples in each run of the model: in the run of the
            unchanged model first, then without each unit.
        note: statement why layer outputs were not reused; None if they were.
    """

    units: list[Mapping[str, Any]] = field(default_factory=list)
    losses: dict[int, list[list[float]]] = field(default_factory=dict)
    note: str | None = None


def _name_of_unit(identifiers: Mapping[str, Any]) -> str:
    """Return the name of an ablation unit (heads that are ablated together): the name of a set of heads, or "head 3.5"
    for a single head. `identifiers` are the columns that identify the unit in the table.
    """
    return identifiers["name"] if "name" in identifiers else f"head {identifiers['layer']}.{identifiers['head']}"


def table_of_losses(
    table_type: type[AblationT],
    parts: Sequence[AblationProgress],
    documents: Sequence[Hashable] | None,
    metadata: Mapping[str, Any],
) -> AblationT:
    """Return the table of an ablation from the losses that all processes measured. Examples whose loss is NaN are left
    out. The table's metadata contains the mean loss of the unchanged model ("baseline"). The metadata also states
    whether the loss is a distance from the unchanged model: 0 for the unchanged model, and never negative.
    """
    units = parts[0].units
    of_batches: dict[int, list[list[float]]] = {}
    for part in parts:
        names = [_name_of_unit(identifiers) for identifiers in part.units]
        runs = [0, *(1 + names.index(_name_of_unit(identifiers)) for identifiers in units)]
        of_batches |= {number: [losses[run] for run in runs] for number, losses in part.losses.items()}
    in_order = [of_batches[number] for number in sorted(of_batches)]
    unchanged, *ablated = ([loss for losses in in_order for loss in losses[run]] for run in range(1 + len(units)))
    baseline = MeanEstimate.of(unchanged, documents)
    require_some_loss(baseline.n)
    rows: list[Any] = []
    for identifiers, losses in zip(units, ablated, strict=True):
        costs = [loss - before for loss, before in zip(losses, unchanged, strict=True)]
        # Both means are over the examples that have a loss in the unchanged model.
        with_cost = [math.nan if math.isnan(cost) else loss for loss, cost in zip(losses, costs, strict=True)]
        statistics = {"cost": MeanEstimate.of(costs, documents), "loss": MeanEstimate.of(with_cost, documents)}
        rows.append(table_type.ROW_TYPE(**identifiers, statistics=statistics))
    is_distance = all(abs(loss) <= ROUNDING for loss in unchanged if not math.isnan(loss)) and all(
        loss >= -ROUNDING for losses in ablated for loss in losses if not math.isnan(loss)
    )
    notes = [part.note for part in parts if part.note is not None]
    measured = metadata["measured"] | ({"note": notes[0]} if notes else {}) | {"is_distance": is_distance}
    by_document = DocumentEffects.of(unchanged, ablated, documents)
    return table_type(tuple(rows), {**metadata, "baseline": baseline._asdict(), "measured": measured}, by_document)


def surveyed(
    model: nn.Module, dataset: Texts | Iterable[Any], loss: Loss
) -> tuple[SiteRegistry, Texts | Iterable[Any]]:
    """Compute a loss on the first batch of a data set, and return a registry of the attention modules that ran. Also
    return the data set, still with its first batch: if it is an iterator, the batch is put back.
    """
    batches = iterate_batches(dataset)
    first_batch = next(batches, None)
    if first_batch is None:
        raise InputError("dataset", expected="at least one batch", got="none")
    inputs = to_device(first_batch, device_of(model))
    with restored_state(model):
        prepare_loss(loss, model, inputs)
        registry = survey(model, lambda: finite_loss_per_example(loss, model, inputs))
    return registry, chain([first_batch], batches) if isinstance(dataset, Iterator) else dataset


def measure_losses(
    data: PassData,
    loss: Loss,
    replacement: float | Replacement,
    units: str | HeadSets,
    data_pass: Pass[AblationProgress],
    notes: list[str],
) -> AblationProgress:
    """Compute the loss of every example in this process's batches: in the unchanged model, and without each ablation
    unit (set of heads that are ablated together). Losses that the checkpoint already has are not computed again. If
    layer outputs of the unchanged model could not be reused in later runs, add the reason to `notes`.
    """
    model = data.model
    # Leaving inference mode turns gradients on, and gives tensors the version counters that reuse of outputs needs.
    with torch.inference_mode(False), torch.no_grad():
        registry, dataset = surveyed(model, data.dataset, loss)
        ablated = list(_ablation_units(registry, units, replacement, model))
        # Named sets may come from a Python set of names, whose order differs between processes.
        order = [_name_of_unit(identifiers) for identifiers in data_pass.resumed.units]
        ablated.sort(key=lambda unit: order.index(_name_of_unit(unit[1])) if order else 0)
        runs = RepeatedRuns(model, {record.site.path for record in registry.records})
        progress = AblationProgress(
            units=[dict(identifiers) for _, identifiers in ablated],
            losses=data_pass.resumed.losses,
            note=data_pass.resumed.note,
        )

        def process_batch(batch: dict[str, Any], _clusters: Clusters) -> None:
            losses = progress.losses.setdefault(progress.batches, [])
            inputs, interceptor = to_device(batch, device_of(model)), _UnitGates()
            with restored_state(model):
                prepare_loss(loss, model, inputs)
            compute = partial(finite_loss_per_example, loss, model, inputs)
            with intercepted(model, interceptor), progress_bar("ablation", 1 + len(ablated), "runs") as bar:
                bar.step = 1
                bar.resume(len(losses))
                baseline = runs.run_unchanged(compute)
                progress.note = runs.note
                if not losses:
                    losses.append(baseline.tolist())
                    bar.advance()
                for gates, identifiers in ablated[len(losses) - 1 :]:
                    interceptor.by_site = gates
                    without_unit = runs.run_gated(compute, {site.path for site in gates})
                    # An example that has no loss without these heads alone would be missing in their mean.
                    if bool((without_unit.isnan() & ~baseline.isnan()).any()):
                        expected = "a number for each example that has one in the unchanged model"
                        raise InputError("loss", expected=expected, got=f"NaN without {_name_of_unit(identifiers)}")
                    losses.append(without_unit.tolist())
                    if len(losses) <= len(ablated):
                        data_pass.save_unfinished(progress)
                    bar.advance()

        data_pass.over(dataset, process_batch, progress)
    if progress.note is not None:
        notes.append(progress.note)
    return progress


class _UnitGates(GateInterceptor):
    """Interceptor of attention calls that ablates one set of heads together (an ablation unit). If the same module runs
    self-attention and cross-attention, the set can have heads of either kind.

    Attributes:
        by_site: gates of the unit that is ablated; they are exchanged between runs of the model.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.by_site: Mapping[SiteKey, list[HeadGate]] = {}

    def change(self, call: Call) -> Change | None:
        """Return the function that ablates heads in an attention call: it applies the gates of the current ablation
        unit (set of heads) to the head outputs. Return None if no head of the unit belongs to this call.
        """
        self.gates = {call.site.label: self.by_site.get(call.site, [])}
        return super().change(call)


def _ablation_units(
    registry: SiteRegistry, units: str | HeadSets, replacement: float | Replacement, model: nn.Module
) -> Iterator[AblationUnit]:
    """Yield the ablation units, sets of heads that are ablated together: each head, each layer ("layer 3") or each
    key/value group ("group 3.1") in the order of the model, or each named set. `units` selects the kind.
    """
    if isinstance(replacement, Replacement):
        replacement = replacement.prepare(model, {record.site.label for record in registry.records})
    site_of_head: dict[tuple[int, int], SiteKey] = {}
    sets = {} if isinstance(units, str) else {name: list(heads) for name, heads in units.items()}
    for record, labels in registry.head_labels():
        layer, head = labels["layer"], labels["head"]
        if units == "heads":
            yield {record.site: [HeadGate(head, replacement)]}, labels
        elif isinstance(units, str):
            name = f"layer {layer}" if units == "layers" else f"group {layer}.{labels['kv_head']}"
            sets.setdefault(name, []).append((layer, head))
        site_of_head[layer, head] = record.site
    for name, heads in sets.items():
        gates: dict[SiteKey, list[HeadGate]] = {}
        pairs = [named_head(head) for head in heads]
        for layer, head in pairs:
            if (layer, head) not in site_of_head:
                expected = f"heads (layer, head) of this model in {name!r}"
                raise InputError("units", expected=expected, got=(layer, head))
            gates.setdefault(site_of_head[layer, head], []).append(HeadGate(head, replacement))
        if not gates:
            raise InputError("units", expected=f"heads in {name!r}", got="none")
        yield gates, {"name": name, "heads": [f"{layer}.{head}" for layer, head in pairs]}
