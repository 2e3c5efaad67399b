"""In-context learning score of a model, and how the ablation of each head changes it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.analysis.ablate import ablate
from headwise.analysis.causality import why_not_causal
from headwise.analysis.in_context.loss import InContextLoss
from headwise.analysis.in_context.sequences import ON_GPU, ChosenSequences, choose_sequences
from headwise.analysis.in_context.table import CHANGE, InContextScores
from headwise.analysis.profile import profile
from headwise.analysis.replacements import Replacement, mean, zero
from headwise.checks import collection_of, flag, head_pair, require_module, whole_number
from headwise.data.batches import NumberedBatches, call_model, device_of, evaluation_mode, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.survey import survey
from headwise.runs.data_pass import prepare_texts
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import NO_ESTIMATE, HeadRow, MeanEstimate
from headwise.runs.table import Table
from headwise.statistics.meanings import RANDOM_SUFFIX

Head = tuple[int, int]
"""A head: its layer's number, and its index in the layer."""

REPLACEMENTS: dict[str, Callable[[NumberedBatches], Replacement]] = {"zero": lambda _data: zero(), "mean": mean}
"""Replacements of an ablated head's output by name: zeros, or its mean over the measured sequences."""

INDUCTION = f"induction{RANDOM_SUFFIX}"

TOKENS_OF_CHECK = 32
"""Number of tokens on which it is checked that a model is causal."""


