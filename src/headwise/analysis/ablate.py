"""Ablation: the loss of a model without each of its heads, or without sets of heads.

All runs on one batch share the layers below the first ablated head, which are computed once.
"""

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.ablation_result import Ablation, SetAblation
from headwise.analysis.ablation_units import AblationUnit, HeadSets, UnitGates, ablation_units
from headwise.analysis.document_effects import DocumentEffects
from headwise.analysis.losses import (
    Loss,
    finite_loss_per_example,
    name_of_loss,
    prepare_loss,
    require_loss,
    require_some_loss,
)
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.analysis.replacements import Replacement, zero
from headwise.checks import collection_of, finite_number, head_pair, require_module
from headwise.data.batches import device_of, documents_of, evaluation_mode, iterate_batches, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.survey import survey
from headwise.progress import ProgressBar, progress_bar
from headwise.runs.checkpoint import CheckpointedRun
from headwise.runs.data_pass import PassProgress, prepare_texts, require_same_data
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import MeanEstimate
from headwise.settings import UNIT_KINDS

ROUNDING = 1e-5
"""Largest size of a loss that counts as 0: rounding makes cosines of equal vectors differ from 1."""


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
    """Measure the ablation effect of each head, layer, key/value group or named set of heads: the mean loss over
    examples with the outputs of these heads replaced (by zeros by default), minus the mean loss of the unchanged model.
    The effect is the column `cost` of `Ablation` (Michel, Levy and Neubig 2019, section 3.2).

        effects = hw.ablate(model, texts, hw.next_token_loss)
        effects.table()                                 # one row per head: layer, head, ..., cost, loss, ...
        effects.outliers()                              # documents whose effect is far from the median
        effects.head(3, 5).statistics["cost"]           # value, sem, n

    The model runs in evaluation mode without gradients, each time with the same random numbers, and is unchanged
    afterwards. Layers below the first ablated head are computed once per batch, and their outputs kept in memory. If a
    check on the first batch shows that this changes results, there is a warning, and each run computes all layers.

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
    dataset, replacement = prepare_texts(dataset, model, out, shown=progress), _checked_replacement(replacement)
    settings = _settings(model, dataset, loss, replacement, units, title)
    table: type[Ablation | SetAblation] = Ablation if units == "heads" else SetAblation
    run: _Run = CheckpointedRun(AblationProgress, table, out, settings)
    # Leaving inference mode turns gradients on, and gives tensors the version counters that reuse of outputs needs.
    with run.claimed(force=force), evaluation_mode(model), torch.inference_mode(False), torch.no_grad():
        if (finished := run.finished_table()) is not None:
            return require_same_data(finished, dataset, run)
        ablated, losses = _measure_losses(model, dataset, loss, replacement, units, run, show_progress=progress)
        by_document = DocumentEffects.of(losses.baseline_losses, losses.ablated_losses, documents_of(dataset))
        rows = tuple(_rows(ablated, losses, dataset))
        run.finish(result := table(rows, {**settings, **_measured(losses, dataset)}, by_document))
        return result


def _checked_replacement(replacement: Any) -> float | Replacement:
    """Return a replacement of head outputs unchanged, a factor as a float, and `zero()` for None; raise `InputError`
    for anything else.
    """
    if replacement is None:
        return zero()
    if isinstance(replacement, str | FunctionType):
        expected = "a number, or one of hw.replacements: zero(), uniform(), mean(dataset), resample(batch)"
        got = repr(replacement) if isinstance(replacement, str) else f"the function {replacement.__name__}, not called"
        raise InputError("replacement", expected=expected, got=got)
    return replacement if isinstance(replacement, Replacement) else finite_number("replacement", replacement)


def _settings(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    loss: Loss,
    replacement: float | Replacement,
    units: str | HeadSets,
    title: str | None,
) -> dict[str, Any]:
    """Return the settings of an ablation run as JSON-compatible values: model, data, package versions, the heads that
    are ablated together (`units`), the replacement of their outputs, and the loss.

    Raises:
        InputError: `units` is neither "heads", "layers" or "groups" nor sets of heads.
    """
    if not isinstance(units, Mapping) and units not in UNIT_KINDS:
        expected = f"one of {', '.join(UNIT_KINDS)}, or sets of heads by name"
        raise InputError("units", expected=expected, got=repr(units))
    return run_settings(
        model,
        dataset if isinstance(dataset, Texts) else None,
        title,
        units=units if isinstance(units, str) else _names_of_heads(units),
        replacement=type(replacement).__name__.lower() if isinstance(replacement, Replacement) else replacement,
        loss=name_of_loss(loss),
    )


def _names_of_heads(sets: HeadSets) -> dict[str, list[str]]:
    """Return the heads `(layer, head)` of each named set as strings such as "3.5", by the set's name. Without any set,
    raise `InputError`.
    """
    expected, names = "heads (layer, head)", {}
    if not sets:
        raise InputError("units", expected="at least one set of heads", got="none")
    for name, heads in sets.items():
        pairs = [head_pair("units", head, of=expected) for head in collection_of("units", heads, of=expected)]
        names[name] = [f"{layer}.{head}" for layer, head in pairs]
    return names


@dataclass
class AblationProgress(PassProgress):
    """Partial result of an ablation: the loss of each example so far, in the unchanged model and without each ablation
    unit (set of heads that are ablated together).

    A checkpoint of these losses lets an interrupted ablation resume, even in the middle of a batch.

    Attributes:
        runs_done: number of runs done on the last batch; the run of the unchanged model is the first.
        baseline_losses: loss of each example in the unchanged model.
        ablated_losses: for each unit, the loss of each example without it.
        note: statement why layer outputs were not reused; None if they were.
    """

    runs_done: int = 0
    baseline_losses: list[float] = field(default_factory=list)
    ablated_losses: list[list[float]] = field(default_factory=list)
    note: str | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """Numbers of sequences and tokens so far, and the hash of their content, for the metadata of a table; with the
        note, if there is one.
        """
        return super().summary | ({} if self.note is None else {"note": self.note})


_Run = CheckpointedRun[AblationProgress, Ablation | SetAblation]


def _measured(losses: AblationProgress, dataset: Texts | Iterable[Any]) -> dict[str, Any]:
    """Return the metadata of finished runs: the mean loss of the unchanged model, under the key "baseline", and the
    numbers of sequences and tokens with the hash of their content, under "measured"; and whether the loss is a distance
    from the unchanged model, which no ablation can lower.

    Raises:
        InputError: no example has a loss.
    """
    baseline = MeanEstimate.of(losses.baseline_losses, documents_of(dataset))
    require_some_loss(baseline.n)
    is_distance = all(abs(loss) <= ROUNDING for loss in losses.baseline_losses if not math.isnan(loss)) and all(
        loss >= -ROUNDING for ablated in losses.ablated_losses for loss in ablated if not math.isnan(loss)
    )
    return {"baseline": baseline._asdict(), "measured": {**losses.summary, "is_distance": is_distance}}


def _measure_losses(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    loss: Loss,
    replacement: float | Replacement,
    units: str | HeadSets,
    run: _Run,
    *,
    show_progress: bool,
) -> tuple[list[AblationUnit], AblationProgress]:
    """Compute the loss of every example in the unchanged model and without each ablation unit (set of heads that are
    ablated together); return the units and all losses. Losses without a unit are not computed again if an interrupted
    ablation computed them: they are read from its checkpoint.
    """
    batches, device = iterate_batches(dataset), device_of(model)
    first_batch = next(batches, None)
    if first_batch is None:
        raise InputError("dataset", expected="at least one batch", got="none")
    survey_batch = to_device(first_batch, device)
    with restored_state(model):
        prepare_loss(loss, model, survey_batch)
        registry = survey(model, lambda: finite_loss_per_example(loss, model, survey_batch))
    ablated = list(ablation_units(registry, units, replacement, model))
    runs = RepeatedRuns(model, {record.site.path for record in registry.records})
    batch_runs = _BatchRuns(model, loss, ablated, runs, run)
    before, losses = run.load_progress(), AblationProgress(ablated_losses=[[] for _ in ablated])
    runs_per_batch = 1 + len(ablated)
    batch_count = sum(1 for _ in dataset) if isinstance(dataset, Texts | Sized) else None
    total = None if batch_count is None else batch_count * runs_per_batch
    with progress_bar("ablation", total, "runs", shown=show_progress) as bar:
        bar.step = 1
        for batch in chain([first_batch], batches):
            losses.count_batch(batch)
            if losses.batches == before.batches:
                if losses.digest != before.digest:
                    raise run.different_data_error()
                losses.baseline_losses, losses.ablated_losses = before.baseline_losses, before.ablated_losses
                losses.runs_done, losses.note = before.runs_done, before.note
            if losses.batches < before.batches or losses.runs_done == runs_per_batch:
                bar.resume(runs_per_batch)
            else:
                if losses.runs_done:
                    bar.resume(losses.runs_done)
                batch_runs.measure(to_device(batch, device), losses, bar)
            losses.runs_done = 0
    if losses.batches < before.batches:
        raise run.different_data_error()
    if losses.note is not None:
        warnings.warn(losses.note, stacklevel=3)
    return ablated, losses


@dataclass
class _BatchRuns:
    """Runs of the model on one batch at a time: one of the unchanged model, and one without each ablation unit (set of
    heads that are ablated together).

    Attributes:
        model: the model.
        loss: the loss.
        units: units to ablate, one at a time.
        runs: runs the model, and reuses layer outputs of the unchanged model where possible.
        checkpoint: saves progress.
    """

    model: nn.Module
    loss: Loss
    units: list[AblationUnit]
    runs: RepeatedRuns
    checkpoint: _Run

    def measure(self, batch: dict[str, Any], losses: AblationProgress, bar: ProgressBar) -> None:
        """Run the model on a batch once unchanged and once without each ablation unit (set of heads that are ablated
        together), and append the loss of each example to `losses`. Units whose losses for this batch are already in
        `losses` are skipped. After each unit, a checkpoint is saved if one is due. `bar` counts the runs.
        """
        with restored_state(self.model):
            prepare_loss(self.loss, self.model, batch)

        def compute() -> Tensor:
            return finite_loss_per_example(self.loss, self.model, batch)

        gates = UnitGates()
        with intercepted(self.model, gates):
            baseline = self.runs.run_unchanged(compute)
            losses.note = self.runs.note
            if not losses.runs_done:
                losses.baseline_losses += baseline.tolist()
                losses.runs_done = 1
                bar.advance()
            for index in range(losses.runs_done - 1, len(self.units)):
                gates.unit = self.units[index]
                ablated = self.runs.run_gated(compute, {site.path for site in gates.unit.gates})
                _require_losses(ablated, baseline, self.units[index])
                losses.ablated_losses[index] += ablated.tolist()
                losses.runs_done += 1
                self.checkpoint.save_progress(losses, now=losses.runs_done > len(self.units))
                bar.advance()


def _require_losses(ablated: Tensor, baseline: Tensor, unit: AblationUnit) -> None:
    """Raise `InputError` if the loss of an example is NaN without the heads of `unit`, but not in the unchanged model:
    it would be missing in the mean.
    """
    if bool((ablated.isnan() & ~baseline.isnan()).any()):
        names = unit.identifiers
        name = names["name"] if "name" in names else f"head {names['layer']}.{names['head']}"
        expected = "a number for each example that has one in the unchanged model"
        raise InputError("loss", expected=expected, got=f"NaN without {name}")


def _rows(units: Iterable[AblationUnit], losses: AblationProgress, dataset: Texts | Iterable[Any]) -> Iterator[Any]:
    """Yield one result row per ablated unit (set of heads) with two statistics, each as mean and standard error over
    examples: `loss`, the loss without these heads, and `cost`, that loss minus the loss of the unchanged model.
    Examples whose loss is NaN are left out.
    """
    documents = documents_of(dataset)
    for unit, ablated in zip(units, losses.ablated_losses, strict=True):
        costs = [loss - baseline for loss, baseline in zip(ablated, losses.baseline_losses, strict=True)]
        # Both means are over the examples that have a loss in the unchanged model.
        with_cost = [math.nan if math.isnan(cost) else loss for loss, cost in zip(ablated, costs, strict=True)]
        statistics = {"cost": MeanEstimate.of(costs, documents), "loss": MeanEstimate.of(with_cost, documents)}
        yield unit.row_type(**unit.identifiers, statistics=statistics)
