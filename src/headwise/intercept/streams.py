"""Padded queries of cross-attention, from the self-attention over the same tokens in the same call of the model."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.intercept.interceptor import Call
from headwise.intercept.mask_facts import MaskFacts
from headwise.intercept.padding import RealTokens
from headwise.intercept.sequences import History
from headwise.shapes import Int

PADDED_QUERIES_UNKNOWN = (
    "a mask shows padding, but it could not be established which queries of these modules are padding, so all their "
    "statistics are left out; state padding= in hw.watch (see docs/watch.md)"
)
"""Reason for modules whose padded queries are unknown."""


class Stream(NamedTuple):
    """Self-attention call of the running model call, whose padding and tokens apply to cross-attention as well.

    Attributes:
        path: path of its module.
        batch: number of sequences.
        queries: number of queries.
        query_sources: sources of its queries, as bits.
        real: its tokens that are not padding.
        history: tokens of the sequences after the call.
        continues: True if the call continues the sequences of an earlier call.
        positions: number of the token of each query in its sequence; None if unknown.
    """

    path: str
    batch: int
    queries: int
    query_sources: int
    real: RealTokens
    history: History
    continues: bool
    positions: Int[Tensor, "#batch queries"] | None = None


def stream_of_queries(call: Call, streams: Iterable[Stream]) -> Stream | None:
    """Return the self-attention over the tokens that are the queries of a call of cross-attention; None if it cannot be
    established.

    Its queries depend on the same inputs of the model. If several streams fit, it is the one in the nearest module, or
    any if they agree about padding.
    """
    fitting = [stream for stream in streams if (stream.batch, stream.queries) == (call.grid.batch, call.grid.queries)]
    related = [each for each in fitting if each.query_sources and not each.query_sources & ~call.sources.of_queries]
    if related:
        return max(reversed(related), key=lambda stream: _common(call.site.path, stream.path))
    return fitting[-1] if fitting and all(_agree(each, fitting[0]) for each in fitting) else None


def stream_of_keys(call: Call, streams: Iterable[Stream]) -> Stream | None:
    """Return the self-attention over the tokens that are the keys of a call of cross-attention; None if it is unknown.
    Its queries depend on the same inputs of the model.
    """
    for stream in streams:
        is_related = stream.query_sources and not stream.query_sources & ~call.sources.of_keys
        if is_related and (stream.batch, stream.history.length) == (call.grid.batch, call.grid.keys):
            return stream
    return None


def has_unknown_padding(
    call: Call, facts: MaskFacts | None, of_queries: Stream | None, streams: Iterable[Stream]
) -> bool:
    """Return True if some queries of a call of cross-attention may be padding, but it is unknown which: it is unknown
    in `of_queries`, the self-attention over the same tokens. Or there is none so far, a mask in this call of the model
    or among the arguments of the modules shows padding, and the queries, of which there are several, depend on inputs
    of the model.
    """
    if of_queries is not None:
        return not of_queries.real.is_known
    if call.grid.queries == 1 or not call.sources.of_queries:
        return False
    shows_padding = facts is not None and not facts.hides_by_distance and not bool(facts.is_seen.all())
    if call.padding is not None and len(call.padding) == call.grid.batch:
        shows_padding = shows_padding or bool((call.padding != 1).any())
    return shows_padding or any(stream.real.queries is not None or not stream.real.is_known for stream in streams)


def _agree(one: Stream, other: Stream) -> bool:
    """Return True if two streams have the same padded queries."""
    if one.real.queries is None or other.real.queries is None:
        return one.real.queries is other.real.queries and one.real.is_known == other.real.is_known
    return torch.equal(one.real.queries, other.real.queries)


def _common(path: str, other: str) -> int:
    """Return the number of names that two module paths have in common at their start."""
    is_equal = [a == b for a, b in zip(path.split("."), other.split("."), strict=False)]
    return (*is_equal, False).index(False)