def in_context_score(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    early: int = 50,
    late: int = 500,
    window: int = 32,
    sequences: int = 3,
    heads: Collection[Head] | None = None,
    replacements: Collection[str] = ("zero",),
    repeats: bool = True,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> InContextScores:
    """Measure the in-context learning score of a causal model (Olsson et al. 2022): the loss at the token number `late`
    minus the loss at the token number `early`. Measure also how the score changes without each head.

        scores = hw.in_context_score(model, texts)
        scores.score                            # of the unchanged model: value, sem, n
        scores.table()                          # one row per head; `change_zero` is above 0 if the head helps

    Olsson et al. use `window=1`. The defaults take about 9 minutes for SmolLM2 on 2 cores (docs/in-context.md).

    Args:
        model: a causal language model.
        dataset: `Texts`, or batches with `input_ids` and, if padded, `attention_mask`; short sequences are left out.
        early: number of the early token, counted from 1.
        late: number of the late token.
        window: number of tokens, the last of which has this number, over which each loss is averaged.
        sequences: number of sequences, drawn at random, from as many documents as possible.
        heads: heads `(layer, head)` to ablate; all by default. An empty collection measures the model alone.
        replacements: what takes the place of a head's output: "zero", "mean" (over all measured tokens), or both.
        repeats: also measure `induction_random`, as `hw.profile` does.
        seed: seed of the choice of sequences.
        out: folder in which an interrupted run resumes.
        force: replace the results of another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Raises:
        InputError: an argument cannot be used, no sequence is long enough, or the model is not causal.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.
    """
    require_module(model)
    loss, has_repeats = InContextLoss(early, late, window), flag("repeats", repeats)
    number, seed = whole_number("sequences", sequences, least=1), whole_number("seed", seed, least=0)
    names, texts = _names(replacements), prepare_texts(dataset, model, out, shown=progress)
    chosen = _chosen(model, texts, loss, number, seed)
    labels = _labels(model, chosen.data, heads)
    options: dict[str, Any] = {"force": force, "progress": progress, "title": title}
    changes = [_changes(model, chosen.data, loss, name, labels, heads, out, options) for name in names if labels]
    effects = dict(zip((CHANGE + name for name in names), changes, strict=False))
    if has_repeats and labels:
        effects[INDUCTION] = _induction(model, texts, chosen.data, labels)
    stated = {"early": loss.early, "late": loss.late, "window": loss.window, "sequences": number, "seed": seed}
    settings = run_settings(model, _texts(texts), title, **stated, replacements=names)
    return InContextScores(_rows(labels, effects), {**settings, **_measured(model, loss, chosen)})


def _texts(dataset: Any) -> Texts | None:
    """Return a data set if it is `Texts`; otherwise None."""
    return dataset if isinstance(dataset, Texts) else None


def _chosen(model: nn.Module, dataset: Any, loss: InContextLoss, number: int, seed: int) -> ChosenSequences:
    """Return the sequences to measure on, after checking on one of them that the model is causal."""
    batch_size = 1 if device_of(model).type == "cpu" else ON_GPU
    chosen = choose_sequences(dataset, loss.late, number, seed, batch_size=batch_size)
    _require_causal(model, chosen.data)
    return chosen


def _rows(labels: list[dict[str, Any]], effects: dict[str, list[MeanEstimate]]) -> tuple[HeadRow, ...]:
    """Return the rows of heads with these labels and statistics."""
    return tuple(
        HeadRow(**each, statistics={name: of_heads[index] for name, of_heads in effects.items()})
        for index, each in enumerate(labels)
    )


def _changes(
    model: nn.Module,
    data: NumberedBatches,
    loss: InContextLoss,
    name: str,
    labels: list[dict[str, Any]],
    heads: Any,
    out: str | Path | None,
    options: dict[str, Any],
) -> list[MeanEstimate]:
    """Return the change of the score for each chosen head, whose output is replaced by the replacement `name`."""
    units = "heads" if heads is None else {_name_of(each): [(each["layer"], each["head"])] for each in labels}
    folder = None if out is None else Path(out) / name
    table = ablate(model, data, loss, replacement=REPLACEMENTS[name](data), units=units, out=folder, **options)
    return _costs(table, labels)


def _names(replacements: Any) -> list[str]:
    """Return the names of replacements, each once."""
    if isinstance(replacements, str):
        replacements = (replacements,)
    names = list(dict.fromkeys(collection_of("replacements", replacements, of="names of replacements")))
    if not names or any(name not in REPLACEMENTS for name in names):
        raise InputError("replacements", expected=f"one or both of {', '.join(REPLACEMENTS)}", got=repr(replacements))
    return names


def _require_causal(model: nn.Module, data: NumberedBatches) -> None:
    """Raise `InputError` if a model sees the tokens that it predicts."""
    first = to_device(data.batches[0], device_of(model))["input_ids"][:, :TOKENS_OF_CHECK]
    got = why_not_causal(model, [{"input_ids": first}])
    if got is not None:
        raise InputError("model", expected="a causal language model", got=got)


def _labels(model: nn.Module, data: NumberedBatches, heads: Any) -> list[dict[str, Any]]:
    """Return the columns that identify each chosen head, in the order of the model.

    Raises:
        InputError: the model has no such head, or one is named twice.
    """
    batch = to_device(data.batches[0], device_of(model))
    with evaluation_mode(model), torch.no_grad():
        registry = survey(model, lambda: call_model(model, {"input_ids": batch["input_ids"][:1, :TOKENS_OF_CHECK]}))
    labels = [label for _, label in registry.head_labels()]
    if heads is None:
        return labels
    chosen = [head_pair("heads", head, of="heads (layer, head)") for head in collection_of("heads", heads, of="heads")]
    available = {(label["layer"], label["head"]): label for label in labels}
    for head in chosen:
        if head not in available or chosen.count(head) > 1:
            expected = "each head (layer, head) of the model once at most"
            raise InputError("heads", expected=expected, got=head)
    return [label for head, label in available.items() if head in chosen]


def _name_of(label: Mapping[str, Any]) -> str:
    """Return the name of a head."""
    return f"{label['layer']}.{label['head']}"


def _costs(table: Table[Any], labels: list[dict[str, Any]]) -> list[MeanEstimate]:
    """Return the change of the score for each chosen head, from a table of ablation effects."""
    by_name = {row.name: row.statistics["cost"] for row in table.rows}
    return [by_name[_name_of(label)] for label in labels]


def _induction(model: nn.Module, texts: Any, data: NumberedBatches, labels: list[dict[str, Any]]) -> list[MeanEstimate]:
    """Return the attention of each chosen head to the tokens after earlier copies, on random tokens that repeat."""
    is_text = isinstance(texts, Texts)
    first: Any = Texts(["a b"], texts.tokenizer) if is_text else [{"input_ids": data.batches[0]["input_ids"][:1, :8]}]
    found = {(row.layer, row.head): row.statistics[INDUCTION] for row in profile(model, first, repeats=True).heads}
    return [found.get((label["layer"], label["head"]), NO_ESTIMATE) for label in labels]


def _measured(model: nn.Module, loss: InContextLoss, chosen: ChosenSequences) -> dict[str, Any]:
    """Return the metadata of the measured sequences: the score of the unchanged model, its two losses, and sizes."""
    device = device_of(model)
    with evaluation_mode(model), torch.no_grad():
        of_batches = [loss.losses(model, to_device(batch, device)) for batch in chosen.data]
    early, late = (torch.cat(parts).double().tolist() for parts in zip(*of_batches, strict=True))
    documents = chosen.data.document_numbers()
    scores = [after - before for before, after in zip(early, late, strict=True)]
    estimates = {"score": scores, "early_loss": early, "late_loss": late}
    sizes = {"sequences": len(scores), "tokens": len(scores) * loss.late, "available": chosen.available}
    return {name: MeanEstimate.of(values, documents)._asdict() for name, values in estimates.items()} | {
        "measured": sizes | {"short": chosen.short}
    }
