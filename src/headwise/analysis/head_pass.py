"""Passes of a model over data that measure statistics of its heads: what all of them need."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from headwise.analysis.nonfinite import nonfinite_error
from headwise.checks import require_module, token_ids
from headwise.data.batches import call_model, device_of, evaluation_mode, to_device
from headwise.data.texts import Texts
from headwise.data.tokenization import SpecialTokens, input_embeddings, special_ids, text_model
from headwise.errors import InputError
from headwise.intercept.heads import Heads
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.intercept.watch import watch_further
from headwise.runs.checkpoint import CheckpointedRun, storable
from headwise.runs.data_pass import Pass, PassProgress, SiteProgress, prepare_texts, require_same_data
from headwise.runs.distributed import broadcast_from_rank0, gather_from_ranks, rank_and_world_size
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import NO_ESTIMATE, HeadRow, MeanEstimate, moment_estimates
from headwise.runs.table import Table
from headwise.shapes import Float
from headwise.statistics.moments import Clusters
from headwise.statistics.tally import FurtherStatistics


def require_finite_outputs(nonfinite: Collection[str], model: nn.Module, batch: dict[str, Any]) -> None:
    """Raise `InputError` if attention was NaN or infinite in some modules, `nonfinite`, when the model ran on `batch`.
    The model runs again to find the first module with such a number, which the error names.
    """
    if nonfinite:
        error = nonfinite_error(model, lambda: call_model(model, batch), batch)
        modules = ", ".join(nonfinite)
        raise error or InputError("model", expected="finite attention", got=f"NaN or infinity in {modules}")


TableT = TypeVar("TableT", bound=Table[Any])
ProgressT = TypeVar("ProgressT", bound=PassProgress)


class PassData(NamedTuple):
    """Model and data set of a pass (one run of the model over the data that measures statistics of heads), with the ids
    of special tokens.

    Attributes:
        model: the model; of an encoder-decoder and texts, its encoder.
        dataset: the data set, tokenized if it is texts.
        special: ids of special tokens, in ascending order.
    """

    model: nn.Module
    dataset: Texts | Iterable[Any]
    special: list[int]

    @property
    def texts(self) -> Texts | None:
        """The data set if it is a `Texts` object; otherwise None."""
        return self.dataset if isinstance(self.dataset, Texts) else None


def pass_data(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    special: Collection[int] | None,
    *,
    out: str | Path | None,
    shown: bool,
) -> PassData:
    """Prepare a model, a data set and the ids of special tokens for a pass over the data. Texts are tokenized, with a
    progress bar if `shown`. For texts, special ids are by default those of the tokenizer.
    """
    require_module(model)
    if isinstance(dataset, Texts):
        model = text_model(model)
        dataset = texts = prepare_texts(dataset, model, out, shown=shown)
        vocabulary, largest = input_embeddings(model).num_embeddings, max(int(ids.max()) for ids in texts.sequences)
        if largest >= vocabulary:
            raise InputError("tokenizer", expected=f"ids below {vocabulary}, the model's vocabulary", got=largest)
        if special is None:  # also tokens that the tokenizer adds; not the unknown token, which stands for any word
            added = SpecialTokens.of(texts.tokenizer)
            special = special_ids(texts.tokenizer) | {*added.before, *added.after}
    return PassData(model, dataset, token_ids("special", () if special is None else special))


def table_of_pass(
    data: PassData,
    table_type: type[TableT],
    progress_type: type[ProgressT],
    measure: Callable[[Pass[ProgressT]], ProgressT],
    make_table: Callable[[list[ProgressT], dict[str, Any]], TableT],
    *,
    out: str | Path | None,
    force: bool,
    progress: bool,
    title: str | None,
    **settings: Any,
) -> TableT:
    """Run a model over data, and return what was measured as a table. `measure` runs the model on one process's share
    of the batches. `make_table` then makes the table from the partial results of all processes and the metadata. A
    stopped run resumes in the folder `out`, and the table of a finished run is read from there. `settings` are the
    other options on which the numbers depend, as JSON-compatible values.
    """
    rank, world_size = rank_and_world_size()
    collected = run_settings(data.model, data.texts, title, processes=world_size, **settings)
    run: CheckpointedRun[ProgressT, TableT] = CheckpointedRun(progress_type, table_type, out, collected, rank)
    with ExitStack() as claim, evaluation_mode(data.model), torch.no_grad():
        broadcast_from_rank0(lambda: claim.enter_context(run.claimed(force=force)))
        finished = broadcast_from_rank0(run.finished_table)
        if finished is not None:
            return require_same_data(finished, data.dataset, run)
        measured = measure(Pass(run, progress))
        parts = gather_from_ranks(measured)

        def finish() -> TableT:
            table = make_table(parts, {**run.settings, "measured": measured.summary})
            run.finish(table)
            return table

        return broadcast_from_rank0(finish)


def merged_registry(model: nn.Module, parts: Iterable[SiteProgress]) -> SiteRegistry:
    """Merge the partial results of all processes. Return a registry (list of attention modules) that has the statistics
    of each module over all sequences.
    """
    registry = SiteRegistry(model)
    for part in parts:
        registry.merge(part.records)
    return registry


def measure_further(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    further: FurtherStatistics,
    table_type: type[TableT],
    make_table: Callable[[SiteRegistry, dict[str, Any]], TableT],
    *,
    special: Collection[int] | None,
    **options: Any,
) -> TableT:
    """Run a model over a data set, and measure the statistics that `further` defines for each head. Return the table
    that `make_table` makes from them. In means, each sequence has the same weight. With torch.distributed, the
    processes share the batches.

    `model`, `dataset` and `special` are those of `profile`, and `options` further arguments of `table_of_pass`.
    """
    data = pass_data(model, dataset, special, out=options["out"], shown=options["progress"])
    return table_of_pass(
        data,
        table_type,
        SiteProgress,
        lambda data_pass: measure_heads(data, watch_further(data.model, further, data.special), data_pass),
        lambda parts, metadata: make_table(merged_registry(data.model, parts), metadata),
        special=data.special,
        **options,
    )


def measure_heads(
    data: PassData, watched: AbstractContextManager[Heads], data_pass: Pass[SiteProgress]
) -> SiteProgress:
    """Run a model on this process's share of the batches, and return the statistics of its heads over the whole share.
    Batches whose statistics are already in the process's checkpoint (its stored partial result) are skipped.
    """
    progress, device = SiteProgress(), device_of(data.model)
    with watched as heads:
        heads.merge(data_pass.resumed.records)
        progress.records = heads.records

        def process_batch(batch: dict[str, Any], clusters: Clusters) -> None:
            heads.clusters = clusters
            batch = to_device(batch, device)
            call_model(data.model, batch)
            require_finite_outputs(heads.nonfinite, data.model, batch)
            progress.records = heads.records

        return data_pass.over(data.dataset, process_batch, progress)


SequenceValues = dict[str, Float[Tensor, "_ _ ..."]]
"""Values of a site by name, on the CPU, `(sequences, heads, ...)`; NaN where a sequence has none."""

SiteValues = dict[SiteKey, SequenceValues]
"""Values of each site."""


@storable
@dataclass
class SequenceProgress(SiteProgress):
    """Partial result of one process that runs a model over data. It has measured values of each sequence, in addition
    to the statistics of the heads.

    Attributes:
        values: values at each site, by the number of the batch, or of the fit of learned gates.
    """

    values: dict[int, SiteValues] = field(default_factory=dict)


def measure_sequences(
    data: PassData,
    measure_batch: Callable[[dict[str, Any]], tuple[Sequence[SiteRecord], SiteValues]],
    table_type: type[TableT],
    make_table: Callable[[SiteRegistry, SiteValues, dict[str, Any]], TableT],
    **options: Any,
) -> TableT:
    """Run a model over data, measure values of each sequence, and return a table of them. `measure_batch` runs the
    model on one batch. For each attention module, it returns a record (the labels and the number of its heads) and the
    measured values. `make_table` makes the table from all modules, the values of all sequences in order, and the
    metadata. `options` are further arguments of `table_of_pass`.
    """
    device = device_of(data.model)

    def measure(data_pass: Pass[SequenceProgress]) -> SequenceProgress:
        registry = SiteRegistry(data.model)
        registry.merge(data_pass.resumed.records)
        done = SequenceProgress(records=data_pass.resumed.records, values=data_pass.resumed.values)

        def process_batch(batch: dict[str, Any], _clusters: Clusters) -> None:
            batch = to_device(batch, device)
            records, values = measure_batch(batch)
            require_finite_outputs([each.site.path for each in records if each.nonfinite_rows], data.model, batch)
            registry.merge(SiteRecord(each.site, each.layer, each.heads, each.kv_heads) for each in records)
            done.records, done.values[done.batches] = registry.records, values

        return data_pass.over(data.dataset, process_batch, done)

    def make(parts: list[SequenceProgress], metadata: dict[str, Any]) -> TableT:
        registry = merged_registry(data.model, parts)
        batches = [of_batch for _, of_batch in sorted(each for part in parts for each in part.values.items())]
        joined: SiteValues = {}
        for record in registry.records:
            if any(record.site not in of_batch for of_batch in batches):
                got = f"some without {record.site.label}"
                raise InputError("model", expected="the same attention modules in each batch", got=got)
            of_site = [of_batch[record.site] for of_batch in batches]
            names = [name for name in of_site[0] if all(name in each for each in of_site)]
            joined[record.site] = {name: torch.cat([each[name] for each in of_site]) for name in names}
        return make_table(registry, joined, metadata)

    return table_of_pass(data, table_type, SequenceProgress, measure, make, **options)


def head_statistics(
    registry: SiteRegistry, names: Iterable[str], numbers: int = 1
) -> Iterator[tuple[dict[str, Any], dict[str, list[MeanEstimate]]]]:
    """Yield, for each head, its labels (layer, head, ...) and the estimates of the statistics `names` for this head.
    Each of these statistics has `numbers` values per head, such as one per bin of positions, and one estimate for each
    value. If a statistic was not measured in the head's module, its estimates have 0 samples.
    """
    of_sites: dict[SiteKey, dict[str, list[MeanEstimate]]] = {}
    for record, labels in registry.head_labels():
        if record.site not in of_sites:
            measured, none = record.statistics, [NO_ESTIMATE] * (record.heads * numbers)
            of_sites[record.site] = {
                name: moment_estimates(measured[name]) if name in measured else none for name in names
            }
        of_head = slice(labels["head"] * numbers, (labels["head"] + 1) * numbers)
        yield labels, {name: each[of_head] for name, each in of_sites[record.site].items()}


def head_rows(registry: SiteRegistry, columns: Mapping[str, str]) -> tuple[HeadRow, ...]:
    """Return a table row for each head with some of its statistics. `columns` maps the name of each statistic in
    `registry` to the name of its column in the table.
    """
    return tuple(
        HeadRow(**labels, statistics={columns[name]: each[0] for name, each in of_head.items()})
        for labels, of_head in head_statistics(registry, columns)
    )


def require_some(registry: SiteRegistry, names: Collection[str], expected: str) -> None:
    """Raise `InputError` if none of the statistics `names` was measured in any attention module. `expected` is the
    error's description of what is missing.
    """
    if not any(name in record.statistics for record in registry.records for name in names):
        raise InputError("model", expected=expected, got="none; warnings name the reasons")
