"""`ablate`: what a model's loss is without a head, or without several, each example against the whole model's.

Runs of one batch share what is the same in them: what lies below the first head that is removed is computed once.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.analysis.gate import Gated, Gates
from headwise.analysis.losses import Loss, losses_of, prepare_loss
from headwise.analysis.recording import require_module
from headwise.analysis.replacements import Replacement, zero
from headwise.data.batches import device_of, evaluation_mode, iterate_batches, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, Site
from headwise.intercept.replay import Replay
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.survey import survey
from headwise.runs.checkpoint import CheckpointedRun
from headwise.runs.data_pass import PassProgress, require_same_data
from headwise.runs.fingerprint import run_settings
from headwise.runs.progress import progress_bar
from headwise.runs.rows import HeadRow, MeanEstimate, Row
from headwise.runs.table import HeadTable, RowT, Table

KINDS = ("heads", "layers", "groups")
"""What may be removed at a time, beside sets of heads with names."""


class _Ablated(Table[RowT]):
    """What a model's loss is without something, beside that of the whole model."""

    NAME = "ablation"

    @property
    def baseline(self) -> MeanEstimate:
        """The loss of the whole model."""
        return MeanEstimate(**self.metadata["baseline"])


class Ablation(_Ablated[HeadRow], HeadTable[HeadRow]):
    """What each head costs alone: `loss` without it, and `cost`, how much that is more than the whole model's."""

    ROW_TYPE = HeadRow


@dataclass(frozen=True, kw_only=True)
class HeadSet(Row):
    """Heads that were removed together, as `layer.head`."""

    name: str
    heads: list[str]


class SetAblation(_Ablated[HeadSet]):
    """What sets of heads cost: `loss` without them, and `cost`, how much that is more than the whole model's."""

    ROW_TYPE = HeadSet


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
    """Measure what a loss is without each head, one at a time, or without each of some sets of heads.

    The model runs in evaluation mode and without gradients, and is left as it was. For every batch it runs once whole
    and once for each head or set, where it computes only what lies above the first head that is removed; what it keeps
    for that are the outputs of its layers.

    Args:
        model: any module that `watch` can see into, which does the same when it is given the same.
        dataset: `Texts`, or batches as the model takes them: mappings of its arguments, or tensors.
        loss: `(model, batch) -> (batch,)`, such as `next_token_loss`, `MaskedTokenLoss(...)`, `EmbeddingDistance()`.
        replacement: takes the place of a head's output, `zero()` by default: a number that multiplies it,
            `mean(dataset)`, `uniform()` and others.
        units: removed at a time: "heads"; whole "layers"; "groups" of heads that share keys and values; or sets of
            `(layer, head)` by name, such as `profile.roles()`.
        out: a folder for the table. A run that was stopped goes on there when it is called again with the same
            arguments, and comes to the same numbers.
        force: replace another run in that folder.
        progress: show a bar on standard error.
        title: the model's name, to show.

    Returns:
        one row a head, or one a set, with mean, standard error and number of `loss` and `cost` over the examples.

    Raises:
        InputError: data, sets or a folder that cannot be used; a loss that does not give one number an example; no
            batch; a model in which no attention is seen.
        MissingExtra: what `out`, `progress` or the data needs is not installed.
    """
    require_module(model)
    texts = dataset = dataset.within(model) if isinstance(dataset, Texts) else dataset
    if not isinstance(units, Mapping) and units not in KINDS:
        raise InputError("units", expected=f"one of {', '.join(KINDS)}, or sets of heads by name", got=repr(units))
    replacement = zero() if replacement is None else replacement
    asked = (
        units
        if isinstance(units, str)
        else {name: [f"{layer}.{head}" for layer, head in units[name]] for name in units}
    )
    settings = run_settings(
        model,
        texts if isinstance(texts, Texts) else None,
        title,
        units=asked,
        replacement=type(replacement).__name__.lower() if isinstance(replacement, Replacement) else replacement,
        loss=getattr(loss, "__name__", type(loss).__name__),
    )
    table: type[Ablation | SetAblation] = Ablation if units == "heads" else SetAblation
    run: _Run = CheckpointedRun(AblationProgress, table, out, settings)
    run.claim_folder(force=force)
    finished = run.finished_table()
    with evaluation_mode(model), torch.no_grad():
        if finished is not None:
            return require_same_data(finished, dataset, run)
        removed, state = _measured(model, dataset, loss, replacement, units, run, progress)
        found = table(tuple(_rows(removed, state)), {**settings, **_about(state)})
        run.finish(found)
        return found


@dataclass(frozen=True)
class Unit:
    """What is removed in one run: heads by the place where they stand, and the row that this makes."""

    gated: Mapping[Site, list[Gated]]
    row: type[Row]
    place: Mapping[str, Any]


@dataclass
class AblationProgress(PassProgress):
    """How far a run is, the batch that runs included.

    Attributes:
        done: how many runs of the last batch are done, the whole model's first.
        whole: the loss of each example, of the whole model.
        without: and without each unit.
    """

    done: int = 0
    whole: list[float] = field(default_factory=list)
    without: list[list[float]] = field(default_factory=list)


