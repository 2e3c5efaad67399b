"""Sink rate: how often a head attends to the first token of a sequence more than a threshold (Gu et al. 2024)."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.head_pass import SiteValues, measure_sequences, pass_data, require_finite_outputs
from headwise.checks import collection_of, finite_number, whole_number
from headwise.data.batches import call_model, count_sequences_and_tokens, documents_of
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.intercept.watch import watch
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.settings import SINK_EPSILON
from headwise.shapes import Float

IMPORTANCE = "importance"
"""Name of the values of each sequence: the importance of some tokens, by the position of the token."""

ROUNDING = 1e-4
"""Largest relative difference between two ways to compute the attention on the first token, in float32."""


class SinkRate(HeadTable[HeadRow]):
    """Table of the sink rate of each head (Gu et al. 2024, equation 7 and the metric `Sink_k`), one row per head. The
    rate is the share of sequences in which the mean attention on a token, such as the first one, is above a threshold.

    The importance of token k of a sequence for a head is the mean weight on it over the queries that may attend to it:

        alpha_k = sum over i >= k of A[i, k] / (T - k)        in a causal model with T tokens, counted from 0

    Each position k has two columns, which are means over sequences:

        sink_k       share of sequences with alpha_k > epsilon
        attention_k  mean of alpha_k

    Standard errors are clustered by document. In a sequence of more than one token, `attention_0` is the mean of the
    statistic `first` of `hw.watch`, if all later tokens may attend to the first one. Under a sliding window, `first`
    also counts the queries that may not, with a weight of 0. In an encoder, alpha_k is a mean over all queries.

    The rate of the whole model, the mean of sink_k over its heads, is `metadata["measured"]["model"]`, with its
    standard error. Sequences of k tokens or fewer have no value at position k.
    """

    NAME = "sinks"


def sink_rate(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    epsilon: float = SINK_EPSILON,
    positions: Collection[int] = (0,),
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> SinkRate:
    """Measure the sink rate of each head (Gu et al. 2024). This is the share of sequences in which the mean attention
    on the first token, or on another token in `positions`, exceeds the threshold `epsilon`. The class `SinkRate` has
    the formula.

    Gu et al. use 100 sequences of 64 tokens. The rate depends on the length, so compare rates of the same length:

        texts = hw.Texts("corpus.jsonl", tokenizer, documents="cut", context=64)
        sinks = hw.sink_rate(model, texts)
        sinks.table()                               # one row per head: sink_0, attention_0
        sinks.metadata["measured"]["model"]         # the rate of the model

    Args:
        model: any module that `watch` can observe. For texts, an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches of the model's arguments, as for `hw.profile`. Each sequence must be one document:
            packed documents, which attend separately, are refused.
        epsilon: threshold of the mean attention.
        positions: numbers of the tokens, from 0, without padding.
        out: folder for the table; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the data is unusable, no attention can be observed, or the first token of sequences is not the one
            that `hw.watch` finds.
        MissingExtra: a package that `out`, `progress` or the data needs is not installed.
    """
    places = [whole_number("positions", k, least=0) for k in collection_of("positions", positions, of="numbers")]
    if not places or len(set(places)) < len(places):
        raise InputError("positions", expected="at least one number, each once", got=places)
    epsilon = sink_threshold(epsilon)
    data = pass_data(model, dataset, (), out=out, shown=progress)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], SiteValues]:
        count = count_sequences_and_tokens(batch)[0]
        with watch(data.model) as heads:
            call_model(data.model, batch)
        require_finite_outputs(heads.nonfinite, data.model, batch)
        heads.require_attention()
        return heads.records, {
            record.site: {IMPORTANCE: _importance(record, count, places)} for record in heads.records
        }

    def make_table(registry: SiteRegistry, values: SiteValues, metadata: dict[str, Any]) -> SinkRate:
        documents, rows = documents_of(data.dataset), []
        for record, labels in registry.head_labels():
            of_head = values[record.site][IMPORTANCE][:, labels["head"]]
            statistics = {
                f"{name}_{place}": MeanEstimate.of(each[:, index].tolist(), documents)
                for index, place in enumerate(places)
                for name, each in (("sink", _exceeds(of_head, epsilon)), ("attention", of_head))
            }
            rows.append(HeadRow(**labels, statistics=statistics))
        all_heads = torch.cat([values[record.site][IMPORTANCE] for record in registry.records], 1)
        shares = _exceeds(all_heads, epsilon).mean(1)
        of_model = {
            f"sink_{place}": MeanEstimate.of(shares[:, index].tolist(), documents)._asdict()
            for index, place in enumerate(places)
        }
        return SinkRate(tuple(rows), {**metadata, "measured": metadata["measured"] | {"model": of_model}})

    options: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    return measure_sequences(data, measure_batch, SinkRate, make_table, epsilon=epsilon, positions=places, **options)


def sink_threshold(epsilon: Any) -> float:
    """Return the threshold of the sink rate as a float. Raise `InputError` unless it is above 0 and below 1."""
    threshold = finite_number("epsilon", epsilon)
    if not 0.0 < threshold < 1.0:
        raise InputError("epsilon", expected="a share of the attention above 0 and below 1", got=epsilon)
    return threshold


def _exceeds(importance: Float[Tensor, "..."], epsilon: float) -> Float[Tensor, "..."]:
    """Return 1 where a token's importance (the mean attention on it) is above `epsilon`, 0 where it is not, and NaN
    where the importance is NaN.
    """
    return (importance > epsilon).double().masked_fill(importance.isnan(), torch.nan)


def _importance(record: SiteRecord, sequences: int, places: list[int]) -> Float[Tensor, "sequences heads positions"]:
    """Return the importance of the tokens at `places` for each sequence and head. It is the mean attention weight on
    the token over the queries that may attend to it. Return NaN for places after the end of a sequence.
    """
    path, tallies = record.site.label, record.latest_tallies()
    if record.site.cross:
        raise InputError("model", expected="self-attention", got=f"cross-attention in {path}")
    if len(tallies) != 1 or "received" not in tallies[0].other_sums or "first" not in tallies[0].means():
        got = f"{path}, which attends several times, or whose positions are unknown"
        raise InputError("model", expected="modules that attend once to all tokens of a sequence", got=got)
    received, seen_by = (part.double().cpu() for part in tallies[0].other_sums["received"])
    if len(received) != sequences:
        got = f"{len(received)} in {path}"
        raise InputError("model", expected=f"attention over {sequences} sequences", got=got)
    # The keys of the first tokens: keys to which a query may attend. A sequence with fewer tokens has -1.
    is_token = (seen_by > 0).any(1)
    number = is_token.cumsum(1) - 1
    keys = torch.full((sequences, max(places) + 1), -1, dtype=torch.int64)
    for token in {0, *places}:
        is_place = is_token & (number == token)
        keys[:, token] = torch.where(is_place.any(1), is_place.int().argmax(1), -1)
    # The first token that `watch` finds must be the first key: the sums of the attention weights on both are the same.
    first, counts = keys[:, 0], tallies[0].counts()["first"]
    sums = (tallies[0].means()["first"] * counts).double().cpu()
    own = received.gather(2, first.clamp(min=0)[:, None, None].expand(-1, received.shape[1], 1))[..., 0]
    is_known = (first >= 0)[:, None] & ~sums.isnan()
    is_other = (sums - own).abs() > ROUNDING * (1 + counts.double().cpu())
    if bool(is_other[is_known.expand_as(sums)].any()):
        raise InputError(
            "dataset",
            expected="sequences of one document each",
            got=f"several first tokens in {path}",
            remedy="pass the documents as sequences of their own",
        )
    index = keys[:, None, places].clamp(min=0).expand(-1, received.shape[1], -1)
    importance = received.gather(2, index) / seen_by.gather(2, index)
    return importance.masked_fill((keys[:, places] < 0)[:, None], torch.nan)
