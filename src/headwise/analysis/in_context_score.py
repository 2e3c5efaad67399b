"""In-context learning score of a model, and how the ablation of each head changes it."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.ablate import ablate
from headwise.analysis.causality import why_not_causal
from headwise.analysis.head_pass import PassData, SiteValues, head_rows, measure_sequences
from headwise.analysis.profile import profile
from headwise.analysis.replacements import Replacement, mean, zero
from headwise.analysis.token_cross_entropy import token_cross_entropy
from headwise.checks import collection_of, flag, head_pairs, require_module, whole_number
from headwise.data.batches import (
    POSITIONAL,
    NumberedBatches,
    device_of,
    documents_of,
    iterate_batches,
    with_cache_disabled,
)
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.intercept.survey import survey
from headwise.runs.data_pass import prepare_texts
from headwise.runs.fingerprint import text_options
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import NO_ESTIMATE, HeadRow, MeanEstimate
from headwise.shapes import Float, Int
from headwise.statistics.columns import RANDOM_SUFFIX, Column

CHANGE = "change_"
"""Start of the name of a change of the score; the rest is the name of the replacement."""


class InContextScores(HeadTable[HeadRow]):
    """Table of how the ablation of each head changes the in-context learning score of a model, one row per head. The
    score is the loss late in the context minus the loss early in it.

    With S the score of a sequence, the loss late in the context minus the loss early in it, the columns are

        change_zero       mean of S(head output replaced by zeros) - S(unchanged)
        change_mean       mean of S(head output replaced by its mean) - S(unchanged)
        induction_random  attention to the tokens after earlier copies, on random tokens that repeat

    over sequences, in nats, paired by sequence. A positive change means that the model makes less use of its context
    without the head. Each change has a p-value (`_p`) and an adjusted one (`_q`).
    """

    NAME = "in_context"

    COLUMNS = (
        Column(
            "change_zero",
            "Change of the in-context learning score if zeros replace the head's output.",
            is_signed=True,
            is_tested=True,
        ),
        Column(
            "change_mean",
            "Change of the in-context learning score if its mean replaces the head's output.",
            is_signed=True,
            is_tested=True,
        ),
    )

    @property
    def score(self) -> MeanEstimate:
        """In-context learning score of the unchanged model: its loss late in the context minus its loss early in it."""
        return MeanEstimate(**self.metadata["score"])

    @property
    def early_loss(self) -> MeanEstimate:
        """Mean loss of the unchanged model early in the context, in nats, with its standard error: the loss of the
        tokens in the early window, which ends at the token number `early`.
        """
        return MeanEstimate(**self.metadata["early_loss"])

    @property
    def late_loss(self) -> MeanEstimate:
        """Mean loss of the unchanged model late in the context, in nats, with its standard error: the loss of the
        tokens in the late window, which ends at the token number `late`.
        """
        return MeanEstimate(**self.metadata["late_loss"])


class InContextLoss:
    """Function that returns the in-context learning score of each sequence in a batch, for a causal model: a mean loss
    late in the sequence minus a mean loss early in it. The late mean is over the `window` tokens that end at token
    number `late`, and the early mean over those that end at token number `early`. The score is negative if the model
    predicts tokens better with more context. With a window of one token it is the score of Olsson et al. 2022,
    "In-context Learning and Induction Heads".

    The loss of token number t, counted from 1, is -ln p(token t | tokens 1 to t - 1), in nats. All sequences have at
    least `late` tokens, without padding.
    """

    def __init__(self, early: int, late: int, window: int) -> None:
        self.window = whole_number("window", window, least=1)
        self.early, self.late = whole_number("early", early, least=2), whole_number("late", late, least=3)
        if self.early <= self.window:
            expected = "fewer tokens than early, since the first token of a sequence has no loss"
            raise InputError("window", expected=expected, got=f"{window} for early={early}")
        if self.late - self.window < self.early:
            got = f"{window} for early={early} and late={late}"
            raise InputError("window", expected="windows that do not overlap", got=got)
        self.__name__ = f"in_context_score(early={self.early}, late={self.late}, window={self.window})"

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return the in-context learning score of each sequence of a batch: its loss late in the context minus its
        early loss.
        """
        early, late = self.losses(model, batch)
        return late - early

    def losses(
        self, model: nn.Module, batch: dict[str, Any]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Return two mean losses for each sequence of a batch: over the tokens of the early window, and over those of
        the late window.
        """
        ids: Int[Tensor, "batch length"] = batch["input_ids" if "input_ids" in batch else POSITIONAL]
        ends = (self.early, self.late)
        tokens = torch.cat([torch.arange(end - self.window, end, device=ids.device) for end in ends])
        of_tokens = token_cross_entropy(model, with_cache_disabled(model, batch), tokens - 1, ids[:, tokens].long())
        early, late = torch.split(of_tokens, self.window, 1)
        return early.mean(1), late.mean(1)


REPLACEMENTS: dict[str, Callable[[NumberedBatches], Replacement]] = {"zero": lambda _data: zero(), "mean": mean}
"""Replacements of an ablated head's output by name: zeros, or its mean over the measured sequences."""

INDUCTION = f"induction{RANDOM_SUFFIX}"

EARLY, LATE = "early_loss", "late_loss"
"""Names of the two losses of the unchanged model, in the values of each sequence and in the metadata."""

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
    heads: Collection[tuple[int, int]] | None = None,
    replacements: Collection[str] = ("zero",),
    repeats: bool = True,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> InContextScores:
    """Measure the in-context learning score of a causal model (Olsson et al. 2022): the loss at the token number `late`
    minus the loss at the token number `early`. Measure also how the score changes when each head's output is replaced,
    by default by zeros.

        scores = hw.in_context_score(model, texts)
        scores.score                            # of the unchanged model: value, sem, n
        scores.table()                          # one row per head; `change_zero` is above 0 if the head helps

    Olsson et al. use `window=1`. The defaults take about 9 minutes for SmolLM2 on 2 cores (docs/in-context.md). With
    torch.distributed, the processes share the sequences.

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
    batch_size = 1 if device_of(model).type == "cpu" else ON_GPU
    chosen, available, short = choose_sequences(texts, loss.late, number, seed, batch_size=batch_size)
    start = {"input_ids": chosen.batches[0]["input_ids"][:1, :TOKENS_OF_CHECK].to(device_of(model))}
    if (reason := why_not_causal(model, [start])) is not None:
        raise InputError("model", expected="a causal language model", got=reason)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], SiteValues]:
        losses: list[Tensor] = []
        records = survey(model, lambda: losses.extend(loss.losses(model, batch))).records
        of_model = {name: each.double().cpu()[:, None] for name, each in zip((EARLY, LATE), losses, strict=True)}
        return records, {record.site: of_model for record in records}

    def make_table(registry: SiteRegistry, values: SiteValues, metadata: dict[str, Any]) -> InContextScores:
        of_model, documents = next(iter(values.values())), chosen.document_numbers()
        losses = {name: of_model[name][:, 0].tolist() for name in (EARLY, LATE)}
        samples = {"score": [late - early for early, late in zip(losses[EARLY], losses[LATE], strict=True)], **losses}
        estimates = {name: MeanEstimate.of(of_name, documents)._asdict() for name, of_name in samples.items()}
        measured = metadata["measured"] | {"available": available, "short": short}
        return InContextScores(head_rows(registry, {}), {**metadata, **estimates, "measured": measured})

    data = PassData(model, chosen, [])
    settings = {"early": loss.early, "late": loss.late, "window": loss.window, "sequences": number, "seed": seed}
    of_pass: dict[str, Any] = {"out": None, "force": force, "progress": progress, "title": title}
    unchanged = measure_sequences(
        data, measure_batch, InContextScores, make_table, **settings, replacements=names, **of_pass
    )
    rows = _chosen(unchanged.rows, heads)
    units: Any = "heads" if heads is None else {row.name: [(row.layer, row.head)] for row in rows}
    effects: dict[str, list[MeanEstimate]] = {}
    for name in names if rows else ():
        replacement, folder = REPLACEMENTS[name](chosen), None if out is None else Path(out) / name
        options: dict[str, Any] = {"out": folder, "force": force, "progress": progress, "title": title}
        table = ablate(model, chosen, loss, replacement=replacement, units=units, **options)
        costs = {row.name: row.statistics["cost"] for row in table.rows}
        effects[CHANGE + name] = [costs[row.name] for row in rows]
    if has_repeats and rows:
        is_text = isinstance(texts, Texts)
        first: Any = Texts(["a b"], texts.tokenizer) if is_text else [{"input_ids": start["input_ids"][:, :8].cpu()}]
        found = {row.name: row.statistics[INDUCTION] for row in profile(model, first, repeats=True).heads}
        effects[INDUCTION] = [found.get(row.name, NO_ESTIMATE) for row in rows]
    rows = [
        replace(row, statistics={name: of_heads[index] for name, of_heads in effects.items()})
        for index, row in enumerate(rows)
    ]
    options_of_texts = text_options(texts) if isinstance(texts, Texts) else None
    return InContextScores(tuple(rows), {**unchanged.metadata, "data": options_of_texts})


def _names(replacements: Any) -> list[str]:
    """Return the names of the replacements of head outputs ("zero", "mean"), each once, after checking them."""
    if isinstance(replacements, str):
        replacements = (replacements,)
    names = list(dict.fromkeys(collection_of("replacements", replacements, of="names of replacements")))
    if not names or any(name not in REPLACEMENTS for name in names):
        raise InputError("replacements", expected=f"one or both of {', '.join(REPLACEMENTS)}", got=repr(replacements))
    return names


def _chosen(rows: Sequence[HeadRow], heads: Any) -> list[HeadRow]:
    """Return the rows of the heads `(layer, head)` in `heads`, or all rows if `heads` is None, in the order of the
    model.
    """
    if heads is None:
        return list(rows)
    chosen, available = head_pairs("heads", heads), [(row.layer, row.head) for row in rows]
    for head in chosen:
        if head not in available or chosen.count(head) > 1:
            raise InputError("heads", expected="each head (layer, head) of the model once at most", got=head)
    return [row for head, row in zip(available, rows, strict=True) if head in chosen]


ON_GPU = 8
"""Number of sequences in a batch on a GPU. On a CPU it is 1: larger batches are slower for each sequence there."""


def choose_sequences(
    dataset: Texts | Iterable[Any], length: int, number: int, seed: int, *, batch_size: int
) -> tuple[NumberedBatches, int, int]:
    """Draw `number` sequences at random among those of a data set with at least `length` tokens, from as many different
    documents as possible. Return batches of the first `length` tokens of the drawn sequences, in the order of the data,
    together with their documents. Also return how many sequences of the data set have at least `length` tokens, and how
    many have fewer.
    """
    documents = documents_of(dataset)
    found: list[tuple[Int[Tensor, " tokens"], int]] = []  # the start of each sequence, and its document
    count, longest = 0, 0
    for ids in _sequences(dataset):
        document = count if documents is None else documents[count]
        count, longest = count + 1, max(longest, len(ids))
        if len(ids) >= length:
            found.append((ids[:length], document))
    if not found:
        got = "no sequence" if not count else f"{longest} in the longest one"
        remedy = "use longer texts, or smaller early= and late="
        raise InputError("dataset", expected=f"sequences of at least {length} tokens", got=got, remedy=remedy)
    order = random.Random(seed).sample(range(len(found)), len(found))
    earlier: Counter[int] = Counter()
    ranks = {}
    for index in order:
        document = found[index][1]
        ranks[index] = earlier[document]
        earlier[document] += 1
    chosen = sorted(sorted(order, key=lambda index: ranks[index])[:number])
    ids = torch.stack([found[index][0] for index in chosen])
    batches = [{"input_ids": part} for part in torch.split(ids, batch_size)]
    return NumberedBatches(batches, [found[index][1] for index in chosen]), len(found), count - len(found)


def _sequences(dataset: Texts | Iterable[Any]) -> Iterator[Int[Tensor, " tokens"]]:
    """Yield the token ids of each sequence of a data set, without padding."""
    for batch in iterate_batches(dataset):
        name = POSITIONAL if POSITIONAL in batch else "input_ids"
        ids, mask = batch.get(name), batch.get("attention_mask")
        unknown = sorted(key for key in batch if key not in (name, "attention_mask"))
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or unknown:
            expected = "batches with input_ids (batch, length) and attention_mask alone"
            raise InputError("dataset", expected=expected, got=", ".join(batch))
        is_real = torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor):
            if mask.shape != ids.shape:
                expected = f"an attention_mask of the shape of input_ids, {tuple(ids.shape)}"
                raise InputError("dataset", expected=expected, got=tuple(mask.shape))
            is_real = mask.bool()
        for row, real in zip(ids.long().cpu(), is_real.cpu(), strict=True):
            places = real.nonzero()[:, 0]
            if len(places) and int(places[-1] - places[0]) >= len(places):
                raise InputError("dataset", expected="padding before or after the tokens", got="padding between tokens")
            yield row[places]
