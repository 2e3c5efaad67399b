"""Passes of a model over data that measure statistics of its heads: what all of them need."""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headwise.analysis.nonfinite import nonfinite_error
from headwise.checks import require_module, token_ids
from headwise.data.batches import call_model, device_of, evaluation_mode, to_device
from headwise.data.special_tokens import SpecialTokens, special_ids
from headwise.data.texts import Texts
from headwise.data.tokenization import text_model
from headwise.errors import InputError
from headwise.intercept.heads import Heads
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.intercept.watch import watch_further
from headwise.runs.checkpoint import CheckpointedRun
from headwise.runs.data_pass import SiteProgress, prepare_texts, require_same_data, run_pass
from headwise.runs.distributed import broadcast_from_rank0, gather_from_ranks, rank_and_world_size
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import NO_ESTIMATE, MeanEstimate, moment_estimates
from headwise.runs.table import Table
from headwise.statistics.further_sums import FurtherStatistics
from headwise.statistics.moments import Clusters


def require_finite_heads(heads: Heads, model: nn.Module, batch: dict[str, Any]) -> None:
    """Raise `InputError` if attention weights or head outputs were NaN or infinite in the last run of the model, on
    `batch`. The error names the first module in which a number is.
    """
    require_finite_outputs(heads.nonfinite, model, batch)


def require_finite_outputs(nonfinite: Collection[str], model: nn.Module, batch: dict[str, Any]) -> None:
    """Raise `InputError` if there are modules in which attention was NaN or infinite in the last run of the model, on
    `batch`. The error names the first module in which a number is.

    Args:
        nonfinite: the paths of these modules.
        model: the model.
        batch: its arguments.
    """
    if nonfinite:
        error = nonfinite_error(model, lambda: call_model(model, batch), batch)
        modules = ", ".join(nonfinite)
        raise error or InputError("model", expected="finite attention", got=f"NaN or infinity in {modules}")


def text_special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens, including those that it adds to every text, but without the
    unknown token, which stands for an ordinary word.
    """
    added = SpecialTokens.of(tokenizer)
    return special_ids(tokenizer) | {*added.before, *added.after}


def require_vocabulary(model: Any, texts: Texts) -> None:
    """Raise an `InputError` if the texts contain token ids outside the model's vocabulary."""
    vocabulary = model.get_input_embeddings().num_embeddings
    largest = max(int(sequence.max()) for sequence in texts.sequences)
    if largest >= vocabulary:
        raise InputError("tokenizer", expected=f"ids below {vocabulary}, the model's vocabulary", got=largest)


TableT = TypeVar("TableT", bound=Table[Any])


def measure_further(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    further: FurtherStatistics,
    table_type: type[TableT],
    make_table: Callable[[SiteRegistry, dict[str, Any]], TableT],
    *,
    special: Collection[int] | None,
    out: str | Path | None,
    force: bool,
    progress: bool,
    title: str | None,
    **settings: Any,
) -> TableT:
    """Run a model over a data set, measure further statistics of its heads, and return the table that `make_table`
    makes of them. Sequences have equal weight. With torch.distributed, the processes share the batches.

    The arguments `model` to `title` are those of `profile`; `settings` are other arguments of the run, JSON-compatible.
    """
    require_module(model)
    texts = None
    if isinstance(dataset, Texts):
        model = text_model(model)
        dataset = texts = prepare_texts(dataset, model, out, shown=progress)
        require_vocabulary(model, texts)
        special = text_special_ids(texts.tokenizer) if special is None else special
    special_tokens = token_ids("special", () if special is None else special)
    rank, world_size = rank_and_world_size()
    collected = run_settings(model, texts, title, special=special_tokens, processes=world_size, **settings)
    run: CheckpointedRun[SiteProgress, TableT] = CheckpointedRun(SiteProgress, table_type, out, collected, rank)
    with ExitStack() as claim, evaluation_mode(model), torch.no_grad():
        broadcast_from_rank0(lambda: claim.enter_context(run.claimed(force=force)))
        finished = broadcast_from_rank0(run.finished_table)
        if finished is not None:
            return require_same_data(finished, dataset, run)
        watched = watch_further(model, further, special_tokens)
        own_progress = measure_heads(model, dataset, watched, run, shown=progress)
        registry = SiteRegistry(model)
        for records in gather_from_ranks(own_progress.records):
            registry.merge(records)

        def finish() -> TableT:
            table = make_table(registry, {**run.settings, "measured": own_progress.summary})
            run.finish(table)
            return table

        return broadcast_from_rank0(finish)


def measure_heads(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    watched: AbstractContextManager[Heads],
    run: CheckpointedRun[SiteProgress, Any],
    *,
    shown: bool,
) -> SiteProgress:
    """Run a model on this process's share of the batches, except those that the process's checkpoint already includes,
    and return the statistics of heads over the whole share.

    Args:
        model: the model.
        dataset: texts, or batches of the model's arguments.
        watched: `watch` of the model, which collects the statistics; it is entered here.
        run: the run, which has the checkpoint.
        shown: whether a progress bar is shown.
    """
    resumed, progress, device = run.load_progress(), SiteProgress(), device_of(model)
    with watched as heads:
        heads.merge(resumed.records)
        progress.records = heads.records

        def process_batch(batch: dict[str, Any], clusters: Clusters) -> None:
            heads.clusters = clusters
            batch = to_device(batch, device)
            call_model(model, batch)
            require_finite_heads(heads, model, batch)
            progress.records = heads.records

        run_pass(dataset, process_batch, run, resumed, progress, shown=shown)
    return progress


def estimates(record: SiteRecord, name: str, columns: int) -> list[list[MeanEstimate]]:
    """Return the estimates of a statistic that has several numbers for each head, one list for each head; estimates
    without a sample if the site has no such statistic.

    Args:
        record: the site.
        name: name of the statistic.
        columns: number of numbers for each head.
    """
    if name not in record.statistics:
        return [[NO_ESTIMATE] * columns for _ in range(record.heads)]
    flat = moment_estimates(record.statistics[name])
    return [flat[head * columns : (head + 1) * columns] for head in range(record.heads)]


def require_some(registry: SiteRegistry, names: Collection[str], expected: str) -> None:
    """Raise `InputError` if no site of the model has any of the statistics `names`."""
    if not any(name in record.statistics for record in registry.records for name in names):
        raise InputError("model", expected=expected, got="none; warnings name the reasons")
