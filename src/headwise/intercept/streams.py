"""Padded queries of cross-attention, from the self-attention over the same tokens in the same call of the model."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.intercept.interceptor import Call
from headwise.intercept.padding import RealTokens
from headwise.intercept.received_mask import MaskFacts
from headwise.intercept.sequences import History
from headwise.shapes import Int

PADDED_QUERIES_UNKNOWN = (
    "a mask shows padding, but it could not be established which queries of these modules are padding, so all their "
    "statistics are left out; state the padding of their queries by padding= in hw.watch (see docs/watch.md)"
)
"""Reason for modules whose padded queries are unknown."""


class Stream(NamedTuple):
    """Record of a self-attention call in the running call of the model. It is kept because cross-attention over the
    same tokens has the same padding and token ids.

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
    """Find the self-attention call over the same tokens as the queries of a cross-attention call, and return its
    record. Return None if it is not certain which call that is.

    The queries of both calls depend on the same inputs of the model. If several calls of self-attention fit, return the
    one in the nearest module, or any of them if they agree about padding.
    """
    fitting = [stream for stream in streams if (stream.batch, stream.queries) == (call.grid.batch, call.grid.queries)]
    related = [each for each in fitting if each.query_sources and not each.query_sources & ~call.sources.of_queries]
    if related:
        return max(reversed(related), key=lambda stream: _common(call.site.path, stream.path))
    return fitting[-1] if fitting and all(_agree(each, fitting[0]) for each in fitting) else None


def stream_of_keys(call: Call, streams: Iterable[Stream]) -> Stream | None:
    """Find the self-attention call over the same tokens as the keys of a cross-attention call, and return its record.
    Its queries and these keys depend on the same inputs of the model. Return None if there is no such call.
    """
    for stream in streams:
        is_related = stream.query_sources and not stream.query_sources & ~call.sources.of_keys
        if is_related and (stream.batch, stream.history.length) == (call.grid.batch, call.grid.keys):
            return stream
    return None


def has_unknown_padding(
    call: Call, facts: MaskFacts | None, of_queries: Stream | None, streams: Iterable[Stream]
) -> bool:
    """Return True if some queries of a cross-attention call may be padding, but it is unknown which ones. If the
    self-attention call over the same tokens is known (`of_queries`), return True if its padding is unknown. Otherwise
    return True if there are several queries, they depend on inputs of the model, and some mask in this call of the
    model shows padding.
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
    """Return True if the records of two self-attention calls mark the same queries as padding."""
    if one.real.queries is None or other.real.queries is None:
        return one.real.queries is other.real.queries and one.real.is_known == other.real.is_known
    return torch.equal(one.real.queries, other.real.queries)


def _common(path: str, other: str) -> int:
    """Return the number of leading names that two module paths have in common, such as 2 for `encoder.0.attn` and
    `encoder.0.mlp`.
    """
    is_equal = [a == b for a, b in zip(path.split("."), other.split("."), strict=False)]
    return (*is_equal, False).index(False)
