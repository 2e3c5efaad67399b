"""`profile`: what every head of a model does over a data set, and how sure that is."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.profile_result import RANDOM_SUFFIX, Profile, ProfiledHead
from headwise.analysis.roles import COPIES, role_of
from headwise.data.batches import call_model, device_of, digest_of, evaluation_mode, to_device
from headwise.data.random_repeats import repeats_for_model
from headwise.data.texts import SpecialTokens, Texts
from headwise.data.tokenization import text_model
from headwise.errors import InputError
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.intercept.watch import watch
from headwise.runs.checkpoint import CheckpointedRun
from headwise.runs.data_pass import SiteProgress, head_estimates, require_same_data, run_pass
from headwise.runs.distributed import broadcast_from_rank0, gather_from_ranks, rank_and_world_size
from headwise.runs.fingerprint import run_settings
from headwise.runs.table import NO_ESTIMATE, MeanEstimate
from headwise.shapes import Int

_Run = CheckpointedRun[SiteProgress, Profile]


def profile(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    special: Collection[int] | None = None,
    repeats: Int[Tensor, "samples length"] | bool | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> Profile:
    """Measure every head of a model over a data set: the mean of each statistic over sequences, its error, a role.

    The model runs in evaluation mode and without gradients, and is left as it was. Where torch.distributed is
    initialized, the processes share the batches among them, and each returns the profile of all.

    Args:
        model: any module that `watch` can see into. Of an encoder-decoder, texts are read by the encoder.
        dataset: `Texts`, or batches as the model takes them: mappings of its arguments, or tensors, in the same order
            each time.
        special: ids of the tokens that count as special; those of the tokenizer, by default.
        repeats: whether to measure *induction* and *duplicate* also on random tokens that repeat (Olsson et al. 2022),
            or these tokens themselves; by default where the data is `Texts`.
        out: a folder for the profile. A run that was stopped, at whatever moment, goes on there when it is called again
            with the same arguments, and comes to the same numbers.
        force: replace another run in that folder.
        progress: show a bar on standard error.
        title: the model's name, to show.

    Raises:
        InputError: data or a folder that cannot be used; no batch; a model that `watch` refuses, or of which nothing
            was seen.
        MissingExtra: what `out`, `progress` or the data needs is not installed.
    """
    if not isinstance(model, nn.Module):
        raise InputError("model", expected="a torch module", got=type(model).__name__)
    texts = None
    if isinstance(dataset, Texts):
        model = text_model(model)
        dataset = texts = dataset.within(model)
        _require_vocabulary(model, texts)
        special = _special_of(texts.tokenizer) if special is None else special
    special = sorted(set(special or ()))
    if repeats is True or (repeats is None and texts is not None):
        repeats = repeats_for_model(model, special, None if texts is None else texts.tokenizer)
    rank, processes = rank_and_world_size()
    of_repeats = {"shape": list(repeats.shape), "digest": digest_of([repeats])} if isinstance(repeats, Tensor) else None
    settings = run_settings(model, texts, title, special=special, repeats=of_repeats, processes=processes)
    run = CheckpointedRun(SiteProgress, Profile, out, settings, rank)
    broadcast_from_rank0(lambda: run.claim_folder(force=force))
    finished = broadcast_from_rank0(run.finished_table)
    with evaluation_mode(model), torch.no_grad():
        if finished is not None:
            return require_same_data(finished, dataset, run)
        state = _measured(model, dataset, special, run, progress)
        registry = SiteRegistry(model)
        for records in gather_from_ranks(state.records):
            registry.merge(records)
        return broadcast_from_rank0(lambda: _concluded(model, state, registry, special, repeats, run))


def _concluded(
    model: nn.Module, state: SiteProgress, registry: SiteRegistry, special: Collection[int], repeats: Any, run: _Run
) -> Profile:
    """The profile, with what the heads do on random tokens, written where it was asked for."""
    random: list[SiteRecord] = []
    if isinstance(repeats, Tensor):
        with watch(model, special=special) as heads:
            model(repeats.to(device_of(model)))
        random = heads.records
    profile = Profile(tuple(_heads(registry, random)), {**run.settings, "measured": state.summary})
    run.finish(profile)
    return profile


def _heads(seen: SiteRegistry, random: list[SiteRecord]) -> Iterator[ProfiledHead]:
    """Every head, all with the same statistics."""
    on_random = {record.site: record for record in random}
    names = dict.fromkeys(name for record in seen.records for name in record.statistics)
    copies = [role.statistic for role in COPIES] if random else []
    measured = {}
    for record in seen.records:
        there = on_random.get(record.site)
        measured[id(record)] = {name: _of_heads(record, name) for name in names} | {
            name + RANDOM_SUFFIX: _of_heads(there, name, record.heads) for name in copies
        }
    for record, where in seen.head_labels():
        statistics = {name: heads[where["head"]] for name, heads in measured[id(record)].items()}
        yield ProfiledHead(**where, role=_role(statistics), statistics=statistics)


def _of_heads(record: SiteRecord | None, name: str, heads: int = 0) -> list[MeanEstimate]:
    """A statistic of each head of a site."""
    if record is None or name not in record.statistics:
        return [NO_ESTIMATE] * (heads if record is None else record.heads)
    return head_estimates(record.statistics[name])


def _role(statistics: Mapping[str, MeanEstimate]) -> str:
    """The name of a head's role. What is measured over sequences rests on many rows, or on none."""
    means = {name: measured.value for name, measured in statistics.items()}
    counts = {name: math.inf if measured.n else 0 for name, measured in statistics.items()}
    random = {
        role.statistic: means[role.statistic + RANDOM_SUFFIX]
        for role in COPIES
        if role.statistic + RANDOM_SUFFIX in means
    }
    return role_of(means, counts, random).name


def _measured(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    special: Collection[int],
    run: _Run,
    shown: bool,
) -> SiteProgress:
    """Run this process's batches, those that it has not run before."""
    before, state, device = run.load_progress(), SiteProgress(), device_of(model)
    with watch(model, special=special) as heads:
        heads.merge(before.records)
        state.records = heads.records

        def read(batch: dict[str, Any]) -> None:
            call_model(model, to_device(batch, device))
            state.records = heads.records

        run_pass(dataset, read, run, before, state, shown=shown)
    return state


def _special_of(tokenizer: Any) -> set[int]:
    """What the tokenizer calls special, but for the unknown word, which is still a word, and is what it adds."""
    frame = SpecialTokens.of(tokenizer)
    return (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}) | {*frame.before, *frame.after}


def _require_vocabulary(model: Any, texts: Texts) -> None:
    known = model.get_input_embeddings().num_embeddings
    largest = max(int(sequence.max()) for sequence in texts.sequences)
    if largest >= known:
        raise InputError("tokenizer", expected=f"ids below {known}, the model's vocabulary", got=largest)