_Run = CheckpointedRun[AblationProgress, Ablation | SetAblation]


class _Without(Gates):
    """The gates of one unit at a time."""

    def __init__(self) -> None:
        super().__init__({})
        self.unit: Unit | None = None

    def change(self, call: Call) -> Change | None:
        """See `Interceptor`."""
        gated = None if self.unit is None else self.unit.gated.get(call.site)
        self.of = {} if gated is None else {call.site.path: gated}
        return super().change(call)


def _measured(
    model: nn.Module, dataset: Texts | Iterable[Any], loss: Loss, how: Any, of: Any, run: _Run, progress: bool
) -> tuple[list[Unit], AblationProgress]:
    """Every loss, those of an earlier run taken over."""
    stream, device = iterate_batches(dataset), device_of(model)
    first = next(stream, None)
    if first is None:
        raise InputError("dataset", expected="at least one batch", got="none")
    shown = to_device(first, device)
    prepare_loss(loss, model, shown)
    seen = survey(model, lambda: loss(model, shown))
    units = list(_units(seen, of, how, model))
    replay, gates = Replay(model, {record.site.path for record in seen.records}), _Without()
    before, state, runs = run.load_progress(), AblationProgress(without=[[] for _ in units]), 1 + len(units)
    number = sum(1 for _ in dataset) if isinstance(dataset, Texts | Sized) else None
    total = None if number is None else number * runs
    with progress_bar("ablation", total, "runs", shown=progress) as advance:
        for batch in chain([first], stream):
            state.count_batch(batch)
            if state.batches == before.batches:
                if state.digest != before.digest:
                    raise run.different_data_error()
                state.whole, state.without, state.done = before.whole, before.without, before.done
            if state.batches < before.batches or state.done == runs:
                advance(runs, True)
            else:
                if state.done:
                    advance(state.done, True)
                _run_batch(model, to_device(batch, device), loss, units, state, replay, gates, run, advance)
            state.done = 0
    if state.batches < before.batches:
        raise run.different_data_error()
    return units, state


def _run_batch(
    model: nn.Module,
    batch: dict[str, Any],
    loss: Any,
    units: list[Unit],
    state: AblationProgress,
    replay: Replay,
    gates: "_Without",
    run: _Run,
    advance: Callable[[int, bool], None],
) -> None:
    """The whole model, whose run is kept, and what is not done yet of the runs without each unit."""
    prepare_loss(loss, model, batch)
    with replay.keeping():
        whole = losses_of(loss, model, batch).tolist()
    if not state.done:
        state.whole += whole
        state.done = 1
        advance(1, False)
    with intercepted(model, gates):
        for index in range(state.done - 1, len(units)):
            gates.unit = units[index]
            with replay.until({path for path, _ in units[index].gated}):
                state.without[index] += losses_of(loss, model, batch).tolist()
            state.done += 1
            run.save_progress(state, now=state.done > len(units))
            advance(1, False)


def _about(state: AblationProgress) -> dict[str, Any]:
    return {
        "baseline": MeanEstimate.of(state.whole)._asdict(),
        "measured": state.summary,
    }


def _rows(units: Iterable[Unit], state: AblationProgress) -> Iterator[Any]:
    """One row a unit; an example that has no loss counts nowhere."""
    for unit, losses in zip(units, state.without, strict=True):
        costs = [loss - whole for loss, whole in zip(losses, state.whole, strict=True)]
        yield unit.row(**unit.place, statistics={"cost": MeanEstimate.of(costs), "loss": MeanEstimate.of(losses)})


# -- what is removed at a time ----------------------------------------------------------------------------------------


def _units(seen: SiteRegistry, of: Any, how: Any, model: nn.Module) -> Iterator[Unit]:
    """What each run removes, from the lowest layer up."""
    value = how.prepare(model, {record.site.path for record in seen.records}) if isinstance(how, Replacement) else how
    if of == "heads":
        for record, place in seen.head_labels():
            yield Unit({record.site: [Gated(place["head"], value)]}, HeadRow, place)
        return
    there = {(place["layer"], place["head"]): record for record, place in seen.head_labels()}
    for name, heads in (_sets(seen, of) if isinstance(of, str) else of).items():
        gated: dict[Site, list[Gated]] = {}
        for layer, head in heads:
            if (layer, head) not in there:
                raise InputError("units", expected=f"heads (layer, head) of this model in {name!r}", got=(layer, head))
            record = there[layer, head]
            gated.setdefault(record.site, []).append(Gated(head, value))
        if not gated:
            raise InputError("units", expected=f"heads in {name!r}", got="none")
        yield Unit(gated, HeadSet, {"name": name, "heads": [f"{layer}.{head}" for layer, head in heads]})


def _sets(seen: SiteRegistry, kind: str) -> dict[str, list[tuple[int, int]]]:
    """The heads of whole layers, or of groups that share keys and values, by name."""
    sets: dict[str, list[tuple[int, int]]] = {}
    for _, place in seen.head_labels():
        layer, group = place["layer"], place["kv_head"]
        name = f"layer {layer}" if kind == "layers" else f"group {layer}.{group}"
        sets.setdefault(name, []).append((layer, place["head"]))
    return sets
